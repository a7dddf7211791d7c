"""Which names of torch a package uses, read from its source.

A use is a dotted path: an imported name, a chain of attributes on an import (`ir.Switch`), on a
variable that stands for one (`details = codecache.FxGraphHashDetails; details.__init__`), on an
argument annotated by a class of torch's, or on `self` in a subclass of one; a name in a string
(`getattr`, `patch.object`, `"torch._inductor.compile_fx.compile_fx"`); a key of a torch config.

A use is weak if it is a guess, such as an attribute behind `isinstance`, or a string that could be
a config's key. It counts where the older torch has that name, and is no use of torch otherwise.
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
    """All uses of one name. Each flag but `called` and `patched` holds for all of them."""

    path: str
    places: list[str] = field(default_factory=list)
    guarded: bool = True
    weak: bool = True
    constructed: bool = False
    patched: bool = False


def find_uses(package: Path) -> dict[str, Use]:
    """The uses in all Python files below a package's folder, by their paths."""
    uses: dict[str, Use] = {}
    for file in sorted(package.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        _Finder(uses, file.relative_to(package.parent).as_posix()).visit(tree)
    return uses


class _Finder(ast.NodeVisitor):
    """One file. A local name stands for several paths where imports depend on a condition."""

    def __init__(self, uses: dict[str, Use], file: str) -> None:
        self.uses = uses
        self.file = file
        self.names: dict[str, tuple[str, ...]] = {}
        """What local names stand for."""
        self.weak_names: dict[str, tuple[str, ...]] = {}
        """What local names may be instances of."""
        self.guards: set[str] = set()
        """Local names that hold what `getattr` has found, or not."""
        self.guarded = False
        self.bases: tuple[str, ...] = ()
        """The bases in torch of the class whose body this is."""
        self.own_classes: dict[str, tuple[str, ...]] = {}
        self.texts: dict[str, str] = {}
        """Strings that the module's variables hold."""

    def _add(self, path: str, node: ast.AST, *, weak: bool = False, **flags: bool) -> None:
        if not path.startswith("torch."):
            return
        use = self.uses.setdefault(path, Use(path))
        place = f"{self.file}:{getattr(node, 'lineno', 0)}"
        if place not in use.places:
            use.places.append(place)
        use.guarded &= flags.get("guarded", False) or self.guarded
        use.weak &= weak
        use.constructed |= flags.get("constructed", False)
        use.patched |= flags.get("patched", False)

    def _paths(self, node: ast.AST | None) -> tuple[str, ...]:
        """The paths that a name or a chain of attributes stands for."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, ())
        if isinstance(node, ast.Attribute):
            return tuple(f"{path}.{node.attr}" for path in self._paths(node.value))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "super":
            return self.bases
        return ()

    # --- scopes ---------------------------------------------------------------------------------

    def visit_Module(self, node: ast.Module) -> None:
        self._bind(node.body)
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
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        every += [item for item in (arguments.vararg, arguments.kwarg) if item]
        annotated = {item.arg: self._instances(item.annotation) for item in every}
        self.names |= dict.fromkeys((item.arg for item in every), ())
        self.weak_names |= annotated
        if self.bases and every:
            self.weak_names[every[0].arg] = self.bases
        body = node.body if isinstance(node.body, list) else [ast.Expr(node.body)]
        self._bind(body)
        self.generic_visit(node)
        self.names, self.weak_names, self.guards = outer

    visit_AsyncFunctionDef = visit_FunctionDef
    visit_Lambda = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self.bases = self.bases, ()
        for base in node.bases:
            paths = self._paths(base)
            own = self.own_classes.get(base.id, ()) if isinstance(base, ast.Name) else ()
            self.bases += paths + own
            for path in paths:
                self._add(path, base, constructed=True)
        self.own_classes[node.name] = self.bases
        for item in node.body:
            defined = item.name if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)) else ""
            if isinstance(item, (ast.Assign, ast.AnnAssign)):
                target = item.targets[0] if isinstance(item, ast.Assign) else item.target
                defined = target.id if isinstance(target, ast.Name) else ""
            for base_path in self.bases if defined else ():
                self._add(f"{base_path}.{defined}", item, weak=True)
        self.generic_visit(node)
        self.bases = outer

    def _instances(self, annotation: ast.expr | None) -> tuple[str, ...]:
        """The classes in torch that an annotation names."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.BinOp):
            return self._instances(annotation.left) + self._instances(annotation.right)
        return self._paths(annotation)

    def _bind(self, body: Iterable[ast.stmt]) -> None:
        """Enter what the statements of one scope bind, wherever they stand in it."""
        bound: dict[str, list[tuple[str, ...]]] = {}
        # Imports first: what an assignment stands for may depend on them.
        for node in (nodes := list(_own_nodes(body))):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    target = alias.name if alias.asname else alias.name.split(".")[0]
                    bound.setdefault(alias.asname or target, []).append(_torch(target))
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    target = f"{node.module}.{alias.name}" if not node.level else ""
                    bound.setdefault(alias.asname or alias.name, []).append(_torch(target))
        self.names |= {name: sum(paths, ()) for name, paths in bound.items()}
        for node in nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound.setdefault(node.id, [])
        assigned = [node for node in nodes if isinstance(node, ast.Assign)]
        stored = [node.id for node in nodes if isinstance(node, ast.Name) and _stores(node)]
        for name in set(stored):
            self.names[name] = ()
        for node in sorted(assigned, key=lambda node: node.lineno):
            target, value = node.targets[0], node.value
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=False))
            else:
                pairs = [(target, value)]
            for pair, source in pairs:
                if isinstance(pair, ast.Name) and stored.count(pair.id) == 1:
                    self.names[pair.id] = self._paths(source)
                if isinstance(pair, ast.Name) and _is_guard(source, self.guards):
                    self.guards.add(pair.id)
        for node in nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                subject, kinds = node.args
                every = kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]
                classes = tuple(path for kind in every for path in self._paths(kind))
                if isinstance(subject, ast.Name):
                    self.weak_names[subject.id] = self.weak_names.get(subject.id, ()) + classes
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                instances = self._instances(node.annotation)
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
        paths = self._paths(node)
        for path in paths:
            # `super().x` in a class with several bases is one's of them.
            self._add(path, node, weak="super()" in ast.unparse(node), patched=patched)
        if isinstance(node.value, ast.Name) and not paths:
            for path in self.weak_names.get(node.value.id, ()):
                self._add(f"{path}.{node.attr}", node, weak=True)
        if not paths:
            self.visit(node.value)

    def visit_Name(self, node: ast.Name) -> None:
        for path in self._paths(node) if isinstance(node.ctx, ast.Load) else ():
            self._add(path, node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._text(node.value, node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        parts = [
            str(value.value) if isinstance(value, ast.Constant) else self._constant(value)
            for value in node.values
        ]
        if None not in parts:
            self._text("".join(map(str, parts)), node)
        self.generic_visit(node)

    def _constant(self, node: ast.AST) -> str | None:
        """The text of a variable in an f-string."""
        name = getattr(node, "value", None)
        return self.texts.get(name.id) if isinstance(name, ast.Name) else None

    def _text(self, text: str, node: ast.AST) -> None:
        alternatives = text.split("|")
        if all(map(_PATH.fullmatch, alternatives)):
            for alternative in alternatives:
                # A text names what is replaced or relied on, as in the table of hooks.
                path, guarded = alternative.replace(":", "."), len(alternatives) > 1
                self._add(path, node, weak=True, guarded=guarded, patched=True)
        elif _NAME.fullmatch(text) and ("." in text or "_" in text):
            for config in CONFIGS:
                self._add(f"{config}.{text}", node, weak=True)

    def visit_Call(self, node: ast.Call) -> None:
        function = ast.unparse(node.func)
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        for path in self._paths(node.func):
            self._add(path, node, constructed=True)
            if path.removesuffix(".patch") in CONFIGS:
                for keyword in node.keywords:
                    if keyword.arg:
                        self._add(f"{path.removesuffix('.patch')}.{keyword.arg}", keyword.value)
        pairs = list(itertools.pairwise(values))
        for owner, name in pairs[:1] if function in _BY_NAME else pairs:
            self._named(function, owner, name, optional=len(values) > 2)
        if function.rpartition(".")[2] == "Hook":
            self._visit_hook(node)
        else:
            self.generic_visit(node)

    def _visit_hook(self, node: ast.Call) -> None:
        """A declaration in the table of hooks: one of several targets has to exist."""
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        limited = bool({"since", "until"} & set(keywords))
        for index, arg in enumerate([*node.args, *keywords.values()]):
            target = index == 2 if index < len(node.args) else arg is keywords.get("targets")
            several = isinstance(arg, ast.Tuple) and len(arg.elts) > 1
            self._visit_guarded([arg], limited or (target and several))

    def _named(self, function: str, owner: ast.expr, name: ast.expr, optional: bool) -> None:
        """A call in which a name follows upon what has it, as in `getattr` and `patch.object`."""
        paths = self._paths(owner)
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
        outer, self.guarded = self.guarded, self.guarded or guarded
        for node in nodes:
            self.visit(node)
        self.guarded = outer

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
        caught = " ".join(ast.unparse(handler.type) for handler in node.handlers if handler.type)
        names = set(re.findall(r"\w+", caught))
        self._visit_guarded(node.body, not names.isdisjoint(_MISSING_NAME))
        self._visit_guarded([*node.handlers, *node.orelse, *node.finalbody], False)

    def visit_With(self, node: ast.With) -> None:
        text = " ".join(ast.unparse(item.context_expr) for item in node.items)
        suppressed = "suppress(" in text and not _MISSING_NAME.isdisjoint(re.findall(r"\w+", text))
        self._visit_guarded(node.items, False)
        self._visit_guarded(node.body, suppressed)


def _torch(path: str) -> tuple[str, ...]:
    return (path,) if path.split(".")[0] == "torch" else ()


def _stores(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def _own_nodes(body: Iterable[ast.AST]) -> Iterable[ast.AST]:
    """All nodes of a scope, without those of the functions and classes in it."""
    for node in body:
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _own_nodes(ast.iter_child_nodes(node))


def _is_guard(node: ast.AST, guards: set[str]) -> bool:
    """Whether an expression asks if something has an attribute, or uses the answer."""
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
