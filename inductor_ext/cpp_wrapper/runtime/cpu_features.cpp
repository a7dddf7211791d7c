#include "cpu_features.h"

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace inductor_ext {

namespace {

#if defined(__x86_64__)

enum Register { EAX, EBX, ECX, EDX };

// Register state that the operating system must save, as bits of XCR0.
constexpr uint64_t kNone = 0;
constexpr uint64_t kAvx = 0x6;
constexpr uint64_t kAvx512 = 0xe6;
constexpr uint64_t kAmx = 0x60000;

struct Feature {
  const char* name;
  uint32_t leaf;
  uint32_t subleaf;
  Register where;
  int bit;
  uint64_t state;
};

// From the Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, CPUID.
constexpr Feature kFeatures[] = {
    {"sse3", 1, 0, ECX, 0, kNone},
    {"ssse3", 1, 0, ECX, 9, kNone},
    {"fma", 1, 0, ECX, 12, kAvx},
    {"cmpxchg16b", 1, 0, ECX, 13, kNone},
    {"sse4.1", 1, 0, ECX, 19, kNone},
    {"sse4.2", 1, 0, ECX, 20, kNone},
    {"movbe", 1, 0, ECX, 22, kNone},
    {"popcnt", 1, 0, ECX, 23, kNone},
    {"osxsave", 1, 0, ECX, 27, kNone},
    {"avx", 1, 0, ECX, 28, kAvx},
    {"f16c", 1, 0, ECX, 29, kAvx},
    {"bmi", 7, 0, EBX, 3, kNone},
    {"avx2", 7, 0, EBX, 5, kAvx},
    {"bmi2", 7, 0, EBX, 8, kNone},
    {"avx512f", 7, 0, EBX, 16, kAvx512},
    {"avx512dq", 7, 0, EBX, 17, kAvx512},
    {"avx512cd", 7, 0, EBX, 28, kAvx512},
    {"avx512bw", 7, 0, EBX, 30, kAvx512},
    {"avx512vl", 7, 0, EBX, 31, kAvx512},
    {"avx512vnni", 7, 0, ECX, 11, kAvx512},
    {"amx-bf16", 7, 0, EDX, 22, kAmx},
    {"avx512fp16", 7, 0, EDX, 23, kAvx512},
    {"amx-tile", 7, 0, EDX, 24, kAmx},
    {"amx-int8", 7, 0, EDX, 25, kAmx},
    {"avx512bf16", 7, 1, EAX, 5, kAvx512},
    {"amx-fp16", 7, 1, EAX, 21, kAmx},
    {"lahf_lm", 0x80000001, 0, ECX, 0, kNone},
    {"lzcnt", 0x80000001, 0, ECX, 5, kNone},
};

struct Registers {
  uint32_t values[4];
};

INDUCTOR_EXT_ANY_CPU Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers found{};
  uint32_t highest, b, c, d;
  __cpuid(leaf & 0x80000000, highest, b, c, d);
  if (leaf <= highest) {
    uint32_t* values = found.values;
    __cpuid_count(leaf, subleaf, values[EAX], values[EBX], values[ECX], values[EDX]);
  }
  return found;
}

INDUCTOR_EXT_ANY_CPU uint64_t saved_state() {
  if (!(cpuid(1, 0).values[ECX] & (1u << 27))) {
    return 0;
  }
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

INDUCTOR_EXT_ANY_CPU bool has(const Feature& feature) {
  return (cpuid(feature.leaf, feature.subleaf).values[feature.where] >> feature.bit & 1u) &&
      (saved_state() & feature.state) == feature.state;
}

#elif defined(__aarch64__) && defined(__linux__)

struct Feature {
  const char* name;
  unsigned long type;
  unsigned long bit;
};

// From Linux' arch/arm64/include/uapi/asm/hwcap.h.
constexpr Feature kFeatures[] = {
    {"asimd", AT_HWCAP, 1ul << 1},
    {"asimdhp", AT_HWCAP, 1ul << 10},
    {"asimddp", AT_HWCAP, 1ul << 20},
    {"sve", AT_HWCAP, 1ul << 22},
    {"i8mm", AT_HWCAP2, 1ul << 13},
    {"bf16", AT_HWCAP2, 1ul << 14},
};

bool has(const Feature& feature) {
  return (getauxval(feature.type) & feature.bit) != 0;
}

#else

struct Feature {
  const char* name;
};

constexpr Feature kFeatures[] = {{""}};

bool has(const Feature&) {
  return false;
}

#endif

INDUCTOR_EXT_ANY_CPU bool is(const char* name, const char* begin, const char* end) {
  while (begin != end && *name == *begin) {
    ++name;
    ++begin;
  }
  return begin == end && *name == '\0';
}

INDUCTOR_EXT_ANY_CPU bool has(const char* begin, const char* end) {
  for (const Feature& feature : kFeatures) {
    if (is(feature.name, begin, end)) {
      return has(feature);
    }
  }
  return false;
}

} // namespace

void missing_cpu_features(const char* features, char* text, size_t room) {
  size_t length = 0;
  for (const char* begin = features; *begin != '\0';) {
    const char* end = begin;
    while (*end != '\0' && *end != ',') {
      ++end;
    }
    if (!has(begin, end)) {
      for (const char* from = length == 0 ? begin : begin - 1; from != end; ++from) {
        if (length + 1 < room) {
          text[length++] = *from;
        }
      }
    }
    begin = *end == ',' ? end + 1 : end;
  }
  text[length] = '\0';
}

} // namespace inductor_ext
