#include "read_weights.h"

#include <atomic>
#include <algorithm>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>

#include <sched.h>

#include "checksum.h"
#include "error.h"

#ifdef USE_CUDA
#include <cuda_runtime.h>
#endif

namespace inductor_ext {

namespace {

constexpr size_t kThreads = 8; // more do not read faster, and pinning their buffers takes time

size_t usable_processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  const bool known = sched_getaffinity(0, sizeof(set), &set) == 0;
  return known ? std::max(1, CPU_COUNT(&set)) : std::max(1U, std::thread::hardware_concurrency());
}

// Calls work(thread, item) for all items on up to `threads` threads, of which one is the caller's.
// After the first exception no further item is begun; it is thrown when all threads have ended.
template <typename Work>
void for_all(size_t items, size_t threads, const Work& work) {
  std::atomic<size_t> next{0};
  std::exception_ptr error;
  std::mutex mutex;
  const auto run = [&](size_t thread) {
    try {
      for (size_t item = next++; item < items; item = next++) {
        work(thread, item);
      }
    } catch (...) {
      next = items;
      const std::lock_guard<std::mutex> lock(mutex);
      error = error == nullptr ? std::current_exception() : error;
    }
  };
  std::vector<std::thread> others;
  try {
    for (size_t thread = 1; thread < threads; ++thread) {
      others.emplace_back(run, thread);
    }
  } catch (const std::system_error&) {
    // The process may have no more threads: those that there are do the work.
  }
  run(0);
  for (std::thread& other : others) {
    other.join();
  }
  if (error != nullptr) {
    std::rethrow_exception(error);
  }
}

size_t blocks_of(uint64_t bytes) {
  return (bytes + kChecksumBlock - 1) / kChecksumBlock;
}

void require_checksums(const WeightsFile& file, const std::vector<uint64_t>& checksums) {
  if (checksums.size() != blocks_of(file.bytes())) {
    file.fail("there are " + std::to_string(checksums.size()) + " checksums for " +
              std::to_string(blocks_of(file.bytes())) + " blocks");
  }
}

void check_block(
    const WeightsFile& file,
    const std::vector<uint64_t>& checksums,
    uint64_t offset,
    const uint8_t* data,
    uint64_t bytes) {
  if (inductor_ext_block_checksum(data, bytes) != checksums[offset / kChecksumBlock]) {
    throw Error(
        ErrorCode::damaged,
        "The weights in " + file.path() + " are damaged: bytes " + std::to_string(offset) + " to " +
        std::to_string(offset + bytes) + " do not match their checksum.");
  }
}

} // namespace

void check_weights(const WeightsFile& file, const std::vector<uint64_t>& checksums) {
  require_checksums(file, checksums);
  const size_t blocks = checksums.size();
  const size_t threads = std::min({kThreads, usable_processors(), blocks});
  std::vector<std::unique_ptr<uint8_t[]>> buffers(threads);
  for_all(blocks, threads, [&](size_t thread, size_t block) {
    std::unique_ptr<uint8_t[]>& buffer = buffers[thread];
    if (buffer == nullptr) {
      buffer.reset(new uint8_t[kChecksumBlock]);
    }
    const uint64_t offset = block * kChecksumBlock;
    const uint64_t bytes = std::min(kChecksumBlock, file.bytes() - offset);
    file.read(buffer.get(), offset, bytes);
    check_block(file, checksums, offset, buffer.get(), bytes);
  });
}

#ifdef USE_CUDA

namespace {

void require(cudaError_t status) {
  if (status != cudaSuccess) {
    throw Error(
        ErrorCode::weights,
        std::string("The weights cannot be copied to the GPU: ") + cudaGetErrorString(status) + ".");
  }
}

// Memory from which the GPU can copy while the CPU works; ordinary memory if none can be pinned.
class HostBuffer {
 public:
  explicit HostBuffer(size_t bytes) {
    void* data = nullptr;
    pinned_ = cudaHostAlloc(&data, bytes, cudaHostAllocDefault) == cudaSuccess;
    if (!pinned_) {
      cudaGetLastError();
      data = std::malloc(bytes);
    }
    data_ = static_cast<uint8_t*>(data);
    if (data_ == nullptr) {
      throw std::bad_alloc();
    }
  }
  HostBuffer(const HostBuffer&) = delete;
  ~HostBuffer() {
    if (pinned_) {
      cudaFreeHost(data_);
    } else {
      std::free(data_);
    }
  }

  uint8_t* data() const {
    return data_;
  }

 private:
  uint8_t* data_ = nullptr;
  bool pinned_ = false;
};

// The stream of one thread, and the two halves of its buffer: one is read into while the GPU copies
// from the other.
class Lane {
 public:
  explicit Lane(uint8_t* buffer) : buffer_(buffer) {}
  Lane(const Lane&) = delete;
  ~Lane() {
    if (stream_ != nullptr) {
      cudaStreamSynchronize(stream_);
      cudaStreamDestroy(stream_);
    }
    for (cudaEvent_t event : copied_) {
      if (event != nullptr) {
        cudaEventDestroy(event);
      }
    }
  }

  void open(int device) {
    require(cudaSetDevice(device));
    require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    for (cudaEvent_t& event : copied_) {
      require(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    }
  }

  // Returns a buffer that the GPU does not use any more.
  uint8_t* take() {
    half_ = 1 - half_;
    require(cudaEventSynchronize(copied_[half_]));
    return buffer_ + half_ * kChecksumBlock;
  }

  // Starts to copy from the buffer taken last.
  void copy(uint8_t* to, uint64_t bytes) {
    require(cudaMemcpyAsync(to, buffer_ + half_ * kChecksumBlock, bytes, cudaMemcpyHostToDevice, stream_));
    require(cudaEventRecord(copied_[half_], stream_));
  }

  void wait() {
    require(cudaStreamSynchronize(stream_));
  }

 private:
  uint8_t* buffer_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t copied_[2] = {};
  int half_ = 0;
};

} // namespace

void upload_weights(
    const WeightsFile& file,
    const std::vector<Upload>& parts,
    const std::vector<uint64_t>& checksums) {
  if (!checksums.empty()) {
    require_checksums(file, checksums);
  }
  std::vector<Upload> blocks;
  for (const Upload& part : parts) {
    for (uint64_t done = 0; done < part.bytes; done += kChecksumBlock) {
      blocks.push_back(
          {part.offset + done, std::min(kChecksumBlock, part.bytes - done), part.to + done});
    }
  }
  if (blocks.empty()) {
    return;
  }
  int device = 0;
  require(cudaGetDevice(&device));
  const size_t threads = std::min({kThreads, usable_processors(), blocks.size()});
  HostBuffer buffer(threads * 2 * kChecksumBlock); // outlives the lanes, which wait for copies from it
  std::vector<std::unique_ptr<Lane>> lanes(threads);
  for_all(blocks.size(), threads, [&](size_t thread, size_t item) {
    std::unique_ptr<Lane>& lane = lanes[thread];
    if (lane == nullptr) {
      lane = std::make_unique<Lane>(buffer.data() + thread * 2 * kChecksumBlock);
      lane->open(device);
    }
    const Upload& block = blocks[item];
    uint8_t* data = lane->take();
    file.read(data, block.offset, block.bytes);
    if (!checksums.empty()) {
      check_block(file, checksums, block.offset, data, block.bytes);
    }
    lane->copy(block.to, block.bytes);
  });
  for (const std::unique_ptr<Lane>& lane : lanes) {
    if (lane != nullptr) {
      lane->wait();
    }
  }
}

#endif // USE_CUDA

} // namespace inductor_ext
