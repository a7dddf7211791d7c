#include "operator_errors.h"

#include "error.h"
#include "names.h"

// From torch 2.13 on; null in earlier releases, which print the reason to stderr.
extern "C" const char* torch_exception_get_what_without_backtrace() __attribute__((weak));

namespace inductor_ext {

namespace {

std::string last_reason() {
  const auto get = torch_exception_get_what_without_backtrace;
  const char* reason = get == nullptr ? nullptr : get();
  return reason == nullptr ? "" : reason;
}

// Returns dtype and sizes, such as float32[3, 4].
std::string described(AtenTensorHandle tensor) {
  int32_t dtype = 0;
  int64_t dim = 0;
  int64_t* sizes = nullptr;
  if (tensor == nullptr || aoti_torch_get_dtype(tensor, &dtype) != AOTI_TORCH_SUCCESS ||
      aoti_torch_get_dim(tensor, &dim) != AOTI_TORCH_SUCCESS ||
      aoti_torch_get_sizes(tensor, &sizes) != AOTI_TORCH_SUCCESS) {
    return "an undefined tensor";
  }
  std::string text = name_in(kDtypes, dtype) + "[";
  for (int64_t i = 0; i < dim; ++i) {
    text += (i ? ", " : "") + std::to_string(sizes[i]);
  }
  return text + "]";
}

std::string trimmed(std::string text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ' || text.back() == '.')) {
    text.pop_back();
  }
  return text;
}

} // namespace

void call_operator(
    AOTIProxyExecutorHandle executor,
    int32_t index,
    int32_t num_integers,
    int64_t* integers,
    int32_t num_tensors,
    AtenTensorHandle* tensors,
    const char* call) {
  if (__builtin_expect(
          aoti_torch_proxy_executor_call_function(executor, index, num_integers, integers, num_tensors, tensors) !=
              AOTI_TORCH_SUCCESS,
          0)) {
    fail_operator(call, last_reason(), tensors, num_tensors);
  }
}

void fail_operator(
    const char* call,
    const std::string& reason,
    AtenTensorHandle const* tensors,
    size_t num_tensors) {
  std::string text;
  size_t tensor = 0;
  // Describing a tensor may fail, which would replace the reason.
  for (const char* c = call; *c != '\0'; ++c) {
    if (*c != '\1') {
      text += *c;
    } else {
      text += tensor < num_tensors ? described(tensors[tensor]) : "a tensor";
      ++tensor;
    }
  }
  const std::string why = trimmed(reason);
  throw Error(
      ErrorCode::failure,
      "The operator " + text + " failed: " + (why.empty() ? "torch prints the reason to stderr" : why));
}

void fail_operator(const char* call, std::initializer_list<AtenTensorHandle> tensors) {
  const std::string reason = last_reason();
  fail_operator(call, reason, tensors.begin(), tensors.size());
}

void fail_call(const char* call, const char* file, int64_t line) {
  const std::string why = trimmed(last_reason());
  const std::string text(call);
  throw Error(
      ErrorCode::failure,
      "The call of " + text.substr(0, text.find('(')) +
          " failed: " + (why.empty() ? "torch prints the reason to stderr" : why),
      text + " at " + file + ", line " + std::to_string(line));
}

void require_release(uint64_t version, const char* call) {
  // The highest byte is the major version, the next one the minor version.
  const auto release = [](uint64_t number) {
    return std::to_string(number >> 56) + "." + std::to_string((number >> 48) & 255);
  };
  const uint64_t current = aoti_torch_abi_version();
  if (__builtin_expect((current >> 48) != (version >> 48), 0)) {
    const std::string name(call, std::string(call).find('('));
    throw Error(
        ErrorCode::failure,
        "The model was compiled with torch " + release(version) + ", but this is torch " + release(current) +
            ". It passes arguments to " + name + " in a way that depends on the release. Compile it again with torch " +
            release(current));
  }
}

} // namespace inductor_ext
