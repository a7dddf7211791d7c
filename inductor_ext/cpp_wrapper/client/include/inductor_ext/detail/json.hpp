// JSON values: the manifest of a package.
#pragma once

#include <cctype>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "text.hpp"

namespace inductor_ext::detail {

// A text that is not JSON, or a value of the wrong type. The text says which, without a full stop.
struct JsonError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Json {
 public:
  using Array = std::vector<Json>;
  using Object = std::map<std::string, Json>;
  enum class Kind { null, boolean, integer, number, string, array, object };

  Kind kind = Kind::null;
  bool boolean = false;
  int64_t integer = 0;
  double number = 0; // also of an integer
  std::string string;
  Array array;
  Object object;

  bool is_null() const {
    return kind == Kind::null;
  }

  // The value of a key; null if there is none.
  const Json& operator[](const std::string& key) const {
    static const Json null;
    const auto found = object.find(key);
    return found == object.end() ? null : found->second;
  }

  // The accessors throw JsonError if the value has another type. `where` is its place in the JSON.

  const std::string& as_string(const std::string& where) const {
    expect(Kind::string, where, "a string");
    return string;
  }

  bool as_boolean(const std::string& where) const {
    expect(Kind::boolean, where, "true or false");
    return boolean;
  }

  int64_t as_integer(const std::string& where) const {
    expect(Kind::integer, where, "an integer");
    return integer;
  }

  // A size or an offset, which is not negative.
  uint64_t as_size(const std::string& where) const {
    if (as_integer(where) < 0) {
      throw JsonError(where + " is " + std::to_string(integer) + ", expected 0 or more");
    }
    return static_cast<uint64_t>(integer);
  }

  const Array& as_array(const std::string& where) const {
    expect(Kind::array, where, "a list");
    return array;
  }

  const Object& as_object(const std::string& where) const {
    expect(Kind::object, where, "an object");
    return object;
  }

  std::vector<std::string> as_strings(const std::string& where) const {
    std::vector<std::string> texts;
    for (const Json& item : as_array(where)) {
      texts.push_back(item.as_string(where));
    }
    return texts;
  }

  std::vector<int64_t> as_sizes(const std::string& where) const {
    std::vector<int64_t> sizes;
    for (const Json& item : as_array(where)) {
      sizes.push_back(static_cast<int64_t>(item.as_size(where)));
    }
    return sizes;
  }

  std::optional<std::string> as_optional_string(const std::string& where) const {
    return is_null() ? std::nullopt : std::optional<std::string>(as_string(where));
  }

 private:
  void expect(Kind expected, const std::string& where, const char* words) const {
    if (kind != expected) {
      throw JsonError(where + (is_null() ? " is missing" : " has another type") + ", expected " + words);
    }
  }
};

// Parses one text. NaN and infinity, which Python writes by default, are not JSON.
class JsonParser {
 public:
  explicit JsonParser(const std::string& text) : text_(text) {}

  Json parse() {
    if (!is_utf8(text_)) {
      throw JsonError("it is not UTF-8");
    }
    Json value = parse_value(0);
    skip_space();
    if (at_ != text_.size()) {
      fail("has more than one value");
    }
    return value;
  }

 private:
  static constexpr int kMaxDepth = 200;

  [[noreturn]] void fail(const std::string& why) const {
    throw JsonError("byte " + std::to_string(at_) + " " + why);
  }

  char peek() const {
    return at_ < text_.size() ? text_[at_] : '\0';
  }

  void skip_space() {
    while (at_ < text_.size() && std::strchr(" \t\r\n", text_[at_]) != nullptr && text_[at_] != '\0') {
      ++at_;
    }
  }

  bool accept(char expected) {
    skip_space();
    if (peek() != expected) {
      return false;
    }
    ++at_;
    return true;
  }

  void require(char expected) {
    if (!accept(expected)) {
      fail(std::string("is not ") + expected);
    }
  }

  bool accept_word(const char* word) {
    const size_t length = std::strlen(word);
    if (text_.compare(at_, length, word) != 0) {
      return false;
    }
    at_ += length;
    return true;
  }

  Json parse_value(int depth) {
    if (depth > kMaxDepth) {
      fail("is nested too deeply");
    }
    skip_space();
    Json value;
    const char next = peek();
    if (next == '{') {
      value.kind = Json::Kind::object;
      parse_object(value.object, depth);
    } else if (next == '[') {
      value.kind = Json::Kind::array;
      parse_array(value.array, depth);
    } else if (next == '"') {
      value.kind = Json::Kind::string;
      value.string = parse_string();
    } else if (next == '-' || (next >= '0' && next <= '9')) {
      parse_number(value);
    } else if (accept_word("true")) {
      value.kind = Json::Kind::boolean;
      value.boolean = true;
    } else if (accept_word("false")) {
      value.kind = Json::Kind::boolean;
    } else if (!accept_word("null")) {
      fail("does not begin a value");
    }
    return value;
  }

  void parse_object(Json::Object& object, int depth) {
    require('{');
    if (accept('}')) {
      return;
    }
    do {
      skip_space();
      std::string key = parse_string();
      require(':');
      // As in Python, the last one of equal keys counts.
      object.insert_or_assign(std::move(key), parse_value(depth + 1));
    } while (accept(','));
    require('}');
  }

  void parse_array(Json::Array& array, int depth) {
    require('[');
    if (accept(']')) {
      return;
    }
    do {
      array.push_back(parse_value(depth + 1));
    } while (accept(','));
    require(']');
  }

  size_t skip_digits() {
    const size_t begin = at_;
    while (peek() >= '0' && peek() <= '9') {
      ++at_;
    }
    return at_ - begin;
  }

  void parse_number(Json& value) {
    const size_t begin = at_;
    if (peek() == '-') {
      ++at_;
    }
    const bool leading_zero = peek() == '0';
    const size_t digits = skip_digits();
    bool is_integer = true;
    if (digits == 0 || (leading_zero && digits > 1)) {
      fail("is in a malformed number");
    }
    if (peek() == '.') {
      ++at_;
      is_integer = false;
      if (skip_digits() == 0) {
        fail("is in a malformed number");
      }
    }
    if (peek() == 'e' || peek() == 'E') {
      ++at_;
      is_integer = false;
      if (peek() == '+' || peek() == '-') {
        ++at_;
      }
      if (skip_digits() == 0) {
        fail("is in a malformed number");
      }
    }
    const std::string text = text_.substr(begin, at_ - begin);
    value.number = std::strtod(text.c_str(), nullptr);
    errno = 0;
    value.integer = is_integer ? std::strtoll(text.c_str(), nullptr, 10) : 0;
    // An integer of more than 64 bits counts as a number.
    value.kind = is_integer && errno == 0 ? Json::Kind::integer : Json::Kind::number;
  }

  uint32_t parse_hex() {
    uint32_t code = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      const char digit = peek();
      if (!std::isxdigit(static_cast<unsigned char>(digit))) {
        fail("is not a hexadecimal digit");
      }
      code = code << 4 | static_cast<uint32_t>(digit <= '9' ? digit - '0' : (digit | 0x20) - 'a' + 10);
    }
    return code;
  }

  uint32_t parse_code_point() {
    const uint32_t code = parse_hex();
    if (code < 0xD800 || code >= 0xE000) {
      return code;
    }
    if (code < 0xDC00 && accept_word("\\u")) {
      const uint32_t low = parse_hex();
      if (low >= 0xDC00 && low < 0xE000) {
        return 0x10000 + ((code - 0xD800) << 10 | (low - 0xDC00));
      }
    }
    fail("ends half of a surrogate pair");
  }

  std::string parse_string() {
    if (peek() != '"') {
      fail("does not begin a string");
    }
    ++at_;
    std::string value;
    while (true) {
      if (at_ >= text_.size() || static_cast<unsigned char>(text_[at_]) < 0x20) {
        fail("is in a string without an end");
      }
      const char next = text_[at_++];
      if (next == '"') {
        return value;
      }
      if (next != '\\') {
        value += next;
        continue;
      }
      const char escape = peek();
      ++at_;
      const char* const codes = "\"\\/bfnrt";
      const char* const found = escape == '\0' ? nullptr : std::strchr(codes, escape);
      if (found != nullptr) {
        value += "\"\\/\b\f\n\r\t"[found - codes];
      } else if (escape == 'u') {
        append_utf8(value, parse_code_point());
      } else {
        fail("follows an unknown escape");
      }
    }
  }

  const std::string& text_;
  size_t at_ = 0;
};

} // namespace inductor_ext::detail
