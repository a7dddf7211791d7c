// SHA-256 and CRC-32. SHA-256 uses the instructions of x86 CPUs that have them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace inductor_ext::detail {

inline constexpr uint32_t kShaConstants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

// SHA-256 of a stream, as in FIPS 180-4.
class Sha256 {
 public:
  // use_instructions: whether to use those of the CPU, if it has them.
  explicit Sha256(bool use_instructions = true) : use_instructions_(use_instructions) {}

  void update(const void* data, size_t size) {
    const auto* bytes = static_cast<const uint8_t*>(data);
    total_ += size;
    if (filled_ != 0) {
      const size_t part = size < 64 - filled_ ? size : 64 - filled_;
      std::memcpy(block_.data() + filled_, bytes, part);
      filled_ += part;
      bytes += part;
      size -= part;
      if (filled_ < 64) {
        return;
      }
      process(block_.data(), 1);
      filled_ = 0;
    }
    process(bytes, size / 64);
    filled_ = size % 64;
    std::memcpy(block_.data(), bytes + size - filled_, filled_);
  }

  void update(const std::string& data) {
    update(data.data(), data.size());
  }

  // The digest of what was added. Call it once.
  std::array<uint8_t, 32> digest() {
    const uint64_t bits = total_ * 8;
    const uint8_t padding[64] = {0x80};
    update(padding, (filled_ < 56 ? 56 : 120) - filled_);
    uint8_t length[8];
    for (int i = 0; i < 8; ++i) {
      length[i] = static_cast<uint8_t>(bits >> (56 - 8 * i));
    }
    update(length, 8);
    std::array<uint8_t, 32> result{};
    for (int i = 0; i < 32; ++i) {
      result[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
    }
    return result;
  }

  std::string hex_digest() {
    std::string text;
    for (const uint8_t byte : digest()) {
      text += "0123456789abcdef"[byte >> 4];
      text += "0123456789abcdef"[byte & 15];
    }
    return text;
  }

 private:
  void process(const uint8_t* data, size_t blocks) {
#if defined(__x86_64__)
    static const bool has_instructions = find_instructions();
    if (has_instructions && use_instructions_) {
      process_by_instructions(data, blocks);
      return;
    }
#endif
    for (; blocks != 0; --blocks, data += 64) {
      process_block(data);
    }
  }

  static uint32_t rotated(uint32_t value, int count) {
    return value >> count | value << (32 - count);
  }

  void process_block(const uint8_t* data) {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i) {
      w[i] = static_cast<uint32_t>(data[4 * i]) << 24 | static_cast<uint32_t>(data[4 * i + 1]) << 16 |
          static_cast<uint32_t>(data[4 * i + 2]) << 8 | data[4 * i + 3];
    }
    for (int i = 16; i < 64; ++i) {
      const uint32_t s0 = rotated(w[i - 15], 7) ^ rotated(w[i - 15], 18) ^ w[i - 15] >> 3;
      const uint32_t s1 = rotated(w[i - 2], 17) ^ rotated(w[i - 2], 19) ^ w[i - 2] >> 10;
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    std::array<uint32_t, 8> v = state_;
    for (int i = 0; i < 64; ++i) {
      const uint32_t s1 = rotated(v[4], 6) ^ rotated(v[4], 11) ^ rotated(v[4], 25);
      const uint32_t choice = (v[4] & v[5]) ^ (~v[4] & v[6]);
      const uint32_t t1 = v[7] + s1 + choice + kShaConstants[i] + w[i];
      const uint32_t s0 = rotated(v[0], 2) ^ rotated(v[0], 13) ^ rotated(v[0], 22);
      const uint32_t majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
      v = {t1 + s0 + majority, v[0], v[1], v[2], v[3] + t1, v[4], v[5], v[6]};
    }
    for (int i = 0; i < 8; ++i) {
      state_[i] += v[i];
    }
  }

#if defined(__x86_64__)
  static bool find_instructions() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    const bool has_sha = __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b >> 29 & 1) != 0;
    return has_sha && __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("ssse3");
  }

  __attribute__((target("sha,sse4.1,ssse3"))) void process_by_instructions(
      const uint8_t* data,
      size_t blocks) {
    auto& s = state_;
    const auto lanes = [](uint32_t a, uint32_t b, uint32_t c, uint32_t d)
                           __attribute__((target("sha,sse4.1,ssse3"))) {
      return _mm_set_epi32(
          static_cast<int>(a), static_cast<int>(b), static_cast<int>(c), static_cast<int>(d));
    };
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    // The instructions have the eight variables as (a, b, e, f) and (c, d, g, h).
    __m128i abef = lanes(s[0], s[1], s[4], s[5]);
    __m128i cdgh = lanes(s[2], s[3], s[6], s[7]);
    for (; blocks != 0; --blocks, data += 64) {
      const __m128i abef_before = abef, cdgh_before = cdgh;
      __m128i w[4];
      for (int i = 0; i < 16; ++i) {
        __m128i& next = w[i % 4];
        if (i < 4) {
          next = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + i);
          next = _mm_shuffle_epi8(next, big_endian);
        } else {
          const __m128i last = w[(i + 3) % 4];
          const __m128i middle = _mm_alignr_epi8(last, w[(i + 2) % 4], 4);
          next = _mm_add_epi32(_mm_sha256msg1_epu32(next, w[(i + 1) % 4]), middle);
          next = _mm_sha256msg2_epu32(next, last);
        }
        const auto* constants = reinterpret_cast<const __m128i*>(kShaConstants) + i;
        const __m128i sums = _mm_add_epi32(next, _mm_loadu_si128(constants));
        // Each instruction makes two rounds, after which (c, d, g, h) is the former (a, b, e, f).
        cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sums);
        abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sums, 0x0E));
      }
      abef = _mm_add_epi32(abef, abef_before);
      cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    alignas(16) uint32_t first[4], second[4];
    _mm_store_si128(reinterpret_cast<__m128i*>(first), abef);
    _mm_store_si128(reinterpret_cast<__m128i*>(second), cdgh);
    s = {first[3], first[2], second[3], second[2], first[1], first[0], second[1], second[0]};
  }
#endif

  std::array<uint32_t, 8> state_{
      0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> block_{};
  size_t filled_ = 0;
  uint64_t total_ = 0;
  [[maybe_unused]] bool use_instructions_;
};

// CRC-32 of a stream, as in zip files.
class Crc32 {
 public:
  void update(const void* data, size_t size) {
    static const std::array<uint32_t, 256> table = make_table();
    const auto* bytes = static_cast<const uint8_t*>(data);
    for (size_t i = 0; i < size; ++i) {
      value_ = table[(value_ ^ bytes[i]) & 0xFF] ^ value_ >> 8;
    }
  }

  uint32_t value() const {
    return ~value_;
  }

 private:
  static std::array<uint32_t, 256> make_table() {
    std::array<uint32_t, 256> table{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t value = i;
      for (int bit = 0; bit < 8; ++bit) {
        value = value >> 1 ^ ((value & 1) != 0 ? 0xEDB88320u : 0u);
      }
      table[i] = value;
    }
    return table;
  }

  uint32_t value_ = 0xFFFFFFFF;
};

} // namespace inductor_ext::detail
