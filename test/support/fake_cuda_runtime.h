// The functions of the CUDA runtime that read_weights.cpp calls, on a machine without a GPU.
//
// Copies are queued, and happen when the program waits for their event or stream: a buffer that is
// overwritten too early gives wrong bytes.
#pragma once

#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
constexpr unsigned cudaHostAllocDefault = 0;
constexpr unsigned cudaStreamNonBlocking = 1;
constexpr unsigned cudaEventDisableTiming = 2;
enum cudaMemcpyKind { cudaMemcpyHostToDevice };

struct FakeStream {
  std::vector<std::function<void()>> queue;
};
struct FakeEvent {
  FakeStream* stream = nullptr;
  size_t position = 0;
};
using cudaStream_t = FakeStream*;
using cudaEvent_t = FakeEvent*;

namespace fake {
inline int copies_until_failure = -1; // -1: no failure
inline bool can_pin = true;
inline int open = 0; // allocations, streams and events
inline std::mutex mutex;

inline void count(int change) {
  const std::lock_guard<std::mutex> lock(mutex);
  open += change;
}

inline void finish(FakeStream* stream, size_t position) {
  for (size_t i = 0; i < position; ++i) {
    if (stream->queue[i]) {
      std::exchange(stream->queue[i], nullptr)();
    }
  }
}
} // namespace fake

inline cudaError_t cudaHostAlloc(void** data, size_t bytes, unsigned) {
  if (!fake::can_pin) {
    return 2;
  }
  fake::count(1);
  *data = std::malloc(bytes);
  return cudaSuccess;
}
inline cudaError_t cudaFreeHost(void* data) {
  fake::count(-1);
  std::free(data);
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
inline const char* cudaGetErrorString(cudaError_t) {
  return "an illegal memory access was encountered";
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 3;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
  return device == 3 ? cudaSuccess : 1;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  fake::count(1);
  *stream = new FakeStream();
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  fake::finish(stream, stream->queue.size());
  return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  fake::count(-1);
  delete stream;
  return cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  fake::count(1);
  *event = new FakeEvent();
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  *event = {stream, stream->queue.size()};
  return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (event->stream != nullptr) {
    fake::finish(event->stream, event->position);
  }
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  fake::count(-1);
  delete event;
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  {
    const std::lock_guard<std::mutex> lock(fake::mutex);
    if (fake::copies_until_failure == 0) {
      return 700;
    }
    fake::copies_until_failure -= fake::copies_until_failure > 0;
  }
  stream->queue.push_back([=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}
