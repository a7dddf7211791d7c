"""Collects the torch names that a package uses from its source.

A use is a dotted path: an imported name; an attribute chain on an import (`ir.Switch`), on a
variable that is assigned one (`details = codecache.FxGraphHashDetails; details.__init__`), on an
argument annotated with a torch class, or on `self` in a subclass of one; a name in a string
(`getattr`, `patch.object`, `"torch._inductor.compile_fx.compile_fx"`); a key of a torch config.

A use is weak if it is a guess, such as an attribute after `isinstance`, or a string that could be a
config key. It is a use only if the older torch has that name.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

CONFIGS = (
    "torch._inductor.config",
    "torch._functorch.config",
    "torch._dynamo.config",
    "torch.compiler.config",
    "torch.fx.experimental._config",
)

_PATH = re.compile(r"torch(\.\w+)+(:\w+(\.\w+)*)?")
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_BY_NAME = ("getattr", "hasattr", "setattr", "delattr")
_REPLACING = ("setattr", "delattr", "patch.object")
_MISSING_NAME = {"AttributeError", "ImportError", "ModuleNotFoundError", "Exception"}


@dataclass
class Use:
    """All uses of one name."""

    path: str
    places: list[str] = field(default_factory=list)
    is_guarded: bool = True
    """Whether all uses check that the name exists."""
    is_weak: bool = True
    """Whether all uses are guesses."""
    is_constructed: bool = False
    """Whether a use calls the name, or derives a class from it."""
    is_patched: bool = False
    """Whether a use replaces the name."""


def find_uses(package: Path) -> dict[str, Use]:
    """Return the uses in all Python files below a package's folder, by path."""
    uses: dict[str, Use] = {}
    for file in sorted(package.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        _UseCollector(uses, file.relative_to(package.parent).as_posix()).visit(tree)
    return uses


class _UseCollector(ast.NodeVisitor):
    """Collects the uses in one file.

    A local name has several paths if imports depend on a condition.
    """

    def __init__(self, uses: dict[str, Use], file: str) -> None:
        self.uses = uses
        self.file = file
        self.names: dict[str, tuple[str, ...]] = {}
        """Paths of local names."""
        self.weak_names: dict[str, tuple[str, ...]] = {}
        """Paths of the classes that local names may be instances of."""
        self.guards: set[str] = set()
        """Local names that are assigned the result of `getattr` with a default, or of `hasattr`."""
        self.is_guarded = False
        self.bases: tuple[str, ...] = ()
        """The torch base classes of the class that is being visited."""
        self.own_classes: dict[str, tuple[str, ...]] = {}
        self.texts: dict[str, str] = {}
        """Values of the module's string constants."""

    def _add(self, path: str, node: ast.AST, *, weak: bool = False, **flags: bool) -> None:
        if not path.startswith("torch."):
            return
        use = self.uses.setdefault(path, Use(path))
        place = f"{self.file}:{getattr(node, 'lineno', 0)}"
        if place not in use.places:
            use.places.append(place)
        use.is_guarded &= flags.get("guarded", False) or self.is_guarded
        use.is_weak &= weak
        use.is_constructed |= flags.get("constructed", False)
        use.is_patched |= flags.get("patched", False)

    def _resolve_paths(self, node: ast.AST | None) -> tuple[str, ...]:
        """Return the paths of a name or an attribute chain."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, ())
        if isinstance(node, ast.Attribute):
            return tuple(f"{path}.{node.attr}" for path in self._resolve_paths(node.value))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "super":
            return self.bases
        return ()

    # --- scopes ---------------------------------------------------------------------------------

    def visit_Module(self, node: ast.Module) -> None:
        self._enter_bindings(node.body)
        for item in node.body:
            value = getattr(item, "value", None)
            if isinstance(item, ast.Assign) and isinstance(value, ast.Constant):
                self.texts |= {ast.unparse(target): str(value.value) for target in item.targets}
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        outer = self.names, self.weak_names, self.guards
        for item in getattr(node, "decorator_list", ()):
            self.visit(item)
        self.names, self.weak_names, self.guards = dict(outer[0]), dict(outer[1]), set(outer[2])
        arguments = node.args
        parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        parameters += [arg for arg in (arguments.vararg, arguments.kwarg) if arg]
        self.names |= dict.fromkeys((parameter.arg for parameter in parameters), ())
        self.weak_names |= {
            parameter.arg: self._resolve_annotation(parameter.annotation)
            for parameter in parameters
        }
        if self.bases and parameters:
            self.weak_names[parameters[0].arg] = self.bases
        body = node.body if isinstance(node.body, list) else [ast.Expr(node.body)]
        self._enter_bindings(body)
        self.generic_visit(node)
        self.names, self.weak_names, self.guards = outer

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_Lambda = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self.bases = self.bases, ()
        for base in node.bases:
            paths = self._resolve_paths(base)
            own = self.own_classes.get(base.id, ()) if isinstance(base, ast.Name) else ()
            self.bases += paths + own
            for path in paths:
                self._add(path, base, constructed=True)
        self.own_classes[node.name] = self.bases
        for item in node.body:
            member = item.name if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)) else ""
            if isinstance(item, (ast.Assign, ast.AnnAssign)):
                target = item.targets[0] if isinstance(item, ast.Assign) else item.target
                member = target.id if isinstance(target, ast.Name) else ""
            for base_path in self.bases if member else ():
                self._add(f"{base_path}.{member}", item, weak=True)
        self.generic_visit(node)
        self.bases = outer

    def _resolve_annotation(self, annotation: ast.expr | None) -> tuple[str, ...]:
        """Return the paths of the torch classes that an annotation names."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.BinOp):
            return self._resolve_annotation(annotation.left) + self._resolve_annotation(
                annotation.right
            )
        return self._resolve_paths(annotation)

    def _enter_bindings(self, body: Iterable[ast.stmt]) -> None:
        """Enter the names that the statements of one scope bind, also inside conditions."""
        nodes = list(_iterate_scope_nodes(body))
        # Imports first: the paths of an assignment may depend on them.
        imports: dict[str, list[tuple[str, ...]]] = {}
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    target = alias.name if alias.asname else alias.name.split(".")[0]
                    imports.setdefault(alias.asname or target, []).append(_keep_torch(target))
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    target = f"{node.module}.{alias.name}" if not node.level else ""
                    imports.setdefault(alias.asname or alias.name, []).append(_keep_torch(target))
        self.names |= {name: sum(paths, ()) for name, paths in imports.items()}
        assignments = [node for node in nodes if isinstance(node, ast.Assign)]
        targets = [
            node.id
            for node in nodes
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        ]
        self.names |= dict.fromkeys(targets, ())
        for node in sorted(assignments, key=lambda node: node.lineno):
            target, value = node.targets[0], node.value
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=False))
            else:
                pairs = [(target, value)]
            for pair, source in pairs:
                if isinstance(pair, ast.Name) and targets.count(pair.id) == 1:
                    self.names[pair.id] = self._resolve_paths(source)
                if isinstance(pair, ast.Name) and _is_guard(source, self.guards):
                    self.guards.add(pair.id)
        for node in nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                subject, kinds = node.args
                items = kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]
                classes = tuple(path for item in items for path in self._resolve_paths(item))
                if isinstance(subject, ast.Name):
                    self.weak_names[subject.id] = self.weak_names.get(subject.id, ()) + classes
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                instances = self._resolve_annotation(node.annotation)
                if instances:
                    self.weak_names[node.target.id] = instances

    # --- uses -----------------------------------------------------------------------------------

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if not node.level and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                self._add(f"{node.module}.{alias.name}".removesuffix(".*"), node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        patched = isinstance(node.ctx, (ast.Store, ast.Del))
        paths = self._resolve_paths(node)
        for path in paths:
            # `super().x` in a class with several bases is an attribute of one of them.
            self._add(path, node, weak="super()" in ast.unparse(node), patched=patched)
        if isinstance(node.value, ast.Name) and not paths:
            for path in self.weak_names.get(node.value.id, ()):
                self._add(f"{path}.{node.attr}", node, weak=True)
        if not paths:
            self.visit(node.value)

    def visit_Name(self, node: ast.Name) -> None:
        for path in self._resolve_paths(node) if isinstance(node.ctx, ast.Load) else ():
            self._add(path, node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._add_text(node.value, node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        parts = [
            str(value.value) if isinstance(value, ast.Constant) else self._find_text(value)
            for value in node.values
        ]
        if None not in parts:
            self._add_text("".join(map(str, parts)), node)
        self.generic_visit(node)

    def _find_text(self, node: ast.AST) -> str | None:
        """Return the text of a variable in an f-string; None if it is not a constant."""
        name = getattr(node, "value", None)
        return self.texts.get(name.id) if isinstance(name, ast.Name) else None

    def _add_text(self, text: str, node: ast.AST) -> None:
        alternatives = text.split("|")
        if all(map(_PATH.fullmatch, alternatives)):
            for alternative in alternatives:
                # As in the declaration of a hook, which names what it replaces and relies on.
                path, guarded = alternative.replace(":", "."), len(alternatives) > 1
                self._add(path, node, weak=True, guarded=guarded, patched=True)
        elif _NAME.fullmatch(text) and ("." in text or "_" in text):
            for config in CONFIGS:
                self._add(f"{config}.{text}", node, weak=True)

    def visit_Call(self, node: ast.Call) -> None:
        function = ast.unparse(node.func)
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        for path in self._resolve_paths(node.func):
            self._add(path, node, constructed=True)
            if path.removesuffix(".patch") in CONFIGS:
                for keyword in node.keywords:
                    if keyword.arg:
                        self._add(f"{path.removesuffix('.patch')}.{keyword.arg}", keyword.value)
        pairs = list(itertools.pairwise(values))
        for owner, name in pairs[:1] if function in _BY_NAME else pairs:
            self._visit_name_argument(function, owner, name, optional=len(values) > 2)
        if function.rpartition(".")[2] == "Hook":
            self._visit_hook(node)
        else:
            self.generic_visit(node)

    def _visit_hook(self, node: ast.Call) -> None:
        """Visit the declaration of a hook: one of several targets has to exist."""
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        is_limited = bool({"since", "until"} & set(keywords))
        for index, arg in enumerate([*node.args, *keywords.values()]):
            is_target = index == 2 if index < len(node.args) else arg is keywords.get("targets")
            has_alternatives = isinstance(arg, ast.Tuple) and len(arg.elts) > 1
            self._visit_guarded([arg], is_limited or (is_target and has_alternatives))

    def _visit_name_argument(
        self, function: str, owner: ast.expr, name: ast.expr, optional: bool
    ) -> None:
        """Visit an object and an attribute name in a call, as in `getattr` and `patch.object`."""
        paths = self._resolve_paths(owner)
        if isinstance(owner, ast.Constant) and _PATH.fullmatch(str(owner.value)):
            paths = (owner.value.replace(":", "."),)
        by_name = function in _BY_NAME
        guarded = function == "hasattr" or (function == "getattr" and optional)
        for path in paths:
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                if _NAME.fullmatch(name.value):
                    patched = isinstance(owner, ast.Constant) or function.endswith(_REPLACING)
                    self._add(
                        f"{path}.{name.value}",
                        name,
                        weak=not by_name,
                        guarded=guarded,
                        patched=patched,
                    )
            elif by_name and len(paths) == 1:
                self._add(f"{path}.<{ast.unparse(name)}>", name, guarded=guarded)

    # --- guards ---------------------------------------------------------------------------------

    def _visit_guarded(self, nodes: Iterable[ast.AST], guarded: bool) -> None:
        outer, self.is_guarded = self.is_guarded, self.is_guarded or guarded
        for node in nodes:
            self.visit(node)
        self.is_guarded = outer

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self._visit_guarded([*node.body, *node.orelse], _is_guard(node.test, self.guards))

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        self._visit_guarded([node.body, node.orelse], _is_guard(node.test, self.guards))

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        guarded = False
        for value in node.values:
            self._visit_guarded([value], guarded)
            guarded = guarded or _is_guard(value, self.guards)

    def visit_Try(self, node: ast.Try) -> None:
        types = " ".join(ast.unparse(handler.type) for handler in node.handlers if handler.type)
        names = set(re.findall(r"\w+", types))
        self._visit_guarded(node.body, not names.isdisjoint(_MISSING_NAME))
        self._visit_guarded([*node.handlers, *node.orelse, *node.finalbody], False)

    def visit_With(self, node: ast.With) -> None:
        text = " ".join(ast.unparse(item.context_expr) for item in node.items)
        is_suppressed = "suppress(" in text and not _MISSING_NAME.isdisjoint(
            re.findall(r"\w+", text)
        )
        self._visit_guarded(node.items, False)
        self._visit_guarded(node.body, is_suppressed)


def _keep_torch(path: str) -> tuple[str, ...]:
    return (path,) if path.split(".")[0] == "torch" else ()


def _iterate_scope_nodes(body: Iterable[ast.AST]) -> Iterable[ast.AST]:
    """Yield the nodes of a scope, without those of the functions and classes in it."""
    for node in body:
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _iterate_scope_nodes(ast.iter_child_nodes(node))


def _is_guard(node: ast.AST, guards: set[str]) -> bool:
    """Whether an expression checks that an attribute exists, or uses the result of such a check."""
    return any(
        (isinstance(item, ast.Call) and ast.unparse(item.func) == "hasattr")
        or (
            isinstance(item, ast.Call)
            and ast.unparse(item.func) == "getattr"
            and len(item.args) == 3
        )
        or (isinstance(item, ast.Name) and item.id in guards)
        for item in ast.walk(node)
    )
