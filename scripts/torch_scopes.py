"""The objects of a torch package, and the names that its modules and classes bind.

`torch_names` resolves dotted paths by these.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(eq=False)
class Module:
    """A module, as an object that a path leads to."""

    name: str
    file: Path
    scope: Scope = field(repr=False)


@dataclass(eq=False)
class Class:
    """A class statement."""

    module: Module = field(repr=False)
    node: ast.ClassDef


@dataclass(eq=False)
class Function:
    """A function or method."""

    module: Module = field(repr=False)
    node: ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(eq=False)
class Value:
    """A variable, a field or an instance attribute."""

    module: Module = field(repr=False)
    value: ast.expr | None
    annotation: ast.expr | None = None


@dataclass(eq=False)
class Builtin:
    """An attribute of a Python builtin: of functions, of `object`, of a `str`."""

    name: str


@dataclass(eq=False)
class Operator:
    """An operator `torch.ops.aten.<name>`, with its schemas."""

    schemas: tuple[str, ...]


Object = Module | Class | Function | Value | Builtin | Operator


@dataclass(eq=False)
class Scope:
    """The names of a module or class: definitions and imports, with `TYPE_CHECKING` ones apart."""

    names: dict[str, list[ast.stmt | Value | str]] = field(default_factory=dict)
    typing_names: dict[str, list[ast.stmt | Value | str]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    dynamic: bool = False


def collect_names(
    module: Module, body: Iterable[ast.stmt], scope: Scope, typing: bool = False
) -> None:
    """Enter the names that statements bind into a scope, also inside conditions."""
    names = scope.typing_names if typing else scope.names
    for node in body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            names.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                target = alias.name if alias.asname else alias.name.split(".")[0]
                names.setdefault(alias.asname or target, []).append(target)
        elif isinstance(node, ast.ImportFrom):
            origin = _resolve_origin(module, node)
            for alias in node.names:
                if alias.name == "*":
                    scope.stars.append(origin)
                else:
                    target = f"{origin}.{alias.name}"
                    names.setdefault(alias.asname or alias.name, []).append(target)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            annotation = node.annotation if isinstance(node, ast.AnnAssign) else None
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        value = node.value if name is target else None
                        names.setdefault(name.id, []).append(Value(module, value, annotation))
        elif isinstance(node, ast.If):
            checking = ast.unparse(node.test).endswith("TYPE_CHECKING")
            collect_names(module, node.body, scope, typing or checking)
            collect_names(module, node.orelse, scope, typing)
        elif not isinstance(node, ast.Expr):
            for part in ("body", "orelse", "finalbody"):
                collect_names(module, getattr(node, part, ()), scope, typing)
            for handler in getattr(node, "handlers", ()):
                collect_names(module, handler.body, scope, typing)


def collect_attributes(
    module: Module, method: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope
) -> None:
    """Enter the attributes that a method assigns to its instance."""
    self_name = method.args.args[0].arg
    parameters = {arg.arg: arg.annotation for arg in [*method.args.args, *method.args.kwonlyargs]}
    for node in ast.walk(method):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            annotation = node.annotation if isinstance(node, ast.AnnAssign) else None
            if annotation is None and isinstance(node.value, ast.Name):
                annotation = parameters.get(node.value.id)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for element in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if (
                        isinstance(element, ast.Attribute)
                        and ast.unparse(element.value) == self_name
                    ):
                        value = node.value if element is target else None
                        scope.names.setdefault(element.attr, [Value(module, value, annotation)])


def _resolve_origin(module: Module, node: ast.ImportFrom) -> str:
    """Return the absolute name of the module that is imported from."""
    if not node.level:
        return node.module or ""
    package = module.name.split(".")
    up = node.level - ("__init__" in module.file.name)
    base = package[: len(package) - up] if up else package
    return ".".join([*base, *([node.module] if node.module else [])])
