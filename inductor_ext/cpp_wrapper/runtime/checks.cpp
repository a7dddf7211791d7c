#include "checks.h"

#include <limits>
#include <string>

#include "error.h"

namespace inductor_ext {

namespace {

[[noreturn]] void refuse(const std::string& text) {
  throw Error(ErrorCode::input, text);
}

// The names of c10::ScalarType, in its order.
const char* const kDtypes[] = {
    "uint8",        "int8",          "int16",           "int32",           "int64",
    "float16",      "float32",       "float64",         "complex32",       "complex64",
    "complex128",   "bool",          "qint8",           "quint8",          "qint32",
    "bfloat16",     "quint4x2",      "quint2x4",        "bits1x8",         "bits2x4",
    "bits4x2",      "bits8",         "bits16",          "float8_e5m2",     "float8_e4m3fn",
    "float8_e5m2fnuz", "float8_e4m3fnuz", "uint16",     "uint32",          "uint64",
    "uint1",        "uint2",         "uint3",           "uint4",           "uint5",
    "uint6",        "uint7",         "int1",            "int2",            "int3",
    "int4",         "int5",          "int6",            "int7",            "float8_e8m0fnu",
    "float4_e2m1fn_x2",
};

constexpr int32_t kFloat16 = 5;
constexpr int32_t kFloat64 = 7;
constexpr int32_t kComplex32 = 8;
constexpr int32_t kComplex128 = 10;

// The names of c10::DeviceType, in its order.
const char* const kDevices[] = {
    "cpu", "cuda", "mkldnn", "opengl", "opencl", "ideep", "hip",  "fpga", "maia", "xla", "vulkan",
    "metal", "xpu", "mps",   "meta",   "hpu",    "ve",    "lazy", "ipu",  "mtia", "privateuse1",
};

// The names of c10::Layout, in its order.
const char* const kLayouts[] = {
    "strided",    "sparse_coo", "sparse_csr", "mkldnn",
    "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged",
};

template <size_t N>
std::string name_in(const char* const (&names)[N], int32_t code) {
  if (code >= 0 && static_cast<size_t>(code) < N) {
    return names[code];
  }
  return "number " + std::to_string(code);
}

std::string quoted(const char* name) {
  return "input '" + std::string(name) + "'";
}

// In the order of OPCODES in signature/expression.py; a test compares the two.
enum Opcode : int64_t {
  kEnd,
  kNumber,
  kSymbol,
  kAdd,
  kSubtract,
  kMultiply,
  kFloorDivide,
  kModulo,
  kPower,
  kBitAnd,
  kBitOr,
  kBitXor,
  kLeftShift,
  kRightShift,
  kEqual,
  kNotEqual,
  kLess,
  kLessEqual,
  kGreater,
  kGreaterEqual,
  kNegate,
  kNot,
  kAbs,
  kMin,
  kMax,
  kAnd,
  kOr,
  kIf,
};

// Unknown if the value does not fit 64 bits, a divisor is zero, or a symbol has no value.
struct Result {
  int64_t value = 0;
  bool known = false;
};

int64_t floor_divide(int64_t a, int64_t b) {
  const int64_t quotient = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}

Result binary(int64_t opcode, int64_t a, int64_t b) {
  constexpr int64_t lowest = std::numeric_limits<int64_t>::min();
  Result result{0, true};
  switch (opcode) {
    case kAdd:
      result.known = !__builtin_add_overflow(a, b, &result.value);
      break;
    case kSubtract:
      result.known = !__builtin_sub_overflow(a, b, &result.value);
      break;
    case kMultiply:
      result.known = !__builtin_mul_overflow(a, b, &result.value);
      break;
    case kFloorDivide:
    case kModulo:
      if (b == 0 || (a == lowest && b == -1)) {
        result.known = false;
      } else {
        const int64_t quotient = floor_divide(a, b);
        result.value = opcode == kModulo ? a - quotient * b : quotient;
      }
      break;
    case kPower:
      result.known = b >= 0;
      result.value = 1;
      for (int64_t i = 0; i < b && result.known; ++i) {
        if (a == 0 || a == 1 || a == -1) {
          result.value = a == -1 && b % 2 == 0 ? 1 : a;
          break;
        }
        result.known = !__builtin_mul_overflow(result.value, a, &result.value);
      }
      break;
    case kBitAnd:
      result.value = a & b;
      break;
    case kBitOr:
      result.value = a | b;
      break;
    case kBitXor:
      result.value = a ^ b;
      break;
    case kLeftShift:
      result.known = b >= 0 && (a == 0 || b < 63) &&
          !__builtin_mul_overflow(a, b < 63 ? int64_t{1} << b : 1, &result.value);
      break;
    case kRightShift:
      result.known = b >= 0;
      result.value = b < 63 ? a >> (b < 0 ? 0 : b) : (a < 0 ? -1 : 0);
      break;
    case kEqual:
      result.value = a == b;
      break;
    case kNotEqual:
      result.value = a != b;
      break;
    case kLess:
      result.value = a < b;
      break;
    case kLessEqual:
      result.value = a <= b;
      break;
    case kGreater:
      result.value = a > b;
      break;
    case kGreaterEqual:
      result.value = a >= b;
      break;
    case kMin:
      result.value = a < b ? a : b;
      break;
    case kMax:
      result.value = a < b ? b : a;
      break;
    default:
      result.known = false;
  }
  return result;
}

// values: those of the symbols; only the first `defined` are set.
Result evaluate(const int64_t* program, const int64_t* values, int32_t defined) {
  constexpr int kDepth = 32;  // DEPTH in signature/expression.py, which writes no deeper program
  Result stack[kDepth];
  int top = -1;
  for (;;) {
    const int64_t opcode = *program++;
    switch (opcode) {
      case kEnd:
        return stack[0];
      case kNumber:
        stack[++top] = {*program++, true};
        break;
      case kSymbol: {
        const int64_t symbol = *program++;
        stack[++top] = {symbol < defined ? values[symbol] : 0, symbol < defined};
        break;
      }
      case kNegate:
      case kAbs:
        if (opcode == kNegate || stack[top].value < 0) {
          stack[top].known = stack[top].known &&
              !__builtin_sub_overflow(int64_t{0}, stack[top].value, &stack[top].value);
        }
        break;
      case kNot:
        stack[top].value = stack[top].value == 0;
        break;
      case kAnd:
      case kOr: {
        // The right operand counts only if the left one does not decide, as in Python.
        const Result right = stack[top--];
        Result& left = stack[top];
        if (left.known) {
          const bool decided = (left.value != 0) == (opcode == kOr);
          left = decided ? Result{opcode == kOr, true} : Result{right.value != 0, right.known};
        }
        break;
      }
      case kIf: {
        const Result other = stack[top--];
        const Result body = stack[top--];
        Result& test = stack[top];
        if (test.known) {
          test = test.value != 0 ? body : other;
        }
        break;
      }
      default: {
        const Result right = stack[top--];
        Result& left = stack[top];
        if (left.known && right.known) {
          left = binary(opcode, left.value, right.value);
        } else {
          left.known = false;
        }
      }
    }
  }
}

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

std::string place(const Checks& checks, const Symbol& symbol) {
  const Input& input = checks.inputs[symbol.input];
  if (input.number != Number::none) {
    return quoted(input.name);
  }
  return (symbol.stride ? "the stride of dimension " : "dimension ") +
      std::to_string(symbol.dimension) + " of '" + input.name + "'";
}

std::string subject(const Input& input, bool stride, int32_t dimension) {
  if (input.number != Number::none) {
    return quoted(input.name);
  }
  return quoted(input.name) + (stride ? ": the stride of dimension " : ": dimension ") +
      std::to_string(dimension);
}

std::string listed(const int64_t* values, int64_t count) {
  std::string text = "(";
  for (int64_t i = 0; i < count; ++i) {
    text += (i ? ", " : "") + std::to_string(values[i]);
  }
  return text + (count == 1 ? ",)" : ")");
}

std::string limits(const Symbol& symbol) {
  const bool below = symbol.min != std::numeric_limits<int64_t>::min();
  const bool above = symbol.max != std::numeric_limits<int64_t>::max();
  if (below && above) {
    return symbol.min == symbol.max
        ? std::to_string(symbol.min)
        : std::to_string(symbol.min) + " to " + std::to_string(symbol.max);
  }
  return below ? std::to_string(symbol.min) + " or more" : std::to_string(symbol.max) + " or less";
}

[[noreturn, gnu::cold, gnu::noinline]] void refuse_count(const Checks& checks, int64_t count) {
  refuse(
      "the artifact takes " + std::to_string(checks.input_count) + " tensors, and " +
      std::to_string(count) + " came");
}

[[noreturn, gnu::cold, gnu::noinline]] void refuse_dtype(const Input& input, int32_t found) {
  const std::string expected = name_in(kDtypes, input.dtype);
  refuse(
      quoted(input.name) + " has dtype " + name_in(kDtypes, found) + ", and the artifact takes " +
      expected + (input.number == Number::none ? ": call .to(torch." + expected + ") on it" : ""));
}

[[noreturn, gnu::cold, gnu::noinline]] void refuse_device(
    const Input& input,
    int32_t type,
    int32_t index,
    int32_t expected_index) {
  std::string expected = name_in(kDevices, input.device_type);
  std::string found = name_in(kDevices, type);
  if (type == input.device_type) {
    expected += ":" + std::to_string(expected_index);
    found += ":" + std::to_string(index);
  }
  refuse(
      quoted(input.name) + " is on " + found + ", and the artifact takes " + expected +
      ": call .to('" + expected + "') on it");
}

[[noreturn, gnu::cold, gnu::noinline]] void refuse_layout(const Input& input, int32_t layout) {
  refuse(
      quoted(input.name) + " is of layout " + name_in(kLayouts, layout) +
      ", and the artifact takes strided tensors: call .to_dense() on it");
}

[[noreturn, gnu::cold, gnu::noinline]] void refuse_rank(
    const Input& input,
    int64_t rank,
    const int64_t* sizes) {
  refuse(
      quoted(input.name) + " has shape " + listed(sizes, rank) + ", of " + std::to_string(rank) +
      (rank == 1 ? " dimension" : " dimensions") + ", and the artifact takes " + input.shape_text +
      ", of " + std::to_string(input.rank));
}

[[noreturn, gnu::cold, gnu::noinline]] void refuse_range(
    const Input& input,
    bool stride,
    int32_t dimension,
    int64_t found,
    const Symbol& symbol) {
  std::string text = subject(input, stride, dimension) + " is " + std::to_string(found);
  if (!symbol.plain) {
    refuse(text + ", and " + symbol.text + " has to be " + limits(symbol));
  }
  text += ", and the artifact takes " + limits(symbol);
  if (!stride && input.number == Number::none && symbol.min == 2 && found < 2) {
    text += " (to allow less, export with torch.export.Dim(name, min=0) for this dimension)";
  }
  refuse(text);
}

[[noreturn, gnu::cold, gnu::noinline]] void refuse_solve(
    const Input& input,
    bool stride,
    int32_t dimension,
    int64_t found,
    const char* text) {
  refuse(
      subject(input, stride, dimension) + " is " + std::to_string(found) + ", and it has to be " +
      text);
}

[[noreturn, gnu::cold, gnu::noinline]] void refuse_size(
    const Call& call,
    const Input& input,
    int32_t dimension,
    int64_t found) {
  const Extent& extent = input.sizes[dimension];
  const std::string text = subject(input, false, dimension) + " is " + std::to_string(found);
  if (extent.rule == Rule::fixed) {
    refuse(text + ", and the artifact takes " + std::to_string(extent.value));
  }
  if (extent.rule == Rule::same) {
    const Symbol& symbol = call.checks.symbols[extent.index];
    refuse(
        text + (symbol.plain ? ", and it has to equal " + place(call.checks, symbol)
                             : std::string(", and it has to be ") + symbol.text) +
        ", which is " + std::to_string(call.values[extent.index]));
  }
  const Result expected = call.run(extent.index);
  refuse(
      text + ", and it has to be " + extent.text +
      (expected.known ? ", which is " + std::to_string(expected.value)
                      : ", which has no value for these inputs"));
}

// The required value of a stride; unknown if it depends on inputs that have not been read.
Result expected_stride(const Call& call, const Extent& extent, int64_t found) {
  switch (extent.rule) {
    case Rule::fixed:
      return {extent.value, true};
    case Rule::same:
      return {call.values[extent.index], extent.index < call.defined};
    case Rule::derived:
      return call.run(extent.index);
    default:
      return {found, true};
  }
}

[[noreturn, gnu::cold, gnu::noinline]] void refuse_strides(
    const Call& call,
    const Input& input,
    const int64_t* sizes,
    const int64_t* strides) {
  std::string expected = "(";
  bool known = true;
  bool contiguous = true;
  bool channels_last = input.rank == 4 || input.rank == 5;
  int64_t row_major = 1;
  for (int32_t d = input.rank; d-- > 0;) {
    const Result value = expected_stride(call, input.strides[d], strides[d]);
    known &= value.known;
    if (sizes[d] != 1) {
      contiguous &= value.value == row_major;
      row_major *= sizes[d];
    }
  }
  int64_t next = 1;
  for (int32_t i = 0; i < input.rank && channels_last; ++i) {
    // Channels vary fastest, then the last dimension, and so on up to the batch.
    const int32_t d = i == 0 ? 1 : i == input.rank - 1 ? 0 : input.rank - i;
    const Result value = expected_stride(call, input.strides[d], strides[d]);
    channels_last = sizes[d] == 1 || value.value == next;
    next *= sizes[d];
  }
  for (int32_t d = 0; d < input.rank; ++d) {
    const Result value = expected_stride(call, input.strides[d], strides[d]);
    expected += (d ? ", " : "");
    expected += value.known ? std::to_string(value.value) : input.strides[d].text;
  }
  expected += input.rank == 1 ? ",)" : ")";
  std::string mend;
  if (known && contiguous) {
    mend = ": call .contiguous() on it";
  } else if (known && channels_last) {
    mend = std::string(": call .contiguous(memory_format=torch.channels_last") +
        (input.rank == 5 ? "_3d" : "") + ") on it";
  } else if (known) {
    mend = ": copy it into torch.empty_strided(" + listed(sizes, input.rank) + ", " + expected +
        ", ...)";
  }
  refuse(
      quoted(input.name) + " has strides " + listed(strides, input.rank) +
      ", and the compiled code needs " + expected + mend);
}

[[noreturn, gnu::cold, gnu::noinline]] void refuse_constraint(
    const Call& call,
    const Constraint& constraint) {
  const Checks& checks = call.checks;
  if (constraint.symbol >= 0) {
    const Symbol& symbol = checks.symbols[constraint.symbol];
    refuse(
        subject(checks.inputs[symbol.input], symbol.stride, symbol.dimension) + " is " +
        std::to_string(call.values[constraint.symbol]) + ", and it has to be a multiple of " +
        std::to_string(constraint.multiple));
  }
  std::string where;
  std::string whose;
  bool named[64] = {};
  for (const int64_t* word = checks.programs + constraint.program; *word != kEnd; ++word) {
    if (*word == kNumber) {
      ++word;
    } else if (*word == kSymbol) {
      const int64_t index = *++word;
      const Symbol& symbol = checks.symbols[index];
      if (whose.empty()) {
        whose = quoted(checks.inputs[symbol.input].name);
      }
      if (index < 64 && !named[index]) {
        named[index] = true;
        where += where.empty() ? ", and " : ", ";
        where += symbol.text;
        where += " is " + std::to_string(call.values[index]);
      }
    }
  }
  refuse(whose + ": the artifact takes inputs with " + constraint.text + where);
}

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
      refuse(quoted(input.name) + " is a lazy conjugate: call .resolve_conj() on it");
    }
  } else if (input.dtype >= kFloat16 && input.dtype <= kFloat64) {
    int64_t offset = 0;
    if (aoti_torch_get_storage_offset(tensor, &offset) == 0 && offset != 0 &&
        dispatched("aten::is_neg", tensor)) {
      refuse(quoted(input.name) + " is a lazy negative: call .resolve_neg() on it");
    }
  }
}

void require(int32_t code, const Input& input, const char* what) {
  if (__builtin_expect(code != 0, 0)) {
    refuse(quoted(input.name) + " is a tensor that has no " + what + " to be read");
  }
}

// For fake tensors and those of functorch transformations, which have metadata but no memory.
[[noreturn, gnu::cold, gnu::noinline]] void refuse_memory(const Input& input) {
  refuse(quoted(input.name) + " is a tensor that has no memory: a fake one, or one of a transformation's");
}

void check_memory(const Input& input, AtenTensorHandle tensor, const int64_t* sizes) {
  void* data = nullptr;
  require(aoti_torch_get_data_ptr(tensor, &data), input, "data");
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
  require(aoti_torch_get_data_ptr(tensor, &data), input, "data");
  if (__builtin_expect(data == nullptr, 0)) {
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
    refuse(
        quoted(input.name) + " is a null handle, and the artifact takes a tensor of dtype " +
        name_in(kDtypes, input.dtype));
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
    refuse(quoted(input.name) + " is an undefined tensor");
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
