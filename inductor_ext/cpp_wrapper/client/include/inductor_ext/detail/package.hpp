// Reading .pt2 packages: zip files whose entries are stored without compression.
//
// The names, sizes and offsets of all entries, and that all records of the file agree with each
// other, are checked before the content of any entry is used.
#pragma once

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "checksums.hpp"
#include "../error.hpp"
#include "paths.hpp"
#include "text.hpp"

namespace inductor_ext::detail {

// An open file descriptor.
class Descriptor {
 public:
  explicit Descriptor(int value = -1) : value_(value) {}
  Descriptor(Descriptor&& other) noexcept : value_(std::exchange(other.value_, -1)) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (value_ >= 0) {
      close(value_);
    }
  }

  int get() const {
    return value_;
  }

 private:
  int value_;
};

// A file that cannot be written.
struct WriteError {
  std::string reason;
};

// A new file with mode 0600.
class NewFile {
 public:
  explicit NewFile(const std::string& path)
      : file_(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600)) {
    if (file_.get() < 0) {
      throw WriteError{std::strerror(errno)};
    }
  }

  void write(const char* data, size_t size) {
    while (size != 0) {
      const ssize_t count = ::write(file_.get(), data, size);
      if (count < 0 && errno != EINTR) {
        throw WriteError{std::strerror(errno)};
      }
      data += std::max<ssize_t>(count, 0);
      size -= static_cast<size_t>(std::max<ssize_t>(count, 0));
    }
  }

 private:
  Descriptor file_;
};

// A part of a file.
struct Location {
  std::string path;
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

// Calls use(data, size) for the chunks of a part of a file. Returns how many bytes there were.
template <typename Use>
uint64_t read_chunks(int descriptor, uint64_t offset, uint64_t size, const Use& use) {
  std::vector<char> buffer(std::min<uint64_t>(size, 1 << 20));
  uint64_t done = 0;
  while (done < size) {
    const size_t most = std::min<uint64_t>(size - done, buffer.size());
    const ssize_t count = pread(descriptor, buffer.data(), most, static_cast<off_t>(offset + done));
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count <= 0) {
      break;
    }
    use(buffer.data(), static_cast<size_t>(count));
    done += static_cast<uint64_t>(count);
  }
  return done;
}

// The SHA-256 of a part of a file; empty if it cannot be read to its end.
inline std::string file_sha256(const Location& location) {
  const Descriptor file(open(location.path.c_str(), O_RDONLY | O_CLOEXEC));
  Sha256 sum;
  const uint64_t count = file.get() < 0
      ? 0
      : read_chunks(file.get(), location.offset, location.bytes, [&](const char* data, size_t size) {
          sum.update(data, size);
        });
  return file.get() >= 0 && count == location.bytes ? sum.hex_digest() : "";
}

// A file in a package.
struct Entry {
  uint64_t offset = 0; // of the content
  uint64_t bytes = 0;
  uint32_t crc32 = 0;
};

class Package {
 public:
  explicit Package(const std::string& path) : path_(absolute_path(path)), file_(open_file()) {
    struct stat status;
    if (fstat(file_.get(), &status) != 0) {
      raise_unreadable(errno);
    }
    if (S_ISDIR(status.st_mode)) {
      raise_unsupported(
          "A folder", path_, "the C++ client reads .pt2 files only", "Pass the path of the .pt2 file.");
    }
    size_ = static_cast<uint64_t>(status.st_size);
    read_directory();
  }

  const std::string& path() const {
    return path_;
  }

  // By name, below the root folder.
  const std::map<std::string, Entry>& entries() const {
    return entries_;
  }

  const Entry& entry(const std::string& name) const {
    const auto found = entries_.find(name);
    if (found == entries_.end()) {
      fail("it has no entry " + in_quotes(name));
    }
    return found->second;
  }

  Location locate(const std::string& name) const {
    return {path_, entry(name).offset, entry(name).bytes};
  }

  // Calls use(data, size) for the chunks of an entry, and checks it after the last one.
  // `sha256` is the expected digest; empty: only the CRC-32 is checked.
  template <typename Use>
  void read_entry(const std::string& name, const std::string& sha256, const Use& use) const {
    const Entry& found = entry(name);
    Sha256 digest;
    Crc32 crc32;
    const uint64_t count = read_chunks(file_.get(), found.offset, found.bytes, [&](const char* data, size_t size) {
      crc32.update(data, size);
      if (!sha256.empty()) {
        digest.update(data, size);
      }
      use(data, size);
    });
    if (count != found.bytes) {
      fail("it has become shorter while it was read");
    }
    if (crc32.value() != found.crc32) {
      fail(name + " is damaged: its content does not match its CRC-32");
    }
    if (!sha256.empty() && digest.hex_digest() != sha256) {
      fail(name + " is damaged: its content does not match its SHA-256");
    }
  }

  std::string read(const std::string& name, uint64_t limit, const std::string& sha256 = "") const {
    if (entry(name).bytes > limit) {
      fail(name + " has " + std::to_string(entry(name).bytes) + " bytes, which is too large for this kind of file");
    }
    std::string content;
    content.reserve(entry(name).bytes);
    read_entry(name, sha256, [&](const char* data, size_t size) { content.append(data, size); });
    return content;
  }

  [[noreturn]] void fail(const std::string& why) const {
    raise_bad_package(path_, why);
  }

 private:
  static constexpr uint32_t kLocal = 0x04034b50, kCentral = 0x02014b50, kEnd = 0x06054b50;
  static constexpr uint32_t kEnd64 = 0x06064b50, kLocator64 = 0x07064b50;
  static constexpr size_t kLocalBytes = 30, kCentralBytes = 46, kEndBytes = 22;
  static constexpr size_t kEnd64Bytes = 56, kLocator64Bytes = 20;
  static constexpr uint64_t kFull16 = 0xFFFF, kFull32 = 0xFFFFFFFF;

  struct End {
    uint64_t disk, first_disk, disk_count, count, bytes, begin;
    uint64_t follows; // offset of what follows the directory
  };

  // What the central directory and the local header of an entry both have.
  struct Header {
    uint64_t flags, method, crc32, packed, size;
  };

  Descriptor open_file() const {
    Descriptor file(open(path_.c_str(), O_RDONLY | O_CLOEXEC));
    if (file.get() < 0 && (errno == ENOENT || errno == ENOTDIR)) {
      throw Error(
          ErrorKind::not_found, sentences("There is no package at " + path_, "Pass the path of a .pt2 file."));
    }
    if (file.get() < 0) {
      raise_unreadable(errno);
    }
    return file;
  }

  [[noreturn]] void raise_unreadable(int code) const {
    throw Error(
        ErrorKind::bad_package,
        sentences(
            "Cannot read the package " + path_ + ": " + std::strerror(code),
            "Check the permissions of the file and its folder."));
  }

  // Exactly these bytes of the file.
  std::string bytes_at(uint64_t offset, uint64_t size) const {
    if (offset > size_ || size > size_ - offset) {
      fail("it is truncated, or its central directory points beyond its end");
    }
    std::string data;
    data.reserve(size);
    read_chunks(file_.get(), offset, size, [&](const char* part, size_t count) { data.append(part, count); });
    if (data.size() != size) {
      fail("it has become shorter while it was read");
    }
    return data;
  }

  // An integer of `width` bytes in little-endian order.
  static uint64_t number(const std::string& data, size_t at, int width) {
    uint64_t value = 0;
    for (int i = width - 1; i >= 0; --i) {
      value = value << 8 | static_cast<unsigned char>(data[at + static_cast<size_t>(i)]);
    }
    return value;
  }

  End read_end() const {
    const std::string end = size_ >= kEndBytes ? bytes_at(size_ - kEndBytes, kEndBytes) : "";
    if (end.empty() || number(end, 0, 4) != kEnd) {
      if (size_ < 4 || number(bytes_at(0, 4), 0, 4) != kLocal) {
        raise_not_a_package(path_, "it is not a zip file");
      }
      fail("it was truncated, or other bytes were appended to it");
    }
    End found{
        number(end, 4, 2),  number(end, 6, 2),  number(end, 8, 2), number(end, 10, 2),
        number(end, 12, 4), number(end, 16, 4), size_ - kEndBytes};
    if (size_ >= kEndBytes + kLocator64Bytes) {
      read_wide_end(found, size_ - kEndBytes - kLocator64Bytes);
    }
    if (found.disk != 0 || found.first_disk != 0 || found.disk_count != found.count || number(end, 20, 2) != 0) {
      fail("its end record is damaged");
    }
    if (found.begin > found.follows || found.bytes != found.follows - found.begin) {
      fail("its central directory does not end at the recorded position");
    }
    return found;
  }

  // Replaces the values of the end record by those of the zip64 end record, if there is one. The
  // values in both records must agree, because a reader may use either.
  void read_wide_end(End& found, uint64_t locator_at) const {
    const std::string locator = bytes_at(locator_at, kLocator64Bytes);
    if (number(locator, 0, 4) != kLocator64) {
      return;
    }
    const uint64_t end_at = number(locator, 8, 8);
    if (number(locator, 4, 4) != 0 || number(locator, 16, 4) > 1 || locator_at < kEnd64Bytes ||
        end_at > locator_at - kEnd64Bytes) {
      fail("its zip64 end record is damaged");
    }
    const std::string end = bytes_at(end_at, kEnd64Bytes);
    if (number(end, 0, 4) != kEnd64) {
      fail("its zip64 end record is damaged");
    }
    const End wide{
        number(end, 16, 4), number(end, 20, 4), number(end, 24, 8), number(end, 32, 8),
        number(end, 40, 8), number(end, 48, 8), end_at};
    const auto is_same = [](uint64_t narrow, uint64_t value, uint64_t full) {
      return narrow == full || narrow == value;
    };
    if (!is_same(found.disk, wide.disk, kFull16) || !is_same(found.first_disk, wide.first_disk, kFull16) ||
        !is_same(found.disk_count, wide.disk_count, kFull16) || !is_same(found.count, wide.count, kFull16) ||
        !is_same(found.bytes, wide.bytes, kFull32) || !is_same(found.begin, wide.begin, kFull32)) {
      fail("its two end records contradict each other");
    }
    found = wide;
  }

  void read_directory() {
    const End end = read_end();
    const std::string directory = bytes_at(end.begin, end.bytes);
    std::vector<std::tuple<uint64_t, uint64_t, std::string>> ranges;
    std::string root;
    size_t at = 0;
    for (uint64_t i = 0; i < end.count; ++i) {
      if (directory.size() - at < kCentralBytes) {
        fail("its central directory is truncated");
      }
      const std::string record = directory.substr(at, kCentralBytes);
      const uint64_t name_bytes = number(record, 28, 2), extra_bytes = number(record, 30, 2);
      const uint64_t rest = name_bytes + extra_bytes + number(record, 32, 2);
      if (number(record, 0, 4) != kCentral || directory.size() - at - kCentralBytes < rest) {
        fail("its central directory is damaged");
      }
      const std::string path = directory.substr(at + kCentralBytes, name_bytes);
      const std::string extra = directory.substr(at + kCentralBytes + name_bytes, extra_bytes);
      at += kCentralBytes + rest;
      const auto [folder, name] = split_path(path);
      if (entries_.empty()) {
        root = folder;
      } else if (folder != root) {
        fail("its entries are below several root folders, " + in_quotes(root) + " and " + in_quotes(folder));
      }
      if (entries_.count(name) != 0) {
        fail("it has two entries " + in_quotes(name));
      }
      const auto [header_at, header] = central_header(name, record, extra);
      const Entry entry = local_entry(name, path, header_at, header);
      ranges.emplace_back(header_at, entry.offset + entry.bytes, name);
      entries_[name] = entry;
    }
    if (at != directory.size()) {
      fail("its central directory has more entries than recorded");
    }
    if (entries_.empty()) {
      fail("it is empty");
    }
    std::sort(ranges.begin(), ranges.end());
    ranges.emplace_back(end.begin, end.begin, "the directory");
    for (size_t i = 0; i + 1 < ranges.size(); ++i) {
      if (std::get<1>(ranges[i]) > std::get<0>(ranges[i + 1])) {
        fail(std::get<2>(ranges[i]) + " and " + std::get<2>(ranges[i + 1]) + " overlap");
      }
    }
  }

  // Why an entry may not have this name; empty if it may.
  static std::string name_error(const std::string& name) {
    if (name.empty() || name.back() == '/') {
      return "names a folder, not a file";
    }
    for (const char c : name) {
      if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F || c == '\\') {
        return "has a backslash or a control character";
      }
    }
    if (name[0] == '/' ||
        (name.size() > 1 && name[1] == ':' && std::isalpha(static_cast<unsigned char>(name[0])) != 0)) {
      return "is absolute";
    }
    for (size_t begin = 0; begin <= name.size();) {
      const size_t end = std::min(name.find('/', begin), name.size());
      const std::string part = name.substr(begin, end - begin);
      if (part.empty() || part == "." || part == "..") {
        return "has an empty part, or a part \".\" or \"..\"";
      }
      if (part.size() > 255) {
        return "has a part of more than 255 bytes";
      }
      begin = end + 1;
    }
    return "";
  }

  // The root folder and the name below it.
  std::pair<std::string, std::string> split_path(const std::string& path) const {
    static const std::set<std::string> folders{".data", "data", "extra", "models", "xl_model_weights"};
    static const std::set<std::string> files{"archive_format", "archive_version", "byteorder", "version"};
    if (!is_utf8(path)) {
      fail("the name of an entry is not UTF-8");
    }
    const std::string why = name_error(path);
    if (!why.empty()) {
      fail("the name " + in_quotes(path) + " " + why);
    }
    const size_t slash = path.find('/');
    if (slash == std::string::npos) {
      fail(in_quotes(path) + " is not below a root folder");
    }
    const std::string name = path.substr(slash + 1);
    const size_t inner = name.find('/');
    const bool is_known = inner == std::string::npos ? files.count(name) != 0 : folders.count(name.substr(0, inner)) != 0;
    if (!is_known) {
      fail("the name " + in_quotes(name) + " is outside the folders of a .pt2 archive");
    }
    return {path.substr(0, slash), name};
  }

  // The values of the zip64 extra field.
  std::vector<uint64_t> wide_values(const std::string& name, const std::string& extra) const {
    for (size_t at = 0; at + 4 <= extra.size();) {
      const uint64_t kind = number(extra, at, 2), size = number(extra, at + 2, 2);
      at += 4;
      if (size > extra.size() - at) {
        fail("the extra fields of " + name + " are damaged");
      }
      if (kind == 1) {
        std::vector<uint64_t> values;
        for (size_t i = 0; i < std::min<uint64_t>(size / 8, 3); ++i) {
          values.push_back(number(extra, at + 8 * i, 8));
        }
        return values;
      }
      at += size;
    }
    return {};
  }

  // The offset of the local header, and what the central directory says of the entry.
  std::pair<uint64_t, Header> central_header(
      const std::string& name,
      const std::string& record,
      const std::string& extra) const {
    constexpr uint64_t kEncrypted = 1, kUnix = 3, kKind = 0170000, kRegular = 0100000;
    Header header{
        number(record, 8, 2), number(record, 10, 2), number(record, 16, 4), number(record, 20, 4),
        number(record, 24, 4)};
    uint64_t header_at = number(record, 42, 4);
    const std::vector<uint64_t> wide = wide_values(name, extra);
    size_t used = 0;
    for (uint64_t* value : {&header.size, &header.packed, &header_at}) {
      if (*value == kFull32) {
        if (used == wide.size()) {
          fail(name + " lacks its zip64 sizes");
        }
        *value = wide[used++];
      }
    }
    if ((header.flags & kEncrypted) != 0) {
      fail(name + " is encrypted");
    }
    if (header.method != 0) {
      raise_unsupported(
          "Compression", path_, "the entry " + name + " is compressed",
          "Unpack the package, and pack it with `zip -0`, or copy it again from its source.");
    }
    if (header.size != header.packed) {
      fail(name + " has two sizes, " + std::to_string(header.size) + " and " + std::to_string(header.packed));
    }
    const uint64_t disk = number(record, 34, 2), kind = number(record, 40, 2) & kKind;
    if (disk != 0 && disk != kFull16) {
      fail(name + " is in another file of a multi-part archive");
    }
    if (number(record, 5, 1) == kUnix && kind != 0 && kind != kRegular) {
      fail(name + " is a link or a device, not a file");
    }
    return {header_at, header};
  }

  // Checks that the local header agrees with the central directory.
  Entry local_entry(
      const std::string& name,
      const std::string& path,
      uint64_t header_at,
      const Header& central) const {
    constexpr uint64_t kSizesFollow = 1 << 3;
    const std::string head = bytes_at(header_at, kLocalBytes);
    const uint64_t name_bytes = number(head, 26, 2), extra_bytes = number(head, 28, 2);
    const std::string rest = bytes_at(header_at + kLocalBytes, name_bytes + extra_bytes);
    if (number(head, 0, 4) != kLocal || rest.substr(0, name_bytes) != path) {
      fail("the header of " + name + " is damaged, or that of another entry");
    }
    uint64_t crc32 = number(head, 14, 4), packed = number(head, 18, 4), size = number(head, 22, 4);
    const std::vector<uint64_t> wide = wide_values(name, rest.substr(name_bytes));
    if (size == kFull32 && packed == kFull32 && wide.size() >= 2) {
      size = wide[0];
      packed = wide[1];
    }
    const bool is_later = (central.flags & kSizesFollow) != 0 && crc32 == 0 && packed == 0 && size == 0;
    const bool is_same = crc32 == central.crc32 && packed == central.packed && size == central.size;
    if (number(head, 8, 2) != central.method || !(is_later || is_same)) {
      fail("the header of " + name + " contradicts the central directory");
    }
    const uint64_t offset = header_at + kLocalBytes + name_bytes + extra_bytes;
    if (central.size > size_ - offset) {
      fail(name + " is truncated");
    }
    return {offset, central.size, static_cast<uint32_t>(central.crc32)};
  }

  std::string path_;
  Descriptor file_;
  uint64_t size_ = 0;
  std::map<std::string, Entry> entries_;
};

// A folder for the files of one model that only this user can read. It is deleted with the object.
class PrivateFolder {
 public:
  PrivateFolder() {
    const std::string parent = temporary_folder();
    std::string path = parent + "/inductor_ext-XXXXXX";
    if (mkdtemp(path.data()) == nullptr) { // mode 0700
      throw WriteError{std::string(std::strerror(errno)) + " while creating a folder in " + parent};
    }
    path_ = path;
  }
  PrivateFolder(const PrivateFolder&) = delete;
  PrivateFolder& operator=(const PrivateFolder&) = delete;
  ~PrivateFolder() {
    remove_folder(path_);
  }

  const std::string& path() const {
    return path_;
  }

  // The path of a file in it. Creates its folder.
  std::string create_parent(const std::string& name) const {
    for (size_t at = name.find('/'); at != std::string::npos; at = name.find('/', at + 1)) {
      const std::string folder = path_ + "/" + name.substr(0, at);
      if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
        throw WriteError{std::strerror(errno)};
      }
    }
    return path_ + "/" + name;
  }

 private:
  std::string path_;
};

} // namespace inductor_ext::detail
