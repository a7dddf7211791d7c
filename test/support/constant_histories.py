"""Random histories of updates and swaps of constants, with eager modules as the oracle.

A `Subject` is a loaded model, driven from Python (`PythonSubject`) or through torch's C++ runner
and the C interface (`RunnerSubject`). The `Oracle` has one eager module for each set of constants.
"""

from __future__ import annotations

import copy
import ctypes
import pathlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

import inductor_ext
from test.support.aot_util import Artifact, clone

Values = Mapping[str, torch.Tensor]


class State(nn.Module):
    """Parameters, an expanded buffer, and buffers that a call mutates."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 16), requires_grad=False)
        self.b = nn.Parameter(torch.randn(16), requires_grad=False)
        self.c = nn.Parameter(torch.randn(16), requires_grad=False)
        self.register_buffer("rows", torch.randn(1, 16).expand(2, 16))
        self.register_buffer("calls", torch.zeros(16))
        self.register_buffer("cache", torch.zeros(3, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        y = x @ self.a * self.b + self.c * self.rows
        self.cache[1].copy_(y[0])
        return y + self.calls + self.cache.sum(0)


class Folded(nn.Module):
    """Parameters of which the main graph uses only what is folded, and a buffer that it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("kept", torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight.t().relu() + self.bias) + self.kept


class Subject(Protocol):
    """What a history does with a loaded model."""

    def update(self, values: Values, *, inactive: bool, managed: bool) -> None: ...

    def swap(self) -> None: ...

    def free(self) -> None: ...

    def fold(self, inactive: bool) -> None: ...

    def constants(self, inactive: bool) -> Values: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class PythonSubject:
    """A model loaded by `inductor_ext.load`."""

    def __init__(self, artifact: Artifact) -> None:
        self._model = inductor_ext.load(artifact.path)

    def update(self, values: Values, *, inactive: bool, managed: bool) -> None:
        if managed and not inactive:
            self._model.load_constants(values, check_full_update=False, user_managed=True)
        elif managed:
            self._model._update(values, True, False, True, False)
        else:
            self._model.update_constants(values, inactive=inactive)

    def swap(self) -> None:
        self._model.swap_constants()

    def free(self) -> None:
        self._model.free_inactive_constants()

    def fold(self, inactive: bool) -> None:
        self._model.fold_constants(inactive=inactive)

    def constants(self, inactive: bool) -> Values:
        return self._model.constants(inactive=inactive)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._model(x)
        return result


class RunnerSubject:
    """A model run by torch's C++ runner, and folded by the C interface."""

    def __init__(self, artifact: Artifact, folder: pathlib.Path) -> None:
        self._runner = artifact.runner(folder)
        (library,) = folder.rglob("*.so")
        self._library = ctypes.CDLL(str(library))
        self._library.inductor_ext_quiet(1)
        self._library.inductor_ext_last_container.restype = ctypes.c_void_p
        self._container = ctypes.c_void_p(self._library.inductor_ext_last_container())
        fqns = self._runner.get_constant_names_to_original_fqns()
        self._names = {fqn: name for name, fqn in fqns.items()}

    def update(self, values: Values, *, inactive: bool, managed: bool) -> None:
        named = {self._names[fqn]: value for fqn, value in values.items()}
        self._runner.update_constant_buffer(named, inactive, False, managed)

    def swap(self) -> None:
        self._runner.swap_constant_buffer()

    def free(self) -> None:
        self._runner.free_inactive_constant_buffer()

    def fold(self, inactive: bool) -> None:
        run = self._library.AOTInductorModelContainerRunConstantFolding
        assert run(self._container, ctypes.c_bool(inactive), None, None) == 0

    def constants(self, inactive: bool) -> Values:
        constants: Values = self._runner.extract_constants_map(inactive)
        return constants

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        (result,) = self._runner.run([x])
        assert isinstance(result, torch.Tensor)
        return result


class Oracle:
    """What the sets of constants should be: an eager module each, None for an empty set."""

    def __init__(self, eager: nn.Module) -> None:
        self.active: nn.Module = clone(eager)
        self.inactive: nn.Module | None = None
        self._pending = False
        self._managed: dict[int, torch.Tensor] = {}

    def _copy_active(self) -> nn.Module:
        # A tensor of the user is in both sets.
        return copy.deepcopy(self.active, dict(self._managed))

    def update(self, values: Values, *, inactive: bool, managed: bool) -> None:
        if inactive and not self._pending:
            self.inactive, self._pending = self._copy_active(), True
        module = self.inactive if inactive else self.active
        assert module is not None
        for name, value in values.items():
            tensor = value if managed else value.clone()
            if name in module._parameters:
                tensor = nn.Parameter(tensor, requires_grad=False)
            setattr(module, name, tensor)
            if managed:
                self._managed[id(tensor)] = tensor

    def swap(self) -> None:
        self.inactive = self.inactive or self._copy_active()
        self.active, self.inactive, self._pending = self.inactive, self.active, False

    def free(self) -> None:
        self.inactive, self._pending = None, False


def state_of(module: nn.Module | None) -> dict[str, torch.Tensor]:
    if module is None:
        return {}
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


class History:
    """A random history of operations on a subject and an oracle, which are compared throughout."""

    def __init__(
        self,
        subject: Subject,
        eager: nn.Module,
        x: torch.Tensor,
        *,
        manageable: Sequence[str],
        exchangeable: tuple[str, str] | None,
        seed: int,
    ) -> None:
        """
        Args:
            subject: a model that was just loaded.
            eager: the module that it was compiled from.
            x: an input.
            manageable: constants that may be user-managed, because none is folded.
            exchangeable: two constants of equal shape; None if there are none.
            seed: of the history.
        """
        self._subject, self._x = subject, x
        self._oracle = Oracle(eager)
        self._random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._shapes = {name: tensor.shape for name, tensor in state_of(eager).items()}
        self._expanded = {name for name, t in state_of(eager).items() if 0 in t.stride()}
        self._manageable, self._exchangeable = manageable, exchangeable
        # Reading the constants could hide that the subject relies on nobody writing to them.
        self._reads = self._random.random() < 0.5
        self._managed: list[torch.Tensor] = []
        self.log: list[str] = []

    def run(self, count: int) -> None:
        """Run `count` operations and compare after each of them."""
        operations: list[tuple[int, Callable[[], None]]] = [
            (4, lambda: self._update(inactive=True)),
            (2, lambda: self._update(inactive=False)),
            (1, lambda: self._update(inactive=True, full=True)),
            (4, self._swap),
            (1, self._free),
            (1, lambda: self._fold(inactive=True)),
            (1, lambda: self._fold(inactive=False)),
            (1, self._manage),
            (1, self._write),
            (2, self._fail),
            (1, self._exchange),
            (2, self._call),
        ]
        weights = [weight for weight, _ in operations]
        for _, operation in self._random.choices(operations, weights, k=count):
            operation()
            if self._reads:
                self._compare()
        self._call()
        self._compare()

    def _fresh(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        values = {}
        for name in names:
            shape = self._shapes[name]
            stored = (1, *shape[1:]) if name in self._expanded else shape
            values[name] = torch.randn(stored, generator=self._generator).expand(shape)
        return values

    def _update(self, *, inactive: bool, full: bool = False) -> None:
        names = sorted(self._shapes)
        chosen = names if full else self._random.sample(names, self._random.randrange(3))
        self.log.append(f"update {chosen} {inactive=}")
        values = self._fresh(chosen)
        self._oracle.update(values, inactive=inactive, managed=False)
        self._subject.update(values, inactive=inactive, managed=False)

    def _swap(self) -> None:
        self.log.append("swap")
        self._oracle.swap()
        self._subject.swap()

    def _free(self) -> None:
        self.log.append("free")
        self._oracle.free()
        self._subject.free()

    def _fold(self, *, inactive: bool) -> None:
        self.log.append(f"fold {inactive=}")
        self._subject.fold(inactive)

    def _manage(self) -> None:
        inactive = self._random.random() < 0.5
        name = self._random.choice(self._manageable)
        self.log.append(f"manage {name} {inactive=}")
        values = self._fresh([name])
        self._managed += values.values()
        self._subject.update(values, inactive=inactive, managed=True)
        self._oracle.update(values, inactive=inactive, managed=True)

    def _write(self) -> None:
        self.log.append("write")
        for tensor in self._managed[-2:]:
            tensor.add_(1)

    def _fail(self) -> None:
        names = sorted(self._shapes)
        good, bad = self._random.sample(names, 2)
        inactive = self._random.random() < 0.7
        self.log.append(f"fail {good} {bad} {inactive=}")
        values = {**self._fresh([good]), bad: torch.ones(7)}
        try:
            self._subject.update(values, inactive=inactive, managed=False)
        except RuntimeError:
            return
        raise AssertionError("a value of another shape was accepted")

    def _exchange(self) -> None:
        """Update two constants with the model's own tensors of each other."""
        if self._exchangeable is None:
            return
        one, other = self._exchangeable
        inactive = self._random.random() < 0.5
        source = self._random.random() < 0.5
        self.log.append(f"exchange {inactive=} {source=}")
        live = self._subject.constants(source)
        if not live:
            return
        module = self._oracle.inactive if source else self._oracle.active
        values = {one: live[other], other: live[one]}
        copies = {one: state_of(module)[other].clone(), other: state_of(module)[one].clone()}
        self._subject.update(values, inactive=inactive, managed=False)
        self._oracle.update(copies, inactive=inactive, managed=False)

    def _call(self) -> None:
        self.log.append("call")
        with torch.no_grad():
            expected = self._oracle.active(self._x)
        torch.testing.assert_close(self._subject(self._x), expected, msg=self._describe)

    def _compare(self) -> None:
        for inactive, module in ((False, self._oracle.active), (True, self._oracle.inactive)):
            expected: Mapping[str, Any] = state_of(module)
            actual = self._subject.constants(inactive)
            assert actual.keys() == expected.keys(), self._describe(f"{inactive=}")
            for name, tensor in expected.items():
                torch.testing.assert_close(actual[name], tensor.data, msg=self._describe)

    def _describe(self, text: str) -> str:
        return "\n".join([text, "after", *self.log])
