// The functions that the library of a compiled model exports beyond torch's C interface.
#pragma once

#include <cstdint>
#include <string>

#include <dlfcn.h>

#include "package_files.hpp"

namespace inductor_ext::detail {

// The kind of a library's last error: `enum class ErrorCode` of the runtime.
enum class LibraryError : int32_t {
  unknown = -1, // the library does not tell
  none = 0,
  failure = 1,
  input = 2,
  constant = 3,
  weights = 4,
  cpu = 5,
  budget = 6,
  damaged = 7,
};

// A library that cannot be loaded, or that the extension did not compile.
struct LibraryLoadError {
  std::string reason;
};

class Library {
 public:
  explicit Library(const std::string& path) : handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) {
      const char* text = dlerror();
      throw LibraryLoadError{text == nullptr ? "it cannot be loaded" : text};
    }
    find(last_error_, "inductor_ext_last_error");
    find(last_error_code_, "inductor_ext_last_error_code");
    find(last_error_details_, "inductor_ext_last_error_details");
    find(missing_cpu_features_, "inductor_ext_missing_cpu_features");
    find(quiet_, "inductor_ext_quiet");
    find(set_weights_, "inductor_ext_set_weights");
    find(set_checksums_, "inductor_ext_set_checksums");
    find(last_container_, "inductor_ext_last_container");
    find(fold_, "AOTInductorModelContainerRunConstantFolding");
    if (last_error_ == nullptr || missing_cpu_features_ == nullptr || quiet_ == nullptr ||
        set_weights_ == nullptr || last_container_ == nullptr || fold_ == nullptr) {
      dlclose(handle_);
      throw LibraryLoadError{"its library lacks functions of inductor_ext"};
    }
  }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;
  ~Library() {
    dlclose(handle_);
  }

  // The text of this thread's last error without a full stop; empty if there is none.
  std::string last_error() const {
    std::string text = last_error_();
    text.erase(text.find_last_not_of(".\n") + 1);
    return text;
  }

  std::string last_error_details() const {
    return last_error_details_ == nullptr ? "" : last_error_details_();
  }

  LibraryError last_error_code() const {
    if (last_error_code_ == nullptr) {
      return LibraryError::unknown;
    }
    const int32_t code = last_error_code_();
    return code >= 0 && code <= 7 ? static_cast<LibraryError>(code) : LibraryError::failure;
  }

  // The required CPU features that this CPU lacks, separated by commas.
  std::string missing_cpu_features() const {
    return missing_cpu_features_();
  }

  // Call this before creating a container in the same thread. Throws LibraryLoadError if the library is
  // to check checksums and cannot.
  void prepare(const LocatedWeights* weights) const {
    quiet_(1);
    if (weights == nullptr) {
      return;
    }
    const Location& location = weights->location;
    set_weights_(location.path.c_str(), location.offset, location.bytes);
    if (!weights->checksums.empty()) {
      if (set_checksums_ == nullptr) {
        throw LibraryLoadError{"its library lacks functions of inductor_ext"};
      }
      set_checksums_(weights->checksums.data(), weights->checksums.size());
    }
  }

  // The container that this thread created last.
  void* last_container() const {
    return last_container_();
  }

  // Runs constant folding of a container, and returns whether it succeeded.
  bool fold(void* container, bool inactive) const {
    return fold_(container, inactive, nullptr, nullptr) == 0;
  }

 private:
  template <typename Function>
  void find(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(handle_, name));
  }

  void* handle_;
  const char* (*last_error_)();
  int32_t (*last_error_code_)();
  const char* (*last_error_details_)();
  const char* (*missing_cpu_features_)();
  void (*quiet_)(int);
  void (*set_weights_)(const char*, uint64_t, uint64_t);
  void (*set_checksums_)(const uint64_t*, size_t);
  void* (*last_container_)();
  int32_t (*fold_)(void*, bool, void*, void*);
};

} // namespace inductor_ext::detail
