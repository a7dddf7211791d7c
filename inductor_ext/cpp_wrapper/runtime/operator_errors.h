// Calls of operators whose errors name the operator, its arguments, and the reason.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <initializer_list>
#include <string>

namespace inductor_ext {

// Calls an operator through torch's proxy executor.
//
// call: the operator and its arguments, with the byte 1 in place of each tensor.
// index, the numbers and arrays: as of aoti_torch_proxy_executor_call_function.
void call_operator(
    AOTIProxyExecutorHandle executor,
    int32_t index,
    int32_t num_integers,
    int64_t* integers,
    int32_t num_tensors,
    AtenTensorHandle* tensors,
    const char* call);

// Throws the error of an operator that failed.
//
// call: as of call_operator. reason: may be empty. tensors: in the order of the bytes 1.
[[noreturn, gnu::cold]] void fail_operator(
    const char* call,
    const std::string& reason,
    AtenTensorHandle const* tensors,
    size_t num_tensors);

// Throws the error of an operator that failed, with torch's last error as the reason.
[[noreturn, gnu::cold]] void fail_operator(const char* call, std::initializer_list<AtenTensorHandle> tensors);

// Throws the error of a function of torch's C interface that failed.
//
// call: the expression that called it.
[[noreturn, gnu::cold]] void fail_call(const char* call, const char* file, int64_t line);

// Throws unless this is the torch release whose headers the calling code includes.
//
// version: TORCH_ABI_VERSION of the headers.
void require_release(uint64_t version, const char* call);

} // namespace inductor_ext

// Calls an operator through a function of torch's C interface.
//
// call: the expression. text and the tensors: as of fail_operator.
#define INDUCTOR_EXT_CALL_OPERATOR(call, text, ...)       \
  if (__builtin_expect((call) != AOTI_TORCH_SUCCESS, 0)) { \
    inductor_ext::fail_operator(text, {__VA_ARGS__});     \
  }
