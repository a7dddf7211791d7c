#include "checksum.h"

#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace inductor_ext {

namespace {

constexpr size_t kRowWords = 512;
constexpr size_t kRowBytes = kRowWords * sizeof(uint64_t);
constexpr size_t kRows = kChecksumBlock / kRowBytes;

// The outputs of the generator splitmix64 for the seed 0, made odd. The first keys are those of the
// words of a row, the others those of the halves of the sums of rows.
struct Keys {
  uint64_t word[kRowWords];
  uint64_t half[4 * kRows];

  constexpr Keys() : word(), half() {
    uint64_t state = 0;
    for (uint64_t& key : word) {
      key = next(state);
    }
    for (uint64_t& key : half) {
      key = next(state);
    }
  }

  static constexpr uint64_t next(uint64_t& state) {
    uint64_t z = (state += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return (z ^ (z >> 31)) | 1;
  }
};

constexpr Keys kKeys;

// Vectors of the compiler: two words, which every x86-64 and aarch64 CPU has instructions for.
using Words = uint64_t __attribute__((vector_size(16)));

// Low half times high half of each word.
inline Words multiply_halves(Words words) {
#ifdef __SSE2__
  return reinterpret_cast<Words>(
      _mm_mul_epu32(reinterpret_cast<__m128i>(words), reinterpret_cast<__m128i>(words >> 32)));
#else
  return (words & 0xffffffff) * (words >> 32);
#endif
}

struct Sums {
  uint64_t words = 0;
  uint64_t mixed = 0;
};

inline __attribute__((always_inline)) Sums sum_row(const uint8_t* row) {
  constexpr size_t kVectors = 4; // that are independent of each other
  constexpr size_t kWords = sizeof(Words) / sizeof(uint64_t);
  Words words[kVectors] = {};
  Words mixed[kVectors] = {};
  for (size_t i = 0; i < kRowWords; i += kVectors * kWords) {
#pragma GCC unroll 4
    for (size_t j = 0; j < kVectors; ++j) {
      Words part;
      Words key;
      std::memcpy(&part, row + (i + j * kWords) * sizeof(uint64_t), sizeof(part));
      std::memcpy(&key, kKeys.word + i + j * kWords, sizeof(key));
      const Words keyed = part ^ key;
      words[j] += part;
      mixed[j] += multiply_halves(keyed);
    }
  }
  Sums sums;
  for (size_t j = 0; j < kVectors; ++j) {
    for (size_t k = 0; k < kWords; ++k) {
      sums.words += words[j][k];
      sums.mixed += mixed[j][k];
    }
  }
  return sums;
}

inline __attribute__((always_inline)) uint64_t sum_rows(const uint8_t* data, size_t bytes) {
  uint64_t checksum = 0;
  for (size_t row = 0; row * kRowBytes < bytes; ++row) {
    const uint8_t* start = data + row * kRowBytes;
    const size_t left = bytes - row * kRowBytes;
    uint8_t filled[kRowBytes];
    if (left < kRowBytes) {
      std::memcpy(filled, start, left);
      std::memset(filled + left, 0, kRowBytes - left);
      start = filled;
    }
    const Sums sums = sum_row(start);
    const uint64_t* keys = kKeys.half + 4 * row;
    checksum += (sums.words & 0xffffffff) * keys[0] + (sums.words >> 32) * keys[1] +
        (sums.mixed & 0xffffffff) * keys[2] + (sums.mixed >> 32) * keys[3];
  }
  return checksum;
}

#ifdef __x86_64__
// The same with the three-operand instructions of AVX.
__attribute__((target("avx2"))) uint64_t sum_rows_avx2(const uint8_t* data, size_t bytes) {
  return sum_rows(data, bytes);
}
#endif

} // namespace

uint64_t inductor_ext_block_checksum(const uint8_t* data, size_t bytes) {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2")) {
    return sum_rows_avx2(data, bytes);
  }
#endif
  return sum_rows(data, bytes);
}

} // namespace inductor_ext
