#include "weights.h"

#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "error.h"

namespace inductor_ext {

namespace {

struct Place {
  std::string path;
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

// A pointer, because a destructor would keep the library loaded until the thread ends.
thread_local Place* next_place = nullptr;

// Follows weights that are appended to a shared object; see `footer` in codegen/weights_layout.py.
struct Footer {
  uint64_t bytes;
  char magic[16];
};

constexpr char kMagic[16] = {'i', 'n', 'd', 'u', 'c', 't', 'o', 'r',
                             '_', 'w', 'e', 'i', 'g', 'h', 't', 's'};

[[noreturn]] void fail(const std::string& path, const std::string& why) {
  throw Error(ErrorCode::weights, "The weights cannot be read from " + path + ": " + why + ".");
}

class File {
 public:
  explicit File(const std::string& path) : path_(path), fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (fd_ < 0) {
      fail(path_, std::strerror(errno));
    }
  }
  File(const File&) = delete;
  ~File() {
    close(fd_);
  }

  int fd() const {
    return fd_;
  }

  uint64_t size() const {
    struct stat status;
    if (fstat(fd_, &status) != 0) {
      fail(path_, std::strerror(errno));
    }
    return static_cast<uint64_t>(status.st_size);
  }

 private:
  const std::string& path_;
  int fd_;
};

std::string own_path() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&own_path), &info) == 0 || info.dli_fname == nullptr) {
    throw Error(ErrorCode::weights, "The path of the compiled model is not known.");
  }
  return info.dli_fname;
}

Place find(uint64_t bytes) {
  const std::unique_ptr<Place> named(std::exchange(next_place, nullptr));
  if (named != nullptr) {
    return *named;
  }
  const std::string own = own_path();
  const std::string beside = own.substr(0, own.rfind(".so")) + ".weights";
  if (access(beside.c_str(), F_OK) == 0) {
    return {beside, 0, bytes};
  }
  File file(own);
  Footer footer;
  const uint64_t size = file.size();
  if (size > sizeof(footer) &&
      pread(file.fd(), &footer, sizeof(footer), static_cast<off_t>(size - sizeof(footer))) ==
          static_cast<ssize_t>(sizeof(footer)) &&
      std::memcmp(footer.magic, kMagic, sizeof(kMagic)) == 0 && footer.bytes <= size - sizeof(footer)) {
    return {own, size - sizeof(footer) - footer.bytes, footer.bytes};
  }
  fail(beside, "there is no such file");
}

} // namespace

Mapping::Mapping(const std::string& path, uint64_t offset, uint64_t bytes) {
  File file(path);
  const uint64_t size = file.size();
  if (offset > size || bytes > size - offset) {
    fail(path, "it has " + std::to_string(size) + " bytes, and " + std::to_string(bytes) +
             " are needed from " + std::to_string(offset) + " on");
  }
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t ahead = offset % page;
  void* start = mmap(
      nullptr, bytes + ahead, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file.fd(),
      static_cast<off_t>(offset - ahead));
  if (start == MAP_FAILED) {
    fail(path, std::strerror(errno));
  }
  start_ = start;
  mapped_ = bytes + ahead;
  data_ = static_cast<uint8_t*>(start) + ahead;
}

Mapping::Mapping(Mapping&& other) noexcept {
  *this = std::move(other);
}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(start_, other.start_);
  std::swap(mapped_, other.mapped_);
  std::swap(data_, other.data_);
  return *this;
}

Mapping::~Mapping() {
  if (start_ != nullptr) {
    munmap(start_, mapped_);
  }
}

void set_weights(const char* path, uint64_t offset, uint64_t bytes) {
  delete std::exchange(next_place, nullptr);
  if (path != nullptr && *path != '\0') {
    next_place = new Place{path, offset, bytes};
  }
}

Mapping map_weights(uint64_t bytes) {
  Place place = find(bytes);
  if (place.bytes != bytes) {
    fail(place.path, "they have " + std::to_string(place.bytes) + " bytes instead of " + std::to_string(bytes));
  }
  return Mapping(place.path, place.offset, place.bytes);
}

} // namespace inductor_ext
