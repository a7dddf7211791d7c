// The runners of a model, which threads share first come first served.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

namespace torch::aot_inductor {

class AOTInductorModel;

} // namespace torch::aot_inductor

namespace inductor_ext {

// Admits as many threads as there are runners, first come first served, or one thread alone.
class Runners {
 public:
  explicit Runners(std::vector<torch::aot_inductor::AOTInductorModel*> models)
      : free_(std::move(models)), count_(free_.size()) {}

  torch::aot_inductor::AOTInductorModel* acquire();
  void release(torch::aot_inductor::AOTInductorModel* model);
  void acquire_all();
  void release_all();

 private:
  struct Waiter {
    explicit Waiter(bool alone) : alone(alone) {}
    bool alone;
    bool admitted = false;
    torch::aot_inductor::AOTInductorModel* model = nullptr;
    std::condition_variable changed;
  };

  torch::aot_inductor::AOTInductorModel* wait(bool alone);
  bool admit(Waiter& waiter);
  void admit_waiting();

  std::mutex mutex_;
  std::deque<Waiter*> waiting_;
  std::vector<torch::aot_inductor::AOTInductorModel*> free_;
  size_t count_;
  bool alone_ = false;
};

} // namespace inductor_ext
