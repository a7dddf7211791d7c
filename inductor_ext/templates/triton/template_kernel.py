"""Inductor's template kernel, extended for the templates of this package.

`GemmKernel` adds workspaces for split-K and stream-K, TMA stores, function names that do not depend
on the graph, and prebuilt launchers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._inductor.codegen.common import WorkspaceArg, WorkspaceZeroMode
from torch._inductor.select_algorithm import PartialRender, TritonTemplateKernel
from torch._inductor.utils import Placeholder, get_num_sms
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import CeilDiv

from inductor_ext import _compat
from inductor_ext.templates.triton import launcher_prebuild


def count_tiles(
    batch: Any, m: Any, n: Any, meta: Mapping[str, Any], cdiv: Callable[..., Any]
) -> Any:
    """Return the number of tiles of all matrices; for a static N, of all fused weights."""
    along_n = meta["TILES_N"] if "TILES_N" in meta else cdiv(n, meta["COLUMNS"])
    return batch * cdiv(m, meta["BLOCK_M"]) * along_n


class _Render(PartialRender):
    """Kernel code normalized so that it is compiled only once.

    Its blank lines and whitespace are those that the code will have in a module: Inductor
    starts compiling a kernel as soon as its code is known, and looks up the result by the
    code's text when it loads the module. The function is renamed: Inductor's names depend on
    the kernel's position in a graph, and Triton compiles the same function again under another
    name. An alias with Inductor's name keeps the function accessible.
    """

    function: str
    """The graph-independent function name."""

    @property
    def code(self) -> str:
        lines = super().code.strip().split("\n")
        text = "\n".join(["", *(line if line.strip() else "" for line in lines), ""])
        name = str(Placeholder.KERNEL_NAME)
        source = text.replace(f"def {name}(", f"def {self.function}(")
        return f"{source}\n{name} = {self.function}\n" if source != text else text


class GemmKernel(TritonTemplateKernel):
    """A template kernel; a subclass names the module of its source."""

    source_name: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._memory: list[WorkspaceArg] = []
        meta = self.meta
        if meta.get("ONE_LAUNCH"):
            batch, m, n = self.call_sizes
            counters = count_tiles(batch, m, n, meta, CeilDiv)
            tiles = counters * meta["SPLIT_K"]
        elif meta.get("STREAM_K"):
            counters = get_num_sms()
            tiles = 2 * counters
        else:
            return
        sums = tiles * meta["BLOCK_M"] * meta.get("SUMS", meta["COLUMNS"])
        accumulator = torch.int32 if meta["ACC_TYPE"] == "tl.int32" else torch.float32
        # Inductor handles both prefixes.
        self._add_memory("WORKSPACE", sums, accumulator, "workspace_", zeros=False)
        self._add_memory("COUNTERS", counters, torch.int32, "semaphores_", zeros=True)

    def _add_memory(
        self, name: str, count: Any, dtype: torch.dtype, prefix: str, *, zeros: bool
    ) -> None:
        """Add an argument for memory that is allocated for the launch."""
        argument = WorkspaceArg(
            count=sympy.sympify(count),
            zero_mode=WorkspaceZeroMode.from_bool(zeros),
            device=self.output_node.get_device(),
            outer_name=WorkspaceArg.unique_name(prefix),
            inner_name=name,
            dtype=dtype,
        )
        self._memory.append(argument)
        self.args.workspace_args.append(argument)

    def render(self, *args: Any, **kwargs: Any) -> PartialRender:
        original = super().render(*args, **kwargs)  # type: ignore[no-untyped-call]
        render = _Render(original._code, original.replacement_hooks)
        columns = self.meta.get("WIDTH", self.meta["COLUMNS"])
        tile = f"{self.meta['BLOCK_M']}x{columns}x{self.meta['BLOCK_K']}"
        render.function = f"triton_gemm_{self.source_name}_{tile}"
        return render

    def jit_lines(self) -> str:
        """Return Inductor's decorators, without a device index if one rank compiles for all
        ranks.

        Inductor omits the index for kernels that are not templates: the launcher then loads the
        kernel on the current device.
        """
        original: Any = super()
        lines: str = original.jit_lines()
        if self.use_jit or not _compat.compiles_on_one_rank():
            return lines
        kernel: Any = self.triton_meta
        properties = kernel["device"]
        kernel["device"] = properties._replace(index=None)
        return lines.replace(repr(properties), repr(kernel["device"]))

    def store_output(self, *args: Any, **kwargs: Any) -> Any:
        meta = self.meta
        if meta.get("RESCALED"):
            # Rescaled values are float32, also with int32 accumulators; Inductor would round
            # them to ACC_TYPE.
            self.meta = {**meta, "ACC_TYPE": "tl.float32"}
        placeholder = super().store_output(*args, **kwargs)
        self.meta = meta
        if self.meta.get("TMA_STORE"):
            hook = self.render_hooks[placeholder]
            self.render_hooks[placeholder] = lambda: self._by_tma(hook())
        return placeholder

    def _by_tma(self, code: str) -> str:
        """Replace stores of whole tiles into the rows of an output by TMA stores.

        Triton hoists the descriptors out of the loop over tiles.
        """
        return WHOLE_TILE.sub(self._tma_store, code)

    def _tma_store(self, match: re.Match[str]) -> str:
        """Return the TMA store in place of a store; the store itself if TMA cannot do it."""
        name, value = match.groups()
        outputs = {inner: outer for outer, inner in self.args.output_buffers.items()}
        dtype = V.graph.get_dtype(outputs[name]) if name in outputs else None
        columns = self.output_node.get_size()[-1]
        multiple_of = V.graph.sizevars.statically_known_multiple_of
        if dtype is None or not multiple_of(columns * dtype.itemsize, 16):
            return match[0]
        shape, block = ["M", "N"], ["BLOCK_M", "COLUMNS"]
        offsets = ["(pid_m * BLOCK_M).to(tl.int32)", "(pid_n * COLUMNS).to(tl.int32)"]
        strides = ["N", "1"]
        if self.meta["BATCHED"]:
            shape, block = [self.size("A", 0), *shape], ["1", *block]
            offsets, strides = ["q.to(tl.int32)", *offsets], ["M * N", *strides]
        tile = f"tl.broadcast_to({value}, [BLOCK_M, COLUMNS]).to({name}.dtype.element_ty)"
        lists = {"shape": shape, "strides": strides, "block_shape": block}
        arguments = ", ".join(f"{key}=[{', '.join(values)}]" for key, values in lists.items())
        return (
            f"tl.make_tensor_descriptor({name}, {arguments})"
            f"{_TMA_STORE}{', '.join(offsets)}], tl.reshape({tile}, [{', '.join(block)}]))"
        )

    def call_kernel(self, name: str, *args: Any, **kwargs: Any) -> None:
        wrapper = V.graph.wrapper_code
        for argument in self._memory:
            if _in_python() and argument.inner_name == "COUNTERS":
                index = argument.device.index
                wrapper.add_import_once("from inductor_ext.templates.triton import semaphores")
                wrapper.add_import_once(f"counters_{index} = semaphores.counters({index})")
                count = wrapper.codegen_python_sizevar(argument.count)
                wrapper.writeline(f"{argument.outer_name} = counters_{index}.take({count})")
            else:
                wrapper.generate_workspace_allocation(argument)
        super().call_kernel(name, *args, **kwargs)
        # Inductor's own launcher supports neither TMA descriptors nor dependent launches.
        kernel: Any = self.triton_meta
        if _in_python() and ("A_ROW" in self.meta or kernel.get("launch_pdl")):
            launcher_prebuild.prepare(kernel)
        for argument in reversed(self._memory):
            if not (_in_python() and argument.inner_name == "COUNTERS"):
                wrapper.generate_workspace_deallocation(argument)


WHOLE_TILE = re.compile(
    r"tl\.store\((\w+) \+ \(tl\.broadcast_to\(xindex, \[BLOCK_M, COLUMNS\]\)\), (\w+), mask\)"
)
"""Inductor's store of a tile into a contiguous output with the GEMM's sizes. Inductor writes it in
`TritonTemplateKernel.store_output`; `stores_by_tma` says whether it was replaced."""

_TMA_STORE = ".store(["
"""The method call on a descriptor, in Triton. No template source contains it."""


def _in_python() -> bool:
    """Whether only Python code calls the kernels, all on one device that is known at compile time.

    Otherwise the counters are zeroed for each launch.
    """
    from torch._inductor import config
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.virtualized import V

    python = isinstance(V.graph.wrapper_code, PythonWrapperCodegen) and not V.graph.cpp_wrapper
    others = config.triton.autotune_at_compile_time or getattr(V.graph, "fx_wrapper", False)
    return python and not others and not _compat.compiles_on_one_rank()


def stores_by_tma(choice: Any) -> bool:
    """Whether a choice's code has a TMA store, which `GemmKernel._by_tma` inserts.

    The file is read because Inductor caches generated code and does not render it again.
    """
    with open(choice.bmreq.module_path) as file:
        return _TMA_STORE in file.read()
