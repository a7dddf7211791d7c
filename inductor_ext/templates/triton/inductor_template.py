"""Choices of Inductor from problems and configurations: the one module here that knows it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from inductor_ext import _compat, events
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton import launcher_prebuild
from inductor_ext.templates.triton.config import TEMPLATES, GemmConfig, statistics_depth
from inductor_ext.templates.triton.kernels import (
    dequant_a_stationary,
    dequant_register,
    gemv,
    grouped,
    persistent_tma,
    tile,
)

__all__ = ["choice"]

_KERNELS: Mapping[str, ModuleType] = {
    "splitk": tile,
    "cp_async": tile,
    "mixed": tile,
    "direct": dequant_register,
    "stationary": dequant_a_stationary,
    "gemv": gemv,
    "grouped": grouped,
    "persistent_tma": persistent_tma,
    "persistent_tma_ws": persistent_tma,
    "bmm_persistent": persistent_tma,
}
"""The module of the kernel of each template, where it does not load by TMA if that is optional."""


def choice(
    problem: GemmProblem,
    config: GemmConfig,
    inputs: Sequence[Any],
    layout: Any,
    *,
    options: Mapping[str, Any],
    **rest: Any,
) -> Any:
    """The choice (`TritonTemplateCaller`) that computes a problem by a configuration.

    Args:
        problem: sizes are those of a hint where they are symbolic; with several factors, a prologue
            or a gate only M may be, with groups only what they divide.
        config: legal for the problem.
        inputs: IR nodes: what `rest` says of prefixes; a; every factor b; what a prologue reads;
            biases of a gate and of what it gates, or none;
            of a grouped product a; b; where groups end, int32; of fp8, scales of a and of b; with
            `ABSOLUTE` last an array [tiles along N, M] in float32, which is written.
        layout: of the output, [M, columns] or [batch, M, columns]; [split_k * M, columns] in
            float32 where K is split and another kernel adds up.
        options: constants that the problem does not tell: the activation, an epsilon; `ABSOLUTE`,
            if tiles give the largest elements of their rows: whether those are absolute values.
        rest: what `TritonTemplate.generate` takes besides (prefix_args, epilogue_fn).

    Returns:
        None if Inductor cannot make one, or only one that stores otherwise than the configuration
        says.
    """
    if config.tma_store and not _has_aligned_rows(layout):
        return None
    kernel = (
        persistent_tma if config.tma and config.template == "splitk" else _KERNELS[config.template]
    )
    a, b = inputs[rest.get("prefix_args", 0) :][:2]
    *batch, m, k = a.get_size()
    n = b.get_size()[-1]
    if problem.operation == "grouped":
        batch = [problem.batch]
    constants = {**kernel.constants(problem, config), **_facts(problem, config, a, b), **options}
    if TEMPLATES[config.template].direct and not constants["EVEN_K"]:
        return None
    if kernel is dequant_a_stationary and _is_unknown(n):
        return None
    for size, names in ((n, ("TILES_N",)), (k, ("K", "SHARE"))):
        if _is_unknown(size):
            # The kernel computes what it is not told.
            constants = {name: value for name, value in constants.items() if name not in names}
    found = _template(kernel).generate(
        input_nodes=tuple(inputs),
        layout=layout,
        num_stages=config.stages,
        num_warps=config.warps,
        call_sizes=[*(batch or [1]), m, n],
        triton_meta={"launch_pdl": True} if config.pdl else None,
        **constants,
        **rest,
    )
    if config.tma_store and found is not None and not _stores_by_tma(found):
        events.warn_once(
            "tma_store",
            "Inductor's code for storing a tile is not the one expected, so no GEMM kernel stores "
            "by TMA. Results are not affected. Report it with your torch version.",
        )
        return None
    return found


def _has_aligned_rows(layout: Any) -> bool:
    """Whether rows of an output are known to be multiples of 16 bytes, as TMA asks for."""
    from torch._inductor.virtualized import V

    row = layout.size[-1] * layout.dtype.itemsize
    return bool(V.graph.sizevars.statically_known_multiple_of(row, 16))


def _stores_by_tma(choice: Any) -> bool:
    """Whether the code of a choice has a store by TMA, which `_by_tma` writes into it.

    The file is read because Inductor keeps generated code and does not render it again.
    """
    with open(choice.bmreq.module_path) as file:
        return _TMA_STORE in file.read()


def _facts(problem: GemmProblem, config: GemmConfig, a: Any, b: Any) -> dict[str, Any]:
    """Constants that depend on what is static in the graph at hand."""
    from torch._inductor.virtualized import V

    sizes = V.graph.sizevars
    m, k = a.get_size()[-2:]
    n = b.get_size()[-1]
    multiple_of, equal = sizes.statically_known_multiple_of, sizes.statically_known_equals

    def batched(operand: Any) -> bool:
        """Whether there are several matrices, and not the same one each time."""
        if len(operand.get_size()) == 2 or equal(operand.get_size()[0], 1):
            return False
        return not equal(operand.get_stride()[0], 0)

    # The stride of a dimension of size 1 is whatever the tensor happens to have.
    one = equal(k if problem.a.layout == "column" else m, 1)
    facts = {
        "PERSISTENT": TEMPLATES[config.template].persistent,
        "EVEN_M": multiple_of(m, config.block_m),
        "EVEN_K": multiple_of(k, config.block_k * config.split_k),
        "EVEN_DEPTH": multiple_of(k, statistics_depth(problem, config)),
        "BATCHED": len(a.get_size()) == 3,
        "A_BATCHED": batched(a),
        "B_BATCHED": batched(b),
        "A_LEADING": problem.a.leading if one else 0,
    }
    if _is_unknown(n):
        facts["EVEN_N"] = multiple_of(n, config.block_n)
    return facts


def _is_unknown(size: Any) -> bool:
    return not isinstance(size, int) and not size.is_number


def _tiles(batch: Any, m: Any, n: Any, meta: Mapping[str, Any], cdiv: Callable[..., Any]) -> Any:
    """Tiles of all matrices; of an N that is known, also of several factors."""
    along_n = meta["TILES_N"] if "TILES_N" in meta else cdiv(n, meta["COLUMNS"])
    return batch * cdiv(m, meta["BLOCK_M"]) * along_n


@functools.cache
def _kernel_type(template: str) -> Any:
    """Inductor's kernels of a template, with memory of their own where splits are added up."""
    from torch._inductor.codegen.common import WorkspaceArg, WorkspaceZeroMode
    from torch._inductor.select_algorithm import PartialRender, TritonTemplateKernel
    from torch._inductor.utils import Placeholder, get_num_sms
    from torch._inductor.virtualized import V
    from torch.utils._sympy.functions import CeilDiv

    class Render(PartialRender):
        """Code that is compiled once.

        It has the blanks and line ends that it will have in a module: Inductor has a kernel
        compiled as soon as its code is known, and finds what came of it by that text when it loads
        the module. And its function has a name of its own: Inductor's tell where in a graph a
        kernel stands, and the same function of another name Triton compiles anew. Inductor finds it
        by its name all the same.
        """

        function: str
        """The name of its own."""

        @property
        def code(self) -> str:
            lines = super().code.strip().split("\n")
            text = "\n".join(["", *(line if line.strip() else "" for line in lines), ""])
            name = str(Placeholder.KERNEL_NAME)
            own = text.replace(f"def {name}(", f"def {self.function}(")
            return f"{own}\n{name} = {self.function}\n" if own != text else text

    class Kernel(TritonTemplateKernel):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._memory: list[WorkspaceArg] = []
            meta = self.meta
            if meta.get("ONE_LAUNCH"):
                batch, m, n = self.call_sizes
                counters = _tiles(batch, m, n, meta, CeilDiv)
                tiles = counters * meta["SPLIT_K"]
            elif meta.get("STREAM_K"):
                counters = get_num_sms()
                tiles = 2 * counters
            else:
                return
            sums = tiles * meta["BLOCK_M"] * meta.get("SUMS", meta["COLUMNS"])
            accumulator = torch.int32 if meta["ACC_TYPE"] == "tl.int32" else torch.float32
            for name, count, dtype, prefix, zeros in (
                ("WORKSPACE", sums, accumulator, "workspace_", False),
                ("COUNTERS", counters, torch.int32, "semaphores_", True),
            ):
                argument = WorkspaceArg(
                    count=sympy.sympify(count),
                    zero_mode=WorkspaceZeroMode.from_bool(zeros),
                    device=self.output_node.get_device(),
                    # Inductor knows both prefixes.
                    outer_name=WorkspaceArg.unique_name(prefix),
                    inner_name=name,
                    dtype=dtype,
                )
                self._memory.append(argument)
                self.args.workspace_args.append(argument)

        def render(self, *args: Any, **kwargs: Any) -> PartialRender:
            found = super().render(*args, **kwargs)  # type: ignore[no-untyped-call]
            render = Render(found._code, found.replacement_hooks)
            columns = self.meta.get("WIDTH", self.meta["COLUMNS"])
            tile = f"{self.meta['BLOCK_M']}x{columns}x{self.meta['BLOCK_K']}"
            render.function = f"triton_gemm_{template}_{tile}"
            return render

        def jit_lines(self) -> str:
            """Inductor's decorators; for one rank's code to run on all, without a device index.

            Inductor leaves the index out of kernels that are not templates: the launcher then loads
            the kernel on the current device.
            """
            stock: Any = super()
            lines: str = stock.jit_lines()
            if self.use_jit or not _compat.compiles_on_one_rank():
                return lines
            kernel: Any = self.triton_meta
            properties = kernel["device"]
            kernel["device"] = properties._replace(index=None)
            return lines.replace(repr(properties), repr(kernel["device"]))

        def store_output(self, *args: Any, **kwargs: Any) -> Any:
            meta = self.meta
            if meta.get("RESCALED"):
                # Of integers as well: Inductor would round them to what they are multiplied as.
                self.meta = {**meta, "ACC_TYPE": "tl.float32"}
            found = super().store_output(*args, **kwargs)
            self.meta = meta
            if self.meta.get("TMA_STORE"):
                stored = self.render_hooks[found]
                self.render_hooks[found] = lambda: self._by_tma(stored())
            return found

        def _by_tma(self, code: str) -> str:
            """Stores by TMA in the place of those of whole tiles into the rows of an output.

            Triton takes descriptors out of the loop over tiles.
            """
            outputs = {inner: outer for outer, inner in self.args.output_buffers.items()}
            sizes = V.graph.sizevars

            def store(found: re.Match[str]) -> str:
                name, value = found.groups()
                dtype = V.graph.get_dtype(outputs[name]) if name in outputs else None
                columns = self.output_node.get_size()[-1]
                if dtype is None or not sizes.statically_known_multiple_of(
                    columns * dtype.itemsize, 16
                ):
                    return found[0]
                shape, block = ["M", "N"], ["BLOCK_M", "COLUMNS"]
                at = ["(pid_m * BLOCK_M).to(tl.int32)", "(pid_n * COLUMNS).to(tl.int32)"]
                strides = ["N", "1"]
                if self.meta["BATCHED"]:
                    shape, block = [self.size("A", 0), *shape], ["1", *block]
                    at, strides = ["q.to(tl.int32)", *at], ["M * N", *strides]
                tile = f"tl.broadcast_to({value}, [BLOCK_M, COLUMNS]).to({name}.dtype.element_ty)"
                listed = {"shape": shape, "strides": strides, "block_shape": block}
                given = ", ".join(f"{key}=[{', '.join(each)}]" for key, each in listed.items())
                return (
                    f"tl.make_tensor_descriptor({name}, {given})"
                    f"{_TMA_STORE}{', '.join(at)}], tl.reshape({tile}, [{', '.join(block)}]))"
                )

            return _WHOLE_TILE.sub(store, code)

        def call_kernel(self, name: str, *args: Any, **kwargs: Any) -> None:
            wrapper = V.graph.wrapper_code
            for each in self._memory:
                if _in_python() and each.inner_name == "COUNTERS":
                    index = each.device.index
                    wrapper.add_import_once("from inductor_ext.templates.triton import semaphores")
                    wrapper.add_import_once(f"counters_{index} = semaphores.counters({index})")
                    count = wrapper.codegen_python_sizevar(each.count)
                    wrapper.writeline(f"{each.outer_name} = counters_{index}.take({count})")
                else:
                    wrapper.generate_workspace_allocation(each)
            super().call_kernel(name, *args, **kwargs)
            # By TMA or with dependent launch: Inductor's own launcher takes neither.
            kernel: Any = self.triton_meta
            if _in_python() and ("A_ROW" in self.meta or kernel.get("launch_pdl")):
                launcher_prebuild.prepare(kernel)
            for each in reversed(self._memory):
                if not (_in_python() and each.inner_name == "COUNTERS"):
                    wrapper.generate_workspace_deallocation(each)

    return Kernel


_WHOLE_TILE = re.compile(
    r"tl\.store\((\w+) \+ \(tl\.broadcast_to\(xindex, \[BLOCK_M, COLUMNS\]\)\), (\w+), mask\)"
)
"""Inductor's store of a tile into an output that has the product's sizes, its rows one after the
other. Inductor writes it in `TritonTemplateKernel.store_output`; `choice` checks that it is found.
"""

_TMA_STORE = ".store(["
"""Of a descriptor, in Triton. No template stores so by itself."""


def _in_python() -> bool:
    """Whether nothing but Python will call kernels, all on one device that is known by now:
    elsewhere zeros are written for each launch.
    """
    from torch._inductor import config
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.virtualized import V

    python = isinstance(V.graph.wrapper_code, PythonWrapperCodegen) and not V.graph.cpp_wrapper
    others = config.triton.autotune_at_compile_time or getattr(V.graph, "fx_wrapper", False)
    return python and not others and not _compat.compiles_on_one_rank()


@functools.cache
def _template(kernel: ModuleType) -> Any:
    from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate
    from torch._inductor.utils import get_num_sms

    name = kernel.__name__.rpartition(".")[2]

    class Template(TritonTemplate):
        kernel_type = _kernel_type(name)

    @SymbolicGridFn
    def grid(
        batch: Any,
        m: Any,
        n: Any,
        meta: Mapping[str, Any],
        *,
        cdiv: Callable[..., Any],
        min: Callable[..., Any],  # noqa: A002
    ) -> Any:
        tiles = _tiles(batch, m, n, meta, cdiv) * meta["SPLIT_K"]
        return min(tiles, get_num_sms()) if meta["PERSISTENT"] else tiles, 1, 1

    return Template(name=f"inductor_ext_{name}", grid=grid, source=kernel.SOURCE)
