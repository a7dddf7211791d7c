// Whether this CPU has the features that a model was compiled for.
#pragma once

#include <cstddef>

// Marks a function that must run on every CPU, even if the whole model is one source compiled for a
// newer one. Such functions call only each other and library functions: inline functions of headers
// are compiled for the newer CPU.
#if defined(__x86_64__)
#define INDUCTOR_EXT_ANY_CPU __attribute__((noinline, target("arch=x86-64,no-sse3")))
#else
#define INDUCTOR_EXT_ANY_CPU __attribute__((noinline))
#endif

namespace inductor_ext {

// Writes to `text`, of `room` characters, the entries of the comma-separated list `features` that this
// CPU or its operating system lacks. Names are those of g++'s __builtin_cpu_supports; unknown names
// count as lacking.
INDUCTOR_EXT_ANY_CPU void missing_cpu_features(const char* features, char* text, size_t room);

} // namespace inductor_ext
