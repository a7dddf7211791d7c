// A loaded model: its runners, which threads share first come first served, and two sets of its
// constants, so that one can be updated while the other is in use.
//
// Calls use the active set. The inactive set is in one of three states:
// - empty: it has no memory. So it is after loading and after free_inactive().
// - previous: it has the values of the set that was active before the last swap().
// - pending: it was updated since then.
// The first update of an empty or previous set starts from the values of the active set, and later
// ones from those of the pending set. Updates of the active set do not reach a pending set. swap()
// exchanges the sets, so that a second swap() restores the previous values; swapping in an empty set
// changes no value.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "model.h"
#include "runners.h"
#include "weights.h"

namespace inductor_ext {

using ConstantMap = std::unordered_map<std::string, AtenTensorHandle>;

// How update() uses the caller's tensors.
struct Update {
  bool inactive = false; // update the inactive set
  bool all = false; // every parameter must have a tensor
  bool borrow = false; // use the caller's tensors instead of copies
  bool from_cpu = false; // copy from the CPU to the model's device
};

class Container {
 public:
  Container(size_t runners, const std::string& device_name, const char* cubin_dir, bool load = true);

  void run(
      AtenTensorHandle* inputs,
      AtenTensorHandle* outputs,
      torch::aot_inductor::DeviceStreamType stream,
      AOTIProxyExecutorHandle proxy_executor,
      bool single_threaded);

  void update(const ConstantMap& tensors, const Update& how);
  void update_from_blob(const uint8_t* blob);
  void fold(
      bool inactive,
      torch::aot_inductor::DeviceStreamType stream,
      AOTIProxyExecutorHandle proxy_executor);
  void swap();
  void free_inactive();

  // Whether the container was created to read its constants from the package, if it has any.
  bool loads_constants() const {
    return loads_constants_;
  }

  // The current tensors by fully qualified name; the container owns them.
  ConstantMap extract(bool inactive) const;

 private:
  struct Storage {
    torch::aot_inductor::RAIIAtenTensorHandle tensor;
    uint64_t bytes = 0;
  };

  // One set of constants. A null tensor has no value yet.
  struct Constants {
    Mapping mapping; // of the weights file
    torch::aot_inductor::RAIIAtenTensorHandle device_blob; // has the layout of the weights file
    // Other storages, by whether they are on the CPU and their offset in the weights file.
    std::map<std::pair<bool, uint64_t>, Storage> storages;
    std::vector<torch::aot_inductor::RAIIAtenTensorHandle> tensors;
    std::vector<bool> borrowed; // the caller's tensor, which must not be written
    std::shared_ptr<std::vector<torch::aot_inductor::ConstantHandle>> handles;
    bool folded = false;
  };

  enum class Inactive { empty, previous, pending };

  Constants& constants(bool inactive) {
    return sets_[inactive ? 1 - active_ : active_];
  }
  const Constants& constants(bool inactive) const {
    return sets_[inactive ? 1 - active_ : active_];
  }

  bool on_cpu(const Constant& constant) const;
  void load(Constants& set, const WeightsRequest& request);
  void load_on_device(
      Constants& set,
      const WeightsFile& file,
      const std::vector<bool>& external,
      const WeightsRequest& request);
  uint8_t* own_storage(Constants& set, const Constant& constant);
  torch::aot_inductor::RAIIAtenTensorHandle tensor_in(const Constant& constant, uint8_t* storage) const;
  void place(Constants& set, size_t index, uint8_t* storage);
  void put(Constants& set, size_t index, torch::aot_inductor::RAIIAtenTensorHandle tensor, bool borrowed);
  void copy_into(Constants& set, size_t index, AtenTensorHandle source);
  bool owns(const Constants& set, AtenTensorHandle tensor) const;
  void copy_storage(const Constant& constant, uint8_t* to, uint8_t* from) const;
  void start_from_active(const std::vector<bool>& replaced);
  void check(size_t index, AtenTensorHandle tensor, const Update& how) const;
  void check_frozen(const std::vector<bool>& given, const Update& how) const;
  void require_constants(const Constants& set) const;
  void fold_alone(
      Constants& set,
      torch::aot_inductor::DeviceStreamType stream,
      AOTIProxyExecutorHandle proxy_executor);

  int32_t device_type_;
  int32_t device_index_;
  std::vector<std::unique_ptr<torch::aot_inductor::AOTInductorModel>> models_;
  std::unique_ptr<Runners> runners_;
  Constants sets_[2];
  int active_ = 0;
  Inactive inactive_ = Inactive::empty;
  bool loads_constants_;
};

} // namespace inductor_ext
