// Loads a package whose model takes one float32 tensor `x` of shape [batch, 8], and runs it.
#include <ATen/ops/ones.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <iostream>
#include "model.h" // from the package: extra/inductor_ext/model.h

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: run_model PACKAGE" << std::endl;
    return 2;
  }
  torch::inductor::AOTIModelPackageLoader loader(argv[1], MODEL_NAME);
  std::vector<at::Tensor> inputs(MODEL_NUM_INPUTS);
  inputs[MODEL_INPUT_X] = at::ones({5, 8});
  for (const at::Tensor& output : loader.run(inputs)) {
    std::cout << output.sum().item<float>() << std::endl;
  }
}
