"""Resolves names of a torch package in its source files, without importing torch.

`TorchNames.resolve` follows a dotted path such as `torch._inductor.ir.Switch.get_free_symbol_uses`
through re-exports, definitions inside `if` and `try`, base classes and annotated types. If the
source does not determine a type, the result is "unknown" instead of "missing".

`inductor_ext.hooks.torch_source` also looks up names in torch's sources. It parses only the
definitions that the hooks declare, in about a second, for `inductor-ext doctor`. To follow types,
and to list classes and new names, this module parses whole modules, which takes longer.
"""

from __future__ import annotations

import ast
import builtins
import functools
import re
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch_scopes import (
    FUNCTIONS,
    Builtin,
    Class,
    Function,
    Module,
    Object,
    Operator,
    Scope,
    Value,
    collect_attributes,
    collect_names,
)


@dataclass(eq=False)
class Resolution:
    """The objects that a dotted path refers to."""

    status: str
    """"defined", "missing" or "unknown"."""
    objects: list[Object]
    prefix: str
    """The part of the path that was resolved."""


class UnknownTypeError(Exception):
    """An attribute of an object whose type the source does not determine."""


class TorchNames:
    """The names of a torch package.

    Args:
        root: the folder that contains torch's `__init__.py`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, Module | None] = {}
        self._class_scopes: dict[int, Scope] = {}
        self._resolving: set[tuple[str, str]] = set()
        self.unreadable: list[str] = []

    @functools.cached_property
    def version(self) -> str:
        file = self.root / "version.py"
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        match = re.search(r"^__version__ = ['\"](.+)['\"]", text, re.MULTILINE)
        return match[1] if match else "of unknown version"

    @functools.cached_property
    def _operators(self) -> dict[str, list[str]] | None:
        """Schemas of ATen operators by name, from the wheel's torchgen; None without it."""
        native = "torchgen/packaged/ATen/native/native_functions.yaml"
        file = self.root.parent / native
        if not file.is_file():
            return None
        schemas: dict[str, list[str]] = {}
        for schema in re.findall(r"^- func: (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE):
            schemas.setdefault(re.split(r"[.(]", schema, maxsplit=1)[0], []).append(schema)
        return schemas

    # --- modules and their names ----------------------------------------------------------------

    def find_module(self, name: str) -> Module | None:
        """Return a module or its stub by dotted name; None if there is neither."""
        if name not in self._modules:
            base = self.root.joinpath(*name.split(".")[1:])
            candidates = [base / "__init__.py", base.with_name(base.name + ".py")]
            candidates += [base / "__init__.pyi", base.with_name(base.name + ".pyi")]
            file = next((candidate for candidate in candidates if candidate.is_file()), None)
            if file is None and base.is_dir():
                self._modules[name] = Module(name, base, Scope())
            else:
                self._modules[name] = None if file is None else self._read_module(name, file)
        return self._modules[name]

    def _read_module(self, name: str, file: Path) -> Module:
        module = Module(name, file, Scope())
        try:
            text = file.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except SyntaxError as error:
            # Syntax of a later Python than the one that runs this.
            self.unreadable.append(f"{name} ({error.msg}, line {error.lineno})")
            module.scope.dynamic = True
            return module
        collect_names(module, tree.body, module.scope)
        for names in re.findall(r"^ +global ([\w, ]+)$", text, re.MULTILINE):
            for global_name in names.split(", "):
                module.scope.names.setdefault(global_name, [Value(module, None)])
        return module

    def iterate_inductor_classes(self) -> Iterator[tuple[str, ast.ClassDef]]:
        """Yield each class of `torch._inductor` with its dotted name."""
        for file in sorted((self.root / "_inductor").rglob("*.py")):
            parts = file.relative_to(self.root).with_suffix("").parts
            name = ".".join(["torch", *(part for part in parts if part != "__init__")])
            module = self.find_module(name)
            for local_name, bindings in module.scope.names.items() if module else ():
                for binding in bindings:
                    if isinstance(binding, ast.ClassDef):
                        yield f"{name}.{local_name}", binding

    def find_subclasses(self, root: str) -> set[str]:
        """Return dotted names of the subclasses of a class in `torch._inductor`.

        Args:
            root: the class's name, without its module. Base classes are matched by this name.
        """
        paths: set[str] = set()
        class_names, previous_count = {root}, 0
        while len(class_names) > previous_count:
            previous_count = len(class_names)
            for path, bases in self._bases:
                if not bases.isdisjoint(class_names):
                    paths.add(path)
                    class_names.add(path.rpartition(".")[2])
        return paths

    @functools.cached_property
    def _bases(self) -> list[tuple[str, set[str]]]:
        return [
            (path, {ast.unparse(base).rpartition(".")[2] for base in node.bases})
            for path, node in self.iterate_inductor_classes()
        ]

    # --- following a path -----------------------------------------------------------------------

    @functools.cache  # noqa: B019  # as long-lived as the source self_name
    def resolve(self, path: str) -> Resolution:
        """Follow a dotted path that begins with `torch`."""
        parts = path.split(".")
        if parts[:3] == ["torch", "ops", "aten"]:
            return self._resolve_operator(path, parts)
        start = self.find_module("torch")
        if start is None:
            return Resolution("missing", [], "")
        objects: list[Object] = [start]
        for index, name in enumerate(parts[1:], 1):
            try:
                attributes = self._find_attribute(objects, name)
            except UnknownTypeError:
                return Resolution("unknown", objects, ".".join(parts[:index]))
            if not attributes:
                return Resolution("missing", objects, ".".join(parts[:index]))
            objects = attributes
        return Resolution("defined", objects, path)

    def _resolve_operator(self, path: str, parts: list[str]) -> Resolution:
        if len(parts) == 3:
            return Resolution("defined", [], path)
        name = parts[3]
        schemas = (self._operators or {}).get(name, [])
        if len(parts) > 4 and not parts[4].startswith("_"):
            prefix = f"{name}(" if parts[4] == "default" else f"{name}.{parts[4]}("
            schemas = [schema for schema in schemas if schema.startswith(prefix)]
        if not schemas:
            # Some operators are registered elsewhere, and the file lacks generated `out` variants.
            return Resolution("unknown", [], "torch.ops.aten")
        return Resolution("defined", [Operator(tuple(sorted(schemas)))], path)

    def _find_attribute(self, objects: Iterable[Object], name: str) -> list[Object]:
        """Return what `.name` of the objects may be; empty if none has that attribute.

        Raises:
            UnknownTypeError: none is known to have it, but one may have it.
        """
        unknown = False
        attributes: list[Object] = []
        for obj in objects:
            try:
                attributes += self._find_attribute_of(obj, name)
            except UnknownTypeError:
                unknown = True
        if not attributes and unknown:
            raise UnknownTypeError
        return attributes

    def _find_attribute_of(self, owner: Object, name: str) -> list[Object]:
        if isinstance(owner, Module):
            return self._find_in_module(owner, name)
        if isinstance(owner, Class):
            return self._find_in_class(owner, name, set())
        if isinstance(owner, Function) and not _is_property(owner):
            if hasattr(types.FunctionType, name) or name in ("__wrapped__", "cache_clear"):
                return [Builtin(name)]
            raise UnknownTypeError
        if isinstance(owner, (Function, Value)):
            return self._find_attribute(self._infer_types(owner), name)
        if isinstance(owner, Builtin):
            kind = getattr(builtins, owner.name, None)
            if isinstance(kind, type):
                return [Builtin(name)] if hasattr(kind, name) else []
        raise UnknownTypeError

    def _find_in_module(self, module: Module, name: str, typing: bool = False) -> list[Object]:
        key = (module.name, name)
        if key not in self._resolving:
            self._resolving.add(key)
            try:
                objects = self._find_binding(module, name, typing)
            finally:
                self._resolving.discard(key)
            if objects:
                return objects
        submodule = (
            self.find_module(f"{module.name}.{name}") if "__init__" in module.file.name else None
        )
        if submodule is None and module.file.is_dir():
            submodule = self.find_module(f"{module.name}.{name}")
        if submodule is not None:
            return [submodule]
        if "install_config_module" in module.scope.names:
            # Its keys are the names it binds. ConfigModule.__getattr__ returns no other names.
            for methods in self.resolve("torch.utils._config_module.ConfigModule").objects:
                if isinstance(methods, Class) and name in self._class_scope(methods).names:
                    return self._find_in_class(methods, name, set())
            return [Builtin(name)] if hasattr(types.ModuleType, name) else []
        if name in ("__name__", "__file__", "__path__", "__doc__", "__dict__"):
            return [Builtin(name)]
        if module.scope.dynamic or "__getattr__" in module.scope.names:
            raise UnknownTypeError
        return []

    def _find_binding(self, module: Module, name: str, typing: bool) -> list[Object]:
        scope = module.scope
        bindings = scope.names.get(name) or (scope.typing_names.get(name) if typing else None)
        if bindings:
            return self._resolve_bindings(module, bindings)
        for star in scope.stars:
            # torch binds private functions of that module too, by a loop.
            if not name.startswith("_") or star == "torch._C._VariableFunctions":
                origin, key = self.find_module(star), (star, name)
                if origin is None or key in self._resolving:
                    continue
                self._resolving.add(key)
                objects = self._find_binding(origin, name, False)
                self._resolving.discard(key)
                if objects:
                    return objects
        return []

    def _resolve_bindings(
        self, module: Module, bindings: Iterable[ast.stmt | Value | str]
    ) -> list[Object]:
        objects: list[Object] = []
        unknown = False
        for binding in bindings:
            if isinstance(binding, str):
                resolution = self.resolve_import(binding)
                unknown |= resolution.status == "unknown"
                objects += resolution.objects if resolution.status == "defined" else []
            elif isinstance(binding, ast.ClassDef):
                objects.append(Class(module, binding))
            elif isinstance(binding, FUNCTIONS):
                objects.append(Function(module, binding))
            elif isinstance(binding, Value):
                objects.append(binding)
        if not objects and unknown:
            raise UnknownTypeError
        return objects

    def resolve_import(self, path: str) -> Resolution:
        """Return what an import binds; a path outside of torch is unknown."""
        if path.split(".")[0] != "torch":
            return Resolution("unknown", [], path)
        parent, _, name = path.rpartition(".")
        origin = self.find_module(parent) if parent else None
        # Unlike an attribute, `b` in `from a.b import c` is never a function of the package a.
        if origin is not None:
            try:
                objects = self._find_in_module(origin, name)
            except UnknownTypeError:
                return Resolution("unknown", [origin], parent)
            return Resolution("defined" if objects else "missing", objects, path)
        return self.resolve(path)

    def _find_in_class(self, owner: Class, name: str, visited: set[int]) -> list[Object]:
        if id(owner.node) in visited:
            return []
        visited.add(id(owner.node))
        scope = self._class_scope(owner)
        if name in scope.names:
            return self._resolve_bindings(owner.module, scope.names[name])
        unknown = "__getattr__" in scope.names or "__getattribute__" in scope.names
        for base in owner.node.bases:
            kinds = self._evaluate(owner.module, base)
            unknown |= not kinds
            for kind in kinds:
                try:
                    if isinstance(kind, Class):
                        objects = self._find_in_class(kind, name, visited)
                    else:
                        objects = self._find_attribute_of(kind, name)
                except UnknownTypeError:
                    unknown = True
                else:
                    if objects:
                        return objects
        if hasattr(type, name):
            return [Builtin(name)]
        if unknown:
            raise UnknownTypeError
        return []

    def _class_scope(self, owner: Class) -> Scope:
        scope = self._class_scopes.get(id(owner.node))
        if scope is None:
            scope = self._class_scopes[id(owner.node)] = Scope()
            collect_names(owner.module, owner.node.body, scope)
            for method in ast.walk(owner.node):
                if isinstance(method, FUNCTIONS) and method.args.args:
                    collect_attributes(owner.module, method, scope)
        return scope

    def _infer_types(self, owner: Function | Value) -> list[Object]:
        """Return the possible classes of a property or variable, or the object that it aliases."""
        if isinstance(owner, Function):
            kinds = self._evaluate(owner.module, owner.node.returns)
        elif owner.annotation is not None:
            kinds = self._evaluate(owner.module, owner.annotation)
        elif isinstance(owner.value, ast.Constant):
            kinds = [Builtin(type(owner.value.value).__name__)]
        elif isinstance(owner.value, ast.Compare):
            kinds = [Builtin("bool")]
        elif isinstance(owner.value, ast.Call):
            callees = self._evaluate(owner.module, owner.value.func)
            kinds = [callee for callee in callees if isinstance(callee, Class)]
            for callee in callees:
                if isinstance(callee, Function):
                    kinds += self._evaluate(callee.module, callee.node.returns)
        else:
            kinds = self._evaluate(owner.module, owner.value)
        if not kinds:
            raise UnknownTypeError
        return kinds

    def _evaluate(self, module: Module, node: ast.expr | None) -> list[Object]:
        """Return the objects of a name, an attribute chain or an annotation; empty if unknown."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                node = ast.parse(node.value, mode="eval").body
            except SyntaxError:
                return []
        if isinstance(node, ast.BinOp):  # X | None
            return [*self._evaluate(module, node.left), *self._evaluate(module, node.right)]
        try:
            if isinstance(node, ast.Subscript):
                name = ast.unparse(node.value).rpartition(".")[2]
                inner = node.slice if name in ("Optional", "Final", "ClassVar") else node.value
                return self._evaluate(module, inner)
            if isinstance(node, ast.Attribute):
                return self._find_attribute(self._evaluate(module, node.value), node.attr)
            if isinstance(node, ast.Name):
                objects = self._find_in_module(module, node.id, typing=True)
                is_builtin = not objects and hasattr(builtins, node.id)
                return [Builtin(node.id)] if is_builtin else objects
        except UnknownTypeError:
            pass
        return []

    # --- signatures -----------------------------------------------------------------------------

    def describe_signature(self, objects: Iterable[Object], constructor: bool) -> str:
        """Return parameters of functions, bases of classes, schemas of operators; else empty.

        Args:
            objects: the objects of a path; several if definitions depend on a condition.
            constructor: whether to include the parameters of a class's constructor.
        """
        texts: set[str] = set()
        functions = [obj for obj in objects if isinstance(obj, Function)]
        implementations = [
            function for function in functions if not _has_decorator(function, "overload")
        ]
        for obj in objects:
            if isinstance(obj, Function) and (obj in implementations or not implementations):
                texts.add(_format_parameters(obj))
            elif isinstance(obj, Class):
                bases = f"({', '.join(ast.unparse(base) for base in obj.node.bases)})"
                texts.add(f"bases {bases}")
                if constructor:
                    texts.add(f"made by {self._describe_constructor(obj)}")
            elif isinstance(obj, Operator):
                texts.update(obj.schemas)
            elif isinstance(obj, Value) and isinstance(obj.value, (ast.Name, ast.Attribute)):
                alias = self._evaluate(obj.module, obj.value)
                if all(isinstance(target, (Function, Class)) for target in alias):
                    texts.add(self.describe_signature(alias, constructor))
        return "; ".join(sorted(texts - {""}))

    def _describe_constructor(self, owner: Class) -> str:
        if any("dataclass" in ast.unparse(item) for item in owner.node.decorator_list):
            return "(" + ", ".join(self._list_fields(owner)) + ")"
        try:
            methods = self._find_in_class(owner, "__init__", set())
        except UnknownTypeError:
            return "an unknown base"
        return self.describe_signature(methods, False)

    def _list_fields(self, owner: Class) -> dict[str, None]:
        fields: dict[str, None] = {}
        for base in owner.node.bases:
            for kind in self._evaluate(owner.module, base):
                fields.update(self._list_fields(kind) if isinstance(kind, Class) else {})
        for node in owner.node.body:
            if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation):
                default = f"={ast.unparse(node.value)}" if node.value else ""
                fields[ast.unparse(node.target) + default] = None
        return fields

    @staticmethod
    def describe_default(objects: Iterable[Object], literal: bool) -> str:
        """Return the source of a variable's value, or an empty string.

        Args:
            literal: whether to return literals only.
        """
        texts = set()
        for obj in objects:
            if not isinstance(obj, Value) or obj.value is None:
                continue
            # Values in stubs are placeholders.
            if not literal or (_is_literal(obj.value) and obj.module.file.suffix == ".py"):
                texts.add(ast.unparse(obj.value))
        return " or ".join(sorted(texts))


def _has_decorator(function: Function, name: str) -> bool:
    texts = (ast.unparse(item) for item in function.node.decorator_list)
    return any(text.rpartition(".")[2].lstrip("_") == name for text in texts)


def _is_property(function: Function) -> bool:
    return _has_decorator(function, "property") or _has_decorator(function, "cached_property")


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def _format_parameters(function: Function) -> str:
    """Return the parameters with kinds and defaults, without annotations."""
    if _is_property(function):
        return "property"
    arguments = function.node.args
    stripped = ast.arguments(
        posonlyargs=[ast.arg(posonlyarg.arg) for posonlyarg in arguments.posonlyargs],
        args=[ast.arg(arg.arg) for arg in arguments.args],
        vararg=ast.arg(arguments.vararg.arg) if arguments.vararg else None,
        kwonlyargs=[ast.arg(kwonlyarg.arg) for kwonlyarg in arguments.kwonlyargs],
        kw_defaults=arguments.kw_defaults,
        kwarg=ast.arg(arguments.kwarg.arg) if arguments.kwarg else None,
        defaults=arguments.defaults,
    )
    kinds = [name for name in ("staticmethod", "classmethod") if _has_decorator(function, name)]
    kinds += ["async"] if isinstance(function.node, ast.AsyncFunctionDef) else []
    return " ".join([*kinds, f"({ast.unparse(stripped)})"])
