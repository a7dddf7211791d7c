// The self test of a compiled model: inputs and results that are recorded in its package.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/logical_not.h>
#include <ATen/ops/masked_select.h>
#include <ATen/ops/nan_to_num.h>

#include "../error.hpp"
#include "manifest.hpp"
#include "package.hpp"

namespace inductor_ext::detail {

// A tensor or another value among the recorded inputs or results.
struct Leaf {
  bool is_tensor = false;
  std::string dtype;
  std::vector<int64_t> shape, stride;
  uint64_t offset = 0, bytes = 0; // of its elements, those between gaps included
  bool is_on_cpu = true;
  Json value; // if it is not a tensor
  bool is_compared = true; // false for a result that is random
};

class SelfTest {
 public:
  // Reads the recording of a model, and checks its SHA-256.
  SelfTest(const Package& package, const Manifest& manifest, const std::string& name)
      : path_(package.path()), name_(name), model_(manifest.models.at(name)) {
    const Json& json = model_.self_test;
    if (json.is_null()) {
      throw Error(
          ErrorKind::unsupported,
          "The model " + in_quotes(name) + " in the package " + path_ +
              " has no self test. Compile it with aot_self_test=True.");
    }
    try {
      const std::string file = json["file"].as_string("file");
      const auto listed = manifest.files.find(file);
      if (listed == manifest.files.end()) {
        package.fail("its manifest does not list " + in_quotes(file));
      }
      inputs_ = read_leaves(json["inputs"], "inputs");
      results_ = read_leaves(json["results"], "results");
      data_ = package.read(file, uint64_t{1} << 34, listed->second.sha256);
    } catch (const JsonError& error) {
      package.fail(std::string("its self test is damaged: ") + error.what());
    }
  }

  // The tensors to call the model with.
  std::vector<at::Tensor> inputs(const at::Device& device) const {
    if (inputs_.size() != model_.is_constant_input.size()) {
      raise_bad_package(path_, "its self test is damaged: it has another number of inputs than the model");
    }
    std::vector<at::Tensor> tensors;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const Leaf& leaf = inputs_[i];
      if (model_.is_constant_input[i]) {
        continue;
      }
      const Input& input = model_.signature.inputs.at(tensors.size());
      tensors.push_back(leaf.is_tensor ? restore(leaf, device) : scalar(leaf.value, input.scalar_type));
    }
    return tensors;
  }

  // Compares the results of a call. Returns how many were compared and the largest difference,
  // relative to the largest expected magnitude in a tensor.
  std::pair<size_t, double> compare(const std::vector<at::Tensor>& results) const {
    if (results.size() != results_.size()) {
      fail("it returns " + std::to_string(results.size()) + " values and not " + std::to_string(results_.size()));
    }
    const at::NoGradGuard no_grad;
    size_t compared = 0;
    double largest = 0;
    for (size_t i = 0; i < results.size(); ++i) {
      if (!results_[i].is_compared || model_.signature.outputs.at(i).is_constant) {
        continue;
      }
      ++compared;
      largest = std::max(largest, compare_one("result " + std::to_string(i), results_[i], results[i]));
    }
    return {compared, largest};
  }

 private:
  static std::vector<Leaf> read_leaves(const Json& json, const std::string& where) {
    std::vector<Leaf> leaves;
    for (const Json& item : json.as_array(where)) {
      Leaf leaf;
      leaf.is_tensor = !item["dtype"].is_null();
      leaf.is_compared = item["is_compared"].as_boolean(where + ".is_compared");
      leaf.value = item["value"];
      if (leaf.is_tensor) {
        leaf.dtype = item["dtype"].as_string(where + ".dtype");
        leaf.shape = item["shape"].as_sizes(where + ".shape");
        leaf.stride = item["stride"].as_sizes(where + ".stride");
        leaf.offset = item["offset"].as_size(where + ".offset");
        leaf.bytes = item["bytes"].as_size(where + ".bytes");
        leaf.is_on_cpu = item["device"].as_string(where + ".device") == "cpu";
      }
      leaves.push_back(std::move(leaf));
    }
    return leaves;
  }

  [[noreturn]] void fail(const std::string& why) const {
    throw Error(
        ErrorKind::self_test,
        sentences(
            "The self test of the model " + in_quotes(name_) + " in the package " + path_ + " failed: " + why,
            "Do not use the model on this machine; compile it there, and compare."));
  }

  static at::Tensor scalar(const Json& value, at::ScalarType type) {
    if (type == at::ScalarType::Double) {
      const double number =
          value.kind == Json::Kind::integer ? static_cast<double>(value.integer) : value.number;
      return at::full({}, number, at::kDouble);
    }
    const int64_t integer = value.kind == Json::Kind::boolean ? value.boolean : value.integer;
    return at::full({}, integer, type);
  }

  // The recorded tensor, on the model's device unless it was a CPU tensor.
  at::Tensor restore(const Leaf& leaf, const at::Device& device) const {
    const at::ScalarType type = find_scalar_type(leaf.dtype);
    const size_t width = type == at::ScalarType::Undefined ? 0 : c10::elementSize(type);
    int64_t last = 0;
    bool is_empty = false;
    bool is_valid = width != 0 && leaf.shape.size() == leaf.stride.size() && leaf.offset <= data_.size() &&
        leaf.bytes <= data_.size() - leaf.offset;
    for (size_t i = 0; is_valid && i < leaf.shape.size(); ++i) {
      int64_t step = 0;
      is_empty |= leaf.shape[i] == 0;
      is_valid = leaf.shape[i] == 0 || (!__builtin_mul_overflow(leaf.shape[i] - 1, leaf.stride[i], &step) &&
                                        !__builtin_add_overflow(last, step, &last));
    }
    if (!is_valid || (!is_empty && static_cast<uint64_t>(last) >= leaf.bytes / width)) {
      raise_bad_package(path_, "its self test is damaged: a tensor does not fit its elements");
    }
    at::Tensor elements = at::empty({static_cast<int64_t>(leaf.bytes / width)}, type);
    std::memcpy(elements.data_ptr(), data_.data() + leaf.offset, elements.nbytes());
    if (!leaf.is_on_cpu) {
      elements = elements.to(device);
    }
    return elements.as_strided(leaf.shape, leaf.stride);
  }

  double compare_one(const std::string& what, const Leaf& leaf, const at::Tensor& actual) const {
    if (!actual.defined()) {
      fail(what + " is not a tensor");
    }
    if (!leaf.is_tensor) {
      const at::Tensor expected = scalar(leaf.value, actual.scalar_type());
      if (actual.numel() != 1 || !at::equal(actual.cpu().reshape({}), expected)) {
        fail(what + " differs from the recorded value");
      }
      return 0;
    }
    const at::Tensor expected = restore(leaf, at::kCPU).cpu();
    if (actual.scalar_type() != expected.scalar_type()) {
      fail(
          what + " has the dtype " + find_dtype(actual.scalar_type()) + " and not " +
          find_dtype(expected.scalar_type()));
    }
    if (actual.sizes() != expected.sizes()) {
      fail(what + " has the shape " + shape_text(actual) + " and not " + shape_text(expected));
    }
    const double difference = compute_difference(actual.cpu(), expected);
    const double allowed = tolerance(leaf.dtype, expected);
    if (!(difference <= allowed)) {
      char text[128];
      std::snprintf(
          text, sizeof(text), " differs by %.3g of its largest value, allowed are %g", difference, allowed);
      fail(what + text);
    }
    return difference;
  }

  static std::string shape_text(const at::Tensor& tensor) {
    std::vector<std::string> sizes;
    for (const int64_t size : tensor.sizes()) {
      sizes.push_back(std::to_string(size));
    }
    return "(" + joined(sizes) + ")";
  }

  // The accepted difference, relative to the largest expected magnitude: the values of the Python
  // package (`cpp_wrapper/package/self_test.py`).
  static double tolerance(const std::string& dtype, const at::Tensor& expected) {
    static const std::map<std::string, double> tolerances{
        {"float64", 1e-7}, {"complex128", 1e-7}, {"float32", 1e-3},
        {"complex64", 1e-3}, {"float16", 1e-2}, {"bfloat16", 5e-2}};
    if (!expected.is_floating_point() && !expected.is_complex()) {
      return 0;
    }
    const auto found = tolerances.find(dtype);
    return found == tolerances.end() ? 0.25 : found->second;
  }

  // Infinite if values that are not finite differ.
  static double compute_difference(const at::Tensor& actual, const at::Tensor& expected) {
    const double infinity = std::numeric_limits<double>::infinity();
    if (!expected.is_floating_point() && !expected.is_complex()) {
      return at::equal(actual, expected) ? 0 : infinity;
    }
    const at::ScalarType wide = expected.is_complex() ? at::kComplexDouble : at::kDouble;
    const at::Tensor one = actual.to(wide), other = expected.to(wide);
    const at::Tensor is_finite = at::isfinite(other);
    const at::Tensor rest = at::logical_not(is_finite);
    if (!at::equal(is_finite, at::isfinite(one)) ||
        !at::equal(
            at::nan_to_num(at::masked_select(one, rest)), at::nan_to_num(at::masked_select(other, rest)))) {
      return infinity;
    }
    const at::Tensor values = at::masked_select(other, is_finite);
    if (values.numel() == 0) {
      return 0;
    }
    const double distance = at::masked_select(one, is_finite).sub(values).abs().max().item<double>();
    const double magnitude = values.abs().max().item<double>();
    return distance == 0 ? 0 : distance / std::max(magnitude, 1e-30);
  }

  std::string path_;
  std::string name_;
  const ModelRecord& model_;
  std::vector<Leaf> inputs_, results_;
  std::string data_;
};

} // namespace inductor_ext::detail
