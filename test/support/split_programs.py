"""Random programs like those of the AOT code generator, and a runtime that traces them.

`Program` generates a `run_impl` of statements, each with its number in a comment. `MODEL` is a
header that replaces runtime/model.h, in which every call, construction and destruction of an object
prints a line, and in which the n-th call throws, for any n.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from inductor_ext.cpp_wrapper.codegen import split_units
from inductor_ext.cpp_wrapper.codegen.split_units import Mark, Section

MODEL = r"""
#pragma once
#include <cstdint>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

inline int calls = 0;
inline int throw_at = 0;
inline void* last_stream = nullptr;

inline void step(const char* what, int64_t a = 0, int64_t b = 0) {
  std::printf("%s %ld %ld\n", what, long(a), long(b));
  if (++calls == throw_at) {
    throw std::runtime_error(what);
  }
}

struct Tensor { int64_t id; int64_t sizes[2]; };
using AtenTensorHandle = Tensor*;
using DeviceStreamType = void*;
using AOTIProxyExecutorHandle = void*;
#define AOTI_TORCH_ERROR_CODE_CHECK(call) \
  if ((call) != 0) { throw std::runtime_error(#call); }
#define CACHE_TORCH_DTYPE(name) static auto cached_torch_dtype_##name = dtype_##name()
inline int64_t dtype_float32() { return 6; }
inline int64_t dtype_float8_e4m3fn() { return 24; }

inline int64_t id(AtenTensorHandle tensor) { return tensor ? tensor->id : -1; }
inline int64_t made = 0;
inline int make(int64_t size, AtenTensorHandle* result) {
  step("make", made, size);
  *result = new Tensor{++made, {size, 2}};
  return 0;
}
inline int item(AtenTensorHandle tensor, int64_t* result) {
  step("item", id(tensor));
  *result = id(tensor);
  return 0;
}
inline int assign(AtenTensorHandle from, int64_t size, AtenTensorHandle to) {
  step("assign", id(from), id(to) + size);
  return 0;
}

namespace torch::aot_inductor {

class RAIIAtenTensorHandle {
 public:
  RAIIAtenTensorHandle() = default;
  RAIIAtenTensorHandle(AtenTensorHandle handle) : handle_(handle) {}
  RAIIAtenTensorHandle(RAIIAtenTensorHandle&& other) : handle_(other.release()) {}
  RAIIAtenTensorHandle& operator=(RAIIAtenTensorHandle&& other) {
    reset();
    handle_ = other.release();
    return *this;
  }
  ~RAIIAtenTensorHandle() { reset(); }
  operator AtenTensorHandle() const { return handle_; }
  AtenTensorHandle release() {
    AtenTensorHandle handle = handle_;
    handle_ = nullptr;
    return handle;
  }
  void reset() {
    if (handle_) {
      std::printf("delete %ld\n", long(handle_->id));
      delete handle_;
    }
    handle_ = nullptr;
  }
  void* data_ptr() const { return handle_ ? &handle_->id : nullptr; }
  int64_t size(int64_t dim) const { step("size"); return handle_ ? handle_->sizes[dim] : -1; }
  int64_t* sizes() const { return handle_->sizes; }
 private:
  AtenTensorHandle handle_ = nullptr;
};

struct ConstantHandle {
  Tensor tensor;
  operator AtenTensorHandle() { return &tensor; }
  void* data_ptr() { return &tensor.id; }
};

struct Guard {
  explicit Guard(int64_t number) : number(number) { step("enter", number); }
  ~Guard() { std::printf("leave %ld\n", long(number)); }
  int64_t number;
};

inline AtenTensorHandle reinterpret_tensor_wrapper(
    AtenTensorHandle from, int64_t, const int64_t* size, const int64_t* stride, int64_t offset) {
  AtenTensorHandle result;
  step("view", id(from), size[0] + 10 * stride[1] + offset);
  AOTI_TORCH_ERROR_CODE_CHECK(make(size[0], &result));
  return result;
}
inline RAIIAtenTensorHandle wrap_with_raii_handle_if_needed(AtenTensorHandle handle) {
  return RAIIAtenTensorHandle(handle);
}
inline void* get_data_ptr_wrapper(AtenTensorHandle tensor) { return &tensor->id; }
inline std::vector<RAIIAtenTensorHandle> steal_from_raw_handles_to_raii_handles(
    AtenTensorHandle* handles, size_t count) {
  std::vector<RAIIAtenTensorHandle> result;
  for (size_t i = 0; i < count; ++i) {
    result.emplace_back(handles[i]);
  }
  return result;
}
inline void use(const void* data, int64_t number = 0) {
  step("use", data ? *static_cast<const int64_t*>(data) : -1, number);
}
inline void use_all(const AtenTensorHandle* tensors, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    step("one of all", id(tensors[i]));
  }
}

struct AOTInductorModelKernelsBase {
  virtual ~AOTInductorModelKernelsBase() = default;
};

class AOTInductorModel {
 public:
  void run_impl(AtenTensorHandle*, AtenTensorHandle*, DeviceStreamType, AOTIProxyExecutorHandle);
  template <int Part, typename Frame>
  void run_part(
      Frame&, AtenTensorHandle*, AtenTensorHandle*, DeviceStreamType, AOTIProxyExecutorHandle);
  std::shared_ptr<std::vector<ConstantHandle>> constants_;
  std::unique_ptr<AOTInductorModelKernelsBase> kernels_;
  int32_t device_idx_ = 3;
};

std::unique_ptr<AOTInductorModelKernelsBase> new_kernels();

} // namespace torch::aot_inductor
"""

MAIN = r"""
#include "model.h"
using namespace torch::aot_inductor;

extern "C" void kernel_of_all(const int64_t* data, int64_t number) { use(data, number); }
extern "C" const unsigned char __first_start[] = "one";
extern "C" const unsigned char __second_start[] = "second";
extern "C" void kernel_of_none(int64_t number) { step("none", number); }

int main() {
  bool thrown = true;
  for (throw_at = 1; thrown; ++throw_at) {
    calls = made = 0;
    thrown = false;
    AOTInductorModel model;
    model.kernels_ = new_kernels();
    model.constants_ = std::make_shared<std::vector<ConstantHandle>>();
    for (int64_t i = 0; i < 8; ++i) {
      model.constants_->push_back({{-10 - i, {i, i}}});
    }
    AtenTensorHandle inputs[] = {new Tensor{100, {5, 6}}, new Tensor{101, {7, 8}}};
    AtenTensorHandle outputs[64] = {};
    try {
      model.run_impl(inputs, outputs, &model, nullptr);
      std::printf("done\n");
    } catch (const std::runtime_error& error) {
      thrown = true;
      std::printf("thrown %s\n", error.what());
    }
    for (AtenTensorHandle output : outputs) {
      if (output) {
        std::printf("output %ld\n", long(output->id));
        delete output;
      }
    }
  }
}
"""

TOP = (
    (
        Mark(Section.SHARED),
        """\

#include "model.h"
extern "C"  void  kernel_of_all(const int64_t* data,
                       int64_t number);
extern "C"  void  kernel_of_none(int64_t number);
#define DRIVER_CHECK(EXPR)                      \\
    do {                                        \\
        if (!(EXPR)) {                          \\
            throw std::runtime_error(#EXPR);    \\
        }                                       \\
    } while (0);

static inline int64_t loadKernel(
        std::string name,
        std::vector<int64_t>* loaded = nullptr) {
    DRIVER_CHECK(!name.empty());
    step("load");
    if (loaded) {
        loaded->push_back(1);
    }
    return int64_t(name.size());
}

CACHE_TORCH_DTYPE(float32);
CACHE_TORCH_DTYPE(float8_e4m3fn);
namespace torch::aot_inductor {
""",
    ),
    (
        Mark(Section.WHOLE),
        """\
namespace {
""",
    ),
    (
        Mark(Section.SHARED),
        """\
class AOTInductorModelKernels : public AOTInductorModelKernelsBase {
  public:
    int64_t kernel{0};
    std::vector<int64_t> loaded_modules_;
};
""",
    ),
    (
        Mark(Section.WHOLE),
        """\
}  // namespace
""",
    ),
    (
        Mark(Section.SHARED),
        """\
extern "C" {
    extern const unsigned char __first_start[];
    extern const unsigned char __second_start[];
}
""",
    ),
    (
        Mark(Section.LAUNCHER, "call_launched"),
        """\

// A launcher as there is one for each kernel on a GPU.
template <typename data_type_, typename kernels_type_>
static inline void call_launched(
    const data_type_& data,
    int64_t number,
    kernels_type_& kernels_
){
    if (kernels_.kernel == 0) {
        kernels_.kernel = loadKernel((const char*)__second_start, &kernels_.loaded_modules_);
    }
    use(data.data_ptr(), number + kernels_.kernel);
}

""",
    ),
    (
        Mark(Section.FIRST),
        """\
namespace {
const char* const kNames[] = {
    "x };",
};
std::unique_ptr<AOTInductorModelKernelsBase> make_kernels() {
    return std::make_unique<AOTInductorModelKernels>();
}
}  // namespace
std::unique_ptr<AOTInductorModelKernelsBase> new_kernels() { return make_kernels(); }
""",
    ),
    (
        Mark(Section.SHARED),
        """\
} // namespace torch::aot_inductor
using namespace torch::aot_inductor;
namespace torch::aot_inductor {

[[maybe_unused]] static constexpr bool _check_env() {
    return false;
}

""",
    ),
)
"""Sections before `run_impl`."""

HEAD = """void AOTInductorModel::run_impl(
    AtenTensorHandle*
        input_handles, // array of input AtenTensorHandle; handles
                        // are stolen; the array itself is borrowed
    AtenTensorHandle* output_handles,
    DeviceStreamType stream,
    AOTIProxyExecutorHandle proxy_executor
) {
"""

TAIL = """} // AOTInductorModel::run_impl
} // namespace torch::aot_inductor


"""

PROLOGUE = (
    "auto inputs = steal_from_raw_handles_to_raii_handles(input_handles, 2);",
    "auto arg0_1 = std::move(inputs[0]);",
    "auto arg1_1 = std::move(inputs[1]);",
    "auto arg0_1_size = arg0_1.sizes();",
    "int64_t s0 = arg0_1_size[1];",
    "[[maybe_unused]] auto& weight = constants_->at(2);",
    "[[maybe_unused]] auto& bias = constants_->at(3);",
    "inputs.clear();",
    "auto& kernels = static_cast<AOTInductorModelKernels&>(*this->kernels_.get());",
)


def program(*statements: str) -> split_units.Program:
    """A program with these statements in its `run_impl`, of which PROLOGUE is not moved."""
    unpacking = statements[: len(PROLOGUE)] if statements[: len(PROLOGUE)] == PROLOGUE else ()
    lines: list[Mark | str] = []
    for mark, text in (*TOP, (Mark(Section.HEAD), HEAD)):
        lines += [mark, *text.removesuffix("\n").split("\n")]
    lines += [f"    {line}" for line in unpacking]
    lines.append(Mark(Section.BODY))
    for statement in statements[len(unpacking) :]:
        lines += [f"    {line}" for line in statement.split("\n")]
    return split_units.Program(lines)


def whole_text(program: split_units.Program) -> str:
    """The text of the whole program."""
    return program.text(*Section) + TAIL


def numbered(*statements: str) -> split_units.Program:
    """A program whose statements end with their numbers."""
    return program(*(f"{statement}  // <{i}>" for i, statement in enumerate(statements)))


class Program:
    """A random program that compiles; its statements are in `statements`."""

    def __init__(self, seed: int, length: int) -> None:
        """Make at least `length` statements from a seed."""
        self.random = random.Random(seed)
        self.statements = list(PROLOGUE)
        self.owners = ["arg0_1", "arg1_1"]
        """Tensors that own memory."""
        self.numbers = ["s0"]
        self.tables: list[str] = []
        self.lists: list[str] = []
        self.lambdas: list[str] = []
        self.pointers: list[str] = []
        self.outputs = 0
        self.names = 0
        kinds: list[Callable[[], None]] = [
            *[self.allocate] * 4,
            *[self.move, self.drop, self.view, self.call] * 3,
            *[self.number, self.table, self.launch] * 2,
            *[self.items, self.branch, self.loop, self.list, self.pointer, self.scope],
        ]
        rare = [self.guard, self.function, self.leave, self.output]
        while len(self.statements) < length:
            self.random.choice(rare if self.random.random() < 0.04 else kinds)()
        self.program = numbered(*self.statements)

    def add(self, *statements: str) -> None:
        self.statements.extend(statements)

    def name(self, kind: str) -> str:
        self.names += 1
        return f"{kind}{self.names}"

    def owner(self) -> str:
        if not self.owners:
            self.allocate()
        return self.random.choice(self.owners)

    def value(self) -> str:
        """An integer expression."""
        return self.random.choice([*self.numbers, "7L"])

    def sizes(self) -> str:
        while not self.tables:
            self.table()
        return self.random.choice(self.tables)

    def allocate(self) -> None:
        name = self.name("buf")
        size = f"{self.value()} + cached_torch_dtype_float32"
        self.add(f"AtenTensorHandle {name}_handle;")
        filling = self.random.random() < 0.3
        if filling:
            # Between two statements that belong together.
            self.call()
        self.add(f"AOTI_TORCH_ERROR_CODE_CHECK(make({size}, &{name}_handle));")
        declarations = (
            f"RAIIAtenTensorHandle {name}({name}_handle);",
            f"RAIIAtenTensorHandle {name} = {name}_handle;",
            f"auto {name} = RAIIAtenTensorHandle({name}_handle);",
        )
        self.add(self.random.choice(declarations))
        self.owners.append(name)

    def move(self) -> None:
        old, new = self.owner(), self.name("buf")
        self.add(f"auto {new} = std::move({old});  // reuse")
        self.owners[self.owners.index(old)] = new

    def drop(self) -> None:
        old = self.owner()
        self.add(f"{old}.reset();")
        self.owners.remove(old)

    def view(self) -> None:
        old, new = self.owner(), self.name("buf")
        first, second = self.sizes(), self.sizes()
        self.add(
            f"auto {new} = wrap_with_raii_handle_if_needed("
            f"reinterpret_tensor_wrapper({old}, 2, {first}, {second}, 0L));",
            f"{old}.reset();  // reuse",
        )
        self.owners[self.owners.index(old)] = new

    def call(self) -> None:
        # Also of a tensor that may be empty: data_ptr() is then null.
        self.add(
            self.random.choice(
                (
                    f"kernel_of_all((const int64_t*)({self.owner()}.data_ptr()), {self.value()});",
                    f"kernel_of_none({self.value()});",
                    f"use(weight.data_ptr(), {self.value()});",
                    "use(bias.data_ptr(), cached_torch_dtype_float8_e4m3fn);",
                    f"AOTI_TORCH_ERROR_CODE_CHECK(assign({self.owner()}, device_idx_, bias));",
                    f"if (_check_env()) {{ use({self.owner()}.data_ptr()); }}",
                    "if (stream == nullptr || proxy_executor != nullptr) throw 1;",
                    f"use_all(std::vector<AtenTensorHandle>{{{self.owner()}}}.data(), 1L); // a",
                )
            )
        )

    def launch(self) -> None:
        self.add(f"call_launched({self.owner()}, {self.value()}, kernels);")

    def number(self) -> None:
        name = self.name("s")
        self.add(
            self.random.choice(
                (
                    f"int64_t {name} = {self.value()} + 3L;",
                    f"const int64_t {name} = ({self.value()} * 2L) % 11L;",
                    f"auto {name} = {self.random.choice(self.numbers)};",
                    f"auto {name} = {self.owner()}.size(1);",
                )
            )
        )
        self.numbers.append(name)

    def table(self) -> None:
        name = self.name("int_array_")
        if self.random.random() < 0.5:
            self.add(f"static constexpr int64_t {name}[] = {{{self.random.randrange(9)}L, -1L}};")
        else:
            self.add(
                f"const int64_t {name}[] = {{std::max<int64_t>({self.value()}, 2L), 4L + s0}};"
                if self.random.random() < 0.5
                else f"const int64_t {name}[] = {{{self.value()}, 1L}};"
            )
        self.tables.append(name)

    def items(self) -> None:
        name = self.name("u")
        self.add(
            f"int64_t {name}_raw;",
            f"AOTI_TORCH_ERROR_CODE_CHECK(item({self.owner()}, &{name}_raw));",
        )
        if self.random.random() < 0.5:
            self.call()
        self.add(f"auto {name} = {name}_raw;")
        self.numbers.append(name)

    def branch(self) -> None:
        name = self.name("buf")
        self.add(
            f"RAIIAtenTensorHandle {name};",
            f"if ({self.value()} % 2 == 0) {{ AtenTensorHandle inner; make(4L, &inner); "
            "RAIIAtenTensorHandle owner(inner); use(owner.data_ptr(), this->device_idx_); "
            f"{name} = std::move(owner); }} else if ({self.value()} > 3) {{ "
            'use(weight.data_ptr(), 5); } else { step("other"); }',
        )
        self.owners.append(name)

    def loop(self) -> None:
        name = self.name("s")
        self.add(
            f"int64_t {name} = 3L;",
            f"while (true) {{ if ({name} == 0) break; Guard inner({name}); {name} = {name} - 1; }}",
        )
        self.numbers.append(name)

    def list(self) -> None:
        name = self.name("list")
        self.add(f"const AtenTensorHandle {name}[] = {{weight, bias}};")
        self.lists.append(name)
        self.call()
        self.add(f"use_all({self.random.choice(self.lists)}, 2L);")

    def pointer(self) -> None:
        name, tensor = self.name("var_"), self.name("u")
        self.add(
            f"int64_t {tensor} = {self.value()};",
            f"int64_t* {name} = &{tensor};",
        )
        self.pointers.append(name)
        self.call()
        used = self.pointers[-1] if self.random.random() < 0.9 else self.pointers[0]
        self.add(f"use({used}, 2L);", f"auto* {name}_data = get_data_ptr_wrapper(weight);")
        self.call()
        self.add(f"use({name}_data);")

    def scope(self) -> None:
        call = f"use({self.owner()}.data_ptr());"
        self.add(f'{{ Guard record(9); std::string text = R"(a "; b)"; {call} }}')

    def guard(self) -> None:
        self.add(f"Guard {self.name('guard')}({self.value()});")

    def function(self) -> None:
        name = self.name("f")
        self.add(f"auto {name} = [&](int64_t n) {{ return n + s0; }};")
        self.lambdas.append(name)
        self.call()
        self.add(f"use(nullptr, {self.random.choice(self.lambdas)}({self.value()}));")

    def leave(self) -> None:
        self.add(f"if ({self.value()} == 1234L) return;")

    def output(self) -> None:
        old = self.owner()
        if self.outputs < 60:
            self.add(f"output_handles[{self.outputs}] = {old}.release();")
            self.owners.remove(old)
            self.outputs += 1
