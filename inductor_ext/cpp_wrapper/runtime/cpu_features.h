// Whether this CPU has what an artifact was compiled for.
#pragma once

#include <cstddef>

// Before a function that has to run on every CPU, also where all of an artifact is one source that
// is compiled for a newer one. Such functions call only each other and what lies in libraries:
// inline functions of headers are compiled for the newer CPU.
#if defined(__x86_64__)
#define INDUCTOR_EXT_ANY_CPU __attribute__((noinline, target("arch=x86-64,no-sse3")))
#else
#define INDUCTOR_EXT_ANY_CPU __attribute__((noinline))
#endif

namespace inductor_ext {

// Writes to `text`, which has room for `room` characters, those of a comma-separated list of
// features, named as by g++'s __builtin_cpu_supports, that this CPU or its operating system lacks;
// names that are not known count as lacking.
INDUCTOR_EXT_ANY_CPU void missing_cpu_features(const char* features, char* text, size_t room);

} // namespace inductor_ext
