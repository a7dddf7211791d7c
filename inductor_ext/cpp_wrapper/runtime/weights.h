// Where an artifact's weights lie, and their mapping into memory.
#pragma once

#include <cstdint>
#include <string>

namespace inductor_ext {

// A private mapping of a file's range: pages are shared with every process that maps the file until
// they are written to, and never written back.
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
  void* start_ = nullptr; // of the page in which the range begins
  uint64_t mapped_ = 0;
  uint8_t* data_ = nullptr;
};

// Says where this thread's next container finds its weights.
void set_weights(const char* path, uint64_t offset, uint64_t bytes);

// Maps the weights: those that set_weights named, else <shared object without .so>.weights, else
// those at the end of the shared object itself, before the footer that weights.py writes.
Mapping map_weights(uint64_t bytes);

} // namespace inductor_ext
