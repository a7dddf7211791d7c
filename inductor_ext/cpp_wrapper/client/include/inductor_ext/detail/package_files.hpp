// The files of one model: copying those that running it needs, finding its weights.
//
// All files are checked against the SHA-256 of the manifest, unless the user has turned that off.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include <sys/stat.h>

#include "manifest.hpp"
#include "package.hpp"
#include "paths.hpp"

namespace inductor_ext::detail {

// The weights that a library is to read.
struct LocatedWeights {
  Location location;
  std::vector<uint64_t> checksums; // that the library is to check; empty: they are intact, or not checked
};

class PackageFiles {
 public:
  PackageFiles(
      const Package& package,
      const Manifest& manifest,
      std::string name,
      bool verify,
      bool map_weights)
      : package_(package),
        manifest_(manifest),
        name_(std::move(name)),
        model_(manifest.models.at(name_)),
        verify_(verify),
        map_weights_(map_weights) {
    const std::string& library = *model_.library;
    folder_ = library.substr(0, library.rfind('/') + 1);
    if (folder_ != base() && folder_ != "data/inductor_ext/" + model_.target + "/" + name_ + "/") {
      package_.fail("its manifest names " + in_quotes(library) + " as a library");
    }
  }

  // The path of the library below the folder of `extract`.
  std::string library() const {
    return base() + model_.library->substr(folder_.size());
  }

  [[noreturn]] void raise_load_error(const std::string& why, const std::string& remedy = "") const {
    inductor_ext::detail::raise_load_error(package_.path(), name_, why, remedy);
  }

  [[noreturn]] void raise_not_writable(const std::string& reason, const std::string& folder) const {
    raise_load_error(
        reason + " while writing to " + folder,
        "If the folder for temporary files is full or does not allow libraries to be loaded from it "
        "(mount option noexec), set TMPDIR to another.");
  }

  // Copies the files that running the model needs.
  void extract(const PrivateFolder& folder) const {
    for (const auto& [name, entry] : package_.entries()) {
      const bool is_own = starts_with(name, folder_);
      const bool is_needed = is_own || starts_with(name, "data/constants/");
      if ((is_needed && !is_unused(name)) || name == *model_.library) {
        // Files for another target are put where torch's runner expects those of a model.
        copy_entry(name, folder, is_own ? base() + name.substr(folder_.size()) : name);
      }
    }
  }

  // Where the library finds the weights; nothing if the model has none. `outside` is the file that the
  // user named; weights are copied to the folder if they cannot be mapped, or are not to be.
  std::optional<LocatedWeights> locate_weights(const PrivateFolder& folder, const std::string& outside) const {
    if (!outside.empty()) {
      return locate_outside(folder, absolute_path(outside));
    }
    if (!model_.weights) {
      if (model_.outside) {
        raise_load_error(
            "its weights are in a separate file", "Pass the path of that file as the option weights.");
      }
      return std::nullopt;
    }
    const std::string& name = *model_.weights;
    const Location location = package_.locate(name);
    if (map_weights_ && location.offset % kAlignment == 0) {
      const std::vector<uint64_t> checksums = checksums_of(manifest_.files.at(name));
      if (verify_ && checksums.empty() && file_sha256(location) != digest(name)) {
        raise_damaged({location, {}});
      }
      return LocatedWeights{location, checksums};
    }
    return LocatedWeights{{copy_entry(name, folder, "weights"), 0, location.bytes}, {}};
  }

  // Raises the error for weights that are not those of the manifest.
  [[noreturn]] void raise_damaged(const LocatedWeights& weights) const {
    if (weights.location.path != package_.path()) {
      raise_load_error(weights.location.path + " has other weights", "Pass the file of this model.");
    }
    package_.fail(*model_.weights + " is damaged: its content does not match the manifest");
  }

 private:
  static constexpr uint64_t kAlignment = 64; // of weights, which compiled code requires

  std::string base() const {
    return "data/aotinductor/" + name_ + "/";
  }

  static bool starts_with(const std::string& text, const std::string& prefix) {
    return text.compare(0, prefix.size(), prefix) == 0;
  }

  static bool ends_with(const std::string& text, const std::string& suffix) {
    return text.size() >= suffix.size() &&
        text.compare(text.size() - suffix.size(), suffix.size(), suffix) == 0;
  }

  // Whether running the model needs no copy of a file.
  static bool is_unused(const std::string& name) {
    for (const char* suffix : {".c", ".cpp", ".cu", ".h", ".o", ".py", ".txt", ".weights"}) {
      if (ends_with(name, suffix)) {
        return true;
      }
    }
    return false;
  }

  // The expected SHA-256 of an entry; empty if it is not to be checked.
  std::string digest(const std::string& name) const {
    if (!verify_) {
      return "";
    }
    const auto found = manifest_.files.find(name);
    if (found == manifest_.files.end()) {
      package_.fail("its manifest does not list " + in_quotes(name));
    }
    return found->second.sha256;
  }

  // Returns the path of the copy.
  std::string copy_entry(const std::string& name, const PrivateFolder& folder, const std::string& target) const {
    try {
      const std::string path = folder.create_parent(target);
      NewFile file(path);
      package_.read_entry(name, digest(name), [&](const char* data, size_t size) { file.write(data, size); });
      return path;
    } catch (const WriteError& error) {
      raise_not_writable(error.reason, folder.path());
    }
  }

  // The checksums that the library is to check; empty if it is not to, or has none.
  std::vector<uint64_t> checksums_of(const FileRecord& file) const {
    return verify_ ? file.checksums : std::vector<uint64_t>();
  }

  std::optional<LocatedWeights> locate_outside(const PrivateFolder& folder, const std::string& path) const {
    const std::optional<FileRecord> file =
        model_.weights ? manifest_.files.at(*model_.weights) : model_.outside;
    if (!file) {
      raise_load_error("it has no external weights", "Do not pass the option weights.");
    }
    Location location{path, 0, file->bytes};
    std::vector<uint64_t> checksums;
    if (ends_with(path, ".pt2")) {
      location = find_entry(Package(path), *file);
    } else {
      checksums = checksums_of(*file);
      struct stat status;
      if (stat(path.c_str(), &status) != 0) {
        raise_load_error(
            "its weights in " + path + " cannot be read (" + std::strerror(errno) + ")",
            "Pass the path of its weights file as the option weights.");
      }
      if (static_cast<uint64_t>(status.st_size) != file->bytes ||
          (checksums.empty() && !is_intact(location, *file))) {
        raise_load_error(path + " has other weights", "Pass the file of this model.");
      }
    }
    return LocatedWeights{map_weights_ ? location : copy_outside(location, folder, *file), checksums};
  }

  bool is_intact(const Location& location, const FileRecord& file) const {
    return !verify_ || file_sha256(location) == file.sha256;
  }

  // The weights in another package.
  Location find_entry(const Package& package, const FileRecord& file) const {
    for (const auto& [name, entry] : package.entries()) {
      if (entry.bytes == file.bytes && entry.offset % kAlignment == 0 &&
          is_intact(package.locate(name), file)) {
        return package.locate(name);
      }
    }
    raise_load_error(
        package.path() + " has no entry with its weights", "Pass the package that contains them.");
  }

  Location copy_outside(const Location& location, const PrivateFolder& folder, const FileRecord& file) const {
    const Location copy{folder.path() + "/weights", 0, location.bytes};
    try {
      const Descriptor source(open(location.path.c_str(), O_RDONLY | O_CLOEXEC));
      NewFile target(copy.path);
      read_chunks(source.get(), location.offset, location.bytes, [&](const char* data, size_t size) {
        target.write(data, size);
      });
    } catch (const WriteError& error) {
      raise_not_writable(error.reason, folder.path());
    }
    struct stat status;
    // The file may have been changed since it was checked.
    if (stat(copy.path.c_str(), &status) != 0 || static_cast<uint64_t>(status.st_size) != copy.bytes ||
        !is_intact(copy, file)) {
      raise_load_error(location.path + " has other weights", "Pass the file of this model.");
    }
    return copy;
  }

  const Package& package_;
  const Manifest& manifest_;
  std::string name_;
  const ModelRecord& model_;
  std::string folder_; // of the files for the chosen target
  bool verify_;
  bool map_weights_;
};

} // namespace inductor_ext::detail
