// The kinds of errors that the C interface distinguishes, and the exception that carries one.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace inductor_ext {

// Results of inductor_ext_last_error_code. Callers depend on the values: do not change or reuse one.
// load/native.py has the same list.
enum class ErrorCode : int32_t {
  none = 0,     // the last call of this thread succeeded
  failure = 1,  // any error that is not one of the following
  input = 2,    // the inputs do not match the signature; nothing was computed
  constant = 3, // a constant has no value, or a new value does not match it
  weights = 4,  // the weights cannot be read
  cpu = 5,      // the CPU lacks features that the code needs
  budget = 6,   // the sizes of the inputs need more memory than memory_budget
  damaged = 7,  // the weights do not match their checksums
};

struct Error : std::runtime_error {
  // text: one sentence for the caller. details: where it happened in the code.
  Error(ErrorCode code, const std::string& text, std::string details = "")
      : std::runtime_error(text), code(code), details(std::move(details)) {}
  ErrorCode code;
  std::string details;
};

// Thrown by generated code.
struct BudgetError : Error {
  explicit BudgetError(const std::string& text) : Error(ErrorCode::budget, text) {}
};

} // namespace inductor_ext
