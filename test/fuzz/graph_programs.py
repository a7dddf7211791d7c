"""Programs of the graph fuzzer: their text, inputs and buffers, custom operators, and their runs.

A program is the text of a module's `forward`. It names dtypes `f32`, `f16`, `bf16`, `f64` and
`c64`, so that the same text runs in double precision, and calls `cond`, `while_loop` and `scan`,
which are Python control flow in eager mode and PyTorch's operators in compiled code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan as _torch_scan
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from test.fuzz import memory_programs
from test.fuzz.memory_programs import NAMES

_Op = torch.library.custom_op


@_Op("inductor_ext_fuzz::flip_into", mutates_args={"out"})
def _flip_into(x: Tensor, out: Tensor) -> None:
    out.copy_(x.flip(0))


@_Op("inductor_ext_fuzz::flip_first_into", mutates_args={"out"})
def _flip_first_into(out: Tensor, x: Tensor) -> None:
    out.copy_(x.flip(0))


@_Op("inductor_ext_fuzz::exchange", mutates_args={"x", "y"})
def _exchange(x: Tensor, y: Tensor) -> None:
    kept = x.clone()
    x.copy_(y)
    y.copy_(kept)


@_Op("inductor_ext_fuzz::advance", mutates_args={"state"})
def _advance(state: Tensor, x: Tensor) -> Tensor:
    state.copy_(state + x)
    return state * 2


@_Op("inductor_ext_fuzz::negate_all", mutates_args={"xs"})
def _negate_all(xs: list[Tensor]) -> None:
    for x in xs:
        x.copy_(-x)


@_Op("inductor_ext_fuzz::scale_into", mutates_args={"x"})
def _scale_into(x: Tensor, count: int, y: Tensor | None = None) -> None:
    x.copy_(x * count if y is None else x + y * count)


for _operator in (_flip_into, _flip_first_into, _exchange, _negate_all, _scale_into):
    _operator.register_fake(lambda *args, **more: None)
_advance.register_fake(lambda state, x: torch.empty_like(state))


def _call_branch(
    condition: Tensor | bool, yes: Callable[..., Any], no: Callable[..., Any], operands: Any = ()
) -> Any:
    return (yes if bool(condition) else no)(*operands)


def _loop(
    condition: Callable[..., Any], body: Callable[..., Any], carried: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """A loop whose results share no memory with the initial values, as `torch.while_loop`'s."""
    carried = tuple(value.clone() for value in carried)
    while condition(*carried):
        carried = tuple(value.clone() for value in body(*carried))
    return carried


def _scan(
    combine: Callable[..., tuple[Any, Any]],
    init: Any,
    xs: Any,
    *,
    dim: int = 0,
    reverse: bool = False,
) -> tuple[Any, Any]:
    carried, results = init, []
    steps = range(pytree.tree_leaves(xs)[0].shape[dim])
    for step in reversed(steps) if reverse else steps:
        carried, result = combine(
            carried, pytree.tree_map(lambda x, step=step: x.select(dim, step), xs)
        )
        results.append(result)
    if reverse:
        results.reverse()
    stacked = pytree.tree_map(lambda *values: torch.stack(values), *results)
    return pytree.tree_map(torch.clone, carried), stacked


DTYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "c64": torch.complex64,
}
"""Names of dtypes in programs, which stand for float64 and complex128 in double precision."""

_DOUBLES = {name: torch.complex128 if name == "c64" else torch.float64 for name in DTYPES}
_EAGER = {"cond": _call_branch, "while_loop": _loop, "scan": _scan}
_COMPILED = {"cond": torch.cond, "while_loop": torch.while_loop, "scan": _torch_scan}


def namespace(device: str, *, compiled: bool = False, double: bool = False) -> dict[str, Any]:
    """The names that programs use.

    Args:
        device: "cpu" or "cuda".
        compiled: whether control flow is PyTorch's operators.
        double: whether floating-point dtypes are double precision.
    """
    names = {**NAMES, **(_DOUBLES if double else DTYPES), **(_COMPILED if compiled else _EAGER)}
    for name in ("CONSTANT", "KERNEL"):
        names[name] = names[name].to(device, torch.float64 if double else torch.float32)
    return names


def to_double(value: Tensor) -> Tensor:
    """The value in double precision; integers and Booleans as they are."""
    if value.dtype.is_complex:
        return value.to(torch.complex128)
    return value.double() if value.dtype.is_floating_point else value


_EPSILONS = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


def perturb(value: Tensor) -> Tensor:
    """The value with relative changes of about the rounding error of its dtype."""
    if not (value.dtype.is_floating_point or value.dtype.is_complex) or not value.numel():
        return value
    generator = torch.Generator().manual_seed(value.numel())
    sign = torch.randint(0, 2, value.shape, generator=generator).to(value.device) * 2 - 1
    return (value * (1 + sign * _EPSILONS.get(value.dtype, 4e-6))).to(value.dtype)


class RoundingErrors(TorchDispatchMode):
    """Changes each new result of an operator in half precision by about its rounding error."""

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(0)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator and change its result, unless it has the memory of an operand."""
        result = func(*args, **(kwargs or {}))
        operands = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        memory = {operand.untyped_storage().data_ptr() for operand in operands}

        def change(value: Any) -> Any:
            is_half = isinstance(value, Tensor) and value.dtype in _EPSILONS
            if not is_half or value.untyped_storage().data_ptr() in memory:
                return value
            error = torch.rand(value.shape, generator=self._generator).to(value.device) * 2 - 1
            return value.copy_(value.float() * (1 + error * _EPSILONS[value.dtype]))

        return pytree.tree_map(change, result)


@dataclasses.dataclass(frozen=True)
class Input(memory_programs.Input):
    """An argument, buffer or parameter of a program.

    `layout` may also be "channels_last" (4-D), "padded" (rows have other elements in between) or
    "strided" (every second element of the last dimension).
    """

    def make(self, sizes: Mapping[str, int], seed: int) -> Tensor:
        """Equal values on every call, on the CPU."""
        dtype = getattr(torch, self.dtype)
        if self.dtype in ("float32", "int64") and self.layout in ("plain", "transposed", "offset"):
            return super().make(sizes, seed)
        shape = [sizes[d] if d in sizes else int(d) for d in self.shape]
        generator = torch.Generator().manual_seed(seed)
        padding = {"padded": 3, "strided": shape[-1]}.get(self.layout, 0) if shape else 0
        wide = [*shape[:-1], shape[-1] + padding] if shape else shape
        if self.layout == "transposed" and len(wide) > 1:
            wide[-1], wide[-2] = wide[-2], wide[-1]
        value = _draw_values(dtype, wide, generator)
        if self.layout == "channels_last" and len(shape) == 4:
            value = value.contiguous(memory_format=torch.channels_last)
        if self.layout == "transposed" and len(wide) > 1:
            value = value.mT
        if self.layout == "strided" and shape:
            value = value[..., ::2]
        elif padding:
            value = value[..., : shape[-1]]
        return value.detach().requires_grad_() if self.grad else value


def _draw_values(dtype: torch.dtype, shape: list[int], generator: torch.Generator) -> Tensor:
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_floating_point or dtype.is_complex:
        real = torch.randn(shape, generator=generator) / 8
        if dtype.is_complex:
            imaginary = torch.randn(shape, generator=generator) / 8
            return torch.complex(real, imaginary).to(dtype)
        return real.to(dtype)
    info = torch.iinfo(dtype)
    low, high = max(info.min, -1000), min(info.max, 1000)
    if int(torch.randint(0, 2, (), generator=generator)):
        # A narrow range away from 0: padding lanes of a vector show up as a minimum or maximum.
        low, high = (40, 80) if low >= 0 else (-90, -40)
    return torch.randint(low, high + 1, shape, generator=generator).to(dtype)


@dataclasses.dataclass(frozen=True)
class Program(memory_programs.Program):
    """The text of a module's `forward`, its inputs, buffers and parameters."""

    buffers: tuple[Input, ...] = ()
    """Those with `grad` are parameters."""
    device: str = "cpu"

    @property
    def training(self) -> bool:
        """Whether gradients are computed."""
        return any(i.grad for i in (*self.inputs, *self.buffers))

    @property
    def calls(self) -> int:
        """Number of calls of a run."""
        return max(memory_programs.CALLS, len(self.sizes))

    def source(self) -> str:
        """The text of `forward`."""
        body = [line for text in self.lines for line in text.splitlines()]
        body.append(f"return ({''.join(output + ', ' for output in self.outputs)})")
        names = ", ".join(["self", *(i.name for i in self.inputs)])
        return f"def forward({names}):\n" + "".join(f"    {line}\n" for line in body)

    def module(self, *, compiled: bool = False, double: bool = False) -> torch.nn.Module:
        """A new module; `compiled` and `double` as in `namespace`."""
        names = namespace(self.device, compiled=compiled, double=double)
        exec(compile(self.source(), f"<graph {self.seed}>", "exec"), names)
        module = type("Model", (torch.nn.Module,), {"forward": names["forward"]})()
        for index, buffer in enumerate(self.buffers):
            value = self._place(buffer.make(dict(self.sizes[0]), 77 + index), buffer, double)
            if buffer.grad:
                module.register_parameter(buffer.name, torch.nn.Parameter(value.detach()))
            else:
                module.register_buffer(buffer.name, value)
        return module

    def arguments(self, call: int, *, double: bool = False) -> list[Tensor]:
        """New inputs for one call."""
        sizes = dict(self.sizes[call % len(self.sizes)])
        return [
            self._place(i.make(sizes, 1000 * call + k), i, double)
            for k, i in enumerate(self.inputs)
        ]

    def _place(self, value: Tensor, source: Input, double: bool) -> Tensor:
        if not double and self.device == "cpu":
            return value
        plain = value.detach()
        # Only the storage is copied: a copy of the tensor would be dense.
        flat = plain.new_empty(0).set_(plain.untyped_storage()).to(self.device)
        base = flat.new_empty(0).set_(
            flat.untyped_storage(), plain.storage_offset(), plain.shape, plain.stride()
        )
        if double:
            base = to_double(base)
        return base.requires_grad_() if source.grad else base


@dataclasses.dataclass
class Run:
    """What a user observes of a program's calls."""

    values: dict[str, Tensor | None]
    """Results, mutated inputs, buffers and gradients, by name."""
    aliases: tuple[tuple[str, str], ...]
    """Pairs of tensors of which at least one is a result and that share memory."""
    has_module: bool = True
    """Whether buffers and parameters are observed."""


def _find_aliases(named: Sequence[tuple[str, Tensor]]) -> list[tuple[str, str]]:
    owners: dict[int, list[str]] = {}
    pairs = []
    for name, value in named:
        if value.numel() == 0:
            continue
        names = owners.setdefault(value.untyped_storage().data_ptr(), [])
        if "result" in name:
            pairs += [(other, name) for other in names]
        names.append(name)
    return pairs


class Observer:
    """Collects what a user observes of one program, call by call."""

    def __init__(self, program: Program, module: torch.nn.Module | None) -> None:
        self.program = program
        self.module = module
        self.values: dict[str, Tensor | None] = {}
        self.aliases: list[tuple[str, str]] = []
        self.kept: list[tuple[list[Tensor], Sequence[Tensor]]] = []

    def loss(self, results: Sequence[Tensor]) -> Tensor | None:
        """A scalar to differentiate, if any result requires a gradient."""
        real = [value for value in results if value.requires_grad]
        return sum((v.abs().float() * 0.1).sum() for v in real) if real else None  # type: ignore[return-value]

    def add(self, call: int, arguments: list[Tensor], results: Sequence[Tensor]) -> None:
        """Record a call; after it, arguments and results may change only by later calls."""
        self.kept.append((arguments, results))
        named = [(f"input {i.name}", v) for i, v in zip(self.program.inputs, arguments)]  # noqa: B905
        if self.module is not None:
            named += [(f"buffer {n}", b) for n, b in self.module.named_buffers()]
        named += [(f"result {k}", value) for k, value in enumerate(results)]
        self.aliases += [(f"call {call}: {a}", b) for a, b in _find_aliases(named)]
        for index, value in enumerate(results):
            self.values[f"call {call}: result {index} at once"] = value.detach().clone()

    def finish(self) -> Run:
        """The run, read after all calls."""
        for call, (arguments, results) in enumerate(self.kept):
            for index, value in enumerate(results):
                self.values[f"call {call}: result {index}"] = value.detach().clone()
            for i, value in zip(self.program.inputs, arguments, strict=True):
                self.values[f"call {call}: input {i.name}"] = value.detach().clone()
                if i.grad:
                    self.values[f"call {call}: gradient {i.name}"] = value.grad
        if self.module is not None:
            for name, value in self.module.named_buffers():
                self.values[f"buffer {name}"] = value.detach().clone()
            for name, value in self.module.named_parameters():
                self.values[f"gradient {name}"] = value.grad
        return Run(self.values, tuple(self.aliases), self.module is not None)


def run_eager(program: Program, *, double: bool = False, perturbed: bool = False) -> Run:
    """Run a program in eager mode."""
    module = program.module(double=double)
    observer = Observer(program, module)
    if perturbed:
        with torch.no_grad():
            for value in (*module.buffers(), *module.parameters()):
                value.copy_(perturb(value))
    for call in range(program.calls):
        arguments = program.arguments(call, double=double)
        if perturbed:
            with torch.no_grad():
                for value in arguments:
                    value.copy_(perturb(value))
        with torch.set_grad_enabled(program.training):
            results = module(*arguments)
            loss = observer.loss(results)
        if loss is not None:
            loss.backward()
        observer.add(call, arguments, results)
    return observer.finish()
