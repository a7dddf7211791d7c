#include "container.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "error.h"
#include "read_weights.h"

#ifdef USE_CUDA
#include <torch/csrc/inductor/aoti_runtime/utils_cuda.h>
#endif

namespace torch::aot_inductor {

AOTInductorModel::AOTInductorModel(
    int32_t device_type,
    int32_t device_idx,
    std::optional<std::string> cubin_dir)
    : cubin_dir_(std::move(cubin_dir)),
      device_type_(device_type),
      device_idx_(device_idx),
      kernels_(inductor_ext::model_info.make_kernels()) {}

} // namespace torch::aot_inductor

namespace inductor_ext {

using torch::aot_inductor::AOTInductorModel;
using torch::aot_inductor::ConstantHandle;
using torch::aot_inductor::ConstantType;
using torch::aot_inductor::DeviceStreamType;
using torch::aot_inductor::RAIIAtenTensorHandle;

namespace {

constexpr int64_t kBytesAsTensor[] = {1};

std::string quoted(const Constant& constant) {
  return std::string("constant '") + constant.fqn + "'";
}

std::string shape_text(const int64_t* sizes, int64_t ndim) {
  std::string text = "[";
  for (int64_t d = 0; d < ndim; ++d) {
    text += (d ? ", " : "") + std::to_string(sizes[d]);
  }
  return text + "]";
}

RAIIAtenTensorHandle bytes_tensor(uint64_t bytes, int32_t device_type, int32_t device_index) {
  const int64_t size = static_cast<int64_t>(bytes);
  AtenTensorHandle handle = nullptr;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      1, &size, kBytesAsTensor, aoti_torch_dtype_uint8(), device_type, device_index, &handle));
  return RAIIAtenTensorHandle(handle);
}

RAIIAtenTensorHandle view_bytes(void* data, uint64_t bytes, int32_t device_type, int32_t device_index) {
  const int64_t size = static_cast<int64_t>(bytes);
  AtenTensorHandle handle = nullptr;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(
      data, 1, &size, kBytesAsTensor, 0, aoti_torch_dtype_uint8(), device_type, device_index, &handle));
  return RAIIAtenTensorHandle(handle);
}

// Whether the constant is expanded along a dimension.
bool expanded(const Constant& constant, int64_t dimension) {
  return constant.opaque == nullptr && constant.shape[dimension] > 1 && constant.stride[dimension] == 0;
}

// A view of the tensor with size 1 along the dimensions in which the constant is expanded.
RAIIAtenTensorHandle unexpanded(const Constant& constant, AtenTensorHandle tensor) {
  std::vector<int64_t> sizes(constant.shape, constant.shape + constant.ndim);
  for (int64_t d = 0; d < constant.ndim; ++d) {
    sizes[d] = expanded(constant, d) ? 1 : sizes[d];
  }
  int64_t* strides = nullptr;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &strides));
  AtenTensorHandle view = nullptr;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_as_strided(tensor, sizes.data(), strides, &view));
  return RAIIAtenTensorHandle(view);
}

// torch rejects copies into a tensor whose elements share memory.
void copy_elements(const Constant& constant, AtenTensorHandle to, AtenTensorHandle from) {
  bool shared = false;
  for (int64_t d = 0; d < constant.ndim; ++d) {
    shared = shared || expanded(constant, d);
  }
  if (!shared) {
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(to, from, 0));
    return;
  }
  AOTI_TORCH_ERROR_CODE_CHECK(
      aoti_torch_copy_(unexpanded(constant, to), unexpanded(constant, from), 0));
}

// "cpu", "cuda" or "cuda:1".
void parse_device(const std::string& text, int32_t& type, int32_t& index) {
  const size_t colon = text.find(':');
  const std::string name = text.substr(0, colon);
  index = -1;
  bool valid = name == "cpu" || name == "cuda";
  if (colon != std::string::npos) {
    const std::string digits = text.substr(colon + 1);
    valid = valid && !digits.empty() && digits.size() < 5 &&
        digits.find_first_not_of("0123456789") == std::string::npos;
    index = valid ? std::stoi(digits) : -1;
  }
  if (!valid) {
    throw std::runtime_error("There is no device '" + text + "': give cpu, cuda or cuda:N.");
  }
  type = name == "cpu" ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda();
  if (name == "cuda" && index < 0) {
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_device_index(&index));
  }
}

// torch's executor reads enumeration values as c10's up to 2.11, and as torch.export's since 2.12. With
// the wrong one, an operator would return another dtype than the code expects.
void check_executor() {
  const uint64_t version = aoti_torch_abi_version();
  const unsigned major = version >> 56;
  const unsigned minor = (version >> 48) & 255;
  const bool reads_export = major > 2 || (major == 2 && minor >= 12);
  if (model_info.has_enumerations && model_info.export_numbers != reads_export) {
    const std::string found = std::to_string(major) + "." + std::to_string(minor);
    throw std::runtime_error(
        std::string("The model was compiled with torch ") + model_info.torch + ", but this is torch " + found +
        ", which reads the dtypes, layouts and memory formats that it passes to operators in another way. "
        "Compile it again with torch " + found + ".");
  }
}

class RunnerGuard {
 public:
  explicit RunnerGuard(Runners& runners) : runners_(runners), model_(runners.acquire()) {}
  RunnerGuard(const RunnerGuard&) = delete;
  ~RunnerGuard() {
    runners_.release(model_);
  }
  AOTInductorModel* operator->() const {
    return model_;
  }

 private:
  Runners& runners_;
  AOTInductorModel* model_;
};

// Whether each constant is provided by the caller.
std::vector<bool> find_external(std::vector<std::string> names) {
  std::sort(names.begin(), names.end());
  std::vector<bool> external(model_info.num_constants);
  for (size_t i = 0; i < model_info.num_constants; ++i) {
    external[i] = std::binary_search(names.begin(), names.end(), model_info.constants[i].name);
  }
  return external;
}

// Makes the model's device the current one within a scope.
class OnDevice {
 public:
  OnDevice([[maybe_unused]] int32_t type, [[maybe_unused]] int32_t index) {
#ifdef USE_CUDA
    if (type == aoti_torch_device_type_cuda()) {
      guard_.emplace(index);
    }
#endif
  }

#ifdef USE_CUDA
 private:
  std::optional<torch::aot_inductor::AOTICudaGuard> guard_;
#endif
};

class AloneGuard {
 public:
  AloneGuard(Runners& runners, int32_t device_type, int32_t device_index)
      : runners_(runners), device_(device_type, device_index) {
    runners_.acquire_all();
#ifdef USE_CUDA
    // Kernels that were launched before may still read the constants.
    cudaDeviceSynchronize();
#endif
  }
  AloneGuard(const AloneGuard&) = delete;
  ~AloneGuard() {
    runners_.release_all();
  }

 private:
  Runners& runners_;
  OnDevice device_;
};

} // namespace

// --- loading --------------------------------------------------------------------------------------

Container::Container(size_t runners, const std::string& device_name, const char* cubin_dir, bool load)
    : loads_constants_(load) {
  const WeightsRequest request = take_weights_request();
  if (runners == 0) {
    throw std::runtime_error("num_models must be positive, but got 0");
  }
  check_executor();
  parse_device(device_name, device_type_, device_index_);
  const OnDevice device(device_type_, device_index_);
  for (Constants& set : sets_) {
    set.tensors.resize(model_info.num_constants);
    set.borrowed.resize(model_info.num_constants);
    set.handles = std::make_shared<std::vector<ConstantHandle>>(model_info.num_constants);
  }
  std::vector<AOTInductorModel*> free;
  for (size_t i = 0; i < runners; ++i) {
    models_.push_back(std::make_unique<AOTInductorModel>(
        device_type_,
        device_index_,
        cubin_dir == nullptr ? std::nullopt : std::optional<std::string>(cubin_dir)));
    models_.back()->constants_ = sets_[0].handles;
    free.push_back(models_.back().get());
  }
  runners_ = std::make_unique<Runners>(std::move(free));
  if (load && model_info.has_weights) {
    this->load(sets_[0], request);
  }
}

bool Container::on_cpu(const Constant& constant) const {
  const int32_t type = constant.device_type();
  if (type != device_type_ && type != aoti_torch_device_type_cpu()) {
    throw std::runtime_error(
        "The model was compiled for another type of device than the one that it is loaded on, that of " +
        quoted(constant) + ".");
  }
  return type == aoti_torch_device_type_cpu();
}

// Gives the set the values of the weights file, except for external constants.
void Container::load(Constants& set, const WeightsRequest& request) {
  const std::vector<bool> external = find_external(request.external);
  bool needed = false;
  bool on_host = false;
  bool on_device = false;
  for (size_t i = 0; i < model_info.num_constants; ++i) {
    const Constant& constant = model_info.constants[i];
    if (!constant.folded && !external[i] && constant.bytes > 0) {
      needed = true;
      (on_cpu(constant) ? on_host : on_device) = true;
    }
  }
  if (needed) {
    const WeightsFile file(request, model_info.weights_bytes);
    if (on_host) {
      set.mapping = file.map();
    }
    const bool uploads_all = on_device && request.external.empty();
    if (!uploads_all && !request.checksums.empty()) {
      check_weights(file, request.checksums);
    }
    if (on_device) {
      load_on_device(set, file, external, request);
    }
  }
  for (size_t i = 0; i < model_info.num_constants; ++i) {
    const Constant& constant = model_info.constants[i];
    if (!constant.folded && !external[i]) {
      place(set, i, own_storage(set, constant));
    }
  }
}

void Container::load_on_device(
    [[maybe_unused]] Constants& set,
    [[maybe_unused]] const WeightsFile& file,
    [[maybe_unused]] const std::vector<bool>& external,
    [[maybe_unused]] const WeightsRequest& request) {
#ifdef USE_CUDA
  // The allocator returns memory that may be in use by kernels launched before on this stream.
  void* stream = nullptr;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index_, &stream));
  AOTI_RUNTIME_CUDA_CHECK(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
  if (request.external.empty()) {
    set.device_blob = bytes_tensor(model_info.weights_bytes, device_type_, device_index_);
    upload_weights(
        file,
        {{0, model_info.weights_bytes, static_cast<uint8_t*>(set.device_blob.data_ptr())}},
        request.checksums);
    return;
  }
  std::map<uint64_t, Upload> parts; // constants may share a storage
  for (size_t i = 0; i < model_info.num_constants; ++i) {
    const Constant& constant = model_info.constants[i];
    if (!constant.folded && !external[i] && !on_cpu(constant) && constant.bytes > 0) {
      parts[constant.offset] = {constant.offset, constant.bytes, own_storage(set, constant)};
    }
  }
  std::vector<Upload> uploads;
  for (const auto& [offset, part] : parts) {
    uploads.push_back(part);
  }
  upload_weights(file, uploads, {});
#endif
}

// Address of the constant's storage in memory owned by the set; null for a storage of size 0.
uint8_t* Container::own_storage(Constants& set, const Constant& constant) {
  if (constant.bytes == 0) {
    return nullptr;
  }
  const bool cpu = on_cpu(constant);
  if (cpu && set.mapping.data() != nullptr) {
    return set.mapping.data() + constant.offset;
  }
  if (!cpu && set.device_blob.get() != nullptr) {
    return static_cast<uint8_t*>(set.device_blob.data_ptr()) + constant.offset;
  }
  Storage& storage = set.storages[{cpu, constant.offset}];
  if (storage.tensor.get() == nullptr) {
    storage.tensor = bytes_tensor(
        constant.bytes,
        cpu ? aoti_torch_device_type_cpu() : device_type_,
        cpu ? 0 : device_index_);
    storage.bytes = constant.bytes;
  }
  return static_cast<uint8_t*>(storage.tensor.data_ptr());
}

RAIIAtenTensorHandle Container::tensor_in(const Constant& constant, uint8_t* storage) const {
  AtenTensorHandle tensor = nullptr;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob_v2(
      storage,
      constant.ndim,
      constant.shape,
      constant.stride,
      constant.storage_offset,
      constant.dtype(),
      constant.device_type(),
      on_cpu(constant) ? 0 : device_index_,
      &tensor,
      constant.layout(),
      constant.opaque,
      constant.opaque_bytes));
  return RAIIAtenTensorHandle(tensor);
}

void Container::place(Constants& set, size_t index, uint8_t* storage) {
  put(set, index, tensor_in(model_info.constants[index], storage), /*borrowed=*/false);
}

void Container::put(Constants& set, size_t index, RAIIAtenTensorHandle tensor, bool borrowed) {
  set.tensors[index] = std::move(tensor);
  set.borrowed[index] = borrowed;
  (*set.handles)[index] = ConstantHandle(set.tensors[index].get());
}

// --- running --------------------------------------------------------------------------------------

void Container::run(
    AtenTensorHandle* inputs,
    AtenTensorHandle* outputs,
    DeviceStreamType stream,
    AOTIProxyExecutorHandle proxy_executor,
    bool single_threaded) {
  if (model_info.check != nullptr) {
    model_info.check(
        inputs, static_cast<int64_t>(model_info.num_inputs), device_index_);
  }
  if (single_threaded) {
    Constants& set = constants(false);
    if (!set.folded) {
      fold_alone(set, stream, proxy_executor);
    }
    models_[0]->run_impl(inputs, outputs, stream, proxy_executor);
    return;
  }
  for (;;) {
    {
      RunnerGuard model(*runners_);
      if (constants(false).folded) {
        model->run_impl(inputs, outputs, stream, proxy_executor);
        return;
      }
    }
    AloneGuard alone(*runners_, device_type_, device_index_);
    Constants& set = constants(false);
    if (!set.folded) {
      fold_alone(set, stream, proxy_executor);
    }
  }
}

void Container::require_constants(const Constants& set) const {
  for (size_t i = 0; i < model_info.num_constants; ++i) {
    if (!model_info.constants[i].folded && set.tensors[i].get() == nullptr) {
      throw Error(
          ErrorCode::constant,
          quoted(model_info.constants[i]) +
          (loads_constants_ ? " has no value: the model was compiled without its weights. Set it with load_constants."
                            : " has no value: it is not among the constants that the model was created with."));
    }
  }
}

void Container::fold_alone(
    Constants& set,
    DeviceStreamType stream,
    AOTIProxyExecutorHandle proxy_executor) {
  require_constants(set);
  if (model_info.folds) {
    std::vector<AtenTensorHandle> results(model_info.num_folded);
    for (size_t i = 0; i < model_info.num_folded; ++i) {
      results[i] = (*set.handles)[model_info.folded[i]].get();
    }
    std::shared_ptr<std::vector<ConstantHandle>> active =
        std::exchange(models_[0]->constants_, set.handles);
    try {
      models_[0]->_const_run_impl(results, stream, proxy_executor);
    } catch (...) {
      models_[0]->constants_ = active;
      throw;
    }
    models_[0]->constants_ = active;
    for (size_t i = 0; i < model_info.num_folded; ++i) {
      put(set, model_info.folded[i], RAIIAtenTensorHandle(results[i]), /*borrowed=*/false);
    }
#ifdef USE_CUDA
    // Later runs may use other streams.
    AOTI_RUNTIME_CUDA_CHECK(cudaStreamSynchronize(stream));
#endif
  }
  set.folded = true;
}

// --- changing constants ---------------------------------------------------------------------------

void Container::check(size_t index, AtenTensorHandle tensor, const Update& how) const {
  const Constant& constant = model_info.constants[index];
  int32_t dtype = 0;
  int32_t device_type = 0;
  int32_t layout = 0;
  int64_t ndim = 0;
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &dtype));
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor, &device_type));
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &ndim));
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &sizes));
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &strides));
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor, &layout));
  if (dtype != constant.dtype()) {
    throw Error(ErrorCode::constant, "The new value of " + quoted(constant) + " has another dtype.");
  }
  if (ndim != constant.ndim || !std::equal(sizes, sizes + ndim, constant.shape)) {
    throw Error(
        ErrorCode::constant,
        "The new value of " + quoted(constant) + " has the shape " + shape_text(sizes, ndim) +
        ", but the model takes " + shape_text(constant.shape, constant.ndim) + ".");
  }
  if (how.borrow) {
    for (int64_t d = 0; d < ndim; ++d) {
      if (sizes[d] > 1 && strides[d] != constant.stride[d]) {
        throw Error(
            ErrorCode::constant,
            "The new value of " + quoted(constant) + " has the strides " + shape_text(strides, ndim) +
            ", but to be used without a copy it needs " + shape_text(constant.stride, ndim) + ".");
      }
    }
  }
  const bool moved = how.from_cpu && device_type == aoti_torch_device_type_cpu();
  if (device_type != constant.device_type() && !moved) {
    throw Error(ErrorCode::constant, "The new value of " + quoted(constant) + " is on another device.");
  }
  if (constant.opaque != nullptr) {
    throw Error(
        ErrorCode::constant,
        quoted(constant) + " was packed for this machine when the model was compiled, and cannot "
        "be given a new value.");
  }
  if (layout != constant.layout()) {
    throw Error(ErrorCode::constant, "The new value of " + quoted(constant) + " has another layout.");
  }
  // Wrappers of torch.func and storages of size 0 have none. A copy from them would fail half-way.
  void* data = nullptr;
  if (aoti_torch_get_data_ptr(tensor, &data) != AOTI_TORCH_SUCCESS ||
      (data == nullptr && constant.bytes > 0)) {
    throw Error(ErrorCode::constant, "The new value of " + quoted(constant) + " has no memory.");
  }
  for (int64_t d = 0; d < ndim; ++d) {
    if (expanded(constant, d) && strides[d] != 0) {
      throw Error(
          ErrorCode::constant,
          "The new value of " + quoted(constant) + " is not expanded along dimension " + std::to_string(d) +
          ", but the model stores a single value for it: call .expand on it.");
    }
  }
}

void Container::copy_into(Constants& set, size_t index, AtenTensorHandle source) {
  const Constant& constant = model_info.constants[index];
  if (set.tensors[index].get() == nullptr || set.borrowed[index]) {
    // Replace the tensor last: the copy may fail.
    RAIIAtenTensorHandle own = tensor_in(constant, own_storage(set, constant));
    copy_elements(constant, own, source);
    put(set, index, std::move(own), /*borrowed=*/false);
  } else {
    copy_elements(constant, set.tensors[index], source);
  }
}

// Whether the tensor is in memory of the set, which copy_into() and copy_storage() overwrite.
bool Container::owns(const Constants& set, AtenTensorHandle tensor) const {
  void* data = nullptr;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor, &data));
  const auto address = reinterpret_cast<uintptr_t>(data);
  const auto contains = [&](const void* start, uint64_t bytes) {
    const auto begin = reinterpret_cast<uintptr_t>(start);
    return start != nullptr && address >= begin && address - begin < bytes;
  };
  for (const auto& [key, storage] : set.storages) {
    if (storage.tensor.get() != nullptr && contains(storage.tensor.data_ptr(), storage.bytes)) {
      return true;
    }
  }
  return contains(set.mapping.data(), model_info.weights_bytes) ||
      (set.device_blob.get() != nullptr &&
       contains(set.device_blob.data_ptr(), model_info.weights_bytes));
}

void Container::copy_storage(const Constant& constant, uint8_t* to, uint8_t* from) const {
  if (constant.bytes == 0) {
    return;
  }
  if (on_cpu(constant)) {
    // A page of a mapped file stays shared with other processes until it is written to.
    if (std::memcmp(to, from, constant.bytes) != 0) {
      std::memcpy(to, from, constant.bytes);
    }
    return;
  }
  RAIIAtenTensorHandle target = view_bytes(to, constant.bytes, device_type_, device_index_);
  RAIIAtenTensorHandle source = view_bytes(from, constant.bytes, device_type_, device_index_);
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(target, source, 0));
}

// Gives the inactive set the values of the active set, and makes it pending. Tensors of the caller are
// used in both sets. replaced: constants that the caller will overwrite, which are not copied.
void Container::start_from_active(const std::vector<bool>& replaced) {
  Constants& active = constants(false);
  Constants& set = constants(true);
  for (size_t i = 0; i < model_info.num_constants; ++i) {
    const Constant& constant = model_info.constants[i];
    if (constant.folded || replaced[i]) {
      continue;
    }
    if (active.tensors[i].get() == nullptr) {
      put(set, i, RAIIAtenTensorHandle(), /*borrowed=*/false);
    } else if (active.borrowed[i]) {
      AtenTensorHandle shared = nullptr;
      AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(active.tensors[i], &shared));
      put(set, i, RAIIAtenTensorHandle(shared), /*borrowed=*/true);
    } else {
      uint8_t* storage = own_storage(set, constant);
      copy_storage(constant, storage, own_storage(active, constant));
      if (set.tensors[i].get() == nullptr || set.borrowed[i]) {
        place(set, i, storage);
      }
    }
  }
  set.folded = false;
  inactive_ = Inactive::pending;
}

// Throws if the update would leave values that were computed from the old values of constants.
void Container::check_frozen(const std::vector<bool>& given, const Update& how) const {
  for (size_t i = 0; i < model_info.num_frozen; ++i) {
    const FrozenUse& use = model_info.frozen[i];
    bool updated = how.all;
    for (size_t j = 0; j < model_info.num_constants; ++j) {
      updated = updated || (given[j] && std::strcmp(model_info.constants[j].fqn, use.fqn) == 0);
    }
    if (updated && (use.constant < 0 || !given[use.constant])) {
      const std::string where = use.constant < 0
          ? "the code"
          : std::string("\"") + model_info.constants[use.constant].name + "\", which has no new value";
      throw Error(
          ErrorCode::constant,
          std::string("The value of \"") + use.fqn + "\" was compiled into " + where +
          ": the model was compiled with freezing. Compile it without freezing to update it.");
    }
  }
}

void Container::update(const ConstantMap& tensors, const Update& how) {
  if (how.borrow && how.from_cpu) {
    throw std::runtime_error("A tensor cannot be both borrowed and copied to another device.");
  }
  std::vector<std::pair<size_t, AtenTensorHandle>> given;
  std::vector<bool> replaced(model_info.num_constants);
  for (size_t i = 0; i < model_info.num_constants; ++i) {
    const Constant& constant = model_info.constants[i];
    if (constant.folded) {
      continue;
    }
    auto found = tensors.find(constant.name);
    if (found != tensors.end()) {
      check(i, found->second, how);
      given.emplace_back(i, found->second);
      replaced[i] = true;
    } else if (how.all && constant.type != ConstantType::TensorConstant &&
               constant.type != ConstantType::Buffer && constant.bytes > 0) {
      throw Error(ErrorCode::constant, "There is no new value of " + quoted(constant) + ".");
    }
  }
  check_frozen(replaced, how);
  AloneGuard alone(*runners_, device_type_, device_index_);
  Constants& set = constants(how.inactive);
  std::vector<RAIIAtenTensorHandle> copies;
  for (auto& [index, tensor] : given) {
    if (how.borrow) {
      continue;
    }
    own_storage(set, model_info.constants[index]); // allocate before anything changes
    if (owns(set, tensor)) {
      // From constants(): another constant's new value may overwrite this one's.
      AtenTensorHandle copy = nullptr;
      AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_clone(tensor, &copy));
      tensor = copies.emplace_back(copy).get();
    }
  }
  if (how.inactive && inactive_ != Inactive::pending) {
    start_from_active(replaced);
  }
  for (const auto& [index, tensor] : given) {
    if (how.borrow) {
      AtenTensorHandle shared = nullptr;
      AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor, &shared));
      put(set, index, RAIIAtenTensorHandle(shared), /*borrowed=*/true);
    } else {
      copy_into(set, index, tensor);
    }
  }
  set.folded = false;
}

// blob: values in the layout of the weights file, in memory of the CPU.
void Container::update_from_blob(const uint8_t* blob) {
  AloneGuard alone(*runners_, device_type_, device_index_);
  Constants& set = constants(false);
  for (size_t i = 0; i < model_info.num_constants; ++i) {
    const Constant& constant = model_info.constants[i];
    if (constant.folded) {
      continue;
    }
    uint8_t* storage = own_storage(set, constant);
    if (constant.bytes > 0) {
      const bool cpu = on_cpu(constant);
      RAIIAtenTensorHandle target = view_bytes(
          storage, constant.bytes, cpu ? aoti_torch_device_type_cpu() : device_type_, cpu ? 0 : device_index_);
      RAIIAtenTensorHandle source = view_bytes(
          const_cast<uint8_t*>(blob) + constant.offset, constant.bytes, aoti_torch_device_type_cpu(), 0);
      AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(target, source, 0));
    }
    place(set, i, storage);
  }
  set.folded = false;
}

void Container::fold(bool inactive, DeviceStreamType stream, AOTIProxyExecutorHandle proxy_executor) {
  AloneGuard alone(*runners_, device_type_, device_index_);
  if (inactive && inactive_ == Inactive::empty) {
    require_constants(constants(false));
    return;
  }
  Constants& set = constants(inactive);
  if (model_info.folding_needs_executor && proxy_executor == nullptr) {
    // The next run has an executor, and folds.
    require_constants(set);
    set.folded = false;
    return;
  }
  fold_alone(set, stream, proxy_executor);
}

void Container::swap() {
  AloneGuard alone(*runners_, device_type_, device_index_);
  if (inactive_ == Inactive::empty) {
    start_from_active(std::vector<bool>(model_info.num_constants));
  }
  active_ = 1 - active_;
  inactive_ = Inactive::previous;
  for (auto& model : models_) {
    model->constants_ = constants(false).handles;
  }
}

void Container::free_inactive() {
  AloneGuard alone(*runners_, device_type_, device_index_);
  Constants& set = constants(true);
  for (size_t i = 0; i < model_info.num_constants; ++i) {
    set.tensors[i] = RAIIAtenTensorHandle();
    set.borrowed[i] = false;
    (*set.handles)[i] = ConstantHandle();
  }
  set.device_blob = RAIIAtenTensorHandle();
  set.storages.clear();
  set.mapping = Mapping();
  set.folded = false;
  inactive_ = Inactive::empty;
}

ConstantMap Container::extract(bool inactive) const {
  ConstantMap found;
  const Constants& set = constants(inactive);
  for (size_t i = 0; i < model_info.num_constants; ++i) {
    const Constant& constant = model_info.constants[i];
    if (!constant.folded && set.tensors[i].get() != nullptr) {
      found.emplace(constant.fqn, set.tensors[i].get());
    }
  }
  return found;
}

} // namespace inductor_ext
