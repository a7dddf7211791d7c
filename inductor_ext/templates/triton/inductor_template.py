"""Creates Inductor's `TritonTemplateCaller` choices from problems and configurations.

The kernel classes extend Inductor's template kernels by workspaces for split-K and stream-K, TMA
stores, function names that do not depend on the graph, and prebuilt launchers. `choice` returns
None if Inductor cannot generate a kernel as the configuration says, and warns once if its code for
stores is not the expected code.
"""

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
"""The kernel module of each template; for templates with optional TMA, the one without TMA."""


def choice(
    problem: GemmProblem,
    config: GemmConfig,
    inputs: Sequence[Any],
    layout: Any,
    *,
    options: Mapping[str, Any],
    **rest: Any,
) -> Any:
    """Return the choice (`TritonTemplateCaller`) that computes a problem with a configuration.

    Args:
        problem: sizes are size hints where they are symbolic. With fused weights, a prologue or a
            gate only M may be symbolic; with groups only the dimension that they divide.
        config: legal for the problem.
        inputs: IR nodes: prefix args (see `rest`); a; every weight b; what a prologue reads; the
            biases of gate and up projection, or none. For a grouped GEMM a; b; the int32 end
            offsets of the groups; for fp8, the scales of a and of b. With `ABSOLUTE`, last an
            output array [tiles along N, M] in float32 for the row amax.
        layout: layout of the output, [M, columns] or [batch, M, columns]; [split_k * M, columns] in
            float32 if K is split and another kernel reduces the splits.
        options: constants that do not follow from the problem: the activation, an epsilon;
            `ABSOLUTE`, if tiles compute row maxima: whether those are of absolute values.
        rest: further arguments of `TritonTemplate.generate` (prefix_args, epilogue_fn).

    Returns:
        None if Inductor cannot generate the kernel, or only one that does not store as the
            configuration says.
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
            # The kernel computes these values if they are not given as constants.
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
            "Inductor generates unexpected code for storing a tile, so GEMM kernels do not use TMA "
            "stores. Results are not affected. Please report this with your torch version.",
        )
        return None
    return found


def _has_aligned_rows(layout: Any) -> bool:
    """Whether the rows of an output are known to be multiples of 16 bytes, as TMA requires."""
    from torch._inductor.virtualized import V

    row = layout.size[-1] * layout.dtype.itemsize
    return bool(V.graph.sizevars.statically_known_multiple_of(row, 16))


def _stores_by_tma(choice: Any) -> bool:
    """Whether a choice's code has a TMA store, which `Kernel._by_tma` inserts.

    The file is read because Inductor caches generated code and does not render it again.
    """
    with open(choice.bmreq.module_path) as file:
        return _TMA_STORE in file.read()


def _facts(problem: GemmProblem, config: GemmConfig, a: Any, b: Any) -> dict[str, Any]:
    """Return constants that depend on which sizes and strides are static in the current graph."""
    from torch._inductor.virtualized import V

    sizes = V.graph.sizevars
    m, k = a.get_size()[-2:]
    n = b.get_size()[-1]
    multiple_of, equal = sizes.statically_known_multiple_of, sizes.statically_known_equals

    def batched(operand: Any) -> bool:
        """Whether the operand has a batch of more than one matrix with a non-zero batch stride."""
        if len(operand.get_size()) == 2 or equal(operand.get_size()[0], 1):
            return False
        return not equal(operand.get_stride()[0], 0)

    # The tensor's stride of a dimension of size 1 is arbitrary.
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
    """Return the number of tiles of all matrices; for a static N, of all fused weights."""
    along_n = meta["TILES_N"] if "TILES_N" in meta else cdiv(n, meta["COLUMNS"])
    return batch * cdiv(m, meta["BLOCK_M"]) * along_n


@functools.cache
def _kernel_type(template: str) -> Any:
    """Return the Inductor kernel class for a template, with workspaces for split-K and stream-K."""
    from torch._inductor.codegen.common import WorkspaceArg, WorkspaceZeroMode
    from torch._inductor.select_algorithm import PartialRender, TritonTemplateKernel
    from torch._inductor.utils import Placeholder, get_num_sms
    from torch._inductor.virtualized import V
    from torch.utils._sympy.functions import CeilDiv

    class Render(PartialRender):
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
                    # Inductor handles both prefixes.
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
            """Return Inductor's decorators, without a device index if one rank compiles for all
            ranks.

            Inductor omits the index for kernels that are not templates: the launcher then loads the
            kernel on the current device.
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
                # Rescaled values are float32, also with int32 accumulators; Inductor would round
                # them to ACC_TYPE.
                self.meta = {**meta, "ACC_TYPE": "tl.float32"}
            found = super().store_output(*args, **kwargs)
            self.meta = meta
            if self.meta.get("TMA_STORE"):
                stored = self.render_hooks[found]
                self.render_hooks[found] = lambda: self._by_tma(stored())
            return found

        def _by_tma(self, code: str) -> str:
            """Replace stores of whole tiles into the rows of an output by TMA stores.

            Triton hoists the descriptors out of the loop over tiles.
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
                given = ", ".join(f"{key}=[{', '.join(item)}]" for key, item in listed.items())
                return (
                    f"tl.make_tensor_descriptor({name}, {given})"
                    f"{_TMA_STORE}{', '.join(at)}], tl.reshape({tile}, [{', '.join(block)}]))"
                )

            return _WHOLE_TILE.sub(store, code)

        def call_kernel(self, name: str, *args: Any, **kwargs: Any) -> None:
            wrapper = V.graph.wrapper_code
            for item in self._memory:
                if _in_python() and item.inner_name == "COUNTERS":
                    index = item.device.index
                    wrapper.add_import_once("from inductor_ext.templates.triton import semaphores")
                    wrapper.add_import_once(f"counters_{index} = semaphores.counters({index})")
                    count = wrapper.codegen_python_sizevar(item.count)
                    wrapper.writeline(f"{item.outer_name} = counters_{index}.take({count})")
                else:
                    wrapper.generate_workspace_allocation(item)
            super().call_kernel(name, *args, **kwargs)
            # Inductor's own launcher supports neither TMA descriptors nor dependent launches.
            kernel: Any = self.triton_meta
            if _in_python() and ("A_ROW" in self.meta or kernel.get("launch_pdl")):
                launcher_prebuild.prepare(kernel)
            for item in reversed(self._memory):
                if not (_in_python() and item.inner_name == "COUNTERS"):
                    wrapper.generate_workspace_deallocation(item)

    return Kernel


_WHOLE_TILE = re.compile(
    r"tl\.store\((\w+) \+ \(tl\.broadcast_to\(xindex, \[BLOCK_M, COLUMNS\]\)\), (\w+), mask\)"
)
"""Inductor's store of a tile into a contiguous output with the GEMM's sizes. Inductor writes it in
`TritonTemplateKernel.store_output`; `choice` checks that it was replaced."""

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
