// Where a model's weights are, and reading them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace inductor_ext {

// A private mapping of a file range. Pages are shared with all processes that map the file until they
// are written to; writes do not reach the file.
class Mapping {
 public:
  Mapping() = default;
  Mapping(int fd, const std::string& path, uint64_t offset, uint64_t bytes);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  uint8_t* data() const {
    return data_;
  }

 private:
  void* start_ = nullptr; // of the page that contains the start of the range
  uint64_t mapped_ = 0;
  uint8_t* data_ = nullptr;
};

// What the loader says about the weights of the next container that this thread creates.
struct WeightsRequest {
  std::string path; // empty: the library finds them itself
  uint64_t offset = 0;
  uint64_t bytes = 0;
  std::vector<uint64_t> checksums; // of their blocks (checksum.h); empty: they are not checked
  std::vector<std::string> external; // names of constants that the caller provides
};

// The request of this thread, which is created if there is none.
WeightsRequest& weights_request();

// Returns the request of this thread, or an empty one, and forgets it.
WeightsRequest take_weights_request();

// An open file.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(const Descriptor&) = delete;
  ~Descriptor();

  int get() const {
    return fd_;
  }

 private:
  int fd_;
};

// The open file of a model's weights.
class WeightsFile {
 public:
  // Opens the requested file, else <shared object without .so>.weights, else the end of the shared
  // object, before the footer that codegen/weights_layout.py writes.
  WeightsFile(const WeightsRequest& request, uint64_t bytes);
  WeightsFile(const WeightsFile&) = delete;

  Mapping map() const;

  // Reads a range of the weights. A file that was truncated is an error, where a mapping would raise
  // SIGBUS. Threads may read at the same time.
  void read(uint8_t* to, uint64_t offset, uint64_t bytes) const;

  const std::string& path() const {
    return path_;
  }

  uint64_t bytes() const {
    return bytes_;
  }

  [[noreturn]] void fail(const std::string& why) const;

 private:
  std::string path_;
  uint64_t offset_ = 0;
  uint64_t bytes_ = 0;
  Descriptor file_;
};

} // namespace inductor_ext
