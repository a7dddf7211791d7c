#include "checks.h"

#include <limits>

#include "expression.h"
#include "input_errors.h"

namespace inductor_ext {

namespace {

constexpr int32_t kFloat16 = 5;
constexpr int32_t kFloat64 = 7;
constexpr int32_t kComplex32 = 8;
constexpr int32_t kComplex128 = 10;

[[gnu::cold, gnu::noinline]] bool dispatched(const char* op, AtenTensorHandle tensor) {
  // The dispatcher takes ownership of its arguments.
  AtenTensorHandle own = nullptr;
  if (aoti_torch_new_tensor_handle(tensor, &own) != 0) {
    return false;
  }
  uint64_t stack[1] = {reinterpret_cast<uint64_t>(own)};
  return aoti_torch_call_dispatcher(op, "", stack) == 0 && (stack[0] & 0xff) != 0;
}

// The C interface does not expose the bits of lazy conjugation and negation. A dispatcher call takes
// half a microsecond, so a real tensor is queried only if torch can have created a lazy negative:
// `z.conj().imag` begins within a complex element, so never at the start of its storage.
void check_lazy_bits(const Input& input, AtenTensorHandle tensor) {
  if (input.dtype >= kComplex32 && input.dtype <= kComplex128) {
    if (dispatched("aten::is_conj", tensor)) {
      refuse_lazy(input, "conjugate", "resolve_conj");
    }
  } else if (input.dtype >= kFloat16 && input.dtype <= kFloat64) {
    int64_t offset = 0;
    if (aoti_torch_get_storage_offset(tensor, &offset) == 0 && offset != 0 &&
        dispatched("aten::is_neg", tensor)) {
      refuse_lazy(input, "negative", "resolve_neg");
    }
  }
}

void require(int32_t code, const Input& input, const char* what) {
  if (__builtin_expect(code != 0, 0)) {
    refuse_unreadable(input, what);
  }
}

void check_memory(const Input& input, AtenTensorHandle tensor, const int64_t* sizes) {
  void* data = nullptr;
  if (__builtin_expect(aoti_torch_get_data_ptr(tensor, &data) != 0, 0)) {
    refuse_memory(input);
  }
  if (__builtin_expect(data != nullptr, 1)) {
    return;
  }
  bool empty = false;
  for (int32_t d = 0; d < input.rank; ++d) {
    empty |= sizes[d] == 0;
  }
  if (!empty) {
    refuse_memory(input);
  }
}

// found: the size or stride that the value was derived from; equal to it unless solved for.
void define(
    Call& call,
    const Input& input,
    bool stride,
    int32_t dimension,
    int32_t index,
    int64_t value,
    int64_t found) {
  const Symbol& symbol = call.checks.symbols[index];
  if (__builtin_expect(value < symbol.min || value > symbol.max, 0)) {
    refuse_range(input, stride, dimension, found, symbol);
  }
  call.values[index] = value;
  call.defined = index + 1;
}

// Solves an extent for a symbol that is no extent by itself, as the compiled code does.
void solve(Call& call, const Input& input, bool stride, int32_t dimension, int64_t found) {
  const Extent& extent = (stride ? input.strides : input.sizes)[dimension];
  const Solve& terms = call.checks.solves[extent.value];
  const Result scale = call.run(terms.scale);
  const Result shift = call.run(terms.shift);
  int64_t rest = 0;
  const bool exact = scale.known && shift.known && scale.value != 0 &&
      !__builtin_sub_overflow(found, shift.value, &rest) &&
      // INT64_MIN / -1 does not fit; -1 divides all other values.
      rest != std::numeric_limits<int64_t>::min() && rest % scale.value == 0;
  if (!exact) {
    refuse_solve(input, stride, dimension, found, extent.text);
  }
  define(call, input, stride, dimension, extent.index, rest / scale.value, found);
}

// Sizes, then strides, input by input: the order in which the compiled code assigns symbols.
void check_early(Call& call, const Input& input, const int64_t* sizes, const int64_t* strides) {
  bool empty = false;
  for (int32_t d = 0; d < input.rank; ++d) {
    const Extent& extent = input.sizes[d];
    empty |= sizes[d] == 0;
    switch (extent.rule) {
      case Rule::fixed:
        if (__builtin_expect(sizes[d] != extent.value, 0)) {
          refuse_size(call, input, d, sizes[d]);
        }
        break;
      case Rule::define:
        define(call, input, false, d, extent.index, sizes[d], sizes[d]);
        break;
      case Rule::same:
        if (__builtin_expect(sizes[d] != call.values[extent.index], 0)) {
          refuse_size(call, input, d, sizes[d]);
        }
        break;
      case Rule::solve:
        solve(call, input, false, d, sizes[d]);
        break;
      case Rule::derived:
        break;
    }
  }
  for (int32_t d = 0; d < input.rank; ++d) {
    const Extent& extent = input.strides[d];
    switch (extent.rule) {
      case Rule::fixed:
        // The stride of a dimension of size 1, or of an empty tensor, is never used.
        if (__builtin_expect(strides[d] != extent.value, 0) && sizes[d] != 1 && !empty) {
          refuse_strides(call, input, sizes, strides);
        }
        break;
      case Rule::define:
        define(call, input, true, d, extent.index, strides[d], strides[d]);
        break;
      case Rule::same:
        if (strides[d] != call.values[extent.index] && sizes[d] != 1 && !empty) {
          refuse_strides(call, input, sizes, strides);
        }
        break;
      case Rule::solve:
        solve(call, input, true, d, strides[d]);
        break;
      case Rule::derived:
        break;
    }
  }
}

void check_late(const Call& call, const Input& input, const int64_t* sizes, const int64_t* strides) {
  bool empty = false;
  for (int32_t d = 0; d < input.rank; ++d) {
    empty |= sizes[d] == 0;
    if (input.sizes[d].rule == Rule::derived) {
      const Result expected = call.run(input.sizes[d].index);
      if (!expected.known || expected.value != sizes[d]) {
        refuse_size(call, input, d, sizes[d]);
      }
    }
  }
  for (int32_t d = 0; d < input.rank && !empty; ++d) {
    if (input.strides[d].rule == Rule::derived && sizes[d] != 1) {
      const Result expected = call.run(input.strides[d].index);
      if (!expected.known || expected.value != strides[d]) {
        refuse_strides(call, input, sizes, strides);
      }
    }
  }
}

void check_number(Call& call, const Input& input, AtenTensorHandle tensor) {
  void* data = nullptr;
  if (__builtin_expect(aoti_torch_get_data_ptr(tensor, &data) != 0 || data == nullptr, 0)) {
    refuse_memory(input);
  }
  if (input.number == Number::integer) {
    const int64_t value = *static_cast<const int64_t*>(data);
    const Extent& extent = input.sizes[0];
    if (extent.rule == Rule::define) {
      define(call, input, false, 0, extent.index, value, value);
    } else if (
        (extent.rule == Rule::fixed && value != extent.value) ||
        (extent.rule == Rule::same && value != call.values[extent.index])) {
      refuse_size(call, input, 0, value);
    } else if (extent.rule == Rule::solve) {
      solve(call, input, false, 0, value);
    }
  }
}

void check_tensor(Call& call, const Input& input, AtenTensorHandle tensor) {
  if (__builtin_expect(tensor == nullptr, 0)) {
    refuse_null(input);
  }
  bool defined = false;
  int32_t layout = 0;
  int32_t dtype = 0;
  int32_t device_type = 0;
  int64_t rank = 0;
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  require(aoti_torch_is_defined(tensor, &defined), input, "state");
  if (__builtin_expect(!defined, 0)) {
    refuse_undefined(input);
  }
  require(aoti_torch_get_layout(tensor, &layout), input, "layout");
  if (__builtin_expect(layout != 0, 0)) {
    refuse_layout(input, layout);
  }
  require(aoti_torch_get_dtype(tensor, &dtype), input, "dtype");
  if (__builtin_expect(dtype != input.dtype, 0)) {
    refuse_dtype(input, dtype);
  }
  require(aoti_torch_get_device_type(tensor, &device_type), input, "device");
  if (__builtin_expect(device_type != input.device_type, 0)) {
    refuse_device(input, device_type, 0, 0);
  }
  if (device_type != 0) {
    int32_t index = 0;
    require(aoti_torch_get_device_index(tensor, &index), input, "device");
    if (input.device_index < 0 && call.device_index < 0) {
      call.device_index = index;
    }
    const int32_t expected = input.device_index >= 0 ? input.device_index : call.device_index;
    if (__builtin_expect(index != expected, 0)) {
      refuse_device(input, device_type, index, expected);
    }
  }
  require(aoti_torch_get_dim(tensor, &rank), input, "dimensions");
  require(aoti_torch_get_sizes(tensor, &sizes), input, "sizes");
  const int32_t expected_rank = input.number == Number::none ? input.rank : 0;
  if (__builtin_expect(rank != expected_rank, 0)) {
    refuse_rank(input, rank, sizes);
  }
  if (input.number != Number::none) {
    check_number(call, input, tensor);
    return;
  }
  require(aoti_torch_get_strides(tensor, &strides), input, "strides");
  check_early(call, input, sizes, strides);
  check_memory(input, tensor, sizes);
  check_lazy_bits(input, tensor);
}

}  // namespace

void check_tensors(
    const Checks& checks,
    AtenTensorHandle const* tensors,
    int64_t count,
    int32_t device_index,
    int64_t* values) {
  if (__builtin_expect(count != checks.input_count, 0)) {
    refuse_count(checks, count);
  }
  Call call{checks, values, device_index};
  bool late = false;
  // Scalars assign symbols before tensors do.
  for (int32_t i = 0; i < checks.input_count; ++i) {
    if (checks.inputs[i].number != Number::none) {
      check_tensor(call, checks.inputs[i], tensors[i]);
      late |= checks.inputs[i].late;
    }
  }
  for (int32_t i = 0; i < checks.input_count; ++i) {
    if (checks.inputs[i].number == Number::none) {
      check_tensor(call, checks.inputs[i], tensors[i]);
      late |= checks.inputs[i].late;
    }
  }
  for (int32_t i = 0; i < checks.input_count && late; ++i) {
    const Input& input = checks.inputs[i];
    if (!input.late) {
      continue;
    }
    if (input.number != Number::none) {
      void* data = nullptr;
      require(aoti_torch_get_data_ptr(tensors[i], &data), input, "data");
      const int64_t value = *static_cast<const int64_t*>(data);
      const Result expected = call.run(input.sizes[0].index);
      if (!expected.known || expected.value != value) {
        refuse_size(call, input, 0, value);
      }
      continue;
    }
    int64_t* sizes = nullptr;
    int64_t* strides = nullptr;
    require(aoti_torch_get_sizes(tensors[i], &sizes), input, "sizes");
    require(aoti_torch_get_strides(tensors[i], &strides), input, "strides");
    check_late(call, input, sizes, strides);
  }
  for (int32_t i = 0; i < checks.constraint_count; ++i) {
    const Result holds = call.run(checks.constraints[i].program);
    if (__builtin_expect(!holds.known || holds.value == 0, 0)) {
      refuse_constraint(call, checks.constraints[i]);
    }
  }
}

}  // namespace inductor_ext
