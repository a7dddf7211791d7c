#include "expression.h"

#include <limits>

namespace inductor_ext {

namespace {

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

}  // namespace

Result evaluate(const int64_t* program, const int64_t* values, int32_t defined) {
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

}  // namespace inductor_ext
