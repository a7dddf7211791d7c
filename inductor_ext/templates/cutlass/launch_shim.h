
#ifndef INDUCTOR_EXT_CUTLASS
#define INDUCTOR_EXT_CUTLASS
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

namespace inductor_ext_cutlass {

struct Operand {
@TENSOR_FIELDS@
};

struct Call {
@CALL_FIELDS@
};

struct Kernel {
  const char* name;
  int64_t (*workspace_size)(const Call*);
  int32_t (*run)(const Call*, void*, void*);
};

[[noreturn]] inline void refuse(const Kernel& kernel, const std::string& why) {
  throw std::runtime_error(
      "The kernel " + std::string(kernel.name) + " cannot be launched: " + why + ".");
}

inline void launch(
    const Kernel& kernel,
    Call call,
    std::initializer_list<Operand> operands,
    std::initializer_list<float> scalars,
    void* stream,
    void* workspace) {
  call.tensors = operands.begin();
  call.scalars = scalars.begin();
  const int32_t error = kernel.run(&call, workspace, stream);
  if (error > @CUDA_ERRORS@) {
    refuse(kernel, "CUDA's error is " + std::to_string(error - @CUDA_ERRORS@));
  }
  if (error != 0) {
    refuse(kernel, "CUTLASS's status is " + std::to_string(error));
  }
}

// The memory comes from torch's allocator for the current stream, and may be another's once the
// launch is in that.
inline void launch_with_workspace(
    const Kernel& kernel,
    Call call,
    std::initializer_list<Operand> operands,
    std::initializer_list<float> scalars,
    void* stream,
    int32_t device_type,
    int32_t device) {
  call.tensors = operands.begin();
  call.scalars = scalars.begin();
  const int64_t size = kernel.workspace_size(&call);
  if (size < 0) {
    refuse(kernel, "it does not take such operands");
  }
  const int64_t stride = 1;
  AtenTensorHandle handle = nullptr;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      1, &size, &stride, aoti_torch_dtype_uint8(), device_type, device, &handle));
  torch::aot_inductor::RAIIAtenTensorHandle memory(handle);
  launch(kernel, call, operands, scalars, stream, memory.data_ptr());
}

#ifdef USE_CUDA
inline void* current_stream(int32_t device) {
  void* stream = nullptr;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return stream;
}
#endif

}  // namespace inductor_ext_cutlass
#endif
