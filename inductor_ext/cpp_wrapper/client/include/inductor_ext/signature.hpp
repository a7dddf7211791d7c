// How a compiled model is called from C++: its inputs and outputs.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

namespace inductor_ext {

// The inclusive range of a size; no value: unbounded.
struct Range {
  std::optional<int64_t> min;
  std::optional<int64_t> max;
};

// A size or a stride, in elements.
struct Size {
  std::string text; // "8", "batch", "2*batch + 1"
  std::optional<int64_t> value; // no value: it is dynamic
};

// A tensor that `Model::run` takes.
struct Input {
  std::string name; // of the argument in the exported model: "x", "batch['ids'][0]"
  std::string dtype; // torch's name: "float32"
  at::ScalarType scalar_type = at::ScalarType::Undefined;
  std::vector<Size> sizes;
  std::vector<Size> strides;
  std::string device; // "cpu", "cuda:0"
  bool is_scalar = false; // a dynamic int, float or bool, passed as a CPU tensor without dimensions
  std::string symbol; // of a scalar: what stands for it in `Signature::ranges` and in dynamic sizes
};

// A tensor that `Model::run` returns.
struct Output {
  std::string path; // in the result of the exported model: "" for the whole, "[1]['loss']" for a leaf
  std::string dtype; // empty for a constant
  at::ScalarType scalar_type = at::ScalarType::Undefined;
  std::vector<Size> sizes;
  std::string device;
  bool is_scalar = false; // an int, float or bool, returned as a CPU tensor without dimensions
  bool is_constant = false; // the same value in every call, or None; the tensor may be undefined
};

struct Signature {
  std::vector<Input> inputs; // in the order of the arguments of `run`
  std::vector<Output> outputs; // in the order of the results of `run`
  std::map<std::string, Range> ranges; // of the names in dynamic sizes

  // One line for each input, output and range.
  std::string to_string() const {
    std::string text;
    for (const Input& input : inputs) {
      text += "input " + input.name + ": " + describe(input.dtype, input.sizes, input.device, input.is_scalar);
      text += (input.is_scalar ? " " + input.symbol : "") + "\n";
    }
    for (const Output& output : outputs) {
      text += "output" + (output.path.empty() ? "" : " " + output.path) + ": ";
      text += output.is_constant ? "constant"
                                 : describe(output.dtype, output.sizes, output.device, output.is_scalar);
      text += "\n";
    }
    for (const auto& [name, range] : ranges) {
      text += name + ": " + (range.min ? std::to_string(*range.min) : "any") + " to " +
          (range.max ? std::to_string(*range.max) : "any") + "\n";
    }
    return text;
  }

 private:
  static std::string describe(
      const std::string& dtype,
      const std::vector<Size>& sizes,
      const std::string& device,
      bool is_scalar) {
    if (is_scalar) {
      return dtype + " scalar";
    }
    std::string text = dtype + " [";
    for (size_t i = 0; i < sizes.size(); ++i) {
      text += (i == 0 ? "" : ", ") + sizes[i].text;
    }
    return text + "] on " + device;
  }
};

namespace detail {

inline const std::map<std::string, at::ScalarType>& scalar_types() {
  static const std::map<std::string, at::ScalarType> types{
      {"uint8", at::ScalarType::Byte},
      {"int8", at::ScalarType::Char},
      {"int16", at::ScalarType::Short},
      {"int32", at::ScalarType::Int},
      {"int64", at::ScalarType::Long},
      {"uint16", at::ScalarType::UInt16},
      {"uint32", at::ScalarType::UInt32},
      {"uint64", at::ScalarType::UInt64},
      {"float16", at::ScalarType::Half},
      {"float32", at::ScalarType::Float},
      {"float64", at::ScalarType::Double},
      {"bfloat16", at::ScalarType::BFloat16},
      {"bool", at::ScalarType::Bool},
      {"complex32", at::ScalarType::ComplexHalf},
      {"complex64", at::ScalarType::ComplexFloat},
      {"complex128", at::ScalarType::ComplexDouble},
      {"float8_e4m3fn", at::ScalarType::Float8_e4m3fn},
      {"float8_e4m3fnuz", at::ScalarType::Float8_e4m3fnuz},
      {"float8_e5m2", at::ScalarType::Float8_e5m2},
      {"float8_e5m2fnuz", at::ScalarType::Float8_e5m2fnuz},
      {"float8_e8m0fnu", at::ScalarType::Float8_e8m0fnu},
  };
  return types;
}

// The scalar type by torch's name of a dtype; Undefined if the name is not known.
inline at::ScalarType find_scalar_type(const std::string& dtype) {
  const auto found = scalar_types().find(dtype);
  return found == scalar_types().end() ? at::ScalarType::Undefined : found->second;
}

inline std::string find_dtype(at::ScalarType type) {
  for (const auto& [name, scalar_type] : scalar_types()) {
    if (scalar_type == type) {
      return name;
    }
  }
  return c10::toString(type);
}

} // namespace detail

} // namespace inductor_ext
