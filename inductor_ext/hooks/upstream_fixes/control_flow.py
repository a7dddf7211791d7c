"""Fixes for control flow: `cond`, `while_loop`, `scan`, `map`."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from inductor_ext import _compat, exc
from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook

HOOKS = (
    Hook(
        "branch_symbols",
        "replaced",
        (
            "torch._inductor.ir.Switch.get_free_symbol_uses",
            "torch._inductor.ir.Conditional.get_free_symbol_uses",
        ),
        "hooks.upstream_fixes.control_flow",
        "A predicate such as u0 > 2 is a relation, in which Inductor finds no symbols: the code "
        "that computes u0 is removed as dead, and the generated code does not compile.",
        parameters=("unbacked_only",),
        relies_on=("torch._inductor.ir.Switch.selector|torch._inductor.ir.Conditional.predicate",),
    ),
    Hook(
        "branch_constants",
        "replaced",
        ("torch._inductor.graph.GraphLowering.allocate_non_dup_const_name",),
        "hooks.upstream_fixes.control_flow",
        "A tensor that a branch or a loop's body creates from numbers is a constant of the "
        "subgraph, but only the outermost graph's constants are set in the compiled module.",
        parameters=("name", "data"),
        relies_on=(
            "torch._inductor.graph.SubgraphLowering",
            "torch._inductor.graph.GraphLowering.get_original_value_of_constant",
        ),
        upstream="#185482",
        until="2.14",
    ),
    Hook(
        "branch_strides",
        "replaced",
        ("torch._inductor.ir.ExternKernel.require_exact_strides",),
        "hooks.upstream_fixes.control_flow",
        "The strides of a result of cond whose branches differ in an inner size contain a symbol "
        "that is defined after the branches. A branch's result keeps its own strides.",
        parameters=("x", "exact_strides"),
        relies_on=("torch._inductor.graph.SubgraphLowering",),
        upstream="#189528",
        until="2.14",
    ),
    Hook(
        "operand_strides",
        "replaced",
        ("torch._inductor.ir.Switch.create", "torch._inductor.ir.Conditional.create"),
        "hooks.upstream_fixes.control_flow",
        "The code of a branch reads its operands with the strides that the traced graph has, but a "
        "tensor that is updated in place keeps those of the input. Operands get these strides.",
        parameters=("operands",),
        relies_on=("torch._inductor.ir.ExternKernel.require_exact_strides",),
    ),
    Hook(
        "subgraph_operands",
        "replaced",
        ("torch._inductor.graph.SubgraphLowering.__init__",),
        "hooks.upstream_fixes.control_flow",
        "The positions of the inputs that a backward graph may overwrite are taken for those of "
        "each subgraph, which then overwrites operands that are read later.",
        relies_on=("torch._inductor.graph.get_donated_idxs",),
    ),
    Hook(
        "loop_numbers",
        "replaced",
        ("torch._inductor.fx_utils.FakeTensorUpdater.incremental_update",),
        "hooks.upstream_fixes.control_flow",
        "Carried integers of while_loop fail an assertion that does not name the loop.",
    ),
    Hook(
        "scan_sizes",
        "replaced",
        ("torch._inductor.fx_passes.post_grad.decompose_scan_to_while_loop",),
        "hooks.upstream_fixes.control_flow",
        "A scan over a slice of dynamic size fails with a KeyError of a symbol. Every scan fails "
        "unless `torch._dynamo.config.capture_scalar_outputs` is set: the loop reads its index.",
        parameters=("gm",),
    ),
    Hook(
        "map_index",
        "replaced",
        ("torch._inductor.fx_passes.post_grad.decompose_map_to_while_loop",),
        "hooks.upstream_fixes.control_flow",
        "As `scan_sizes`, for `map`.",
        parameters=("gm",),
    ),
)


def install_hooks() -> None:
    """Install the dispatchers, once per process."""
    dispatchers = {
        "branch_symbols": _dispatch_branch_symbols,
        "branch_constants": _dispatch_allocate_constant,
        "branch_strides": _dispatch_require_exact_strides,
        "operand_strides": _dispatch_create_branches,
        "subgraph_operands": _dispatch_subgraph,
        "loop_numbers": _dispatch_incremental_update,
        "scan_sizes": _dispatch_decompose_scan,
        "map_index": _dispatch_decompose,
    }
    registry.install(HOOKS, dispatchers)


def _dispatch_subgraph(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        if context.settings() is not None:
            self.bw_donated_idxs = None

    return __init__


def _dispatch_incremental_update(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def incremental_update(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return stock(self, *args, **kwargs)
        except AssertionError as error:
            # torch 2.11 and 2.12 have only the graph.
            operators = _find_control_flow(getattr(self, "gm", self).graph)
            if context.settings() is None or not operators:
                raise
            raise exc.UnsupportedControlFlowError(
                operators=operators,
                why=str(error).rstrip("!. ") or "an argument changes",
                fix="If a loop carries an integer, carry a tensor of no dimensions instead.",
            ) from error

    return incremental_update


def _dispatch_decompose_scan(stock: Callable[..., Any]) -> Callable[..., Any]:
    decompose = _dispatch_decompose(stock)

    @functools.wraps(stock)
    def decompose_scan_to_while_loop(gm: Any) -> Any:
        try:
            return decompose(gm)
        except KeyError as error:
            if context.settings() is None:
                raise
            raise exc.UnsupportedControlFlowError(
                operators="scan",
                why=f"the size {error.args[0]} of a result is not among its arguments",
                fix="Pass tensors whose first dimension is that of an input in place of slices, or "
                "compile with dynamic=False.",
            ) from error

    return decompose_scan_to_while_loop


def _dispatch_decompose(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def decompose_to_while_loop(gm: Any) -> Any:
        if context.settings() is None:
            return stock(gm)
        with _allow_scalar_outputs():
            return stock(gm)

    return decompose_to_while_loop


@contextlib.contextmanager
def _allow_scalar_outputs() -> Iterator[None]:
    """Let traces read numbers from tensors, as those of loops read the index."""
    from torch._inductor.virtualized import V

    mode = V.fake_mode
    saved, mode.allow_scalar_outputs = mode.allow_scalar_outputs, True
    try:
        yield
    finally:
        mode.allow_scalar_outputs = saved


def _find_control_flow(graph: Any) -> str:
    """Return the names of the control-flow operators of a graph, with commas between them."""
    from torch._ops import HigherOrderOperator

    names = {
        node.target.name()
        for node in graph.nodes
        if isinstance(node.target, HigherOrderOperator) and "get_attr" in _argument_kinds(node)
    }
    return ", ".join(sorted(names))


def _argument_kinds(node: Any) -> set[str]:
    return {argument.op for argument in node.all_input_nodes}


def _dispatch_allocate_constant(stock: Callable[..., str]) -> Callable[..., str]:
    # The module gets the values of the outermost graph's constants; names of subgraphs are unique.
    @functools.wraps(stock)
    def allocate_non_dup_const_name(self: Any, name: str | None, data: Any) -> str:
        constant = stock(self, name, data)
        if context.settings() is None:
            return constant
        from torch._inductor.graph import SubgraphLowering

        root = self
        while isinstance(root, SubgraphLowering):
            root = root.parent
        if root is not self:
            for table in ("constants", "constant_reprs", "allocated_constant_name"):
                getattr(root, table)[constant] = getattr(self, table)[constant]
        return constant

    return allocate_non_dup_const_name


def _dispatch_require_exact_strides(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def require_exact_strides(x: Any, exact_strides: Any, allow_padding: bool = False) -> Any:
        if context.settings() is not None:
            exact_strides = _find_branch_strides(x, exact_strides)
        return stock(x, exact_strides, allow_padding)

    return require_exact_strides


def _find_branch_strides(x: Any, strides: Any) -> Any:
    """Return the strides of a subgraph's result; `strides` unless the subgraph lacks a symbol."""
    import torch
    from torch._inductor.graph import SubgraphLowering
    from torch._inductor.virtualized import V
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    if not isinstance(V.graph, SubgraphLowering) or not free_unbacked_symbols(list(strides)):
        return strides
    module: Any = V.graph.module
    (results,) = module.graph.output_node().args
    for result, buffer in zip(results, V.graph.graph_outputs or (), strict=False):
        if buffer is x.data and isinstance(result, torch.fx.Node):
            return result.meta["val"].stride()
    return strides


def _dispatch_create_branches(stock: Callable[..., Any]) -> Callable[..., Any]:
    # `stock` is bound to its class: the dispatcher replaces a class method.
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def create(*args: Any, **kwargs: Any) -> Any:
        if context.settings() is None:
            return stock(*args, **kwargs)
        from torch._inductor.virtualized import V

        call = signature.bind(*args, **kwargs)
        traced: Any = V.graph.current_node.args[-1]
        call.arguments["operands"] = [
            _with_traced_strides(operand, node)
            for operand, node in zip(call.arguments["operands"], traced, strict=True)
        ]
        return stock(*call.args, **call.kwargs)

    return create


def _with_traced_strides(operand: Any, node: Any) -> Any:
    """Return an operand of a branch, with the strides of its node in the traced graph."""
    import torch
    from torch._inductor import ir
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    value = node.meta["val"] if isinstance(node, torch.fx.Node) else None
    if not (isinstance(value, torch.Tensor) and isinstance(operand, ir.TensorBox)):
        return operand
    if free_unbacked_symbols(list(value.stride())):
        return operand
    return ir.ExternKernel.require_exact_strides(operand, value.stride())


def _dispatch_branch_symbols(stock: Callable[..., Any]) -> Callable[..., Any]:
    # Inductor looks for symbols only in expressions, but a predicate such as u0 > 2 is a relation.
    # The code that computes u0 is removed as dead, and the branch uses an undeclared variable.
    @functools.wraps(stock)
    def get_free_symbol_uses(self: Any, unbacked_only: bool = False) -> Any:
        uses = stock(self, unbacked_only)
        if context.settings() is None:
            return uses
        from torch._inductor.utils import OrderedSet
        from torch.utils._sympy.symbol import SymT, symbol_is_type

        unbacked = (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)
        symbols = getattr(getattr(_compat.branch_selector(self), "expr", None), "free_symbols", ())
        return uses | OrderedSet(
            symbol
            for symbol in sorted(symbols, key=str)
            if not unbacked_only or symbol_is_type(symbol, unbacked)
        )

    return get_free_symbol_uses
