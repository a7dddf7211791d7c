#include "input_errors.h"

#include <limits>
#include <string>

#include "error.h"
#include "names.h"

namespace inductor_ext {

namespace {

[[noreturn]] void refuse(const std::string& text) {
  throw Error(ErrorCode::input, text);
}

std::string quoted(const char* name) {
  return "input '" + std::string(name) + "'";
}

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

}  // namespace

void refuse_count(const Checks& checks, int64_t count) {
  refuse(
      "the model takes " + std::to_string(checks.input_count) + " tensors, but was called with " +
      std::to_string(count));
}

void refuse_dtype(const Input& input, int32_t found) {
  const std::string expected = name_in(kDtypes, input.dtype);
  refuse(
      quoted(input.name) + " has dtype " + name_in(kDtypes, found) + ", but the model takes " +
      expected + (input.number == Number::none ? ": call .to(torch." + expected + ") on it" : ""));
}

void refuse_device(
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
      quoted(input.name) + " is on " + found + ", but the model takes " + expected +
      ": call .to('" + expected + "') on it");
}

void refuse_layout(const Input& input, int32_t layout) {
  refuse(
      quoted(input.name) + " is of layout " + name_in(kLayouts, layout) +
      ", but the model takes strided tensors: call .to_dense() on it");
}

void refuse_rank(
    const Input& input,
    int64_t rank,
    const int64_t* sizes) {
  refuse(
      quoted(input.name) + " has shape " + listed(sizes, rank) + ", of " + std::to_string(rank) +
      (rank == 1 ? " dimension" : " dimensions") + ", but the model takes " + input.shape_text +
      ", of " + std::to_string(input.rank));
}

void refuse_range(
    const Input& input,
    bool stride,
    int32_t dimension,
    int64_t found,
    const Symbol& symbol) {
  std::string text = subject(input, stride, dimension) + " is " + std::to_string(found);
  if (!symbol.plain) {
    refuse(text + ", but " + symbol.text + " must be " + limits(symbol));
  }
  text += ", but the model takes " + limits(symbol);
  if (!stride && input.number == Number::none && symbol.min == 2 && found < 2) {
    text += " (to allow less, export with torch.export.Dim(name, min=0) for this dimension)";
  }
  refuse(text);
}

void refuse_solve(
    const Input& input,
    bool stride,
    int32_t dimension,
    int64_t found,
    const char* text) {
  refuse(
      subject(input, stride, dimension) + " is " + std::to_string(found) + ", but it must be " +
      text);
}

void refuse_size(
    const Call& call,
    const Input& input,
    int32_t dimension,
    int64_t found) {
  const Extent& extent = input.sizes[dimension];
  const std::string text = subject(input, false, dimension) + " is " + std::to_string(found);
  if (extent.rule == Rule::fixed) {
    refuse(text + ", but the model takes " + std::to_string(extent.value));
  }
  if (extent.rule == Rule::same) {
    const Symbol& symbol = call.checks.symbols[extent.index];
    refuse(
        text + (symbol.plain ? ", but it must equal " + place(call.checks, symbol)
                             : std::string(", but it must be ") + symbol.text) +
        ", which is " + std::to_string(call.values[extent.index]));
  }
  const Result expected = call.run(extent.index);
  refuse(
      text + ", but it must be " + extent.text +
      (expected.known ? ", which is " + std::to_string(expected.value)
                      : ", which has no value for these inputs"));
}

void refuse_strides(
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
  std::string remedy;
  if (known && contiguous) {
    remedy = ": call .contiguous() on it";
  } else if (known && channels_last) {
    remedy = std::string(": call .contiguous(memory_format=torch.channels_last") +
        (input.rank == 5 ? "_3d" : "") + ") on it";
  } else if (known) {
    remedy = ": copy it into torch.empty_strided(" + listed(sizes, input.rank) + ", " + expected +
        ", ...)";
  }
  refuse(
      quoted(input.name) + " has strides " + listed(strides, input.rank) +
      ", but the model takes " + expected + remedy);
}

void refuse_constraint(
    const Call& call,
    const Constraint& constraint) {
  const Checks& checks = call.checks;
  if (constraint.symbol >= 0) {
    const Symbol& symbol = checks.symbols[constraint.symbol];
    refuse(
        subject(checks.inputs[symbol.input], symbol.stride, symbol.dimension) + " is " +
        std::to_string(call.values[constraint.symbol]) + ", but it must be a multiple of " +
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
        where += where.empty() ? ", but " : ", ";
        where += symbol.text;
        where += " is " + std::to_string(call.values[index]);
      }
    }
  }
  refuse(whose + ": the model requires " + constraint.text + where);
}

void refuse_null(const Input& input) {
  refuse(
      quoted(input.name) + " is a null handle, but the model takes a tensor of dtype " +
      name_in(kDtypes, input.dtype));
}

void refuse_undefined(const Input& input) {
  refuse(quoted(input.name) + " is an undefined tensor");
}

void refuse_unreadable(const Input& input, const char* what) {
  refuse(quoted(input.name) + " is a tensor whose " + what + " cannot be read");
}

void refuse_memory(const Input& input) {
  refuse(
      quoted(input.name) + " is a tensor without memory: the model cannot be called with fake tensors or "
      "within a torch.func transformation");
}

void refuse_lazy(const Input& input, const char* kind, const char* method) {
  refuse(quoted(input.name) + " is a lazy " + kind + ": call ." + method + "() on it");
}

}  // namespace inductor_ext
