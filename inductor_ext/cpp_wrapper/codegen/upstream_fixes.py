"""Workarounds for bugs of torch's C++ wrapper codegen, each with the release that ends it.

`cpp_wrapper.generator` adds the mixins to torch's wrapper classes, for packages and for
`torch.compile` with `cpp_wrapper`; it places them before torch's class in the MRO.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any


class GridScratch:
    """Mixin for torch's GPU wrapper: allocates Triton scratch memory for every CTA of a launch.

    A kernel that creates TMA descriptors writes them to memory that its launcher allocates; each
    CTA uses its own part. torch 2.11 allocates the size of one CTA, and the others write out of
    bounds. Fixed in torch 2.12.
    """

    def generate_args_decl(
        self,
        code: Any,
        call_args: Any,
        arg_types: Any,
        arg_signatures: Any,
        is_triton_kernel: bool = True,
        scratch_spaces: Mapping[str, int] | None = None,
    ) -> str:
        """Declare a launch's arguments, with scratch sizes multiplied by the grid.

        Scratch comes from torch's allocator for the current stream, like other buffers, with more
        than the alignment that Triton requires. It is freed once the kernel is enqueued.
        """
        spaces = {name: _OfGrid(size) for name, size in (scratch_spaces or {}).items()}
        arguments: str = super().generate_args_decl(  # type: ignore[misc]
            code, call_args, arg_types, arg_signatures, is_triton_kernel, spaces
        )
        return arguments


class _OfGrid(int):
    """Bytes per CTA, printed into the code as the bytes for all CTAs of a launch."""

    def __str__(self) -> str:
        return f"int64_t({int(self)}) * grid_0 * grid_1 * grid_2"


class LoopOutputs:
    """Mixin for torch's wrappers: the outputs of a while_loop do not alias its carried inputs.

    torch's C++ initializes the outputs as aliases of the carried inputs. If no iteration runs, they
    remain aliases, and a later mutation of the input, or reuse of its memory, changes the output.
    torch's Python wrapper clones them in that case. No release up to 2.14 has a fix.
    """

    def codegen_while_loop(self: Any, while_loop: Any, stack_output: bool = False) -> None:
        """Generate the loop, then clone the outputs that still alias their inputs."""
        super().codegen_while_loop(while_loop, stack_output)  # type: ignore[misc]
        for carried_input, name in _carried_outputs(self, while_loop):
            # Empty tensors have no address and need no clone.
            before = f"get_data_ptr_wrapper({carried_input.codegen_reference()})"
            self.writeline(f"if ({name}.data_ptr() == {before}) {{")
            self.writeline(f"    AtenTensorHandle {name}_own_handle;")
            self.writeline(
                "    AOTI_TORCH_ERROR_CODE_CHECK("
                f"aoti_torch_clone_preserve_strides({name}, &{name}_own_handle));"
            )
            self.writeline(f"    {name} = RAIIAtenTensorHandle({name}_own_handle);")
            self.writeline("}")


def _carried_outputs(wrapper: Any, while_loop: Any) -> list[tuple[Any, str]]:
    """Return carried inputs with their outputs' variables, except outputs mutated in place."""
    find = getattr(wrapper, "_get_while_loop_carried_output_names", None)
    if find is None:  # torch 2.11, 2.12
        names = [output.get_name() for output in while_loop.outputs]
    else:
        names = find(while_loop)
    mutated_names = {output.get_name() for output in while_loop.mutation_outputs}
    pairs = zip(while_loop.carried_inputs, names, strict=False)
    return [(carried_input, name) for carried_input, name in pairs if name not in mutated_names]


class SizeArrays:
    """Mixin for torch's wrappers: an array of sizes or strides is declared before it is used.

    torch reuses an array that was declared in the same place, which it identifies by the id of the
    function that writes lines there (until torch 2.12), or of the object that has the function. The
    id of an object that is gone can be that of a new one: an array is then declared elsewhere,
    perhaps later, and C++ does not compile. No release up to 2.14 has a complete fix.
    """

    def codegen_int_array_var(
        self: Any, int_array: str, writeline: Callable[..., None], *args: Any, **kwargs: Any
    ) -> str:
        """Return the variable of an array, see torch's method; keep `writeline` and its object."""
        place = getattr(writeline, "__self__", writeline)
        key = (id(place), getattr(writeline, "__name__", ""))
        kept = vars(self).setdefault("_kept_writelines", {}).setdefault(key, writeline)
        name: str = super().codegen_int_array_var(int_array, kept, *args, **kwargs)  # type: ignore[misc]
        return name


_MATCH_STRIDES = """
#ifndef INDUCTOR_EXT_MATCH_STRIDES
#define INDUCTOR_EXT_MATCH_STRIDES
[[maybe_unused]] static void match_strides(
    torch::aot_inductor::RAIIAtenTensorHandle& tensor,
    std::initializer_list<int64_t> size,
    std::initializer_list<int64_t> stride) {
  int64_t dim;
  int64_t* sizes;
  int64_t* strides;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &dim));
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &sizes));
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &strides));
  if (dim != static_cast<int64_t>(size.size())) return;
  bool same = true;
  for (int64_t i = 0; i < dim; ++i) {
    if (sizes[i] != size.begin()[i] || sizes[i] == 0) return;
    same = same && (sizes[i] == 1 || strides[i] == stride.begin()[i]);
  }
  if (same) return;
  int32_t dtype, device_type, device_index;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &dtype));
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor, &device_type));
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor, &device_index));
  AtenTensorHandle handle;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      dim, size.begin(), stride.begin(), dtype, device_type, device_index, &handle));
  torch::aot_inductor::RAIIAtenTensorHandle copy(handle);
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(copy, tensor, false));
  tensor = std::move(copy);
}
#endif
"""


class FallbackStrides:
    """Mixin for torch's wrappers: copies an operator's result whose strides are not as predicted.

    `hooks.upstream_fixes.fallback_strides` calls it for results that own their memory.
    """

    def generate_match_strides(self: Any, name: str, size: str, stride: str) -> str:
        """Return the statement for a result; a result of another size is left as it is.

        Args:
            name: the variable of the result.
            size: the predicted size, as a C++ initializer list.
            stride: the predicted strides, likewise.
        """
        if not vars(self).get("_declares_match_strides"):
            self._declares_match_strides = True
            self.header.splice(_MATCH_STRIDES)
        return f"match_strides({name}, {size}, {stride});"


def generate_launcher(stock: Any, wrapper: Any) -> None:
    """Append the C++ function that launches a Triton kernel to a wrapper's prefix.

    torch declares the function's scalar parameters by their Python class: int64_t for any
    expression, which truncates a float of the graph, and float for a float, although a kernel may
    need all 53 bits of a double. Here a parameter is double if the kernel's signature has a float
    type for it. No release up to 2.14 has a fix.

    Args:
        stock: torch's generator of the function.
        wrapper: the wrapper codegen.
    """
    from torch._inductor.codecache import CudaKernelParamCache

    # torch 2.13 may write two files at once.
    buffers = [wrapper.prefix, *filter(None, [getattr(wrapper.prefix, "aot", None)])]
    starts = [len(buffer._lines) for buffer in buffers]
    stock.generate(wrapper)
    kernel = CudaKernelParamCache.get(stock.kernel_name) or {}
    declared = {
        f"{declaration} {name},": f"double {name},"
        for name, kind in kernel["triton_meta"]["signature"].items()
        if kind in ("fp16", "bf16", "fp32", "fp64")
        for declaration in ("int64_t", "float")
    }
    for buffer, start in zip(buffers, starts, strict=True):
        buffer._lines[start:] = [
            declared.get(str(line).strip(), line) for line in buffer._lines[start:]
        ]


_STOCK_MODEL = "#include <torch/csrc/inductor/aoti_include/common.h>"
"""torch 2.13's include for a graph without a device; it contains torch's model classes."""


def remove_interface(header: Any) -> None:
    """Remove torch's model classes, and the interface that torch 2.11 and 2.12 paste into models.

    torch 2.13 writes the interface in a method of its own, which `AotWrapper` overrides.
    """
    from torch._inductor.codegen import cpp_wrapper_cpu

    header._lines[:] = [line for line in header._lines if str(line).strip() != _STOCK_MODEL]

    path = pathlib.Path(cpp_wrapper_cpu.__file__).parent / "aoti_runtime" / "interface.cpp"
    interface = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    present = [(index, str(line).strip()) for index, line in enumerate(header._lines)]
    present = [(index, line) for index, line in present if line]
    for start in range(len(present) - len(interface) + 1):
        window = present[start : start + len(interface)]
        if all(line == expected for (_, line), expected in zip(window, interface, strict=True)):
            del header._lines[window[0][0] : window[-1][0] + 1]
            return
