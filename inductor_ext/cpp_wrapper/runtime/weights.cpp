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

// A pointer, because a destructor would keep the library loaded until the thread ends.
thread_local WeightsRequest* next_request = nullptr;

// Follows weights that are appended to a shared object; see `footer` in codegen/weights_layout.py.
struct Footer {
  uint64_t bytes;
  char magic[16];
};

constexpr char kMagic[16] = {'i', 'n', 'd', 'u', 'c', 't', 'o', 'r',
                             '_', 'w', 'e', 'i', 'g', 'h', 't', 's'};

[[noreturn]] void fail_to_read(const std::string& path, const std::string& why) {
  throw Error(ErrorCode::weights, "The weights cannot be read from " + path + ": " + why + ".");
}

uint64_t size_of(int fd, const std::string& path) {
  struct stat status;
  if (fstat(fd, &status) != 0) {
    fail_to_read(path, std::strerror(errno));
  }
  return static_cast<uint64_t>(status.st_size);
}

std::string own_path() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&own_path), &info) == 0 || info.dli_fname == nullptr) {
    throw Error(ErrorCode::weights, "The path of the compiled model is not known.");
  }
  return info.dli_fname;
}

std::string beside(const std::string& library) {
  return library.substr(0, library.rfind(".so")) + ".weights";
}

// The file beside this library, or the library itself.
std::string default_path() {
  const std::string library = own_path();
  const std::string path = beside(library);
  return access(path.c_str(), F_OK) == 0 ? path : library;
}

// The size of the weights that are appended to this library.
uint64_t appended_bytes(int fd, const std::string& library, uint64_t size) {
  Footer footer;
  if (size <= sizeof(footer) ||
      pread(fd, &footer, sizeof(footer), static_cast<off_t>(size - sizeof(footer))) !=
          static_cast<ssize_t>(sizeof(footer)) ||
      std::memcmp(footer.magic, kMagic, sizeof(kMagic)) != 0 || footer.bytes > size - sizeof(footer)) {
    fail_to_read(beside(library), "there is no such file");
  }
  return footer.bytes;
}

} // namespace

Mapping::Mapping(int fd, const std::string& path, uint64_t offset, uint64_t bytes) {
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t ahead = offset % page;
  void* start = mmap(
      nullptr, bytes + ahead, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd,
      static_cast<off_t>(offset - ahead));
  if (start == MAP_FAILED) {
    fail_to_read(path, std::strerror(errno));
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

WeightsRequest& weights_request() {
  if (next_request == nullptr) {
    next_request = new WeightsRequest();
  }
  return *next_request;
}

WeightsRequest take_weights_request() {
  const std::unique_ptr<WeightsRequest> request(std::exchange(next_request, nullptr));
  return request == nullptr ? WeightsRequest() : std::move(*request);
}

Descriptor::~Descriptor() {
  if (fd_ >= 0) {
    close(fd_);
  }
}

WeightsFile::WeightsFile(const WeightsRequest& request, uint64_t bytes)
    : path_(request.path.empty() ? default_path() : request.path),
      offset_(request.offset),
      bytes_(request.path.empty() ? bytes : request.bytes),
      file_(open(path_.c_str(), O_RDONLY | O_CLOEXEC)) {
  if (file_.get() < 0) {
    fail(std::strerror(errno));
  }
  const uint64_t size = size_of(file_.get(), path_);
  if (request.path.empty() && path_ == own_path()) {
    bytes_ = appended_bytes(file_.get(), path_, size);
    offset_ = size - sizeof(Footer) - bytes_;
  }
  if (bytes_ != bytes) {
    fail("they have " + std::to_string(bytes_) + " bytes instead of " + std::to_string(bytes));
  }
  if (offset_ > size || bytes_ > size - offset_) {
    fail("it has " + std::to_string(size) + " bytes, and " + std::to_string(bytes_) +
         " are needed from " + std::to_string(offset_) + " on");
  }
}

void WeightsFile::fail(const std::string& why) const {
  fail_to_read(path_, why);
}

Mapping WeightsFile::map() const {
  return Mapping(file_.get(), path_, offset_, bytes_);
}

void WeightsFile::read(uint8_t* to, uint64_t offset, uint64_t bytes) const {
  while (bytes > 0) {
    const ssize_t count = pread(file_.get(), to, bytes, static_cast<off_t>(offset_ + offset));
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count <= 0) {
      fail(count == 0 ? "the file was truncated" : std::strerror(errno));
    }
    to += count;
    offset += static_cast<uint64_t>(count);
    bytes -= static_cast<uint64_t>(count);
  }
}

} // namespace inductor_ext
