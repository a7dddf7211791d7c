// The errors of a call with inputs that do not match: Error(ErrorCode::input), whose text names the
// input, the actual and the expected value, and what to do.
#pragma once

#include "checks.h"
#include "expression.h"

namespace inductor_ext {

// The state of one call.
struct Call {
  const Checks& checks;
  int64_t* values;
  int32_t device_index;
  int32_t defined = 0;

  Result run(int32_t program) const {
    return evaluate(checks.programs + program, values, defined);
  }
};

[[noreturn, gnu::cold]] void refuse_count(const Checks& checks, int64_t count);
[[noreturn, gnu::cold]] void refuse_dtype(const Input& input, int32_t found);
[[noreturn, gnu::cold]] void refuse_device(
    const Input& input,
    int32_t type,
    int32_t index,
    int32_t expected_index);
[[noreturn, gnu::cold]] void refuse_layout(const Input& input, int32_t layout);
[[noreturn, gnu::cold]] void refuse_rank(
    const Input& input,
    int64_t rank,
    const int64_t* sizes);
// stride: whether `found` is a stride, and not a size.
[[noreturn, gnu::cold]] void refuse_range(
    const Input& input,
    bool stride,
    int32_t dimension,
    int64_t found,
    const Symbol& symbol);
[[noreturn, gnu::cold]] void refuse_solve(
    const Input& input,
    bool stride,
    int32_t dimension,
    int64_t found,
    const char* text);
[[noreturn, gnu::cold]] void refuse_size(
    const Call& call,
    const Input& input,
    int32_t dimension,
    int64_t found);
[[noreturn, gnu::cold]] void refuse_strides(
    const Call& call,
    const Input& input,
    const int64_t* sizes,
    const int64_t* strides);
[[noreturn, gnu::cold]] void refuse_constraint(
    const Call& call,
    const Constraint& constraint);
[[noreturn, gnu::cold]] void refuse_null(const Input& input);
[[noreturn, gnu::cold]] void refuse_undefined(const Input& input);
[[noreturn, gnu::cold]] void refuse_unreadable(const Input& input, const char* what);
// For fake tensors and those of functorch transformations, which have metadata but no memory.
[[noreturn, gnu::cold]] void refuse_memory(const Input& input);
[[noreturn, gnu::cold]] void refuse_lazy(const Input& input, const char* kind, const char* method);

}  // namespace inductor_ext
