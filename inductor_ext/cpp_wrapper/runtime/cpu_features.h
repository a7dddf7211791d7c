// Whether this CPU has what an artifact was compiled for.
#pragma once

#include <string>

namespace inductor_ext {

// Those of a comma-separated list of features, named as by g++'s __builtin_cpu_supports, that this
// CPU or its operating system lacks; names that are not known count as lacking.
std::string missing_cpu_features(const char* features);

} // namespace inductor_ext
