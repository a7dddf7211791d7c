// Paths and folders, with the functions of POSIX.
//
// Not with std::filesystem: libtorch.so of torch 2.11 for CUDA defines its functions again, a program
// that links torch calls these, and some of them crash (std::filesystem::remove_all).
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include <ftw.h>
#include <sys/stat.h>
#include <unistd.h>

namespace inductor_ext::detail {

// The path of the current folder; empty if it has been deleted.
inline std::string current_folder() {
  const std::unique_ptr<char, void (*)(void*)> path(getcwd(nullptr, 0), std::free);
  return path == nullptr ? "" : path.get();
}

// An absolute path without ".", ".." and repeated slashes. Links are not followed.
inline std::string absolute_path(const std::string& path) {
  const std::string full = !path.empty() && path[0] == '/' ? path : current_folder() + "/" + path;
  std::vector<std::string> parts;
  for (size_t begin = 0; begin < full.size();) {
    const size_t end = std::min(full.find('/', begin), full.size());
    const std::string part = full.substr(begin, end - begin);
    begin = end + 1;
    if (part == "..") {
      if (!parts.empty()) {
        parts.pop_back();
      }
    } else if (!part.empty() && part != ".") {
      parts.push_back(part);
    }
  }
  std::string result;
  for (const std::string& part : parts) {
    result += "/" + part;
  }
  return result.empty() ? "/" : result;
}

inline bool is_folder(const std::string& path) {
  struct stat status;
  return stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

// The folder for temporary files: that of the first of these variables which is set, or /tmp.
inline std::string temporary_folder() {
  for (const char* name : {"TMPDIR", "TMP", "TEMP", "TEMPDIR"}) {
    if (const char* path = std::getenv(name)) {
      return is_folder(path) ? absolute_path(path) : "/tmp";
    }
  }
  return "/tmp";
}

// Deletes a folder and all that it contains. Links are deleted, not what they point to. What cannot be
// deleted is left.
inline void remove_folder(const std::string& path) {
  constexpr int kOpenFolders = 8;
  const auto remove_entry = [](const char* entry, const struct stat*, int, struct FTW*) {
    std::remove(entry);
    return 0;
  };
  nftw(path.c_str(), remove_entry, kOpenFolders, FTW_DEPTH | FTW_PHYS);
}

} // namespace inductor_ext::detail
