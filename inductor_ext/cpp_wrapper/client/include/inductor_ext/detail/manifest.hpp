// The manifest of a package, extra/inductor_ext/manifest.json, and the checks that it allows before
// any code of the package runs.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <sys/utsname.h>

#include <torch/version.h>

#include "../error.hpp"
#include "../signature.hpp"
#include "cuda.hpp"
#include "json.hpp"
#include "package.hpp"

namespace inductor_ext::detail {

inline constexpr const char* kManifest = "extra/inductor_ext/manifest.json";
inline constexpr const char* kSerializationId = ".data/serialization_id";
inline constexpr int64_t kManifestFormat = 1;

struct FileRecord {
  uint64_t bytes = 0;
  std::string sha256;
  std::vector<uint64_t> checksums; // of its blocks; empty if there are none
};

struct ConstantRecord {
  std::string name; // in the generated code
  std::string fqn; // empty for a constant that the compiler created
  std::string dtype;
  std::vector<int64_t> shape;
  std::string device;
};

using IndexInputs = std::map<std::string, std::map<std::string, std::string>>;

// What differs between the targets that a model was compiled for.
struct CodeRecord {
  std::string target; // "x86-64-v3", "sm_90", "ptx"; empty if none was named
  std::optional<std::string> library;
  std::optional<std::string> machine; // processor architecture, if it is not that of the package
  // By kernel: the input that an index comes from, by the message of the check that failed.
  IndexInputs index_inputs;
  std::vector<std::string> cpu_features;
  std::vector<std::string> cuda_architectures;
};

struct ModelRecord : CodeRecord {
  std::string device; // "cpu", "cuda"
  std::optional<std::string> weights;
  std::optional<FileRecord> outside;
  Signature signature;
  std::vector<bool> is_constant_input; // by leaf of the arguments; `signature` has only the others
  std::string in_spec, out_spec;
  std::map<std::string, ConstantRecord> constants; // by name in the generated code
  std::set<std::string> frozen;
  std::vector<CodeRecord> variants; // for further targets
  Json self_test;
};

struct Manifest {
  std::map<std::string, ModelRecord> models;
  std::map<std::string, FileRecord> files;
  std::optional<std::string> torch, cuda; // versions
  std::optional<std::string> system, machine;
  std::string text; // its JSON
};

// Reads the JSON of a manifest. Keys that it does not know are ignored.
class ManifestReader {
 public:
  static Manifest read(const Json& json) {
    Manifest manifest;
    for (const auto& [name, file] : json["files"].as_object("files")) {
      manifest.files[name] = read_file(file, "files['" + name + "']");
    }
    const Json& versions = json["versions"];
    versions.as_object("versions");
    manifest.torch = versions["torch"].as_optional_string("versions.torch");
    manifest.cuda = versions["cuda"].as_optional_string("versions.cuda");
    const Json& platform = json["platform"];
    manifest.system = platform["system"].as_optional_string("platform.system");
    manifest.machine = platform["machine"].as_optional_string("platform.machine");
    for (const auto& [name, model] : json["models"].as_object("models")) {
      manifest.models[name] = read_model(model, name, "models['" + name + "']");
      for (const auto& entry : {manifest.models[name].library, manifest.models[name].weights}) {
        if (entry && manifest.files.count(*entry) == 0) {
          throw JsonError("models['" + name + "'] needs the file " + in_quotes(*entry) + ", which is not listed");
        }
      }
      for (const CodeRecord& variant : manifest.models[name].variants) {
        if (manifest.files.count(*variant.library) == 0) {
          throw JsonError("a variant needs the file " + in_quotes(*variant.library) + ", which is not listed");
        }
      }
    }
    return manifest;
  }

 private:
  static FileRecord read_file(const Json& json, const std::string& where) {
    FileRecord file;
    file.bytes = json["bytes"].as_size(where + ".bytes");
    file.sha256 = json["sha256"].as_string(where + ".sha256");
    if (file.sha256.size() != 64 || file.sha256.find_first_not_of("0123456789abcdef") != std::string::npos) {
      throw JsonError(where + ".sha256 is not a SHA-256 digest");
    }
    if (!json["checksums"].is_null()) {
      file.checksums = read_checksums(json["checksums"].as_string(where + ".checksums"), file.bytes, where);
    }
    return file;
  }

  // The text has 16 hexadecimal digits for each block of 2 MiB.
  static std::vector<uint64_t> read_checksums(const std::string& text, uint64_t bytes, const std::string& where) {
    constexpr uint64_t kBlock = 2 << 20;
    constexpr size_t kDigits = 16;
    if (text.size() / kDigits != (bytes + kBlock - 1) / kBlock || text.size() % kDigits != 0 ||
        text.find_first_not_of("0123456789abcdef") != std::string::npos) {
      throw JsonError(where + ".checksums are not those of " + std::to_string(bytes) + " bytes");
    }
    std::vector<uint64_t> checksums;
    for (size_t i = 0; i < text.size(); i += kDigits) {
      checksums.push_back(std::stoull(text.substr(i, kDigits), nullptr, 16));
    }
    return checksums;
  }

  static ModelRecord read_model(const Json& json, const std::string& name, const std::string& where) {
    ModelRecord model;
    read_code(model, json, where);
    model.device = json["device"].as_string(where + ".device");
    model.weights = json["weights"].as_optional_string(where + ".weights");
    if (!json["outside"].is_null()) {
      model.outside = read_file(json["outside"], where + ".outside");
    }
    const Json& signature = json["signature"];
    model.signature = read_signature(signature, where + ".signature");
    model.in_spec = signature["in_spec"].as_string(where + ".signature.in_spec");
    model.out_spec = signature["out_spec"].as_string(where + ".signature.out_spec");
    for (const Json& item : signature["inputs"].array) {
      model.is_constant_input.push_back(item["kind"].string == "constant");
    }
    for (const Json& item : json["constants"].as_array(where + ".constants")) {
      const std::string place = where + ".constants";
      ConstantRecord constant{
          item["name"].as_string(place + ".name"), item["fqn"].as_string(place + ".fqn"),
          item["dtype"].as_string(place + ".dtype"), item["shape"].as_sizes(place + ".shape"),
          item["device"].as_optional_string(place + ".device").value_or("cpu")};
      model.constants[constant.name] = std::move(constant);
    }
    if (!json["frozen"].is_null()) {
      const std::vector<std::string> frozen = json["frozen"].as_strings(where + ".frozen");
      model.frozen = {frozen.begin(), frozen.end()};
    }
    for (const Json& item : json["variants"].array) {
      CodeRecord variant;
      read_code(variant, item, where + ".variants");
      const std::string folder = "data/inductor_ext/" + variant.target + "/" + name + "/";
      if (!variant.library || variant.library->rfind('/') != folder.size() - 1 ||
          variant.library->compare(0, folder.size(), folder) != 0) {
        throw JsonError(where + ".variants has a library in another folder");
      }
      model.variants.push_back(std::move(variant));
    }
    model.self_test = json["self_test"];
    return model;
  }

  static void read_code(CodeRecord& code, const Json& json, const std::string& where) {
    code.target = json["target"].as_optional_string(where + ".target").value_or("");
    code.library = json["library"].as_optional_string(where + ".library");
    code.machine = json["machine"].as_optional_string(where + ".machine");
    for (const Json& kernel : json["kernels"].array) {
      for (const auto& [message, input] : kernel["index_inputs"].object) {
        code.index_inputs[kernel["name"].string][message] = input.string;
      }
    }
    if (!json["cpu_features"].is_null()) {
      code.cpu_features = json["cpu_features"].as_strings(where + ".cpu_features");
    }
    if (!json["cuda_architectures"].is_null()) {
      code.cuda_architectures = json["cuda_architectures"].as_strings(where + ".cuda_architectures");
    }
  }

  static Signature read_signature(const Json& json, const std::string& where) {
    Signature signature;
    for (const auto& [name, range] : json["symbols"].object) {
      const std::string place = where + ".symbols['" + name + "']";
      signature.ranges[name] = {read_limit(range["min"], place), read_limit(range["max"], place)};
    }
    for (const Json& item : json["inputs"].as_array(where + ".inputs")) {
      const std::string kind = item["kind"].as_string(where + ".inputs.kind");
      if (kind == "constant") {
        continue; // The compiled code does not take it.
      }
      Input input;
      input.name = item["name"].as_string(where + ".inputs.name");
      input.is_scalar = kind == "symbol";
      read_leaf(input, item, where + ".inputs");
      input.symbol = item["symbol"].string;
      input.strides = read_sizes(item["stride"], where + ".inputs.stride");
      signature.inputs.push_back(std::move(input));
    }
    for (const Json& item : json["outputs"].as_array(where + ".outputs")) {
      const std::string kind = item["kind"].as_string(where + ".outputs.kind");
      Output output;
      output.path = item["path"].as_string(where + ".outputs.path");
      output.is_scalar = kind == "symbol";
      output.is_constant = kind == "constant" || kind == "none";
      if (!output.is_constant) {
        read_leaf(output, item, where + ".outputs");
      }
      signature.outputs.push_back(std::move(output));
    }
    return signature;
  }

  // What inputs and outputs have in common.
  template <typename Leaf>
  static void read_leaf(Leaf& leaf, const Json& item, const std::string& where) {
    if (leaf.is_scalar) {
      const std::string type = item["type"].as_string(where + ".type");
      leaf.dtype = type == "int" ? "int64" : type == "float" ? "float64" : "bool";
      leaf.device = "cpu";
    } else {
      leaf.dtype = item["dtype"].as_string(where + ".dtype");
      leaf.sizes = read_sizes(item["shape"], where + ".shape");
      leaf.device = item["device"].as_string(where + ".device");
    }
    leaf.scalar_type = find_scalar_type(leaf.dtype);
  }

  static std::vector<Size> read_sizes(const Json& json, const std::string& where) {
    std::vector<Size> sizes;
    for (const Json& item : json.array) {
      if (item.kind == Json::Kind::integer) {
        sizes.push_back({std::to_string(item.integer), item.integer});
      } else {
        sizes.push_back({item.as_string(where), std::nullopt});
      }
    }
    return sizes;
  }

  static std::optional<int64_t> read_limit(const Json& json, const std::string& where) {
    return json.is_null() ? std::nullopt : std::optional<int64_t>(json.as_integer(where));
  }
};

// Reads the manifest of a package.
inline Manifest read_manifest(const Package& package) {
  constexpr uint64_t kLimit = 1 << 28;
  if (package.entries().count(kManifest) == 0) {
    for (const auto& [name, entry] : package.entries()) {
      if (name.compare(0, 19, "extra/inductor_ext/") == 0) {
        package.fail("it was written by inductor_ext, but its manifest is missing");
      }
    }
    raise_unsupported(
        "Loading", package.path(), "it was compiled by Inductor (default)",
        "Compile the model with inductor_ext.aoti_compile_and_package, or use torch's AOTIModelPackageLoader.");
  }
  std::string text = package.read(kManifest, kLimit);
  try {
    const Json json = JsonParser(text).parse();
    json.as_object("the manifest");
    if (json["format"].kind == Json::Kind::integer && json["format"].integer > kManifestFormat) {
      raise_incompatible(
          package.path(),
          "its manifest has format " + std::to_string(json["format"].integer) +
              ", and this inductor_ext reads up to " + std::to_string(kManifestFormat),
          "Install a newer inductor_ext, or compile it again with this version.");
    }
    Manifest manifest = ManifestReader::read(json);
    manifest.text = std::move(text);
    return manifest;
  } catch (const JsonError& error) {
    package.fail(std::string("its manifest is damaged: ") + error.what());
  }
}

// Checks that the manifest is the one that the package was written with: the package's identity, 40
// decimal digits, is derived from the SHA-256 of all files.
inline void check_seal(const Package& package, const Manifest& manifest) {
  const std::set<std::string> uncovered{
      "archive_format", "archive_version", "byteorder", ".data/version", kSerializationId,
      "extra/inductor_ext/signatures.json"};
  std::map<std::string, std::string> digests;
  for (const auto& [name, file] : manifest.files) {
    digests[name] = file.sha256;
  }
  Sha256 of_manifest;
  of_manifest.update(manifest.text);
  digests[kManifest] = of_manifest.hex_digest();
  Sha256 total;
  for (const auto& [name, digest] : digests) {
    if (uncovered.count(name) == 0) {
      total.update(name);
      total.update("\0", 1);
      total.update(digest + "\n");
    }
  }
  // The last 40 of the digits of the 256-bit number, by long division.
  std::array<uint8_t, 32> number = total.digest();
  std::string identity(40, '0');
  for (size_t i = 40; i-- > 0;) {
    unsigned rest = 0;
    for (uint8_t& byte : number) {
      const unsigned value = rest << 8 | byte;
      byte = static_cast<uint8_t>(value / 10);
      rest = value % 10;
    }
    identity[i] = static_cast<char>('0' + rest);
  }
  if (package.read(kSerializationId, 64) != identity) {
    package.fail("its manifest is not the one that it was written with");
  }
  for (const auto& [name, entry] : package.entries()) {
    if (name.compare(0, 5, "data/") == 0 && manifest.files.count(name) == 0) {
      package.fail("it has an entry " + in_quotes(name) + " that its manifest does not list");
    }
  }
}

// The first `count` parts of a version.
inline std::string version_prefix(const std::string& version, int count) {
  size_t end = 0;
  for (; count > 0 && end < version.size(); ++end) {
    if (version[end] == '.' || version[end] == '+') {
      if (--count == 0) {
        break;
      }
    }
  }
  return version.substr(0, end);
}

// How well kernels that were compiled for an architecture ("sm_90", "sm_90a", "compute_90") fit a
// device: greater is better, and nothing if they do not run there.
inline std::optional<std::array<int, 4>> rank_architecture(
    const std::string& architecture,
    const CudaCapability& device) {
  const bool is_ptx = architecture.compare(0, 8, "compute_") == 0;
  if (!is_ptx && architecture.compare(0, 3, "sm_") != 0) {
    return std::nullopt;
  }
  std::string digits = architecture.substr(architecture.find('_') + 1);
  char suffix = '\0';
  if (!digits.empty() && (digits.back() == 'a' || digits.back() == 'f')) {
    suffix = digits.back();
    digits.pop_back();
  }
  if (digits.size() < 2 || digits.size() > 4 || digits.find_first_not_of("0123456789") != std::string::npos) {
    return std::nullopt;
  }
  const int code = std::stoi(digits);
  const CudaCapability compiled{code / 10, code % 10};
  const bool is_later = device.major > compiled.major ||
      (device.major == compiled.major && device.minor >= compiled.minor);
  const bool is_same = device.major == compiled.major && device.minor == compiled.minor;
  const bool fits = is_ptx && suffix == '\0' ? is_later // The driver compiles PTX for any later device.
      : suffix == 'a'                        ? is_same
                                             : device.major == compiled.major && is_later;
  if (!fits) {
    return std::nullopt;
  }
  return std::array<int, 4>{is_ptx ? 0 : 1, compiled.major, compiled.minor, suffix == '\0' ? 0 : suffix == 'f' ? 1 : 2};
}

// The rank of the architecture that fits best.
inline std::optional<std::array<int, 4>> rank_architectures(
    const std::vector<std::string>& architectures,
    const CudaCapability& device) {
  std::optional<std::array<int, 4>> best;
  for (const std::string& architecture : architectures) {
    best = std::max(best, rank_architecture(architecture, device));
  }
  return best;
}

// Whether kernels that were compiled for one of the architectures run on a device.
inline bool has_kernels_for(const std::vector<std::string>& architectures, const CudaCapability& device) {
  return rank_architectures(architectures, device).has_value();
}

// The number of the highest level of the x86-64 psABI that this CPU supports: 2, 3 or 4; 0 if unknown.
inline int cpu_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool is_v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool is_v4 = is_v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl");
  return is_v4 ? 4 : is_v3 ? 3 : __builtin_cpu_supports("sse4.2") ? 2 : 0;
#else
  return 0;
#endif
}

// The processor architecture of this machine, such as "x86_64".
inline std::string current_machine() {
  utsname names{};
  uname(&names);
  return names.machine;
}

// The processor architecture that code is for, if it is known.
inline std::optional<std::string> machine_of(const Manifest& manifest, const CodeRecord& code) {
  return code.machine ? code.machine : manifest.machine;
}

// Replaces the code of a model by that for the target that fits this machine best, if it has several.
// The first one remains if none fits; `check_machine` and the library say why.
inline void choose_target(const Manifest& manifest, ModelRecord& model, int device_index) {
  std::optional<std::array<int, 4>> best;
  const CodeRecord* chosen = nullptr;
  const std::string here = current_machine();
  const auto consider = [&](const CodeRecord& code) {
    std::optional<std::array<int, 4>> rank;
    if (machine_of(manifest, code).value_or(here) != here) {
      return;
    }
    if (model.device == "cuda") {
      const std::optional<CudaCapability> device = Cuda::get().capability(device_index);
      rank = device ? rank_architectures(code.cuda_architectures, *device) : std::nullopt;
    } else {
      const std::map<std::string, int> levels{
          {"x86-64-v2", 2}, {"x86-64-v3", 3}, {"x86-64-v4", 4}, {"aarch64", 0}};
      const auto level = levels.find(code.target);
      if (level != levels.end() && level->second <= cpu_level()) {
        rank = std::array<int, 4>{level->second, 0, 0, 0};
      }
    }
    if (rank && (!best || *rank > *best)) {
      best = rank;
      chosen = &code;
    }
  };
  if (model.variants.empty()) {
    return;
  }
  consider(model);
  for (const CodeRecord& variant : model.variants) {
    consider(variant);
  }
  if (chosen != nullptr && chosen != &model) {
    static_cast<CodeRecord&>(model) = CodeRecord(*chosen);
  }
}

// Checks that a model can run on this machine and with this torch. The library reports itself which
// CPU features it lacks.
inline void check_machine(
    const Manifest& manifest,
    const ModelRecord& model,
    const std::string& path,
    int device_index) {
  std::vector<std::string> reasons;
  if (manifest.system && *manifest.system != "linux") {
    reasons.push_back("it was compiled for " + *manifest.system + ", and this is linux");
  }
  const std::string machine = machine_of(manifest, model).value_or(current_machine());
  if (machine != current_machine()) {
    reasons.push_back("it was compiled for " + machine + ", and this is " + current_machine());
  }
  std::string remedy = "Compile it again for this machine, or load it on a machine that meets its requirements.";
  const std::string here = TORCH_VERSION;
  if (manifest.torch && version_prefix(*manifest.torch, 2) != version_prefix(here, 2)) {
    reasons.push_back("it was compiled for torch " + *manifest.torch + ", and this is torch " + here);
    remedy = "Compile it again with torch " + here + ", or load it with torch " +
        version_prefix(*manifest.torch, 2) + ".";
  }
  if (model.device == "cuda") {
    const Cuda& cuda = Cuda::get();
    if (!cuda.is_built()) {
      reasons.push_back("it runs on CUDA, and this torch is built without it");
    } else {
      const std::string version = std::to_string(cuda.version() / 1000);
      if (manifest.cuda && cuda.version() != 0 && version_prefix(*manifest.cuda, 1) != version) {
        reasons.push_back("it was compiled for CUDA " + *manifest.cuda + ", and this torch has CUDA " + version);
      }
      std::string why;
      const std::optional<CudaCapability> device = cuda.capability(device_index, &why);
      if (!device) {
        reasons.push_back(
            "it runs on CUDA, but this machine has no such CUDA device" +
            (why.empty() ? "" : " (" + why + ")"));
      } else if (
          !model.cuda_architectures.empty() && !has_kernels_for(model.cuda_architectures, *device)) {
        reasons.push_back(
            "its kernels are compiled for " + joined(model.cuda_architectures) + ", and the device is sm_" +
            std::to_string(device->major) + std::to_string(device->minor));
      }
    }
  }
  if (!reasons.empty()) {
    raise_incompatible(path, joined(reasons, "; "), remedy);
  }
}

} // namespace inductor_ext::detail
