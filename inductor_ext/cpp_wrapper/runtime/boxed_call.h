// Calls of operators with boxed arguments, for those that torch's proxy executor cannot pass.
//
// Only the units of models with such calls include this file, because it includes ATen. Their code
// depends on the release of torch.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/headeronly/version.h>

#include <exception>
#include <vector>

#include "operator_errors.h"

namespace inductor_ext {

// Throws the error of an operator that failed; see fail_operator.
[[noreturn, gnu::cold]] inline void fail_boxed(
    const char* call,
    const char* reason,
    const std::vector<c10::IValue>& arguments) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor()) {
      tensors.push_back(argument.toTensor());
    } else if (argument.isList()) {
      for (const c10::IValue& item : argument.toListRef()) {
        if (item.isTensor()) {
          tensors.push_back(item.toTensor());
        }
      }
    }
  }
  std::vector<AtenTensorHandle> handles;
  for (at::Tensor& tensor : tensors) {
    handles.push_back(reinterpret_cast<AtenTensorHandle>(&tensor));
  }
  fail_operator(call, reason, handles.data(), handles.size());
}

// Replaces the arguments in `stack` by the results.
//
// call: the operator and its arguments, as of call_operator.
inline void call_boxed(
    const c10::OperatorHandle& op,
    std::vector<c10::IValue>& stack,
    const char* call) {
  const std::vector<c10::IValue> arguments = stack;
  try {
    op.callBoxed(&stack);
  } catch (const c10::Error& error) {
    fail_boxed(call, error.what_without_backtrace(), arguments);
  } catch (const std::exception& error) {
    fail_boxed(call, error.what(), arguments);
  }
}

// Returns an operator, for a `static` variable at the call.
inline c10::OperatorHandle find_operator(const char* name, const char* overload, const char* call) {
  require_release(TORCH_ABI_VERSION, call);
  try {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  } catch (const c10::Error& error) {
    fail_boxed(call, error.what_without_backtrace(), {});
  }
}

} // namespace inductor_ext
