// Names of the values of c10's enumerations, for messages.
#pragma once

#include <cstdint>
#include <string>

namespace inductor_ext {

// The names of c10::ScalarType, in its order.
inline const char* const kDtypes[] = {
    "uint8",        "int8",          "int16",           "int32",           "int64",
    "float16",      "float32",       "float64",         "complex32",       "complex64",
    "complex128",   "bool",          "qint8",           "quint8",          "qint32",
    "bfloat16",     "quint4x2",      "quint2x4",        "bits1x8",         "bits2x4",
    "bits4x2",      "bits8",         "bits16",          "float8_e5m2",     "float8_e4m3fn",
    "float8_e5m2fnuz", "float8_e4m3fnuz", "uint16",     "uint32",          "uint64",
    "uint1",        "uint2",         "uint3",           "uint4",           "uint5",
    "uint6",        "uint7",         "int1",            "int2",            "int3",
    "int4",         "int5",          "int6",            "int7",            "float8_e8m0fnu",
    "float4_e2m1fn_x2",
};

// The names of c10::DeviceType, in its order.
inline const char* const kDevices[] = {
    "cpu", "cuda", "mkldnn", "opengl", "opencl", "ideep", "hip",  "fpga", "maia", "xla", "vulkan",
    "metal", "xpu", "mps",   "meta",   "hpu",    "ve",    "lazy", "ipu",  "mtia", "privateuse1",
};

// The names of c10::Layout, in its order.
inline const char* const kLayouts[] = {
    "strided",    "sparse_coo", "sparse_csr", "mkldnn",
    "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged",
};

template <size_t N>
std::string name_in(const char* const (&names)[N], int32_t code) {
  if (code >= 0 && static_cast<size_t>(code) < N) {
    return names[code];
  }
  return "number " + std::to_string(code);
}

} // namespace inductor_ext
