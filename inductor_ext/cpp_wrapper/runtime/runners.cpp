#include "runners.h"

namespace inductor_ext {

using torch::aot_inductor::AOTInductorModel;

AOTInductorModel* Runners::acquire() {
  return wait(false);
}

void Runners::acquire_all() {
  wait(true);
}

void Runners::release(AOTInductorModel* model) {
  std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(model);
  admit_waiting();
}

void Runners::release_all() {
  std::lock_guard<std::mutex> lock(mutex_);
  alone_ = false;
  admit_waiting();
}

AOTInductorModel* Runners::wait(bool alone) {
  Waiter waiter(alone);
  std::unique_lock<std::mutex> lock(mutex_);
  if (waiting_.empty() && admit(waiter)) {
    return waiter.model;
  }
  waiting_.push_back(&waiter);
  waiter.changed.wait(lock, [&] { return waiter.admitted; });
  return waiter.model;
}

bool Runners::admit(Waiter& waiter) {
  if (alone_ || free_.empty() || (waiter.alone && free_.size() < count_)) {
    return false;
  }
  if (waiter.alone) {
    alone_ = true;
  } else {
    waiter.model = free_.back();
    free_.pop_back();
  }
  waiter.admitted = true;
  return true;
}

void Runners::admit_waiting() {
  while (!waiting_.empty() && admit(*waiting_.front())) {
    // Keep the lock: once the waiter sees that it is admitted, it may be destroyed.
    waiting_.front()->changed.notify_one();
    waiting_.pop_front();
  }
}

} // namespace inductor_ext
