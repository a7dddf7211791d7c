// Runs a package whose model takes one float32 tensor of shape [batch, 8]: prints how it is called,
// calls it, shows the error of a wrong call, replaces its weights, and calls it by several threads.
#include <inductor_ext.hpp>

#include <atomic>
#include <iostream>
#include <thread>

#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>

namespace {

void print_sums(const char* what, const std::vector<at::Tensor>& results) {
  std::cout << what << ":";
  for (const at::Tensor& result : results) {
    std::cout << " " << result.sum().item().toDouble();
  }
  std::cout << std::endl;
}

void run(const std::string& path) {
  inductor_ext::Options options;
  options.num_runners = 4; // threads that may run it at the same time
  inductor_ext::Model model = inductor_ext::load(path, options);
  std::cout << model.signature().to_string();

  const std::vector<at::Tensor> inputs{at::ones({5, 8})};
  print_sums("sums", model.run(inputs));

  try {
    model.run({at::ones({5, 7})});
  } catch (const inductor_ext::Error& error) {
    if (error.kind() != inductor_ext::ErrorKind::input) {
      throw;
    }
    std::cout << "refused: " << error.what() << std::endl;
  }

  std::map<std::string, at::Tensor> doubled;
  for (const auto& [name, tensor] : model.constants()) {
    doubled[name] = tensor.mul(2);
  }
  inductor_ext::Model::Update update;
  update.inactive = true; // Calls use the old weights until the swap.
  model.update_constants(doubled, update);
  model.swap_constants();
  const std::vector<at::Tensor> results = model.run(inputs);
  print_sums("with doubled weights", results);

  std::atomic<int> equal{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int call = 0; call < 100; ++call) {
        equal += at::equal(model.run(inputs)[0], results[0]);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  std::cout << "calls of 4 threads with the same result: " << equal << std::endl;
}

} // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: run_model PACKAGE" << std::endl;
    return 2;
  }
  try {
    run(argv[1]);
  } catch (const inductor_ext::Error& error) {
    std::cerr << "error " << static_cast<int>(error.kind()) << ": " << error.what() << std::endl;
    return 1;
  }
}
