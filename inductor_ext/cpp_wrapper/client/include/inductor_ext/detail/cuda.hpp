// What the client needs to know about CUDA. No CUDA header is needed: torch registers how it runs a
// model on a device, and the CUDA runtime that torch has loaded is called by name.
#pragma once

#include <optional>
#include <string>

#include <dlfcn.h>

#include <torch/csrc/inductor/aoti_runner/model_container_runner.h>

namespace inductor_ext::detail {

struct CudaCapability {
  int major = 0;
  int minor = 0;
};

class Cuda {
 public:
  static const Cuda& get() {
    static const Cuda cuda;
    return cuda;
  }

  // Whether this torch can run models on CUDA.
  bool is_built() const {
    return torch::inductor::getAOTIModelRunnerRegistry().count("cuda") != 0;
  }

  // 1000 times the major version plus 10 times the minor one; 0 if unknown.
  int version() const {
    int value = 0;
    const auto function = find<int (*)(int*)>("cudaRuntimeGetVersion");
    return function != nullptr && function(&value) == 0 ? value : 0;
  }

  // The compute capability of a device; of the current one if the index is -1. If it cannot be
  // queried, `why` is set to CUDA's error.
  std::optional<CudaCapability> capability(int index, std::string* why = nullptr) const {
    constexpr int kMajor = 75, kMinor = 76; // cudaDevAttrComputeCapabilityMajor, -Minor
    const auto current = find<int (*)(int*)>("cudaGetDevice");
    const auto attribute = find<int (*)(int*, int, int)>("cudaDeviceGetAttribute");
    if (current == nullptr || attribute == nullptr) {
      return std::nullopt;
    }
    CudaCapability found;
    int error = index < 0 ? current(&index) : 0;
    error = error == 0 ? attribute(&found.major, kMajor, index) : error;
    error = error == 0 ? attribute(&found.minor, kMinor, index) : error;
    if (error == 0) {
      return found;
    }
    const auto describe = find<const char* (*)(int)>("cudaGetErrorString");
    if (why != nullptr && describe != nullptr) {
      *why = describe(error);
    }
    return std::nullopt;
  }

 private:
  // The linker drops libtorch_cuda.so from a program that calls no function of it (--as-needed).
  Cuda() : library_(dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL)) {}

  template <typename Function>
  Function find(const char* name) const {
    return library_ == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(library_, name));
  }

  void* library_;
};

} // namespace inductor_ext::detail
