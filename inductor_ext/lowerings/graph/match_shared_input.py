"""Matching of matmuls that one kernel can compute: gated MLPs, shared inputs (QKV), norms.

`find` matches three patterns in a graph after Inductor's own passes:

- gate (`gemm_fuse_gated`): act(x @ w1 + b1) * (x @ w2 + b2) with two weights or one packed gate-up
  weight, both with a bias or both without;
- shared input (`gemm_fuse_shared_input`): matmuls with the same operand A (Q, K and V), of which
  none is computed from another;
- norm (`gemm_fuse_norm`): an RMSNorm or LayerNorm of the rows of A, if nothing else reads the
  normalized value.

It matches the same patterns among matmuls with a dequantized B (`mixed`) and their scales.

There is no match if an inner value is used elsewhere, as are values that a forward graph saves for
its backward, nor across an operator that mutates its arguments. If Inductor is set to round as
eager mode does (`emulate_precision_casts`), gates and norms are not fused.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import sympy  # type: ignore[import-untyped]

from inductor_ext import numerics
from inductor_ext.lowerings.graph import matmul_nodes
from inductor_ext.lowerings.graph.formula import FormulaReader, canonical, relu, symbol
from inductor_ext.lowerings.graph.fusion import Fusion, is_closed, is_written_between
from inductor_ext.lowerings.graph.fx_nodes import (
    Unreadable,
    flat,
    is_cast,
    is_contiguous,
    is_read_by_strides,
    is_view,
    shape,
)
from inductor_ext.lowerings.graph.match_norm import Norm, norm_of
from inductor_ext.lowerings.graph.rewrite import as_matrix, later
from inductor_ext.settings import Settings
from inductor_ext.templates.problem import (
    DTYPE_BITS,
    Epilogue,
    EpilogueInput,
    GemmProblem,
    Operand,
    Operation,
    Prologue,
)

if TYPE_CHECKING:
    import torch
    from torch import fx

__all__ = ["find", "tidy"]

MOST_PARTS = 8
"""Limit on the weights of one launch: every tile selects its weight among them."""

FEW_ROWS = 64
"""Up to this M a matmul is bound by reading B."""

X = sympy.Dummy("x", real=True)
"""The variable of formulas of one variable."""


def find(graph: fx.Graph, settings: Settings, dequantized: Sequence[Fusion] = ()) -> list[Fusion]:
    """Return the fusions that a graph offers. Cleans the graph with `tidy` first.

    Fusions with a norm precede the same ones without it. Of fusions that share a node at most one
    can be applied; any selection that respects this can be applied together.

    Args:
        graph: after Inductor's own passes.
        settings: which patterns to match.
        dequantized: matmuls with a B that is dequantized in the graph, with their scales, from
            `match_dequantized`. Those with large M are also matched as matmuls of the dequantized
            tensor; with small M it is far slower to write that tensor and read it again.
    """
    tidy(graph)
    few = {node for case in dequantized if case.problem.m <= FEW_ROWS for node in case.nodes}
    found = _Search(graph, without=few).find(settings, ())
    if dequantized:
        found = [*_Search(graph, dequantized).find(settings, found), *found]
    return found


def tidy(graph: fx.Graph) -> None:
    """Remove dead calls and duplicate views of one tensor.

    A dead call would count as a user. Duplicate views would become separate inputs of a branch, in
    which matmuls that share their input would not be seen to share it.
    """
    for node in reversed(graph.nodes):
        if not node.users and _is_pure(node):
            graph.erase_node(node)
    views: dict[object, fx.Node] = {}
    for node in list(graph.nodes):
        if is_view(node):
            first = views.setdefault((node.target, str(node.args)), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def _is_pure(node: fx.Node) -> bool:
    """Whether a call can be removed or moved among others."""
    import torch

    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem
    return (
        target.namespace in ("aten", "prims")
        and not target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not node.is_impure()
    )


@dataclass(frozen=True)
class _Part:
    """One side of a gate: the gate or the up projection."""

    product: fx.Node
    bias: fx.Node | None = None
    """The vector [N] that is added to the rows of the matmul."""
    begin: int | None = None
    """The first column, if this is half of the columns of the matmul."""
    nodes: frozenset[fx.Node] = frozenset()
    """The nodes from the matmul to this side, without the matmul."""


class _Search:
    def __init__(
        self,
        graph: fx.Graph,
        dequantized: Sequence[Fusion] = (),
        without: Container[fx.Node] = (),
    ) -> None:
        """Collect the matmuls; see `find`.

        Args:
            graph: its nodes must not change while this object is used.
            dequantized: matmuls to fuse instead of the graph's own.
            without: matmuls of the graph that are not to be fused.
        """
        import torch

        aten = torch.ops.aten
        self.order = {node: index for index, node in enumerate(graph.nodes)}
        self.graph = graph
        self.products: dict[fx.Node, Fusion] = {}
        """The matmuls that can be fused, by output: those of the graph, or those passed instead."""
        if dequantized:
            for item in sorted(dequantized, key=lambda x: self.order[x.outputs[0]]):
                if is_closed(item.nodes, item.outputs, item.inputs):
                    self.products[item.outputs[0]] = item
            return
        for node in graph.nodes:
            products = (aten.mm.default, aten.addmm.default, aten._scaled_mm.default)
            if node.target in products and node not in without:
                problem = matmul_nodes.problem_of(node)
                a, b, *rest = matmul_nodes.inputs(node)
                # Only M may be symbolic.
                if problem is not None and all(
                    isinstance(size, int) for size in matmul_nodes.value_of(b).shape
                ):
                    inputs = (a, b, *rest)
                    self.products[node] = Fusion(problem, (node,), (node,), inputs, {"operands": 2})

    def find(self, settings: Settings, others: Sequence[Fusion]) -> list[Fusion]:
        """Return gates, shared inputs, and these and the remaining matmuls with norms.

        Args:
            settings: which patterns to match.
            others: fusions that were found before.
        """
        rounds = numerics.has_exact_pointwise()
        gated = list(self.gated()) if settings.gemm_fuse_gated and not rounds else []
        taken = {node for item in gated for node in item.nodes}
        before = [*others, *gated]
        shared = list(self.shared(before, taken)) if settings.gemm_fuse_shared_input else []
        taken |= {node for item in shared for node in item.nodes}
        found = [*gated, *shared]
        if not settings.gemm_fuse_norm or rounds:
            return found
        single = (product for node, product in self.products.items() if node not in taken)
        normalized = (self.normalized(item) for item in [*found, *single])
        return [*(item for item in normalized if item is not None), *found]

    def ordered(self, nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
        return tuple(sorted(set(nodes), key=self.order.__getitem__))

    # Gates

    def gated(self) -> Iterator[Fusion]:
        """Yield every act(x @ w1 + b1) * (x @ w2 + b2)."""
        import torch

        taken: set[fx.Node] = set()
        for node in self.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
            found = self.gate(node)
            if found is not None and taken.isdisjoint(found.nodes):
                taken.update(found.nodes)
                yield found

    def gate(self, root: fx.Node) -> Fusion | None:
        """Return the gate that ends in the multiplication `root`."""
        leaves: dict[fx.Node, _Part] = {}

        def leaf(node: fx.Node) -> sympy.Expr | None:
            part = self.part(node)
            if part is None:
                return None
            if flat(node) != flat(root):
                raise Unreadable
            leaves[node] = part
            return symbol(node)

        try:
            reader = FormulaReader(root, leaf)
            split = _split(reader.read(root), list(leaves))
        except Unreadable:
            return None
        if split is None:
            return None
        gate, up, activation = split
        one, two = leaves[gate], leaves[up]
        halves = None if one.begin is None or two.begin is None else (one.begin, two.begin)
        parts = list(dict.fromkeys((one.product, two.product)))
        if (one.begin is None) != (two.begin is None):
            return None
        if (halves is None) == (len(parts) == 1) or (halves and one.begin == two.begin):
            return None
        if (one.bias is None) != (two.bias is None) or (halves and one.bias is not two.bias):
            return None
        biases = [part.bias for part in (one, two)[: len(parts)] if part.bias is not None]
        output = _cast_of(root, one.product.meta["val"].dtype)
        between = {node for part in (one, two) for node in part.nodes}
        own = (node for part in parts for node in self.products[part].nodes)
        nodes = self.ordered([*between, *reader.inner, *own, output])
        problem = self.together(parts, halves=halves is not None)
        if problem is None:
            return None
        out = matmul_nodes.dtype_of(output.meta["val"])
        first: Literal["gate", "up"] = "gate" if one.begin == 0 else "up"
        epilogue = Epilogue(
            out=out if out != problem.out else None,
            gated=True,
            activation=activation,
            halves=first if halves else None,
        )
        operation: Operation = problem.operation
        if biases:
            operation = "addmm"
            row = EpilogueInput(problem.out, "row")
            epilogue = dataclasses.replace(epilogue, inputs=(row,), pointwise=1)
        problem = dataclasses.replace(problem, operation=operation, epilogue=epilogue)
        found = self.of_parts(problem, parts, halves)
        options = {**found.options, "ACTIVATION": repr(activation)}
        # The kernel adds these biases, each to its side, and nothing else is added.
        options["operands"] += 2 if biases else 0
        inputs = found.inputs[: len(found.inputs) - len(self.biases(parts))]
        found = dataclasses.replace(
            found, nodes=nodes, outputs=(output,), inputs=(*inputs, *biases), options=options
        )
        return found if is_closed(found.nodes, found.outputs, found.inputs) else None

    def part(self, node: fx.Node) -> _Part | None:
        """Return the matmul, with or without its bias, whose result or half-result a node is."""
        whole = self.whole(node)
        if whole is not None:
            return whole
        half = _half(node)
        if half is None:
            return None
        source, begin, between = half
        views = set(_views(source))
        whole = self.whole(_source(source))
        if whole is None or self.products[whole.product].problem.n != shape(source)[-1]:
            return None
        return dataclasses.replace(whole, begin=begin, nodes=whole.nodes | between | views)

    def whole(self, node: fx.Node) -> _Part | None:
        """Return the matmul, with or without its bias, that a node is."""
        import torch

        if node in self.products:
            biases = _biases(self.products[node])
            if not biases:
                return _Part(node)
            by_row = self.is_biased_by_row(node)
            alone = self.products[node].problem.operation == "addmm"
            return _Part(node, biases[0]) if alone and by_row else None
        if node.target is not torch.ops.aten.add.Tensor or node.kwargs:
            return None
        # An addition written by the model, on a reshaped matmul result.
        operands = node.all_input_nodes
        for added, bias in zip(operands, reversed(operands), strict=True):
            product = _source(added)
            problem = self.products[product].problem if product in self.products else None
            if (
                problem is not None
                and problem.operation == "mm"
                and flat(added)[1] == problem.n
                and shape(bias) == (problem.n,)
                and node.meta["val"].dtype == product.meta["val"].dtype == bias.meta["val"].dtype
            ):
                return _Part(product, bias, nodes=frozenset({node, *_views(added)}))
        return None

    # Shared inputs

    def shared(self, others: Sequence[Fusion], taken: set[fx.Node]) -> Iterator[Fusion]:
        """Yield groups of compatible matmuls with the same operand A."""
        groups: dict[Any, list[fx.Node]] = {}
        for node in self.products:
            # The results share one allocation, so their strides change.
            if node not in taken and not is_read_by_strides(node):
                product = self.products[node]
                a = product.inputs[0]
                groups.setdefault((_source(a), shape(a), _kind(product)), []).append(node)
        found: list[Fusion] = []
        for group in groups.values():
            while group:
                chosen = self.independent(group, [*others, *found])
                group = [node for node in group if node not in chosen]
                fusion = self.side_by_side(chosen)
                if fusion is not None:
                    found.append(fusion)
                    yield fusion

    def independent(self, group: Sequence[fx.Node], fusions: Sequence[Fusion]) -> list[fx.Node]:
        """Return the first matmul of a group and others that can be computed together with it.

        Args:
            group: matmuls in graph order.
            fusions: other fusions that may be applied.
        """
        chosen = [group[0]]
        for node in group[1:]:
            together = [*chosen, node]
            own = {node for one in together for node in self.products[one].nodes}
            if (
                len(together) <= MOST_PARTS
                and not is_written_between(own)
                and not self.cyclic(together, fusions)
            ):
                chosen = together
        return chosen

    def cyclic(self, nodes: Sequence[fx.Node], fusions: Sequence[Fusion]) -> bool:
        """Whether one of the nodes is computed from another if all fusions are applied."""
        whole: dict[fx.Node, set[fx.Node]] = {}
        for fusion in fusions:
            for node in fusion.nodes:
                whole.setdefault(node, set()).update(fusion.nodes)
        spans = [(self.order[fusion.nodes[0]], self.order[fusion.nodes[-1]]) for fusion in fusions]
        # No fusion spans this position.
        begin = self.order[nodes[0]]
        while spanning := [first for first, last in spans if first < begin <= last]:
            begin = min(spanning)
        seen: set[fx.Node] = set()
        pending = [item for node in nodes for item in node.all_input_nodes]
        while pending:
            node = pending.pop()
            if node in seen or self.order[node] < begin:
                continue
            if node in nodes:
                return True
            together = whole.get(node, {node})
            seen.update(together)
            pending.extend(node for one in together for node in one.all_input_nodes)
        return False

    def side_by_side(self, nodes: Sequence[fx.Node]) -> Fusion | None:
        """Return matmuls with the same operand A as one fusion."""
        problem = self.together(nodes, halves=False) if len(nodes) > 1 else None
        if problem is None:
            return None
        found = self.of_parts(problem, nodes)
        moved = later(nodes[0], found.inputs, self.order)
        if not all(node.op != "call_function" or self.movable(node, nodes[0]) for node in moved):
            return None
        return found

    def of_parts(
        self, problem: GemmProblem, nodes: Sequence[fx.Node], halves: tuple[int, int] | None = None
    ) -> Fusion:
        """Return matmuls with the same operand A as one fusion, with all their results as outputs.

        Args:
            problem: of the fusion.
            nodes: the outputs of the matmuls.
            halves: the halves of the weight, if there is only one matmul.
        """
        products = [self.products[node] for node in nodes]
        (first, *_) = products
        # All weights, then all scales, then all zero points.
        given = zip(
            *(product.inputs[1 : product.options["operands"]] for product in products), strict=True
        )
        operands = [node for item in given for node in item]
        views = [
            view
            for item in zip(*(product.views for product in products), strict=True)
            for view in item
        ]
        own = {node for product in products for node in product.nodes}
        return Fusion(
            problem,
            self.ordered(own),
            tuple(nodes),
            (first.inputs[0], *operands, *self.biases(nodes)),
            {**first.options, "operands": 1 + len(operands) * (2 if halves else 1)},
            halves,
            tuple(views),
        )

    def biases(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """Return the biases of matmuls of one kind; for fp8 after A's scale and the scales of the
        weights.
        """
        products = [self.products[node] for node in nodes]
        given = list(zip(*map(_biases, products), strict=True))
        if products[0].problem.operation == "scaled":
            given[0] = given[0][:1]
        return [bias for item in given for bias in item]

    def movable(self, node: fx.Node, place: fx.Node) -> bool:
        """Whether a node can be moved to the position of another."""
        return _is_pure(node) and not is_written_between((node, place))

    def together(self, nodes: Sequence[fx.Node], *, halves: bool) -> GemmProblem | None:
        """Return the problem of matmuls with the same operand A; None if they cannot share a
        kernel.

        Args:
            nodes: matmuls.
            halves: whether there is only one matmul, fused as two halves of its columns.
        """
        first, *others = (self.products[node] for node in nodes)
        a = first.inputs[0]
        for product in others:
            other = product.inputs[0]
            if (
                _source(other) is not _source(a)
                or shape(other) != shape(a)
                or _kind(product) != _kind(first)
            ):
                return None
        alike = [self.products[node].problem for node in nodes]
        parts = tuple(problem.n for problem in alike)
        operand = min((problem.b for problem in alike), key=lambda x: x.alignment)
        if halves:
            parts = (parts[0] // 2,) * 2
            operand = _half_of(operand, alike[0].k, parts[0])
        if min(parts) == 1:
            # With N = 1 the stride between columns is arbitrary, and the kernel would use it.
            return None
        if alike[0].operation == "scaled":
            # The kinds of the scales are in the epilogue. Further inputs must be bias vectors.
            if any(
                len(shape(inp)) != 1 for node in nodes for inp in self.products[node].inputs[4:]
            ):
                return None
        elif (alike[0].operation == "addmm" or self.biases(nodes)) and (
            not all(map(self.is_biased_by_row, nodes))
            or len({problem.epilogue for problem in alike}) > 1
        ):
            return None
        return dataclasses.replace(alike[0], n=sum(parts), b=operand, parts=parts)

    def is_biased_by_row(self, product: fx.Node) -> bool:
        """Whether an unscaled vector [N] is added, by aten.addmm or after the scales."""
        epilogue = self.products[product].problem.epilogue
        biases = _biases(self.products[product])
        return (
            bool(biases)
            and len(shape(biases[0])) == 1
            and [inp.broadcast for inp in epilogue.inputs] == ["row"]
            and epilogue.pointwise == 1
        )

    # Norms

    def normalized(self, fusion: Fusion) -> Fusion | None:
        """Return a fusion extended by the norm of the rows of A, if there is one."""
        import torch

        problem = fusion.problem
        products = [node for node in fusion.nodes if node in self.products]
        if any(
            self.products[node].problem.operation == "addmm" or _biases(self.products[node])
            for node in products
            if not self.is_biased_by_row(node)
        ):
            return None
        views = {view for node in products for view in _views(self.products[node].inputs[0])}
        normalized = _source(fusion.inputs[0])
        norm = norm_of(normalized, problem.k)
        if norm is None:
            return None
        inner = norm.nodes
        own = {*fusion.nodes, *views, *inner}
        # Keep a cast of the input that others read in float32; the kernel has its own.
        own -= {node for node in inner if is_cast(node) and not set(node.users) <= own}
        nodes = self.ordered(own)
        value = norm.x.meta["val"]
        # Under autocast a float32 LayerNorm is rounded to the dtype of the matmul.
        read = {matmul_nodes.value_of(normalized).dtype}
        read |= {torch.float32} if norm.kind == "standardize" else set()
        if value.dtype not in read or not is_contiguous(norm.x):
            return None
        # For halves the call has two weights where `inputs` has one. Biases of a gate are last.
        gate_biases = 2 if problem.epilogue.gated and problem.operation == "addmm" else 0
        operands = fusion.options["operands"] - 1 - gate_biases
        last = 1 + (operands // 2 if fusion.halves else operands)
        rows = matmul_nodes.value_of(fusion.inputs[0]).shape[0]
        prologue, vectors = Prologue(norm.kind, epsilon=norm.epsilon), norm.vectors
        if vectors:
            dtype = matmul_nodes.dtype_of(matmul_nodes.value_of(vectors[0]))
            prologue = dataclasses.replace(prologue, scale_dtype=dtype, vectors=len(vectors))
        if problem.prologue is not None:
            if not _is_read_like(norm, problem, fusion.options.get("ZERO", 0)):
                return None
            prologue = dataclasses.replace(
                problem.prologue, kind="both", vectors=len(vectors), epsilon=norm.epsilon
            )
        found = dataclasses.replace(
            fusion,
            problem=dataclasses.replace(
                problem,
                a=matmul_nodes.operand(as_matrix(value, rows)),
                prologue=prologue,
            ),
            nodes=nodes,
            inputs=(norm.x, *fusion.inputs[1:last], *vectors, *fusion.inputs[last:]),
            options={
                **fusion.options,
                "EPSILON": norm.epsilon,
                "operands": fusion.options["operands"] + len(vectors),
            },
        )
        return found if is_closed(found.nodes, found.outputs, found.inputs) else None


# Node properties


def _biases(product: Fusion) -> tuple[fx.Node, ...]:
    """Return the bias of a matmul, if any; for fp8 the scales of A and B precede it."""
    return product.inputs[product.options["operands"] :]


def _kind(product: Fusion) -> Hashable:
    """Return what matmuls that share a kernel must have in common, besides operand A."""
    operands = product.inputs[1 : product.options["operands"]]
    values = [matmul_nodes.value_of(operand) for operand in operands]
    # A matmul without views has only one operand here, the weight, used as it is.
    values = [view.of(value) for view, value in zip(product.views, values, strict=False)] or values
    problem = product.problem
    # fp8 scales are applied to the accumulators, in the kernel.
    scaled = problem.operation == "scaled"
    scales = (product.inputs[2], problem.epilogue, problem.fast_accumulation) if scaled else ()
    constants = {name: value for name, value in product.options.items() if name != "operands"}
    return (
        (problem.operation, problem.b.dtype, problem.out, problem.prologue),
        (values[0].dtype, values[0].shape[0], *(value.stride() for value in values)),
        tuple(sorted(constants.items())),
        scales,
        len(_biases(product)),
    )


def _views(node: fx.Node) -> Iterator[fx.Node]:
    """Yield a node and its sources as long as they are views."""
    while is_view(node):
        yield node
        node = node.all_input_nodes[0]


def _source(node: fx.Node) -> fx.Node:
    """Return the node behind all views."""
    for view in _views(node):
        node = view.all_input_nodes[0]
    return node


def _half(node: fx.Node) -> tuple[fx.Node, int, set[fx.Node]] | None:
    """Match a node that is half of another along the last dimension.

    Returns:
        The whole; the first index of the half; the nodes in between, including `node`.
    """
    import torch

    aten = torch.ops.aten
    if node.target is operator.getitem:
        split: Any = node.args[0]
        index: Any = node.args[1]
        if split.target not in (aten.split.Tensor, aten.split_with_sizes.default):
            return None
        source, sizes, *axis = split.args
        begin = index * sizes if isinstance(sizes, int) else sum(sizes[:index])
        between = {node, split}
    elif node.target is aten.slice.Tensor and len(node.args) == 4:
        source, *axis, begin, _ = node.args
        between = {node}
    else:
        return None
    size = shape(source)
    if axis not in ([-1], [len(size) - 1]) or 2 * shape(node)[-1] != size[-1]:
        return None
    return (source, begin, between) if begin in (0, size[-1] // 2) else None


def _half_of(operand: Operand, k: int, columns: int) -> Operand:
    """Return half of the columns of an operand, with the alignment that holds for both halves."""
    offset = columns * operand.strides[1]
    half = Operand.of(operand.dtype, (k, columns), operand.strides, offset=offset)
    return dataclasses.replace(half, alignment=min(half.alignment, operand.alignment))


# Formulas


@functools.cache
def _activations() -> Mapping[sympy.Expr, str]:
    """Return the supported gate activations, as formulas of `X`."""
    half = sympy.Rational(1, 2)
    sigmoid = 1 / (1 + sympy.exp(-X))
    formulas = {
        "silu": X * sigmoid,
        "gelu": half * X * (1 + sympy.erf(X * math.sqrt(0.5))),
        "gelu_tanh": half * X * (1 + sympy.tanh(math.sqrt(2 / math.pi) * (X + 0.044715 * X**3))),
        "relu": relu(X),
        "sigmoid": sigmoid,
        "identity": X,
    }
    return {canonical(formula): name for name, formula in formulas.items()}


def _split(formula: sympy.Expr, leaves: Sequence[fx.Node]) -> tuple[fx.Node, fx.Node, str] | None:
    """Return the gate node, the up-projection node, and the activation.

    Args:
        formula: of the symbols of the leaves.
        leaves: the nodes that were read.
    """
    if len(leaves) != 2:
        return None
    for gate, up in (leaves, reversed(leaves)):
        activation, rest = formula.as_independent(symbol(up), as_Add=False)
        if rest == symbol(up):
            name = _activations().get(canonical(activation.xreplace({symbol(gate): X})))
            if name is not None:
                return gate, up, name
    return None


def _is_read_like(norm: Norm, problem: GemmProblem, zero: int) -> bool:
    """Whether a kernel that dequantizes B can also apply a norm.

    It can apply an RMSNorm with a weight in A's dtype. For 4-bit B it reads that weight in words of
    two elements, which must be aligned. For 8-bit B there must be no constant zero point: the
    kernel pads K with it, in A too, and the padding would count among the squares.
    """
    by_words = DTYPE_BITS[problem.b.dtype] == 4
    if norm.kind != "normalize" or (zero and not by_words):
        return False
    for value in map(matmul_nodes.value_of, norm.vectors):
        offset = value.storage_offset()
        if matmul_nodes.dtype_of(value) != problem.a.dtype:
            return False
        if by_words and (not isinstance(offset, int) or offset % 2):
            return False
    return True


def _cast_of(root: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Return the cast of a node to a dtype if it is the only user of the node, else the node."""
    (user, *others) = root.users
    if root.meta["val"].dtype != dtype and not others and is_cast(user):
        return user
    return root
