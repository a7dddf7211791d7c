// Included by every generated translation unit of a model: its class, and the tables that describe it.
//
// The generated code defines `inductor_ext::model_info` as constant-initialised data, and the member
// functions of AOTInductorModel. The *.cpp files of this folder, compiled once for all models, do the
// rest. Namespace and names are those of torch's model.h, which this file replaces: it compiles
// faster, because it does without std::regex, iostream and hash tables.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/inductor/aoti_runtime/constant_type.h>
#include <torch/csrc/inductor/aoti_runtime/device_utils.h>
#include <torch/csrc/inductor/aoti_runtime/scalar_to_tensor.h>
#include <torch/csrc/inductor/aoti_runtime/utils.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e4m3fnuz.h>
#include <c10/util/Float8_e5m2.h>
#include <c10/util/Float8_e5m2fnuz.h>
#include <c10/util/Half.h>
#include <c10/util/generic_math.h>

#ifdef USE_CUDA
#include <filesystem>
#endif

#include "error.h"
#include "operator_errors.h"

// torch's macro, with the reason in the error.
#undef AOTI_TORCH_ERROR_CODE_CHECK
#define AOTI_TORCH_ERROR_CODE_CHECK(call)               \
  if ((call) != AOTI_TORCH_SUCCESS) {                   \
    inductor_ext::fail_call(#call, __FILE__, __LINE__); \
  }

// Generated code rounds the sizes of allocations up with this.
[[maybe_unused]] static inline int64_t align(int64_t bytes) {
  return (bytes + 63) & -64;
}

namespace torch::aot_inductor {

// Base of the generated table of kernels that are loaded at run time.
struct AOTInductorModelKernelsBase {
  virtual ~AOTInductorModelKernelsBase() {
#ifdef USE_CUDA
    for (CUmodule module : loaded_modules_) {
      cuModuleUnload(module);
    }
#endif
  }
#ifdef USE_CUDA
  std::vector<CUmodule> loaded_modules_;
#endif
};

// One runner. It has its own kernels and shares constants with the other runners of its container.
class AOTInductorModel {
 public:
  AOTInductorModel(
      int32_t device_type,
      int32_t device_idx,
      std::optional<std::string> cubin_dir);

  // Steals the inputs and fills the outputs, which the caller owns.
  void run_impl(
      AtenTensorHandle* input_handles,
      AtenTensorHandle* output_handles,
      DeviceStreamType stream,
      AOTIProxyExecutorHandle proxy_executor);

  // A part of a large run_impl: one specialisation per part, possibly in another translation unit.
  template <int Part, typename Frame>
  void run_part(
      Frame& frame,
      AtenTensorHandle* input_handles,
      AtenTensorHandle* output_handles,
      DeviceStreamType stream,
      AOTIProxyExecutorHandle proxy_executor);

  // Computes the folded constants, in the order of ModelInfo::folded.
  void _const_run_impl(
      std::vector<AtenTensorHandle>& output_handles,
      DeviceStreamType stream,
      AOTIProxyExecutorHandle proxy_executor);

  std::shared_ptr<std::vector<ConstantHandle>> constants_;
  std::optional<std::string> cubin_dir_;
  int32_t device_type_;
  int32_t device_idx_;
  std::unique_ptr<AOTInductorModelKernelsBase> kernels_;
};

} // namespace torch::aot_inductor

namespace inductor_ext {

// Returns the number of a dtype, a device type or a layout, which only torch's library knows.
using Code = int32_t (*)();

struct Constant {
  const char* name;
  const char* fqn; // fully qualified name in the exported module
  Code dtype;
  Code device_type;
  Code layout;
  const int64_t* shape;
  const int64_t* stride;
  int64_t ndim;
  int64_t storage_offset; // elements
  uint64_t bytes; // of its storage
  uint64_t offset; // of its storage in the weights; constants may share one
  const uint8_t* opaque; // metadata of an opaque layout
  int64_t opaque_bytes;
  int32_t type; // a torch::aot_inductor::ConstantType
  bool folded; // computed from other constants at run time
};

// The value of a constant of the exported program went into another constant when the model was
// compiled with freezing.
struct FrozenUse {
  const char* fqn; // of the program's constant
  int64_t constant; // index of the other one; -1: the value is part of the code
};

struct ModelInfo {
  const char* const* input_names;
  size_t num_inputs;
  const char* const* output_names;
  size_t num_outputs;
  const Constant* constants;
  size_t num_constants;
  const size_t* folded; // indices of the constants that the folding graph returns
  size_t num_folded;
  const FrozenUse* frozen;
  size_t num_frozen;
  uint64_t weights_bytes;
  bool has_weights; // false: the caller provides all constants
  bool folds; // whether there is a folding graph
  bool folding_needs_executor; // whether it calls operators by name
  bool has_enumerations; // whether operators called by name take dtypes, layouts or memory formats
  bool export_numbers; // whether these are numbered as in torch.export instead of c10
  const char* torch; // the version that compiled it
  const char* in_spec;
  const char* out_spec;
  const char* cpu_features; // required by the code, separated by commas
  std::unique_ptr<torch::aot_inductor::AOTInductorModelKernelsBase> (*make_kernels)();
  // Throws unless the tensors match the signature; null if nothing is to be checked.
  void (*check)(AtenTensorHandle const* inputs, int64_t count, int32_t device_index);
};

// Defined by the generated code of each model.
extern const ModelInfo model_info;

} // namespace inductor_ext
