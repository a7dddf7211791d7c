"""The hook registry: declarations match the installed torch, and mismatches are named."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inductor_ext import _compat, exc
from inductor_ext.hooks import hook_table, registry
from inductor_ext.hooks.hook_table import HOOKS
from inductor_ext.hooks.registry import Hook
from inductor_ext.hooks.torch_source import TorchSource

TORCH = Path(importlib.util.find_spec("torch").origin).parent  # type: ignore[union-attr,arg-type]
CHECKOUT = Path(__file__).parents[2]


def test_every_hook_fits_the_installed_torch() -> None:
    misfits = registry.check(TORCH, _compat.torch_version(), HOOKS)
    assert [f"{misfit.hook.name}: {misfit.why}" for misfit in misfits] == []


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.name)
def test_the_source_and_the_import_agree(hook: Hook) -> None:
    """The check reads from files what importing torch returns."""
    if not registry.is_applicable(hook, _compat.torch_version()):
        pytest.skip("does not concern this torch")
    source = TorchSource(TORCH)
    target = next(target for target in hook.targets if source.find(target))
    definition = source.find(target)
    assert definition is not None
    value = _imported(target)
    parameters = definition.parameters()
    if parameters is not None and inspect.isfunction(value):
        # A dispatcher has the signature of the function that it replaces. After an activation, a
        # function replaces a class method.
        names = [name.lstrip("*") for name in parameters if name != "cls"]
        imported = [name for name in inspect.signature(value).parameters if name != "cls"]
        # The decorator of decompositions adds the parameter `out`.
        assert imported in (names, [*names, "out"])


def _imported(path: str) -> Any:
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            # An attribute of instances is not an attribute of the class.
            value = getattr(value, name, None)
        return value
    raise AssertionError(path)


def test_names_are_unique_and_owners_exist() -> None:
    names = [hook.name for hook in HOOKS]
    assert len(set(names)) == len(names)
    for hook in HOOKS:
        assert importlib.util.find_spec(f"inductor_ext.{hook.owner}") is not None, hook.owner
        assert hook.kind != "replaced" or "hooks" in hook.owner.split("."), hook.name


def test_the_page_has_the_hook_table() -> None:
    """`python -m inductor_ext.hooks.hook_table docs/switch.md` updates it."""
    page = (CHECKOUT / "docs" / "switch.md").read_text(encoding="utf-8")
    assert page == hook_table.update_page(page)


@pytest.fixture
def fake_torch(tmp_path: Path) -> Callable[[dict[str, str]], TorchSource]:
    """Sources of a small imitation of torch, by module."""

    def write(files: dict[str, str]) -> TorchSource:
        for name, text in {"torch": "", **files}.items():
            folder = tmp_path.joinpath(*name.split("."))
            is_package = any(other.startswith(f"{name}.") for other in files) or name == "torch"
            file = folder / "__init__.py" if is_package else folder.with_suffix(".py")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return TorchSource(tmp_path / "torch")

    return write


MODULE = """
import sys
from torch.other import (
    Base,  # a comment, with a comma
    original as renamed,
)
from . import sibling

VALUE: dict[str, int] = {}

if sys.platform == "linux":
    def guarded(a, /, b=1, *rest, c, **more): ...
else:
    def guarded(a): ...

@decorated(
    "x"
)
class Child(Base, sibling.Other):
    text = '''
at the margin
'''

    field: int

    def method(
        self,
        first,
    ) -> None:
        self.made, self.pair = 1, 2
        self.annotated: int = 3

def function(x,
             y):
    return call(
        renamed=renamed,
        other=x,
    )
"""


def test_definitions_are_found(fake_torch: Callable[[dict[str, str]], TorchSource]) -> None:
    source = fake_torch(
        {
            "torch.pack": "",
            "torch.pack.module": MODULE,
            "torch.pack.sibling": "class Other:\n    def inherited_too(self, z): ...\n",
            "torch.other": "class Base:\n    def inherited(self, y): ...\ndef original(q): ...\n",
        }
    )

    def parameters(name: str) -> tuple[str, ...] | None:
        definition = source.find(f"torch.pack.module.{name}")
        assert definition is not None, name
        return definition.parameters()

    assert parameters("guarded") == ("a", "b", "*rest", "c", "**more")
    assert parameters("function") == ("x", "y")
    assert parameters("renamed") == ("q",)
    assert parameters("Child.method") == ("self", "first")
    assert parameters("Child.inherited") == ("self", "y")
    assert parameters("Child.inherited_too") == ("self", "z")
    for name in ("VALUE", "Child", "Child.field", "Child.text", "Child.made", "Child.pair"):
        assert parameters(name) is None
    assert parameters("Child.annotated") is None
    for absent in ("absent", "Child.absent", "VALUE.absent", "function.absent"):
        assert source.find(f"torch.pack.module.{absent}") is None
    assert source.find("torch.absent.name") is None
    assert source.find("torch.pack.module") is not None


HOOK = Hook(
    "h",
    "replaced",
    ("torch.m.f", "torch.m.g"),
    "hooks.scope",
    "why",
    ("x",),
    ("torch.m.A|torch.m.B",),
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def f(x): ...\nA = 1", ""),
        ("def g(y, *, x): ...\nclass B: ...", ""),
        ("A = 1", "torch.m.f or torch.m.g does not exist"),
        ("def f(y): ...\nA = 1", "torch.m.f has no parameter x; it has y"),
        ("def f(x): ...", "torch.m.A or torch.m.B does not exist"),
    ],
)
def test_mismatches_are_named(
    fake_torch: Callable[[dict[str, str]], TorchSource], text: str, why: str
) -> None:
    folder = fake_torch({"torch.m": text}).folder
    assert [misfit.why for misfit in registry.check(folder, "2.13.0", [HOOK])] == [why][: bool(why)]


@pytest.mark.parametrize(
    ("since", "until", "versions"),
    [
        ("", "", ["2.11.0", "2.12.1", "2.14.1+cu130"]),
        ("2.12", "", ["2.12.1", "2.14.1+cu130"]),
        ("", "2.14", ["2.11.0", "2.12.1"]),
    ],
)
def test_hooks_state_their_torch_releases(since: str, until: str, versions: list[str]) -> None:
    hook = Hook("h", "read", (), "hooks.scope", "why", since=since, until=until)
    tried = ["2.11.0", "2.12.1", "2.14.1+cu130"]
    assert [version for version in tried if registry.is_applicable(hook, version)] == versions


REPLACED = Hook("h", "replaced", ("fake_hook_target.f",), "hooks.scope", "why", ("x",))


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module with a function `f(x)`, which `REPLACED` replaces."""
    module = types.ModuleType("fake_hook_target")
    module.f = lambda x: x + 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_a_dispatcher_is_installed_once(target: types.ModuleType) -> None:
    results = []

    def make(inductor: Callable[[int], int]) -> Callable[[int], int]:
        results.append(inductor)
        return lambda x: inductor(x) * 10

    registry.replace(REPLACED, make)
    registry.install(
        [REPLACED, dataclasses.replace(REPLACED, name="other", kind="read")], {"h": make}
    )
    assert target.f(1) == 20
    assert len(results) == 1


@pytest.mark.parametrize(
    ("function", "why"),
    [(None, "fake_hook_target.f does not exist"), (lambda y: y, "has no parameter x")],
)
def test_mismatched_targets_are_refused(target: types.ModuleType, function: Any, why: str) -> None:
    del target.f
    if function is not None:
        target.f = function  # type: ignore[attr-defined]
    with pytest.raises(exc.HookError, match=why):
        registry.replace(REPLACED, lambda inductor: inductor)
    assert getattr(target, "f", None) is function
