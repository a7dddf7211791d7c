// Expressions over the symbols of a signature: programs of 64-bit words, and their evaluation.
//
// signature/expression.py compiles an expression to postfix words.
#pragma once

#include <cstdint>

namespace inductor_ext {

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

// Maximum stack depth of a program: DEPTH in signature/expression.py.
constexpr int kDepth = 32;

// values: those of the symbols; only the first `defined` are set.
Result evaluate(const int64_t* program, const int64_t* values, int32_t defined);

}  // namespace inductor_ext
