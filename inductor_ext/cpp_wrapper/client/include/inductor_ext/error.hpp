// The exception of the client, and the texts of errors that several of its parts raise.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace inductor_ext {

// What went wrong. Programs may store the values: do not change or reuse one.
enum class ErrorKind : int {
  not_found = 1, // there is no file at the path of the package
  bad_package = 2, // the file is not a package, is damaged, or has unsafe names
  incompatible = 3, // the model cannot run on this machine or with this torch
  model_not_found = 4, // the package has no model of this name
  load = 5, // the library or the weights cannot be loaded
  input = 6, // the inputs of a call do not match the signature; nothing was computed
  constant = 7, // a tensor cannot replace a constant; nothing was changed
  run = 8, // a call failed at run time
  budget = 9, // the inputs of a call need more memory than the model's memory_budget
  self_test = 10, // the model computes something else than was recorded
  unsupported = 11, // the client cannot do this, or the package lacks what it needs
  option = 12, // an option of load has an invalid value
};

// Every error that the client raises. `what()` is for the reader of a log: what happened, to which
// object, and what to do.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& text, std::string details = "")
      : std::runtime_error(text), kind_(kind), details_(std::move(details)) {}

  ErrorKind kind() const noexcept {
    return kind_;
  }

  // Where it happened in the code of the model: C++ frames, files of the build. May be empty.
  const std::string& details() const noexcept {
    return details_;
  }

 private:
  ErrorKind kind_;
  std::string details_;
};

namespace detail {

// A text in single quotes, with escapes for backslashes and control characters.
inline std::string in_quotes(const std::string& text) {
  std::string quoted = "'";
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (code < 0x20 || code == 0x7F) {
      const char* const digits = "0123456789abcdef";
      quoted += std::string("\\x") + digits[code >> 4] + digits[code & 15];
    } else {
      quoted += c == '\\' ? "\\\\" : std::string(1, c);
    }
  }
  return quoted + "'";
}

inline std::string joined(const std::vector<std::string>& parts, const std::string& separator = ", ") {
  std::string text;
  for (size_t i = 0; i < parts.size(); ++i) {
    text += (i == 0 ? "" : separator) + parts[i];
  }
  return text;
}

// The remedy is a sentence, or empty.
inline std::string sentences(const std::string& message, const std::string& remedy) {
  return message + "." + (remedy.empty() ? "" : " " + remedy);
}

[[noreturn]] inline void raise_bad_package(const std::string& path, const std::string& why) {
  throw Error(
      ErrorKind::bad_package,
      sentences(
          "The package " + path + " is damaged or unsafe: " + why,
          "Nothing was loaded from it. Copy the package again from its source, or compile it again."));
}

[[noreturn]] inline void raise_not_a_package(const std::string& path, const std::string& why) {
  throw Error(
      ErrorKind::bad_package,
      sentences(path + " is not a package: " + why, "Pass a .pt2 file that was written by inductor_ext."));
}

[[noreturn]] inline void raise_unsupported(
    const std::string& what,
    const std::string& path,
    const std::string& why,
    const std::string& remedy) {
  throw Error(
      ErrorKind::unsupported,
      sentences(what + " is not supported for the package " + path + ": " + why, remedy));
}

[[noreturn]] inline void raise_incompatible(
    const std::string& path,
    const std::string& why,
    const std::string& remedy) {
  throw Error(
      ErrorKind::incompatible,
      sentences("The package " + path + " cannot run in this environment: " + why, remedy));
}

[[noreturn]] inline void raise_load_error(
    const std::string& path,
    const std::string& name,
    const std::string& why,
    const std::string& remedy = "") {
  throw Error(
      ErrorKind::load,
      sentences("Cannot load model " + in_quotes(name) + " of the package " + path + ": " + why, remedy));
}

[[noreturn]] inline void raise_bad_option(
    const std::string& name,
    const std::string& actual,
    const std::string& allowed) {
  throw Error(
      ErrorKind::option,
      "The option " + name + " of inductor_ext::load is " + actual + ". Pass " + allowed + ".");
}

} // namespace detail

} // namespace inductor_ext
