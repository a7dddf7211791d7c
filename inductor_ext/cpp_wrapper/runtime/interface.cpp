// The C interface of a compiled model: that of torch's AOT Inductor, which torch's loaders and C++
// programs call, and the functions inductor_ext_*, which `load/native.py` calls.

#include <torch/csrc/inductor/aoti_runtime/interface.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>

#include "container.h"
#include "cpu_features.h"
#include "error.h"

using inductor_ext::ConstantMap;
using inductor_ext::Container;
using inductor_ext::Error;
using inductor_ext::ErrorCode;
using inductor_ext::model_info;
using inductor_ext::Update;
using inductor_ext::WeightsRequest;
using torch::aot_inductor::DeviceStreamType;

namespace {

// Thread-local variables must not have destructors: those would keep the library loaded until the
// thread ends, long after the model is deleted.
thread_local char last_error[8192];
thread_local char last_error_details[8192];
thread_local ErrorCode last_error_code = ErrorCode::none;
thread_local AOTInductorModelContainerHandle last_container = nullptr;
bool quiet = false; // accessed by __atomic_*: misfit() must not call functions of headers
std::atomic<bool> always_single_threaded{false};

// PyEval_SaveThread and PyEval_RestoreThread; null unless every caller holds the GIL.
std::atomic<void* (*)()> save_python{nullptr};
std::atomic<void (*)(void*)> restore_python{nullptr};

// Releases the GIL while a model is created or runs. Waiting for a runner with the GIL held would deadlock if the
// model that has the runner calls back into Python.
class ReleaseGil {
 public:
  ReleaseGil() {
    if (auto* save = save_python.load(std::memory_order_relaxed)) {
      state_ = save();
    }
  }
  ReleaseGil(const ReleaseGil&) = delete;
  ~ReleaseGil() {
    if (state_ != nullptr) {
      restore_python.load(std::memory_order_relaxed)(state_);
    }
  }

 private:
  void* state_ = nullptr;
};

// Kernels write into tensors that may require gradients, which autograd would reject.
class NoGrad {
 public:
  NoGrad() : enabled_(aoti_torch_grad_mode_is_enabled()) {
    aoti_torch_grad_mode_set_enabled(false);
  }
  NoGrad(const NoGrad&) = delete;
  ~NoGrad() {
    aoti_torch_grad_mode_set_enabled(enabled_);
  }

 private:
  bool enabled_;
};

// Stores an error, and the C++ frames that torch appends to the text of its own errors apart from it.
AOTIRuntimeError fail(ErrorCode code, const char* what, const char* details = "") {
  const char* frames = std::strstr(what, "\nException raised from ");
  const size_t length = frames == nullptr ? std::strlen(what) : frames - what;
  last_error_code = code;
  std::snprintf(last_error, sizeof(last_error), "%.*s", static_cast<int>(length), what);
  std::snprintf(
      last_error_details, sizeof(last_error_details), "%s%s", details, frames == nullptr ? "" : frames + 1);
  if (!__atomic_load_n(&quiet, __ATOMIC_RELAXED)) {
    std::fprintf(stderr, "Error: %s\n", last_error);
  }
  return AOTI_RUNTIME_FAILURE;
}

// No exception may leave the shared object.
template <typename Call>
AOTIRuntimeError guarded(Call&& call) {
  try {
    last_error[0] = '\0';
    last_error_details[0] = '\0';
    last_error_code = ErrorCode::none;
    call();
    return AOTI_RUNTIME_SUCCESS;
  } catch (const Error& error) {
    return fail(error.code, error.what(), error.details.c_str());
  } catch (const std::exception& error) {
    return fail(ErrorCode::failure, error.what());
  } catch (...) {
    return fail(ErrorCode::failure, "Unknown exception");
  }
}

INDUCTOR_EXT_ANY_CPU const char* missing_cpu_features() {
  thread_local char missing[1024];
  inductor_ext::missing_cpu_features(model_info.cpu_features, missing, sizeof(missing));
  return missing;
}

// Fails to create a model whose code this CPU cannot run.
INDUCTOR_EXT_ANY_CPU AOTIRuntimeError misfit(const char* missing) {
  last_error_code = ErrorCode::cpu;
  last_error_details[0] = '\0';
  const char* const parts[] = {
      "The model was compiled for a CPU with ", missing,
      ", which this machine lacks. Compile it for an older CPU (setting aot_isa), or run it on a newer one."};
  size_t length = 0;
  for (const char* part : parts) {
    for (; *part != '\0' && length + 1 < sizeof(last_error); ++part) {
      last_error[length++] = *part;
    }
  }
  last_error[length] = '\0';
  if (!__atomic_load_n(&quiet, __ATOMIC_RELAXED)) {
    std::fputs("Error: ", stderr);
    std::fputs(last_error, stderr);
    std::fputs("\n", stderr);
  }
  return AOTI_RUNTIME_FAILURE;
}

template <typename Handle>
Container& container(Handle handle) {
  return *reinterpret_cast<Container*>(handle);
}

const ConstantMap& constant_map(AOTInductorConstantMapHandle handle) {
  return *reinterpret_cast<const ConstantMap*>(handle);
}

const inductor_ext::Constant& constant(size_t index) {
  if (index >= model_info.num_constants) {
    throw std::runtime_error("There is no constant " + std::to_string(index) + ".");
  }
  return model_info.constants[index];
}

AOTIRuntimeError run(
    AOTInductorModelContainerHandle handle,
    AtenTensorHandle* inputs,
    size_t num_inputs,
    AtenTensorHandle* outputs,
    size_t num_outputs,
    AOTInductorStreamHandle stream,
    AOTIProxyExecutorHandle proxy_executor,
    bool single_threaded) {
  return guarded([&] {
    try {
      if (num_inputs != model_info.num_inputs) {
        throw Error(
            ErrorCode::input,
            "The model takes " + std::to_string(model_info.num_inputs) + " tensors, but was called with " +
            std::to_string(num_inputs) + ".");
      }
      if (num_outputs != model_info.num_outputs) {
        throw std::runtime_error(
            "The model returns " + std::to_string(model_info.num_outputs) + " tensors, but there is room for " +
            std::to_string(num_outputs) + ".");
      }
      ReleaseGil release_gil;
      NoGrad no_grad;
      container(handle).run(
          inputs, outputs, reinterpret_cast<DeviceStreamType>(stream), proxy_executor,
          single_threaded || always_single_threaded);
    } catch (...) {
      // The callee owns the inputs; free those that the model has not freed.
      for (size_t i = 0; i < num_inputs; ++i) {
        if (inputs[i] != nullptr) {
          aoti_torch_delete_tensor_object(inputs[i]);
          inputs[i] = nullptr;
        }
      }
      throw;
    }
  });
}

AOTIRuntimeError create(
    AOTInductorModelContainerHandle* handle,
    size_t runners,
    const char* device,
    const char* cubin_dir) {
  return guarded([&] {
    ReleaseGil release_gil;
    NoGrad no_grad;
    *handle = reinterpret_cast<AOTInductorModelContainerHandle>(new Container(runners, device, cubin_dir));
    last_container = *handle;
  });
}

AOTIRuntimeError create_alone(AOTInductorModelHandle* handle, AOTInductorConstantMapHandle tensors) {
  return guarded([&] {
    NoGrad no_grad;
    auto model = std::make_unique<Container>(1, "cpu", nullptr, /*load=*/tensors == nullptr);
    if (tensors != nullptr) {
      model->update(constant_map(tensors), {.borrow = true});
    }
    *handle = reinterpret_cast<AOTInductorModelHandle>(model.release());
  });
}

AOTIRuntimeError update(AOTInductorModelContainerHandle handle, const ConstantMap& tensors, const Update& how) {
  return guarded([&] {
    NoGrad no_grad;
    container(handle).update(tensors, how);
  });
}

} // namespace

extern "C" {

// --- functions of the extension -------------------------------------------------------------------

// The next container that this thread creates reads its weights from this part of a file. Forgets what
// the functions below said about it.
AOTI_API void inductor_ext_set_weights(const char* path, uint64_t offset, uint64_t bytes) {
  WeightsRequest& request = inductor_ext::weights_request();
  request = WeightsRequest();
  if (path != nullptr && *path != '\0') {
    request.path = path;
    request.offset = offset;
    request.bytes = bytes;
  }
}

// The next container that this thread creates checks its weights against these checksums (checksum.h).
AOTI_API void inductor_ext_set_checksums(const uint64_t* checksums, size_t number) {
  inductor_ext::weights_request().checksums.assign(checksums, checksums + number);
}

// The next container that this thread creates does not read these constants: the caller provides them
// with AOTInductorModelContainerUpdateUserManagedConstantBuffer before the first call.
AOTI_API void inductor_ext_set_external_constants(const char* const* names, size_t number) {
  inductor_ext::weights_request().external.assign(names, names + number);
}

// This thread's last error, as one sentence for the caller of the model; empty if there is none.
AOTI_API const char* inductor_ext_last_error() {
  return last_error;
}

// Where the error happened in the code: C++ frames, files of the build. May be empty.
AOTI_API const char* inductor_ext_last_error_details() {
  return last_error_details;
}

// The kind of the error that inductor_ext_last_error describes: a value of ErrorCode in error.h.
AOTI_API int32_t inductor_ext_last_error_code() {
  return static_cast<int32_t>(last_error_code);
}

AOTI_API void inductor_ext_quiet(int on) {
  __atomic_store_n(&quiet, on != 0, __ATOMIC_RELAXED);
}

AOTI_API INDUCTOR_EXT_ANY_CPU const char* inductor_ext_missing_cpu_features() {
  return missing_cpu_features();
}

// Makes AOTInductorModelContainerRun behave as AOTInductorModelContainerRunSingleThreaded, for
// callers that cannot call the latter.
AOTI_API void inductor_ext_set_single_threaded(int on) {
  always_single_threaded = on != 0;
}

// Declares that all callers of the functions that create a container or run it hold the GIL, which is
// then released meanwhile. The arguments are PyEval_SaveThread and PyEval_RestoreThread.
AOTI_API void inductor_ext_release_gil(void* save, void* restore) {
  restore_python = reinterpret_cast<void (*)(void*)>(restore);
  save_python = reinterpret_cast<void* (*)()>(save);
}

AOTI_API void* inductor_ext_last_container() {
  return last_container;
}

// --- creating and running -------------------------------------------------------------------------

INDUCTOR_EXT_ANY_CPU AOTIRuntimeError AOTInductorModelContainerCreate(
    AOTInductorModelContainerHandle* container_handle,
    size_t num_models,
    bool is_cpu,
    const char* cubin_dir) {
  const char* missing = missing_cpu_features();
  return *missing == '\0' ? create(container_handle, num_models, is_cpu ? "cpu" : "cuda", cubin_dir)
                          : misfit(missing);
}

INDUCTOR_EXT_ANY_CPU AOTIRuntimeError AOTInductorModelContainerCreateWithDevice(
    AOTInductorModelContainerHandle* container_handle,
    size_t num_models,
    const char* device_str,
    const char* cubin_dir) {
  const char* missing = missing_cpu_features();
  return *missing == '\0' ? create(container_handle, num_models, device_str, cubin_dir)
                          : misfit(missing);
}

AOTIRuntimeError AOTInductorModelContainerDelete(AOTInductorModelContainerHandle container_handle) {
  return guarded([&] { delete &container(container_handle); });
}

AOTIRuntimeError AOTInductorModelContainerRun(
    AOTInductorModelContainerHandle container_handle,
    AtenTensorHandle* input_handles,
    size_t num_inputs,
    AtenTensorHandle* output_handles,
    size_t num_outputs,
    AOTInductorStreamHandle stream_handle,
    AOTIProxyExecutorHandle proxy_executor_handle) {
  return run(
      container_handle, input_handles, num_inputs, output_handles, num_outputs, stream_handle,
      proxy_executor_handle, false);
}

AOTIRuntimeError AOTInductorModelContainerRunSingleThreaded(
    AOTInductorModelContainerHandle container_handle,
    AtenTensorHandle* input_handles,
    size_t num_inputs,
    AtenTensorHandle* output_handles,
    size_t num_outputs,
    AOTInductorStreamHandle stream_handle,
    AOTIProxyExecutorHandle proxy_executor_handle) {
  return run(
      container_handle, input_handles, num_inputs, output_handles, num_outputs, stream_handle,
      proxy_executor_handle, true);
}

// --- description of the model ---------------------------------------------------------------------

AOTIRuntimeError AOTInductorModelContainerGetNumInputs(AOTInductorModelContainerHandle, size_t* number) {
  return guarded([&] { *number = model_info.num_inputs; });
}

AOTIRuntimeError AOTInductorModelContainerGetInputName(
    AOTInductorModelContainerHandle,
    size_t index,
    const char** name) {
  return guarded([&] {
    if (index >= model_info.num_inputs) {
      throw std::runtime_error("There is no input " + std::to_string(index) + ".");
    }
    *name = model_info.input_names[index];
  });
}

AOTIRuntimeError AOTInductorModelContainerGetNumOutputs(AOTInductorModelContainerHandle, size_t* number) {
  return guarded([&] { *number = model_info.num_outputs; });
}

AOTIRuntimeError AOTInductorModelContainerGetOutputName(
    AOTInductorModelContainerHandle,
    size_t index,
    const char** name) {
  return guarded([&] {
    if (index >= model_info.num_outputs) {
      throw std::runtime_error("There is no output " + std::to_string(index) + ".");
    }
    *name = model_info.output_names[index];
  });
}

AOTIRuntimeError AOTInductorModelContainerGetCallSpec(
    AOTInductorModelContainerHandle,
    const char** in_spec,
    const char** out_spec) {
  return guarded([&] {
    *in_spec = model_info.in_spec;
    *out_spec = model_info.out_spec;
  });
}

AOTIRuntimeError AOTInductorModelContainerGetNumConstants(AOTInductorModelContainerHandle, size_t* number) {
  return guarded([&] { *number = model_info.num_constants; });
}

AOTIRuntimeError AOTInductorModelContainerGetConstantName(
    AOTInductorModelContainerHandle,
    size_t index,
    const char** name) {
  return guarded([&] { *name = constant(index).name; });
}

AOTIRuntimeError AOTInductorModelContainerGetConstantOriginalFQN(
    AOTInductorModelContainerHandle,
    size_t index,
    const char** fqn) {
  return guarded([&] { *fqn = constant(index).fqn; });
}

AOTIRuntimeError AOTInductorModelContainerGetConstantFromFolded(
    AOTInductorModelContainerHandle,
    size_t index,
    bool* folded) {
  return guarded([&] { *folded = constant(index).folded; });
}

AOTIRuntimeError AOTInductorModelContainerGetConstantType(
    AOTInductorModelContainerHandle,
    size_t index,
    int32_t* type) {
  return guarded([&] { *type = constant(index).type; });
}

AOTIRuntimeError AOTInductorModelContainerGetConstantDtype(
    AOTInductorModelContainerHandle,
    size_t index,
    int32_t* dtype) {
  return guarded([&] { *dtype = constant(index).dtype(); });
}

AOTIRuntimeError AOTInductorModelContainerGetConstantDataSize(
    AOTInductorModelContainerHandle,
    size_t index,
    size_t* bytes) {
  return guarded([&] { *bytes = constant(index).bytes; });
}

AOTIRuntimeError AOTInductorModelContainerGetConstantsBlobSize(
    AOTInductorModelContainerHandle,
    uint64_t* bytes) {
  return guarded([&] { *bytes = model_info.weights_bytes; });
}

// --- constants ------------------------------------------------------------------------------------

AOTIRuntimeError AOTInductorModelContainerExtractConstantsMap(
    AOTInductorModelContainerHandle container_handle,
    AOTInductorConstantMapHandle constant_map_handle,
    bool use_inactive) {
  return guarded([&] {
    auto& into = *reinterpret_cast<ConstantMap*>(constant_map_handle);
    for (const auto& [name, tensor] : container(container_handle).extract(use_inactive)) {
      into.emplace(name, tensor);
    }
  });
}

AOTIRuntimeError AOTInductorModelContainerUpdateConstantBuffer(
    AOTInductorModelContainerHandle container_handle,
    AOTInductorConstantMapHandle constant_map_handle,
    bool use_inactive,
    bool validate_full_update) {
  return update(
      container_handle, constant_map(constant_map_handle), {.inactive = use_inactive, .all = validate_full_update});
}

AOTIRuntimeError AOTInductorModelContainerUpdateUserManagedConstantBuffer(
    AOTInductorModelContainerHandle container_handle,
    AOTInductorConstantMapHandle constant_map_handle,
    bool use_inactive,
    bool validate_full_update) {
  return update(
      container_handle,
      constant_map(constant_map_handle),
      {.inactive = use_inactive, .all = validate_full_update, .borrow = true});
}

AOTI_API AOTIRuntimeError AOTInductorModelContainerUpdateConstantBufferFromCpu(
    AOTInductorModelContainerHandle container_handle,
    AOTInductorConstantMapHandle constant_map_handle,
    bool use_inactive,
    bool validate_full_update) {
  return update(
      container_handle,
      constant_map(constant_map_handle),
      {.inactive = use_inactive, .all = validate_full_update, .from_cpu = true});
}

AOTIRuntimeError AOTInductorModelContainerUpdateInactiveConstantBuffer(
    AOTInductorModelContainerHandle container_handle,
    AOTInductorConstantMapHandle constant_map_handle) {
  return update(container_handle, constant_map(constant_map_handle), {.inactive = true, .all = true});
}

AOTIRuntimeError AOTInductorModelContainerFreeInactiveConstantBuffer(
    AOTInductorModelContainerHandle container_handle) {
  return guarded([&] { container(container_handle).free_inactive(); });
}

AOTIRuntimeError AOTInductorModelContainerRunConstantFolding(
    AOTInductorModelContainerHandle container_handle,
    bool use_inactive,
    AOTInductorStreamHandle stream_handle,
    AOTIProxyExecutorHandle proxy_executor_handle) {
  return guarded([&] {
    NoGrad no_grad;
    container(container_handle)
        .fold(use_inactive, reinterpret_cast<DeviceStreamType>(stream_handle), proxy_executor_handle);
  });
}

AOTIRuntimeError AOTInductorModelContainerSwapConstantBuffer(AOTInductorModelContainerHandle container_handle) {
  return guarded([&] {
    NoGrad no_grad;
    container(container_handle).swap();
  });
}

AOTIRuntimeError AOTInductorModelUpdateConstantsFromBlob(
    AOTInductorModelContainerHandle container_handle,
    const uint8_t* weight_blob_ptr) {
  return guarded([&] {
    NoGrad no_grad;
    container(container_handle).update_from_blob(weight_blob_ptr);
  });
}

AOTI_API AOTIRuntimeError AOTInductorGetLastError(const char** message) {
  *message = last_error;
  return AOTI_RUNTIME_SUCCESS;
}

// --- one model on the CPU, linked into a program --------------------------------------------------

INDUCTOR_EXT_ANY_CPU AOTIRuntimeError AOTInductorModelCreate(
    AOTInductorModelHandle* model_handle,
    AOTInductorConstantMapHandle constant_map_handle) {
  const char* missing = missing_cpu_features();
  return *missing == '\0' ? create_alone(model_handle, constant_map_handle) : misfit(missing);
}

AOTIRuntimeError AOTInductorModelRun(
    AOTInductorModelHandle model_handle,
    AtenTensorHandle* input_handles,
    AtenTensorHandle* output_handles) {
  return run(
      reinterpret_cast<AOTInductorModelContainerHandle>(model_handle), input_handles, model_info.num_inputs,
      output_handles, model_info.num_outputs, nullptr, nullptr, true);
}

AOTIRuntimeError AOTInductorModelDelete(AOTInductorModelHandle model_handle) {
  return guarded([&] { delete &container(model_handle); });
}

AOTIRuntimeError AOTInductorModelGetNumOutputs(AOTInductorModelHandle, size_t* number) {
  return guarded([&] { *number = model_info.num_outputs; });
}

AOTIRuntimeError AOTInductorModelUpdateConstantsMap(
    AOTInductorModelHandle model_handle,
    AOTInductorConstantMapHandle constant_map_handle) {
  return update(
      reinterpret_cast<AOTInductorModelContainerHandle>(model_handle), constant_map(constant_map_handle),
      {.borrow = true});
}

} // extern "C"

#ifdef INDUCTOR_EXT_CONSTANT_PAIRS

// Since torch 2.13, constants may also be passed as an array, so that caller and library need not
// share a C++ standard library. AOTI_API is repeated here because the header of the compiling torch
// may not declare a function that the loader of a later torch looks up.

namespace {

ConstantMap from_pairs(const AOTInductorConstantMapEntry* pairs, size_t number) {
  ConstantMap tensors;
  for (size_t i = 0; i < number; ++i) {
    tensors.emplace(pairs[i].name, pairs[i].handle);
  }
  return tensors;
}

AOTIRuntimeError create_from_pairs(
    AOTInductorModelHandle* handle,
    const AOTInductorConstantMapEntry* pairs,
    size_t number) {
  if (pairs == nullptr || number == 0) {
    return create_alone(handle, nullptr);
  }
  ConstantMap tensors = from_pairs(pairs, number);
  return create_alone(handle, reinterpret_cast<AOTInductorConstantMapHandle>(&tensors));
}

AOTIRuntimeError create_from_external(
    AOTInductorModelContainerHandle* handle,
    size_t runners,
    const char* device,
    const char* cubin_dir,
    const AOTInductorConstantMapEntry* constants,
    size_t number) {
  return guarded([&] {
    if (number != 0 && constants == nullptr) {
      throw Error(
          ErrorCode::constant,
          "There are to be " + std::to_string(number) + " external constants, and their array is null.");
    }
    NoGrad no_grad;
    auto model = std::make_unique<Container>(runners, device, cubin_dir, /*load=*/false);
    model->update(from_pairs(constants, number), {.borrow = true});
    model->fold(/*inactive=*/false, /*stream=*/nullptr, /*proxy_executor=*/nullptr);
    *handle = reinterpret_cast<AOTInductorModelContainerHandle>(model.release());
    last_container = *handle;
  });
}

} // namespace

extern "C" {

AOTI_API AOTIRuntimeError AOTInductorModelContainerExtractConstantsMapEntries(
    AOTInductorModelContainerHandle container_handle,
    const AOTInductorConstantMapEntry** entries,
    size_t* num_entries,
    bool use_inactive) {
  thread_local std::vector<AOTInductorConstantMapEntry> found;
  return guarded([&] {
    found.clear();
    const ConstantMap tensors = container(container_handle).extract(use_inactive);
    for (size_t i = 0; i < model_info.num_constants; ++i) {
      auto tensor = tensors.find(model_info.constants[i].fqn);
      if (!model_info.constants[i].folded && tensor != tensors.end()) {
        found.push_back({model_info.constants[i].fqn, tensor->second});
      }
    }
    *entries = found.empty() ? nullptr : found.data();
    *num_entries = found.size();
  });
}

AOTI_API AOTIRuntimeError AOTInductorModelContainerUpdateUserManagedConstantBufferPairs(
    AOTInductorModelContainerHandle container_handle,
    const AOTInductorConstantMapEntry* pairs,
    size_t num_pairs,
    bool use_inactive,
    bool validate_full_update) {
  return update(
      container_handle,
      from_pairs(pairs, num_pairs),
      {.inactive = use_inactive, .all = validate_full_update, .borrow = true});
}

AOTI_API AOTIRuntimeError AOTInductorModelContainerUpdateConstantBufferPairs(
    AOTInductorModelContainerHandle container_handle,
    const AOTInductorConstantMapEntry* pairs,
    size_t num_pairs,
    bool use_inactive,
    bool validate_full_update) {
  return update(
      container_handle, from_pairs(pairs, num_pairs), {.inactive = use_inactive, .all = validate_full_update});
}

AOTI_API AOTIRuntimeError AOTInductorModelContainerUpdateConstantBufferFromCpuPairs(
    AOTInductorModelContainerHandle container_handle,
    const AOTInductorConstantMapEntry* pairs,
    size_t num_pairs,
    bool use_inactive,
    bool validate_full_update) {
  return update(
      container_handle,
      from_pairs(pairs, num_pairs),
      {.inactive = use_inactive, .all = validate_full_update, .from_cpu = true});
}

AOTI_API AOTIRuntimeError AOTInductorModelContainerUpdateInactiveConstantBufferPairs(
    AOTInductorModelContainerHandle container_handle,
    const AOTInductorConstantMapEntry* pairs,
    size_t num_pairs) {
  return update(container_handle, from_pairs(pairs, num_pairs), {.inactive = true, .all = true});
}

AOTI_API INDUCTOR_EXT_ANY_CPU AOTIRuntimeError AOTInductorModelCreateV2(
    AOTInductorModelHandle* model_handle,
    const AOTInductorConstantMapEntry* pairs,
    size_t num_pairs) {
  const char* missing = missing_cpu_features();
  return *missing == '\0' ? create_from_pairs(model_handle, pairs, num_pairs) : misfit(missing);
}

AOTI_API AOTIRuntimeError AOTInductorModelUpdateConstantsMapV2(
    AOTInductorModelHandle model_handle,
    const AOTInductorConstantMapEntry* pairs,
    int32_t num_pairs) {
  return update(
      reinterpret_cast<AOTInductorModelContainerHandle>(model_handle),
      from_pairs(pairs, static_cast<size_t>(num_pairs)),
      {.borrow = true});
}

// Since torch 2.14. The model uses the given tensors and reads no weights of its own.
AOTI_API INDUCTOR_EXT_ANY_CPU AOTIRuntimeError AOTInductorModelContainerCreateWithExternalConstants(
    AOTInductorModelContainerHandle* container_handle,
    size_t num_models,
    const char* device_str,
    const char* cubin_dir,
    const AOTInductorConstantMapEntry* constant_entries,
    size_t num_constant_entries) {
  const char* missing = missing_cpu_features();
  return *missing == '\0' ? create_from_external(
                                container_handle, num_models, device_str, cubin_dir,
                                constant_entries, num_constant_entries)
                          : misfit(missing);
}

// Since torch 2.14.
AOTI_API AOTIRuntimeError AOTInductorModelContainerDidCallLoadConstants(
    AOTInductorModelContainerHandle container_handle,
    bool* did_call_load_constants) {
  return guarded([&] { *did_call_load_constants = container(container_handle).loads_constants(); });
}

} // extern "C"

#endif // INDUCTOR_EXT_CONSTANT_PAIRS
