// Loads the package that is the argument, and runs its self test.
#include <inductor_ext.hpp>

#include <iostream>

int main(int count, char** arguments) {
  if (count != 2) {
    return 2;
  }
  const inductor_ext::Model model = inductor_ext::load(arguments[1]);
  const inductor_ext::SelfTestResult result = model.self_test();
  std::cout << result.compared << " " << result.difference << "\n";
  return 0;
}
