"""Inductor IR node of a CUTLASS kernel launch, and its code generation in Python and C++.

`add_launch` builds the kernel and creates the node. Sizes and strides are launch arguments and may
be symbolic; addresses are those of the buffers under any views, so no view is created at run time.
Python wrappers launch through `templates.cutlass.runtime`. In C++, an AOT-compiled model is linked
with its kernels (`aot_link.link`); any other C++ wrapper uses the kernels that Python has loaded.

Stream-K, grouped and group-scaled kernels need a workspace. If all sizes are static and the code
runs on this device, the size is queried at compile time, and the workspace is memory-planned like a
buffer. Otherwise it is queried before each launch and allocated by torch's allocator.
"""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch._inductor import ir
from torch._inductor.virtualized import V

from inductor_ext import _compat, exc
from inductor_ext.hooks.wrapper_codegen import linked_objects, root_wrapper
from inductor_ext.templates.cutlass import launch, nvcc_build, runtime
from inductor_ext.templates.cutlass.aot_link import KernelObject, kernels_of, link, symbol
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.epilogue import Epilogue
from inductor_ext.templates.cutlass.source import CALL_FIELDS, TENSOR_FIELDS, Source, source
from inductor_ext.templates.tensors import INT4


def is_supported() -> bool:
    """Whether Inductor's wrapper can launch CUTLASS kernels; the FX wrapper cannot."""
    from torch._inductor import config

    return not config.fx_wrapper


def add_launch(
    config: CutlassConfig,
    epilogue: Epilogue,
    a: Any,
    b: Any,
    inputs: Sequence[Any],
    layouts: Sequence[Any],
    *,
    scalars: Sequence[Any] = (),
    ends: Any = None,
) -> tuple[Any, ...]:
    """Add a kernel launch to the graph, and build the kernel if it has not been built.

    Args:
        config: the kernel and its launch parameters.
        epilogue: of the kernel.
        a: [M, K] or [batch, M, K]; [M, K] with the rows of all groups for a grouped GEMM.
        b: [K, N] or [batch, K, N]; [groups, K, N] for a grouped GEMM; [K / 2, N] if b is 4-bit.
        inputs: of the epilogue.
        layouts: FixedLayouts of the outputs, in the epilogue's order: [M, N] or [batch, M, N],
            row-major.
        scalars: parameters of the epilogue: numbers or expressions.
        ends: end offsets of the groups of a grouped GEMM (exclusive), int32 [groups].

    Returns:
        A TensorBox for each output.

    Raises:
        exc.BadGemmError: the kernel does not support an operand's strides or offset.
        exc.MissingToolchainError, exc.KernelBuildError: see `nvcc_build.built`.
    """
    from torch._inductor.lowering import empty_strided

    kernel = source(config, epilogue)
    nvcc_build.build(kernel, runtime.store())
    a, b, ends, *inputs = (None if inp is None else _realize(inp) for inp in (a, b, ends, *inputs))
    first, *rest = layouts
    outputs = [
        _realize(
            empty_strided(tensor.size, tensor.stride, dtype=tensor.dtype, device=tensor.device)
        )
        for tensor in rest
    ]
    _check_alignment(config, a, b)
    node = CutlassCall(config, kernel, first, (a, b, inputs, outputs, ends), scalars)
    return tuple(ir.TensorBox.create(output) for output in (node, *outputs))


def _realize(value: Any) -> Any:
    """Return the value as a realized buffer or view with a frozen layout."""
    realized = ir.ExternKernel.realize_input(value)
    realized.freeze_layout()
    return ir.ExternKernel.unwrap_storage_for_input(realized)


def _check_alignment(config: CutlassConfig, a: Any, b: Any) -> None:
    """Check that the strides and offsets of A and B match the kernel's layouts and alignments.

    Raises:
        exc.BadGemmError: they do not.
    """
    sizes = V.graph.sizevars
    rows = [layout == "t" for layout in config.layouts[:2]]
    alignments = list(config.alignments[:2])
    if config.swap_ab:
        rows = [not row for row in reversed(rows)]
        alignments.reverse()
    if config.a in INT4:
        alignments[1] //= 2  # Two elements per byte.
    for name, operand, by_rows, alignment in zip("ab", (a, b), rows, alignments, strict=True):
        layout = operand.get_layout()
        *batch, row, column = layout.stride
        inner, outer = (column, row) if by_rows else (row, column)
        count, length = layout.size[-2:] if by_rows else layout.size[:-3:-1]
        aligned = [layout.offset]
        aligned += [] if sizes.statically_known_equals(count, 1) else [outer]
        aligned += (
            batch if len(batch) and not sizes.statically_known_equals(layout.size[0], 1) else []
        )
        fits = all(sizes.statically_known_multiple_of(size, alignment) for size in aligned)
        unit = sizes.statically_known_equals(inner, 1) or sizes.statically_known_equals(length, 1)
        if not (fits and unit):
            raise exc.BadGemmError(
                record="CUTLASS call",
                field=name,
                value=f"strides {[*layout.stride]} and offset {layout.offset}",
                allowed=f"contiguous {'rows' if by_rows else 'columns'}, with stride and offset "
                f"divisible by {alignment} elements",
            )


class CutlassCall(ir.ExternKernel):
    """IR node of a kernel launch, which allocates the first output and mutates the others.

    The other outputs are buffers that are created before it.
    """

    def __init__(
        self,
        config: CutlassConfig,
        kernel: Source,
        layout: Any,
        operands: tuple[Any, Any, Sequence[Any], Sequence[Any], Any],
        scalars: Sequence[Any],
    ) -> None:
        """Register a launch with the graph.

        Args:
            config: see `add_launch`.
            kernel: its source.
            layout: of the first output.
            operands: a, b, the epilogue's inputs, the other outputs, and `ends` or None.
            scalars: see `add_launch`.
        """
        a, b, inputs, outputs, ends = operands
        others = () if ends is None else (ends,)
        super().__init__(None, layout, [a, b, *inputs, *outputs, *others], tuple(scalars))
        self.config = config
        self.kernel = kernel
        self.operands = operands
        self.name = V.graph.register_buffer(self)
        V.graph.register_operation(self)
        none_layout = ir.NoneLayout(device=layout.device)
        self.mutation_outputs = [ir.MutationOutput(none_layout, output, self) for output in outputs]

    def should_allocate(self) -> bool:
        """Return True: the wrapper allocates the first output."""
        return True

    def codegen(self, wrapper: Any) -> None:
        """Write the launch, and the kernel's declaration on first use."""
        unused = self.get_name() in V.graph.removed_buffers
        if unused:
            # Inductor removed the output as unused, but the kernel still writes it.
            V.graph.removed_buffers.discard(self.get_name())
            wrapper.codegen_allocation(self)
        self.codegen_comment(wrapper, self.kernel.name)
        _Writer(wrapper, self).write()
        if unused:
            wrapper.codegen_free(self)


class _Writer:
    """Code generation of one launch, in Python or C++."""

    def __init__(self, wrapper: Any, node: CutlassCall) -> None:
        self.wrapper = wrapper
        self.node = node
        self.cpp = bool(V.graph.cpp_wrapper)
        self.device = node.get_device_or_error()
        a, b, inputs, outputs, ends = node.operands
        self.tensors = launch.order_operands(node.config, a, b, node, inputs, outputs, ends)
        self.geometry = launch.compute_geometry(
            node.config,
            _shape_of(a),
            _shape_of(b),
            _shape_of(node),
            [_shape_of(inp) for inp in inputs],
            [_shape_of(output) for output in outputs],
            None if ends is None else _shape_of(ends),
        )

    def write(self) -> None:
        """Write the launch, with the allocation and the release of its workspace around it."""
        from torch._inductor.codegen.common import WorkspaceArg, WorkspaceZeroMode
        from torch._inductor.codegen.wrapper import AllocateLine, FreeIfNotReusedLine

        write = self._write_cpp if self.cpp else self._write_python
        size = self._workspace()
        if not size:
            write(None, queries_workspace=size is None)
            return
        memory = WorkspaceArg(
            count=sympy.Integer(size),
            zero_mode=WorkspaceZeroMode.UNINITIALIZED,
            device=self.device,
            outer_name=WorkspaceArg.unique_name(),
        )
        self.wrapper.writeline(AllocateLine(self.wrapper, memory))
        write(f"{memory.get_name()}.data_ptr()", queries_workspace=False)
        self.wrapper.writeline(FreeIfNotReusedLine(self.wrapper, memory))

    def _workspace(self) -> int | None:
        """Return the bytes of the workspace; None if they are only known at run time."""
        if not self.node.config.has_workspace:
            return 0
        values = [
            *self.geometry.sizes,
            *(value for strides in self.geometry.strides for value in strides),
        ]
        if V.graph.aot_mode or not all(sympy.sympify(value).is_number for value in values):
            return None
        kernel = self.node.kernel
        launcher = runtime.load(
            kernel.name,
            kernel.architecture,
            kernel.text,
            operands=len(self.tensors),
            scalars=len(self.node.constant_args),
        )
        head = [int(size) for size in (*self.geometry.sizes, *self._launch_fields())]
        # The size depends on an address only through its alignment; 0 is aligned to everything.
        rest = [
            int(value) for stride, batch in self.geometry.strides for value in (0, stride, batch)
        ]
        scalars = [0.0] * len(self.node.constant_args)
        return launcher.workspace_size(tuple(head), *rest, *scalars)  # type: ignore[arg-type]

    def _launch_fields(self) -> tuple[int, int, int, int]:
        """Return the fields of the `Call` struct between the sizes and the addresses."""
        return (*launch.list_config_fields(self.node.config), self._sms())

    def _sms(self) -> int:
        """Return the number of SMs of the device; 0 if the launch has to query it.

        AOT-compiled code may run on another device than this one.
        """
        import torch

        if V.graph.aot_mode or self.device.type != "cuda":
            return 0
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def _size(self, expression: Any) -> str:
        text: str = self.wrapper.codegen_sizevar(sympy.sympify(expression))
        return text

    # --- in Python ------------------------------------------------------------------------------

    def _write_python(self, workspace: str | None, *, queries_workspace: bool) -> None:
        """Write the launch in Python.

        Args:
            workspace: expression of the workspace's address; None for no workspace.
            queries_workspace: whether to query the size at run time and allocate the workspace.
        """
        name = self._define_launcher()
        fields = [self._size(size) for size in (*self.geometry.sizes, *self._launch_fields())]
        rest = [
            text
            for tensor, strides in zip(self.tensors, self.geometry.strides, strict=True)
            for text in (self._address(tensor), *map(self._size, strides))
        ]
        rest += [self._size(arg) for arg in self.node.constant_args]
        stream, index, device = "0", str(self.device.index), str(self.device)
        if _compat.compiles_on_one_rank():
            operations: Any = V.graph.device_ops
            index, device = operations.current_device_idx_expr(), self.device.type
        if self.device.type == "cuda":
            root_wrapper(self.wrapper).write_get_raw_stream_header()
            # Do not reuse an earlier stream variable: inside a user's stream context it differs.
            stream = f"get_raw_stream({index})"
        function = f"{name}.with_workspace" if queries_workspace else name
        memory = repr(device) if queries_workspace else workspace or "0"
        arguments = [stream, memory, f"({', '.join(fields)})", *rest]
        self.wrapper.writeline(f"{function}({', '.join(arguments)})")

    def _define_launcher(self) -> str:
        """Define the launcher in the module's header on first use; return its name."""
        root, kernel = root_wrapper(self.wrapper), self.node.kernel
        names = kernels_of(root)
        if kernel not in names:
            names[kernel] = f"cutlass_kernel_{len(names)}"
            # String literals preserve the source text exactly.
            lines = "".join(f"    {line!r}\n" for line in kernel.text.splitlines(keepends=True))
            root.add_import_once(
                "from inductor_ext.templates.cutlass import runtime as cutlass_runtime"
            )
            root.imports.splice(
                f"{names[kernel]} = cutlass_runtime.load(\n"
                f"    {kernel.name!r},\n    {kernel.architecture!r},\n{lines}    ,\n"
                f"    operands={len(self.tensors)},\n"
                f"    scalars={len(self.node.constant_args)},\n)"
            )
        return names[kernel]

    def _address(self, tensor: Any) -> str:
        """Return the expression of a tensor's address."""
        layout = tensor.get_layout()
        if isinstance(tensor, ir.ReinterpretView):
            if layout.dtype != tensor.data.get_dtype():
                return f"{tensor.codegen_reference()}.data_ptr()"
            begin = sympy.sympify(layout.offset * layout.dtype.itemsize)
            if begin != 0:
                pointer = f"{tensor.get_name()}.data_ptr()"
                if self.cpp:
                    return f"static_cast<char*>({pointer}) + {self._size(begin)}"
                return f"{pointer} + {self._size(begin)}"
        return f"{tensor.get_name()}.data_ptr()"

    # --- in C++ ---------------------------------------------------------------------------------

    def _write_cpp(self, workspace: str | None, *, queries_workspace: bool) -> None:
        """Write the launch in C++; see `_write_python` for the arguments."""
        name = self._declare_kernel()
        index = "this->device_idx_" if V.graph.aot_mode else str(self.device.index or 0)
        stream = "nullptr"
        if self.device.type == "cuda":
            current = f"inductor_ext_cutlass::current_stream({index})"
            stream = "stream" if V.graph.aot_mode else current
        fields = [
            f"static_cast<int32_t>({self._size(size)})"
            for size in (*self.geometry.sizes, *self._launch_fields())
        ]
        operands = [
            f"{{{self._address(tensor)}, "
            + ", ".join(f"static_cast<int64_t>({self._size(values)})" for values in strides)
            + "}"
            for tensor, strides in zip(self.tensors, self.geometry.strides, strict=True)
        ]
        scalars = [f"static_cast<float>({self._size(arg)})" for arg in self.node.constant_args]
        arguments = [
            name,
            *(f"{{{', '.join(values)}}}" for values in (fields, operands, scalars)),
            stream,
        ]
        if queries_workspace:
            arguments += [f"aoti_torch_device_type_{self.device.type}()", index]
        else:
            arguments.append(workspace or "nullptr")
        function = "launch_with_workspace" if queries_workspace else "launch"
        self.wrapper.writeline(f"inductor_ext_cutlass::{function}({', '.join(arguments)});")

    def _declare_kernel(self) -> str:
        """Declare the kernel in the header on first use; return its C++ name."""
        root, kernel = root_wrapper(self.wrapper), self.node.kernel
        names = kernels_of(root)
        if not names:
            root.header.splice(_read_shim("launch_shim"))
            if not V.graph.aot_mode:
                root.header.splice(_read_shim("launch_shim_loaded"))
        if kernel in names:
            return names[kernel]
        if V.graph.aot_mode:
            names[kernel] = symbol(kernel)
            # The file has an include guard: the constant-folding graph is in the same unit and may
            # call the same kernel.
            text = _read_shim("launch_shim_linked").replace("@SYMBOL@", symbol(kernel))
            root.header.splice(text.replace("@NAME@", kernel.name))
            if getattr(root, "links_kernels", False):
                linked_objects(root)[kernel] = KernelObject(kernel)
            else:
                _link_with_inductor(kernel)
        else:
            # The Python part of the JIT wrapper runs first and loads the kernel.
            root.header.writeline(
                f"static inductor_ext_cutlass::Loaded {self._define_launcher()}"
                f'("{kernel.name}", "{nvcc_build.key(kernel)}");'
            )
        return names[kernel]


def _link_with_inductor(kernel: Source) -> None:
    """Have Inductor's own AOT build link a kernel, where the extension's does not build the model.

    Inductor links the objects that are listed in `CUDACodeCache.aot_kernels_o`.
    """
    from torch._inductor.codecache import CUDACodeCache
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    output = os.path.join(cache_dir(), f"{symbol(kernel)}.o")
    link(kernel, runtime.store(), output)
    CUDACodeCache.aot_kernels_o.append(output)


def _shape_of(value: Any) -> launch.Shape:
    layout = value.get_layout()
    return tuple(layout.size), tuple(layout.stride)


@functools.cache
def _read_shim(name: str) -> str:
    """Return a C++ file of `templates/cutlass`, with the constants that do not depend on a kernel.

    Args:
        name: `launch_shim` for the launch functions; `launch_shim_loaded` for kernels that Python
            has loaded; `launch_shim_linked` for the declaration of a linked kernel.
    """

    def members(fields: tuple[tuple[str, str], ...]) -> str:
        return "\n".join(f"  {kind} {name};" for kind, name in fields)

    text = pathlib.Path(launch.__file__).with_name(f"{name}.h").read_text()
    for placeholder, value in (
        ("@TENSOR_FIELDS@", members(TENSOR_FIELDS)),
        ("@CALL_FIELDS@", members(CALL_FIELDS)),
        ("@CUDA_ERRORS@", str(launch.CUDA_ERRORS)),
    ):
        text = text.replace(placeholder, value)
    return text
