// Runs commands of the tests, one a line with fields separated by tabs, and answers each by a line:
// "ok" and a text, or "error", the kind, the message and the details. Tensors are in files of
// torch.save. `test/support/cpp_client.py` has the other side.
#include <inductor_ext.hpp>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <sstream>
#include <thread>

#include <unistd.h>

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

// Declared here, because their header takes long to compile.
namespace torch::jit {
std::vector<char> pickle_save(const c10::IValue& value);
c10::IValue pickle_load(const std::vector<char>& data);
} // namespace torch::jit

namespace {

using Fields = std::vector<std::string>;
using Tensors = std::vector<at::Tensor>;

std::optional<inductor_ext::Model> loaded;

inductor_ext::Model& model() {
  if (!loaded) {
    throw std::runtime_error("no model is loaded");
  }
  return *loaded;
}

c10::IValue read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return torch::jit::pickle_load({std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()});
}

Tensors read_list(const std::string& path) {
  Tensors tensors;
  const c10::IValue values = read(path);
  for (const c10::IValue& value : values.toListRef()) {
    tensors.push_back(value.isTensor() ? value.toTensor() : at::Tensor());
  }
  return tensors;
}

std::map<std::string, at::Tensor> read_map(const std::string& path) {
  std::map<std::string, at::Tensor> tensors;
  const c10::IValue values = read(path);
  for (const auto& item : values.toGenericDict()) {
    tensors[item.key().toStringRef()] = item.value().isTensor() ? item.value().toTensor() : at::Tensor();
  }
  return tensors;
}

void write(const std::string& path, const Tensors& tensors) {
  std::vector<c10::IValue> values;
  for (const at::Tensor& tensor : tensors) {
    values.push_back(tensor.defined() ? c10::IValue(tensor.clone()) : c10::IValue());
  }
  const std::vector<char> data = torch::jit::pickle_save(c10::ivalue::Tuple::create(std::move(values)));
  std::ofstream(path, std::ios::binary).write(data.data(), static_cast<std::streamsize>(data.size()));
}

std::string joined(const Fields& parts) {
  std::string text;
  for (const std::string& part : parts) {
    text += (text.empty() ? "" : ",") + part;
  }
  return text;
}

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    result += c == '\n' ? "\\n" : c == '\t' ? "\\t" : std::string(1, c);
  }
  return result;
}

std::string load(const Fields& fields) {
  inductor_ext::Options options;
  for (size_t i = 2; i < fields.size(); ++i) {
    const std::string name = fields[i].substr(0, fields[i].find('='));
    const std::string value = fields[i].substr(name.size() + 1);
    if (name == "model_name") {
      options.model_name = value;
    } else if (name == "num_runners") {
      options.num_runners = std::stoul(value);
    } else if (name == "device") {
      options.device = value;
    } else if (name == "verify") {
      options.verify = value == "True";
    } else if (name == "map_weights") {
      options.map_weights = value == "True";
    } else if (name == "weights") {
      options.weights = value;
    } else {
      throw std::runtime_error("unknown option " + name);
    }
  }
  loaded.reset();
  loaded.emplace(inductor_ext::load(fields[1], options));
  return loaded->path() + " on " + loaded->device();
}

std::string signature() {
  std::string text = model().signature().to_string();
  for (const inductor_ext::Input& input : model().signature().inputs) {
    text += std::string(c10::toString(input.scalar_type)) + " strides";
    for (const inductor_ext::Size& stride : input.strides) {
      text += " " + stride.text + (stride.value ? "" : "?");
    }
    text += "\n";
  }
  return text;
}

// Whether results are those of one of the references.
bool is_one_of(const Tensors& results, const std::vector<Tensors>& references) {
  for (const Tensors& reference : references) {
    bool is_close = reference.size() == results.size();
    for (size_t i = 0; is_close && i < results.size(); ++i) {
      is_close = !reference[i].defined() || at::allclose(results[i], reference[i], 1e-4, 1e-5);
    }
    if (is_close) {
      return true;
    }
  }
  return false;
}

// Whether a call without inputs is refused.
bool is_refused() {
  try {
    model().run({});
    return false;
  } catch (const inductor_ext::Error& error) {
    return error.kind() == inductor_ext::ErrorKind::input;
  }
}

// Calls the model by several threads, and `meanwhile` by another one until they are done. One call
// in 16 has no inputs. Returns how many calls failed or had wrong results.
long call_by_threads(
    long threads,
    long calls,
    const Tensors& inputs,
    const std::vector<Tensors>& references,
    const std::function<void(long)>& meanwhile) {
  std::atomic<long> left{calls}, wrong{0}, running{threads};
  std::vector<std::thread> workers;
  for (long t = 0; t < threads; ++t) {
    workers.emplace_back([&] {
      for (long call = left--; call > 0; call = left--) {
        try {
          if (call % 16 == 0 ? !is_refused() : !is_one_of(model().run(inputs), references)) {
            ++wrong;
          }
        } catch (const std::exception&) {
          ++wrong;
        }
      }
      --running;
    });
  }
  for (long round = 0; running != 0; ++round) {
    meanwhile(round);
  }
  for (std::thread& worker : workers) {
    worker.join();
  }
  return wrong;
}

// fields: threads, calls, inputs.
std::string threads(const Fields& fields) {
  const Tensors inputs = read_list(fields[3]);
  const std::vector<Tensors> references{model().run(inputs)};
  const long wrong = call_by_threads(
      std::stol(fields[1]), std::stol(fields[2]), inputs, references, [](long) { std::this_thread::yield(); });
  return std::to_string(wrong) + " wrong";
}

// fields: threads, calls, inputs, one state, another state. While the threads call the model, the
// states are exchanged.
std::string soak(const Fields& fields) {
  const long calls = std::stol(fields[2]);
  const Tensors inputs = read_list(fields[3]);
  const std::map<std::string, at::Tensor> states[] = {read_map(fields[4]), read_map(fields[5])};
  std::vector<Tensors> references;
  for (const auto& state : states) {
    model().update_constants(state);
    references.push_back(model().run(inputs));
  }
  long swaps = 0;
  const long wrong = call_by_threads(std::stol(fields[1]), calls, inputs, references, [&](long round) {
    inductor_ext::Model::Update update;
    update.inactive = true;
    model().update_constants(states[round % 2], update);
    model().fold_constants(true);
    model().swap_constants();
    if (round % 3 == 2) {
      model().free_inactive_constants();
    }
    ++swaps;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  return std::to_string(wrong) + " wrong, " + std::to_string(swaps) + " swaps";
}

// The code in docs/user/aot_packages.md, for the package model.pt2 in the current folder.
void run_documented() {
#include "documented.inc"
}

// Returns what the code prints.
std::string documented(const std::string& folder) {
  if (chdir(folder.c_str()) != 0) {
    throw std::runtime_error("cannot change to " + folder);
  }
  std::ostringstream text;
  std::streambuf* const before = std::cout.rdbuf(text.rdbuf());
  try {
    run_documented();
  } catch (...) {
    std::cout.rdbuf(before);
    throw;
  }
  std::cout.rdbuf(before);
  return text.str();
}

// The SHA-256 of a file, by instructions of the CPU if it has them, and without.
std::string sha256(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string data{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  Fields digests;
  for (const bool use_instructions : {true, false}) {
    inductor_ext::detail::Sha256 sum(use_instructions);
    size_t step = 1; // Blocks that are not those of the algorithm.
    for (size_t at = 0; at < data.size(); at += step, step = step * 3 % 211 + 1) {
      sum.update(data.data() + at, std::min(step, data.size() - at));
    }
    digests.push_back(sum.hex_digest());
  }
  return joined(digests);
}

// fields: architectures separated by commas, compute capability.
std::string has_kernels(const Fields& fields) {
  std::vector<std::string> architectures;
  std::istringstream parts(fields[1]);
  for (std::string part; std::getline(parts, part, ',');) {
    architectures.push_back(part);
  }
  const inductor_ext::detail::CudaCapability device{std::stoi(fields[2]), std::stoi(fields[3])};
  return inductor_ext::detail::has_kernels_for(architectures, device) ? "True" : "False";
}

// fields: an error of CUDA, then inputs that the model checks as indices.
std::string describe_assert(const Fields& fields) {
  inductor_ext::detail::IndexInputs kernels;
  for (size_t i = 2; i < fields.size(); ++i) {
    kernels["kernel"][std::to_string(i)] = fields[i];
  }
  return inductor_ext::detail::describe_assert(fields[1], kernels);
}

std::string execute(const Fields& fields) {
  const std::string& command = fields[0];
  if (command == "load") {
    return load(fields);
  }
  if (command == "signature") {
    return signature();
  }
  if (command == "sha256") {
    return sha256(fields[1]);
  }
  if (command == "has_kernels") {
    return has_kernels(fields);
  }
  if (command == "describe_assert") {
    return describe_assert(fields);
  }
  if (command == "absolute_path") {
    return inductor_ext::detail::absolute_path(fields[1]);
  }
  if (command == "temporary_folder") {
    return inductor_ext::detail::temporary_folder();
  }
  if (command == "remove_folder") {
    inductor_ext::detail::remove_folder(fields[1]);
    return "";
  }
  if (command == "version_prefix") {
    return inductor_ext::detail::version_prefix(fields[1], std::stoi(fields[2]));
  }
  if (command == "manifest") {
    return model().manifest();
  }
  if (command == "run") {
    write(fields[2], model().run(read_list(fields[1])));
  } else if (command == "names") {
    return joined(model().constant_names());
  } else if (command == "constants") {
    Tensors tensors;
    Fields names;
    for (const auto& [name, tensor] : model().constants(fields[2] == "True")) {
      names.push_back(name);
      tensors.push_back(tensor);
    }
    loaded.reset(); // The tensors keep the memory.
    write(fields[1], tensors);
    return joined(names);
  } else if (command == "update") {
    inductor_ext::Model::Update update;
    update.inactive = fields[2] == "True";
    update.partial = fields[3] == "True";
    model().update_constants(read_map(fields[1]), update);
  } else if (command == "close") {
    loaded.reset();
  } else if (command == "swap") {
    model().swap_constants();
  } else if (command == "fold") {
    model().fold_constants(fields[1] == "True");
  } else if (command == "free") {
    model().free_inactive_constants();
  } else if (command == "self_test") {
    const inductor_ext::SelfTestResult result = model().self_test();
    return std::to_string(result.compared) + " " + std::to_string(result.difference);
  } else if (command == "threads") {
    return threads(fields);
  } else if (command == "soak") {
    return soak(fields);
  } else if (command == "setenv") {
    setenv(fields[1].c_str(), fields[2].c_str(), 1);
  } else if (command == "unsetenv") {
    unsetenv(fields[1].c_str());
  } else if (command == "documented") {
    return documented(fields[1]);
  } else {
    throw std::runtime_error("unknown command " + command);
  }
  return "";
}

} // namespace

int main() {
  std::string line;
  while (std::getline(std::cin, line)) {
    Fields fields;
    std::istringstream parts(line);
    for (std::string field; std::getline(parts, field, '\t');) {
      fields.push_back(field);
    }
    try {
      const std::string answer = execute(fields);
      std::cout << "ok\t" << escaped(answer) << std::endl;
    } catch (const inductor_ext::Error& error) {
      std::cout << "error\t" << static_cast<int>(error.kind()) << "\t" << escaped(error.what()) << "\t"
                << escaped(error.details()) << std::endl;
    } catch (const std::exception& error) {
      std::cout << "error\t0\t" << escaped(error.what()) << "\t" << std::endl;
    }
  }
  loaded.reset();
}
