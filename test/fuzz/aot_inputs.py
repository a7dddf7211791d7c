"""Random calls of artifacts, valid and invalid, from the command line or from a test.

Valid calls are drawn from the signature: values of its symbols within their ranges and constraints,
and tensors of the resulting sizes and strides. Invalid calls are valid ones with one to three
changes: another dtype, rank, size, stride, layout or device, a lazy conjugate or negative, a list
or None for a tensor, another scalar, constant or structure. An oracle (`checks_library.accepts`)
that shares no code with the compiled checks decides which calls are valid. Then

- a valid call gives the eager model's result;
- an invalid one raises `exc.InputMismatchError`, and nothing else happens.

    python -m test.fuzz.aot_inputs --calls N --seed S [--models NAME ...] [--targets]

With `--targets`, the models are compiled for each CPU target that this machine can run.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import platform
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.export import Dim
from torch.utils import _pytree as pytree

import inductor_ext
from inductor_ext import exc
from inductor_ext.cpp_wrapper.build import cpu_isa, cpu_target
from inductor_ext.cpp_wrapper.signature import expression
from inductor_ext.cpp_wrapper.signature.signature import (
    ConstantInput,
    Extent,
    Range,
    Signature,
    SymbolInput,
    TensorInput,
)
from test.support.checks_library import accepts

LARGEST = 12
"""Maximum value of a symbol if its range allows more; a size is some multiple of it."""


class Strict(torch.nn.Module):
    """A model with one input of each kind."""

    def forward(
        self,
        fixed: torch.Tensor,
        rows: torch.Tensor,
        batch: dict[str, list[torch.Tensor]],
        n: int,
        *,
        gated: torch.Tensor,
        k: int = 3,
        mode: str = "sum",
    ) -> dict[str, Any]:
        first, second = batch["ids"]
        if rows.shape[0] % 2:
            raise ValueError("an odd number of rows")
        return {
            "fixed": fixed * k,
            "pairs": rows.view(rows.shape[0] // 2, 2, -1).sum(1),
            "ids": (first.sum() if mode == "sum" else first) + second,
            "first": rows[:n] * n,
            "gated": torch.nn.functional.glu(gated),
            "n": n + 1,
        }


class Strided(torch.nn.Module):
    """A model with non-contiguous tensors, and other dtypes than float32."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 2, 3)
        self.table = torch.nn.Embedding(7, 4)

    def forward(
        self,
        image: torch.Tensor,
        columns: torch.Tensor,
        turned: torch.Tensor,
        z: torch.Tensor,
        ids: torch.Tensor,
        flags: torch.Tensor,
        product: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        return (
            self.conv(image),
            columns * 2 + flags[: columns.shape[1]],
            turned.double().cumsum(0),
            z * 2j,
            self.table(ids),
            product + columns.reshape(-1),
        )


Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Example:
    """A model and the arguments of its export."""

    model: Callable[[], torch.nn.Module]
    call: Callable[[], Call]
    shapes: Callable[[], dict[str, Any]]

    def compile(
        self, folder: pathlib.Path, target: str | None = None
    ) -> tuple[torch.nn.Module, Any]:
        """The eager model and its loaded artifact, for this machine or a named CPU target."""
        torch.manual_seed(0)
        model = self.model().eval()
        args, kwargs = self.call()
        program = torch.export.export(model, args, kwargs, dynamic_shapes=self.shapes())
        path = inductor_ext.aoti_compile_and_package(
            program,
            package_path=folder / "model.pt2",
            cpu_targets=None if target is None else [target],
        )
        return model, inductor_ext.load(str(path))


def strict_call() -> Call:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.arange(5), torch.arange(11)]
    fixed, rows, gated = (
        torch.randn(size, generator=generator) for size in ((8, 4), (6, 3), (2, 10))
    )
    return (fixed, rows, {"ids": ids}, 4), {"gated": gated}


def strict_shapes() -> dict[str, Any]:
    ids = Dim("ids", min=2, max=40)
    return {
        "fixed": None,
        "rows": {0: Dim.DYNAMIC},
        "batch": {"ids": [{0: ids}, {0: 2 * ids + 1}]},
        "n": Dim.DYNAMIC,
        "gated": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC},
    }


def strided_call() -> Call:
    image = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
    columns, turned = torch.randn(5, 8)[:, ::2], torch.randn(3, 6, dtype=torch.bfloat16).t()
    z, ids = torch.randn(4, dtype=torch.complex64), torch.tensor([[1, 2, 3]])
    flags, product = torch.ones(9, dtype=torch.bool), torch.randn(20)
    return (image, columns, turned, z, ids, flags, product), {}


def strided_shapes() -> dict[str, Any]:
    batch = Dim("batch", min=1, max=9)
    return {
        "image": {0: Dim.DYNAMIC},
        "columns": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC},
        "turned": {1: Dim("turned", min=0, max=20)},
        "z": {0: 2 * batch},
        "ids": {1: Dim.DYNAMIC},
        "flags": {0: Dim.DYNAMIC},
        "product": {0: Dim.DYNAMIC},
    }


EXAMPLES = {
    "strict": Example(Strict, strict_call, strict_shapes),
    "strided": Example(Strided, strided_call, strided_shapes),
}


# --- right calls ------------------------------------------------------------------------------


def right_leaves(signature: Signature, generator: random.Random) -> list[Any]:
    """The flat arguments of a call that a signature allows."""
    while True:
        values = {name: _drawn(limits, generator) for name, limits in signature.symbols.items()}
        try:
            if all(_evaluated(constraint, values) for constraint in signature.constraints):
                break
        except ZeroDivisionError:
            continue
    leaves: list[Any] = []
    for inp in signature.inputs:
        if isinstance(inp, ConstantInput):
            leaves.append(inp.value)
        elif isinstance(inp, SymbolInput):
            leaves.append(_evaluated(inp.symbol, values))
        else:
            sizes = [_evaluated(size, values) for size in inp.shape]
            strides = [_evaluated(stride, values) for stride in inp.stride]
            leaves.append(_filled(sizes, strides, getattr(torch, inp.dtype), generator))
    return leaves


def _drawn(limits: Range, generator: random.Random) -> int:
    low = limits.min if limits.min is not None else 0
    high = low + LARGEST if limits.max is None else min(limits.max, low + LARGEST)
    return generator.randint(low, high)


def _evaluated(extent: Extent, values: dict[str, int]) -> int:
    if isinstance(extent, int):
        return extent
    return expression.evaluate(expression.parse(extent), values)


def _filled(
    sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype, generator: random.Random
) -> torch.Tensor:
    last = sum(max(size - 1, 0) * stride for size, stride in zip(sizes, strides, strict=True))
    seeds = torch.Generator().manual_seed(generator.randrange(1 << 30))
    if dtype.is_floating_point or dtype.is_complex:
        storage = torch.randn(last + 1, generator=seeds, dtype=torch.float32).to(dtype)
    else:
        storage = torch.randint(0, 2, (last + 1,), generator=seeds).to(dtype)
    return storage.as_strided(tuple(sizes), tuple(strides))


# --- wrong calls ------------------------------------------------------------------------------


def changed(value: Any, generator: random.Random) -> Any:
    """A leaf like `value` that the artifact usually rejects."""
    if not isinstance(value, torch.Tensor):
        others: list[Any] = [7, -1, 0, 2.5, "other", None, torch.tensor(2), [1]]
        if isinstance(value, int):
            others += [value + 1, value - 1] * 3
        return generator.choice(others)
    sizes, strides, dtype = list(value.shape), list(value.stride()), value.dtype
    kind = generator.randrange(11)
    if kind < 3 and sizes:
        where = generator.randrange(len(sizes))
        sizes[where] = max(0, sizes[where] + generator.choice([-2, -1, 1, 2, 7]))
        if kind < 2:
            # With the strides of such a size.
            order = sorted(range(len(sizes)), key=lambda d: (strides[d], -d))
            step = min(strides)
            for dimension in order:
                strides[dimension] = step
                step *= max(sizes[dimension], 1)
        return _filled(sizes, strides, dtype, generator)
    if kind == 3 and sizes:
        where = generator.randrange(len(sizes))
        strides[where] = max(0, strides[where] + generator.choice([-1, 1, 3]))
        return _filled(sizes, strides, dtype, generator)
    if kind == 4:
        others = [torch.float64, torch.float16, torch.int8, torch.int32, torch.bool, torch.float32]
        return _filled(sizes, strides, generator.choice(others), generator)
    if kind == 5:
        return value.unsqueeze(0) if generator.random() < 0.5 else value.reshape(-1)
    if kind == 6 and len(sizes) > 1:
        return value.transpose(0, -1)
    if kind == 7:
        return generator.choice([None, [1.0], 3, value.tolist(), value.to("meta")])
    if kind == 8:
        return value.to_sparse() if len(sizes) and dtype != torch.bool else None
    if kind == 9:
        return value.conj() if dtype.is_complex else _lazy_negative(value)
    return value.clone()


def _lazy_negative(value: torch.Tensor) -> torch.Tensor:
    """Complex, with the same sizes and strides; unchanged if torch has no complex dtype for it."""
    parts = {torch.float16: torch.complex32, torch.float32: torch.complex64}
    if value.dtype not in parts:
        return value
    base = torch.ones(value.untyped_storage().nbytes() + 2, dtype=parts[value.dtype])
    return base.conj().imag.as_strided(value.shape, value.stride(), 1)


def restructured(call: Call, generator: random.Random) -> Call:
    """A call of another structure."""
    args, kwargs = call
    kind = generator.randrange(5)
    if kind == 0:
        return args[:-1], kwargs
    if kind == 1:
        return (*args, torch.ones(3)), kwargs
    if kind == 2:
        return args, {**kwargs, "unknown": torch.ones(3)}
    if kind == 3 and kwargs:
        return args, dict(list(kwargs.items())[1:])
    nested = [place for place, value in enumerate(args) if isinstance(value, dict)]
    if not nested:
        return (), {}
    place = generator.choice(nested)
    other = {key: tuple(value) for key, value in args[place].items()}
    return (*args[:place], other, *args[place + 1 :]), kwargs


def is_right(signature: Signature, leaves: Sequence[Any]) -> bool:
    """Whether an artifact accepts arguments that have the right structure."""
    tensors: list[torch.Tensor | None] = []
    for inp, leaf in zip(signature.inputs, leaves, strict=True):
        if isinstance(inp, ConstantInput):
            if type(leaf) is not type(inp.value) or leaf != inp.value:
                return False
        elif isinstance(inp, TensorInput):
            if not isinstance(leaf, torch.Tensor):
                return False
            tensors.append(leaf)
        elif type(leaf) is not int:
            return False
        else:
            tensors.append(torch.tensor(leaf))
    return accepts(signature, tensors)


# --- the run ----------------------------------------------------------------------------------


@dataclasses.dataclass
class Tally:
    """The results of the calls."""

    right: int = 0
    wrong: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)


def run(model: torch.nn.Module, loaded: Any, calls: int, seed: int) -> Tally:
    """Call an artifact `calls` times.

    Args:
        model: in eager mode.
        loaded: its artifact, as inductor_ext.load returns it.
    """
    signature: Signature = loaded.signature
    spec = pytree.treespec_loads(signature.in_spec)
    tally = Tally()
    for number in range(calls):
        generator = random.Random(seed * 1_000_003 + number)
        leaves = right_leaves(signature, generator)
        changes = generator.choice([0, 0, 1, 1, 1, 2, 3])
        for place in generator.sample(range(len(leaves)), changes):
            leaves[place] = changed(leaves[place], generator)
        right = is_right(signature, leaves)
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        if generator.random() < 0.1:
            right = False
            args, kwargs = restructured((args, kwargs), generator)
        tally.right, tally.wrong = tally.right + right, tally.wrong + (not right)
        problem = _problem(model, loaded, (args, kwargs), right)
        if problem:
            tally.failures.append(f"seed {seed}, call {number}: {problem}\n{_shown(leaves)}")
    return tally


def _problem(model: torch.nn.Module, loaded: Any, call: Call, right: bool) -> str:
    args, kwargs = call
    try:
        result = loaded(*args, **kwargs)
    except exc.InputMismatchError as error:
        return f"refused: {error}" if right else ""
    except Exception as error:
        return f"{type(error).__name__} of {'a right' if right else 'a wrong'} call: {error}"
    if not right:
        return "a wrong call has run"
    try:
        torch.testing.assert_close(result, model(*args, **kwargs), equal_nan=True)
    except AssertionError as error:
        return f"other numbers: {error}"
    return ""


def list_targets() -> list[str | None]:
    """The CPU targets that this machine can run."""
    return [
        level
        for level in cpu_target.SIMD_LENGTHS
        if cpu_target.machine_of(level) == platform.machine()
        and not cpu_isa.missing(cpu_isa.features_of(level))
    ]


def _shown(leaves: Sequence[Any]) -> str:
    return "\n".join(
        f"  {leaf.dtype} {tuple(leaf.shape)} {leaf.layout} {leaf.device}"
        f" {leaf.stride() if leaf.layout == torch.strided else ''}"
        f"{' negative' * leaf.is_neg()}{' conjugate' * leaf.is_conj()}"
        if isinstance(leaf, torch.Tensor)
        else f"  {leaf!r}"
        for leaf in leaves
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 if a case fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--calls", type=int, default=1000, help="of all models together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", nargs="+", choices=sorted(EXAMPLES), default=sorted(EXAMPLES))
    parser.add_argument("--targets", action="store_true", help="compile for named CPU targets")
    options = parser.parse_args(arguments)
    failures: list[str] = []
    targets = list_targets() if options.targets else [None]
    runs = [(name, target) for name in options.models for target in targets]
    for name, target in runs:
        with tempfile.TemporaryDirectory() as folder:
            model, loaded = EXAMPLES[name].compile(pathlib.Path(folder), target)
            tally = run(model, loaded, options.calls // len(runs), options.seed)
        print(f"{name}{f' for {target}' if target else ''}: ", end="")
        print(f"{tally.right} right and {tally.wrong} wrong calls, {len(tally.failures)} failures")
        failures += tally.failures
    print("\n".join(failures[:10]))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
