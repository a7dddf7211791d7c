
#include <atomic>

namespace inductor_ext_cutlass {

// A kernel that Python has loaded. Its functions are asked for when they are first needed: before
// that Python may not be entered, and two threads that do it find the same.
class Loaded {
 public:
  Loaded(const char* name, const char* key) : name_(name), key_(key) {}

  operator Kernel() {
    if (run_.load() == nullptr) {
      size_ = address("inductor_ext_workspace_size");
      run_ = address("inductor_ext_run");
    }
    return {
        name_,
        reinterpret_cast<decltype(Kernel::workspace_size)>(size_.load()),
        reinterpret_cast<decltype(Kernel::run)>(run_.load())};
  }

 private:
  void* address(const char* function) const {
    const PyGILState_STATE state = PyGILState_Ensure();
    PyObject* module = PyImport_ImportModule("inductor_ext.templates.cutlass.runtime");
    PyObject* found = nullptr;
    if (module != nullptr) {
      found = PyObject_CallMethod(module, "address", "ss", key_, function);
    }
    void* address = found == nullptr ? nullptr : PyLong_AsVoidPtr(found);
    PyErr_Clear();
    Py_XDECREF(found);
    Py_XDECREF(module);
    PyGILState_Release(state);
    if (address == nullptr) {
      throw std::runtime_error("The kernel " + std::string(name_) + " is not loaded.");
    }
    return address;
  }

  const char* name_;
  const char* key_;
  std::atomic<void*> size_{nullptr};
  std::atomic<void*> run_{nullptr};
};

}  // namespace inductor_ext_cutlass
