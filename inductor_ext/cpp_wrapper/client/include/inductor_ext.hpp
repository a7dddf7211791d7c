// inductor_ext.hpp: AOT packages of inductor_ext in C++, without Python.
//
//   inductor_ext::Model model = inductor_ext::load("model.pt2");
//   std::vector<at::Tensor> results = model.run({at::ones({5, 8})});
//
// Header-only, C++17 (C++20 from torch 2.14 on), Linux. CMake: find_package(inductor_ext), target
// inductor_ext::client; the folder for CMAKE_PREFIX_PATH is that of
// `python -c "import inductor_ext; print(inductor_ext.cmake_prefix_path())"`.
//
// `load` checks a package before any code of it runs: names and positions of the zip entries, the
// requirements on the machine and torch, and the SHA-256 of every file that is used. The digests are
// not a signature: load only packages from sources that you trust.
//
// Every error is an inductor_ext::Error with a `kind()`. docs/user/aot_packages.md has the rest.
#pragma once

#include <algorithm>
#include <cstddef>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner.h>

#include "inductor_ext/detail/library.hpp"
#include "inductor_ext/detail/manifest.hpp"
#include "inductor_ext/detail/package.hpp"
#include "inductor_ext/detail/package_files.hpp"
#include "inductor_ext/detail/self_test.hpp"
#include "inductor_ext/error.hpp"
#include "inductor_ext/signature.hpp"

namespace inductor_ext {

struct Options {
  // Name of the compiled model in the package.
  std::string model_name = "model";
  // Number of threads that may run the model at the same time; others wait.
  size_t num_runners = 1;
  // Device of the model: "cuda:1". Empty: the CPU, or the current CUDA device.
  std::string device;
  // Whether to check the SHA-256 of every file that is used.
  bool verify = true;
  // Whether weights are mapped from the file, in memory that processes share. The file must then not
  // be written to while the model exists. False copies them first.
  bool map_weights = true;
  // For a package without its weights (`aot_weights_file`): the file that has them, or another
  // package with the same weights.
  std::string weights;
};

struct SelfTestResult {
  size_t compared = 0; // number of results that were compared
  double difference = 0; // largest one, relative to the largest expected magnitude in a tensor
};

class Model;
Model load(const std::string& path, const Options& options = {});

// A loaded model. All functions may be called by several threads, also while others run the model.
// A moved-from model must not be used.
class Model {
 public:
  Model(Model&&) = default;
  Model& operator=(Model&&) = default;
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  // Runs the model. Takes a tensor for each of `signature().inputs` and returns one for each of
  // `signature().outputs`. Kinds of errors: input, run, budget.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) const;

  const Signature& signature() const {
    return state_->record().signature;
  }

  // Fully qualified names of the constants, such as "encoder.layer.0.weight", sorted.
  std::vector<std::string> constant_names() const;

  // The tensors that the model uses, not copies. The inactive set is empty until it is updated. The
  // tensors are valid until the constants are next updated, swapped or freed.
  std::map<std::string, at::Tensor> constants(bool inactive = false) const;

  struct Update {
    // Update the set that `swap_constants` activates, while calls use the other one. The first such
    // update after loading or a swap starts from the values of the active set.
    bool inactive = false;
    // Whether parameters and buffers may be omitted.
    bool partial = true;
  };

  // Copies new values into constants, also from the CPU to the model's device. If it throws (kind
  // constant), nothing was changed.
  void update_constants(const std::map<std::string, at::Tensor>& tensors, Update update);
  void update_constants(const std::map<std::string, at::Tensor>& tensors) {
    update_constants(tensors, Update());
  }

  // Exchanges the active and the inactive set of constants.
  void swap_constants();

  // Runs runtime constant folding now. Otherwise, the next call runs it.
  void fold_constants(bool inactive = false);

  // Frees the memory of the inactive set of constants, and discards its updates.
  void free_inactive_constants();

  // Calls the model with the inputs that are recorded in the package (`aot_self_test`), and compares.
  // Call it after `load`: results are those of the weights in the package. Kinds of errors:
  // self_test if a result differs, unsupported if the package has no self test.
  SelfTestResult self_test() const;

  // The manifest of the package, as JSON.
  const std::string& manifest() const {
    return state_->manifest.text;
  }

  // Path of the package.
  const std::string& path() const {
    return state_->path;
  }

  // Device of the model: "cpu", "cuda", "cuda:1".
  const std::string& device() const {
    return state_->device;
  }

 private:
  friend Model load(const std::string& path, const Options& options);

  // Members are destroyed from the last to the first.
  struct State {
    std::string path;
    std::string name;
    std::string device;
    detail::Manifest manifest;
    std::unique_ptr<detail::PrivateFolder> folder; // CUDA kernels are read from it at their first use
    std::unique_ptr<detail::Library> library;
    std::unique_ptr<torch::inductor::AOTIModelContainerRunner> runner;
    void* container = nullptr;
    std::map<std::string, std::vector<std::string>> names; // in the code, by fully qualified name

    const detail::ModelRecord& record() const {
      return manifest.models.at(name);
    }
  };

  explicit Model(std::shared_ptr<State> state) : state_(std::move(state)) {}

  [[noreturn]] void raise_call_error(const std::exception& error) const;
  [[noreturn]] void raise_run_error(const std::string& why) const;
  [[noreturn]] static void raise_mismatch(const std::string& why, const std::string& remedy = "");
  at::Tensor convert_constant(const std::string& fqn, const std::string& name, const at::Tensor& tensor) const;

  std::shared_ptr<State> state_;
};

namespace detail {

// The text of an exception without the C++ frames that torch appends.
inline std::string first_line(const std::exception& error) {
  std::string text = error.what();
  text.erase(std::min(text.find('\n'), text.size()));
  text.erase(text.find_last_not_of('.') + 1);
  return text;
}

// A dtype and sizes: "(float32, [3, 4])".
inline std::string describe_tensor(const std::string& dtype, const std::vector<int64_t>& sizes) {
  std::vector<std::string> texts;
  for (const int64_t size : sizes) {
    texts.push_back(std::to_string(size));
  }
  return "(" + dtype + ", [" + joined(texts) + "])";
}

// Replaces the expression of a failed check of an index by the size that it must be below. `source`
// is the input that the index comes from; empty if that is not known.
inline std::string describe_index_error(const std::string& why, const std::string& source) {
  const std::string begin = "index out of bounds: 0 <= ";
  const size_t limit = why.rfind(" < ");
  if (why.compare(0, begin.size(), begin) != 0 || limit == std::string::npos) {
    return why;
  }
  std::string size = why.substr(limit + 3);
  size.erase(size.find_last_not_of('L') + 1);
  if (size.empty() || size.find_first_not_of("0123456789") != std::string::npos) {
    return why;
  }
  return (source.empty() ? "An index" : "An index from input " + in_quotes(source)) +
      " is out of bounds for a dimension of size " + size;
}

// Adds the inputs that a failed assert of a GPU kernel may be about: those whose elements the model
// checks as indices. CUDA does not say which assert failed, nor in which kernel of the process.
inline std::string describe_assert(const std::string& why, const IndexInputs& kernels) {
  std::set<std::string> checked;
  for (const auto& kernel : kernels) {
    for (const auto& check : kernel.second) {
      checked.insert(in_quotes(check.second));
    }
  }
  if (why.find("device-side assert triggered") == std::string::npos || checked.empty()) {
    return why;
  }
  std::string names;
  for (const std::string& name : checked) {
    names += (names.empty() ? "" : " or ") + name;
  }
  return why + ": an index from input " + names + " may be out of bounds";
}

// The CUDA index of a device; -1: the current one.
inline int parse_device(const std::string& device, const ModelRecord& model) {
  if (device.empty()) {
    return -1;
  }
  const std::string kind = device.substr(0, device.find(':'));
  const std::string index = kind.size() == device.size() ? "" : device.substr(kind.size() + 1);
  const bool has_index = kind.size() != device.size();
  const bool is_valid = !has_index ||
      (kind != "cpu" && !index.empty() && index.size() < 4 &&
       index.find_first_not_of("0123456789") == std::string::npos);
  if (kind != model.device || !is_valid) {
    const std::string indexed = model.device == "cpu" ? "" : ", or \"" + model.device + ":1\" for one of several";
    raise_bad_option("device", in_quotes(device), "\"" + model.device + "\", on which the model runs" + indexed);
  }
  return has_index ? std::stoi(index) : -1;
}

inline std::unique_ptr<torch::inductor::AOTIModelContainerRunner> create_runner(
    const Library& library,
    const PackageFiles& files,
    const std::string& library_path,
    const std::string& device,
    size_t num_runners,
    const LocatedWeights* weights) {
  const auto& registry = torch::inductor::getAOTIModelRunnerRegistry();
  const auto factory = registry.find(device.substr(0, device.find(':')));
  if (factory == registry.end()) {
    files.raise_load_error("it runs on " + device + ", for which there is no AOTI runner");
  }
  try {
    library.prepare(weights);
    const std::string folder = library_path.substr(0, library_path.rfind('/'));
    return factory->second(library_path, num_runners, device, device == "cpu" ? "" : folder, false);
  } catch (const LibraryLoadError& error) {
    files.raise_load_error(error.reason);
  } catch (const std::exception& error) {
    if (weights != nullptr && library.last_error_code() == LibraryError::damaged) {
      files.raise_damaged(*weights);
    }
    const std::string why = library.last_error();
    files.raise_load_error(why.empty() ? first_line(error) : why);
  }
}

} // namespace detail

inline Model load(const std::string& path, const Options& options) {
  if (options.num_runners < 1) {
    detail::raise_bad_option("num_runners", "0", "an integer of at least 1");
  }
  const detail::Package package(path);
  auto state = std::make_shared<Model::State>();
  state->path = package.path();
  state->name = options.model_name;
  state->manifest = detail::read_manifest(package);
  const auto found = state->manifest.models.find(options.model_name);
  if (found == state->manifest.models.end()) {
    std::vector<std::string> names;
    for (const auto& [name, model] : state->manifest.models) {
      names.push_back(name);
    }
    throw Error(
        ErrorKind::model_not_found,
        detail::sentences(
            "The package " + state->path + " has no model " + detail::in_quotes(options.model_name) +
                "; it has " + detail::joined(names),
            "Pass one of these names as model_name."));
  }
  detail::ModelRecord& model = found->second;
  if (!model.library) {
    throw Error(
        ErrorKind::unsupported,
        "The package " + state->path + " contains only the sources of model " +
            detail::in_quotes(options.model_name) +
            ", no shared library. Build the library with the CMakeLists.txt in the package, or compile the "
            "model without aot_inductor.package_cpp_only.");
  }
  const int index = detail::parse_device(options.device, model);
  detail::choose_target(state->manifest, model, index);
  detail::check_machine(state->manifest, model, state->path, index);
  if (options.verify) {
    detail::check_seal(package, state->manifest);
  }
  state->device = model.device + (index >= 0 ? ":" + std::to_string(index) : "");

  const detail::PackageFiles files(
      package, state->manifest, options.model_name, options.verify, options.map_weights);
  std::unique_ptr<detail::PrivateFolder> folder;
  try {
    folder = std::make_unique<detail::PrivateFolder>();
  } catch (const detail::WriteError& error) {
    files.raise_not_writable(error.reason, "the folder for temporary files");
  }
  files.extract(*folder);
  const std::optional<detail::LocatedWeights> weights = files.locate_weights(*folder, options.weights);
  const std::string library_path = folder->path() + "/" + files.library();
  try {
    state->library = std::make_unique<detail::Library>(library_path);
  } catch (const detail::LibraryLoadError& error) {
    files.raise_load_error(error.reason);
  }
  const std::string features = state->library->missing_cpu_features();
  if (!features.empty()) {
    detail::raise_incompatible(
        state->path, "its code needs " + features + ", which this CPU lacks",
        "Compile it again for this machine, or load it on a CPU with these features.");
  }
  state->runner = detail::create_runner(
      *state->library, files, library_path, state->device, options.num_runners, weights ? &*weights : nullptr);
  state->container = state->library->last_container();
  if (state->runner->get_call_spec() != std::vector<std::string>{model.in_spec, model.out_spec}) {
    package.fail("the signature of its library differs from its manifest");
  }
  for (const auto& [name, fqn] : state->runner->getConstantNamesToOriginalFQNs()) {
    const auto record = model.constants.find(name);
    if (record != model.constants.end() && record->second.fqn != fqn) {
      package.fail("the constants of its library differ from its manifest");
    }
    state->names[fqn.empty() ? name : fqn].push_back(name);
  }
  if (model.device != "cpu") {
    state->folder = std::move(folder);
  }
  return Model(std::move(state));
}

inline std::vector<at::Tensor> Model::run(const std::vector<at::Tensor>& inputs) const {
  const Signature& described = signature();
  for (size_t i = 0; i < inputs.size() && i < described.inputs.size(); ++i) {
    if (!inputs[i].defined()) {
      throw Error(
          ErrorKind::input, "input " + detail::in_quotes(described.inputs[i].name) + " is an undefined tensor.");
    }
  }
  std::vector<at::Tensor> results;
  try {
    results = state_->runner->run(inputs);
  } catch (const std::exception& error) {
    raise_call_error(error);
  }
  if (results.size() == described.outputs.size()) {
    return results;
  }
  // The compiled code may omit results that are not tensors.
  std::vector<at::Tensor> all(described.outputs.size());
  size_t next = 0;
  for (size_t i = 0; i < all.size() && next < results.size(); ++i) {
    if (!described.outputs[i].is_constant && !described.outputs[i].is_scalar) {
      all[i] = std::move(results[next++]);
    }
  }
  return all;
}

inline void Model::raise_call_error(const std::exception& error) const {
  const std::string why = state_->library->last_error();
  if (why.empty()) {
    throw Error(ErrorKind::run, detail::first_line(error) + ".", error.what());
  }
  switch (state_->library->last_error_code()) {
    case detail::LibraryError::input:
      throw Error(ErrorKind::input, why + ".");
    case detail::LibraryError::budget:
      throw Error(
          ErrorKind::budget,
          why + (why.find("memory_budget.") == std::string::npos
                     ? ". Call it with smaller sizes, or compile it again with a higher memory_budget."
                     : "."));
    default:
      raise_run_error(why);
  }
}

inline void Model::raise_run_error(const std::string& why) const {
  const std::string details = state_->library->last_error_details();
  const std::string begin = "Exception raised from ";
  const auto& kernels = state_->record().index_inputs;
  std::string source;
  if (details.compare(0, begin.size(), begin) == 0) {
    const size_t end = details.find(" at ", begin.size());
    const auto kernel = kernels.find(details.substr(begin.size(), end - begin.size()));
    if (kernel != kernels.end() && kernel->second.count(why) != 0) {
      source = kernel->second.at(why);
    }
  }
  const std::string described = detail::describe_assert(detail::describe_index_error(why, source), kernels);
  throw Error(ErrorKind::run, described + ".", details);
}

inline std::vector<std::string> Model::constant_names() const {
  std::vector<std::string> names;
  for (const auto& [fqn, in_code] : state_->names) {
    names.push_back(fqn);
  }
  return names;
}

inline std::map<std::string, at::Tensor> Model::constants(bool inactive) const {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [name, tensor] : state_->runner->extract_constants_map(inactive)) {
    if (!tensor.defined() || !tensor.device().is_cpu() || tensor.numel() == 0) {
      tensors[name] = tensor;
      continue;
    }
    // The tensor keeps the model's memory alive.
    tensors[name] = at::from_blob(
        tensor.data_ptr(), tensor.sizes(), tensor.strides(), [keep = state_](void*) {}, tensor.options());
  }
  return tensors;
}

inline void Model::raise_mismatch(const std::string& why, const std::string& remedy) {
  throw Error(
      ErrorKind::constant, detail::sentences("Cannot update the constants of the model: " + why, remedy));
}

inline at::Tensor Model::convert_constant(
    const std::string& fqn,
    const std::string& name,
    const at::Tensor& tensor) const {
  const std::string quoted_name = detail::in_quotes(fqn);
  if (!tensor.defined() || tensor.is_meta()) {
    raise_mismatch(quoted_name + " has no memory", "Pass a tensor with data.");
  }
  const detail::ModelRecord& model = state_->record();
  const auto record = model.constants.find(name);
  std::string device = state_->device;
  if (record != model.constants.end()) {
    const std::string actual = detail::describe_tensor(detail::find_dtype(tensor.scalar_type()), tensor.sizes().vec());
    const std::string needed = detail::describe_tensor(record->second.dtype, record->second.shape);
    if (actual != needed) {
      raise_mismatch(quoted_name + " is a tensor " + actual + ", but the model needs " + needed);
    }
    // A GPU model may have constants on the CPU.
    device = record->second.device == "cpu" ? "cpu" : device;
  }
  const at::Device target(device);
  if (tensor.device().type() == target.type()) {
    return tensor.detach();
  }
  if (!tensor.device().is_cpu()) {
    raise_mismatch(quoted_name + " is on " + tensor.device().str() + ", and the model's is on " + device);
  }
  return tensor.detach().to(target);
}

inline void Model::update_constants(const std::map<std::string, at::Tensor>& tensors, Update update) {
  std::unordered_map<std::string, at::Tensor> converted;
  for (const auto& [fqn, tensor] : tensors) {
    const auto names = state_->names.find(fqn);
    if (names == state_->names.end()) {
      if (state_->record().frozen.count(fqn) != 0) {
        raise_mismatch(
            "the value of " + detail::in_quotes(fqn) + " was compiled into the model with freezing",
            "Compile it without freezing to update it.");
      }
      std::vector<std::string> known = constant_names();
      const std::string more = known.size() > 8 ? ", ..." : "";
      known.resize(std::min<size_t>(known.size(), 8));
      raise_mismatch(
          "it has no constant " + detail::in_quotes(fqn), "It has " + detail::joined(known) + more + ".");
    }
    for (const std::string& name : names->second) {
      converted[name] = convert_constant(fqn, name, tensor);
    }
  }
  try {
    state_->runner->update_constant_buffer(converted, update.inactive, !update.partial);
  } catch (const std::exception& error) {
    const std::string why = state_->library->last_error();
    if (!why.empty() && state_->library->last_error_code() == detail::LibraryError::failure) {
      raise_run_error(why);
    }
    raise_mismatch(why.empty() ? detail::first_line(error) : why);
  }
}

inline void Model::swap_constants() {
  try {
    state_->runner->swap_constant_buffer();
  } catch (const std::exception& error) {
    const std::string why = state_->library->last_error();
    raise_run_error(why.empty() ? detail::first_line(error) : why);
  }
}

inline void Model::fold_constants(bool inactive) {
  if (!state_->library->fold(state_->container, inactive)) {
    const std::string why = state_->library->last_error();
    raise_run_error(why.empty() ? "Folding the constants failed" : why);
  }
}

inline void Model::free_inactive_constants() {
  try {
    state_->runner->free_inactive_constant_buffer();
  } catch (const std::exception& error) {
    const std::string why = state_->library->last_error();
    raise_run_error(why.empty() ? detail::first_line(error) : why);
  }
}

inline SelfTestResult Model::self_test() const {
  const detail::SelfTest test(detail::Package(state_->path), state_->manifest, state_->name);
  const auto [compared, difference] = test.compare(run(test.inputs(at::Device(state_->device))));
  return {compared, difference};
}

} // namespace inductor_ext
