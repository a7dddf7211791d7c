// Locating a model's weights and mapping them into memory.
#pragma once

#include <cstdint>
#include <string>

namespace inductor_ext {

// A private mapping of a file range. Pages are shared with all processes that map the file until they
// are written to; writes do not reach the file.
class Mapping {
 public:
  Mapping() = default;
  Mapping(const std::string& path, uint64_t offset, uint64_t bytes);
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

// Sets where the next container created by this thread finds its weights.
void set_weights(const char* path, uint64_t offset, uint64_t bytes);

// Maps the weights: from the location of set_weights, else <shared object without .so>.weights, else
// the end of the shared object, before the footer that codegen/weights_layout.py writes.
Mapping map_weights(uint64_t bytes);

} // namespace inductor_ext
