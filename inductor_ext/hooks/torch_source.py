"""Looks up definitions in torch's source files, without importing torch.

Importing `torch._inductor` takes seconds, creates a cache folder and sets environment variables,
which a diagnosis must not do. `TorchSource` therefore looks up names in the source files: a dotted
path such as `torch._inductor.ir.Switch.get_free_symbol_uses` resolves to a module, a function, a
class, a method, a variable, or an attribute that a method of the class assigns to `self`. Names
that a module imports from another torch module, and members of base classes, are followed.

Only the requested definitions are parsed, so that checking all hooks takes about a second.
`scripts/torch_names.py` parses whole modules instead, to compare two torch releases.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Definition:
    """The module and AST node where a name is defined."""

    module: str
    node: ast.AST
    """A `FunctionDef`, a `ClassDef`, an assignment, or a `Module` for a module itself."""

    def parameters(self) -> tuple[str, ...] | None:
        """Return a function's parameter names, including `self` and `cls`; None if not a function.

        `*args` and `**kwargs` are listed with their stars.
        """
        if not isinstance(self.node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return None
        arguments = self.node.args
        names = [posonlyarg.arg for posonlyarg in (*arguments.posonlyargs, *arguments.args)]
        names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
        names += [kwonlyarg.arg for kwonlyarg in arguments.kwonlyargs]
        names += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
        return tuple(names)


class TorchSource:
    """The source files of one torch installation.

    Args:
        folder: the package's folder, which contains `__init__.py`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def find(self, path: str) -> Definition | None:
        """Return the definition at a dotted path; None if there is none.

        Args:
            path: begins with `torch.`.
        """
        module, names = self._split(path)
        return self._find_member(module, names, frozenset())

    def _split(self, path: str) -> tuple[str, list[str]]:
        """Split a path into its longest prefix that is a module, and the remaining names."""
        parts = path.split(".")
        for length in range(len(parts), 0, -1):
            module = ".".join(parts[:length])
            if self._find_file(module) is not None:
                return module, parts[length:]
        return parts[0], parts[1:]

    @functools.cache  # noqa: B019 - it lives as long as one check
    def _find_file(self, module: str) -> Path | None:
        base = self.folder.joinpath(*module.split(".")[1:])
        for file in (base / "__init__.py", base.with_suffix(".py")):
            if file.is_file():
                return file
        return None

    @functools.cache  # noqa: B019
    def _read(self, module: str) -> str:
        file = self._find_file(module)
        return "" if file is None else file.read_text(encoding="utf-8")

    @functools.cache  # noqa: B019
    def _find_top_level(self, module: str, name: str) -> ast.AST | None:
        """Return the definition of a name in a module, also one inside `if` and `try`."""
        text = self._read(module)
        escaped = re.escape(name)
        patterns = (
            rf"^([ \t]*)(?:async )?(?:def|class) {escaped}\b",
            # A keyword argument has no space before the equals sign.
            rf"^([ \t]*){escaped}(?:\s*:[^=]+)?[ \t]+=(?!=)",
        )
        for pattern in patterns:
            # A definition inside `if` or `try` is indented like its block, and methods are indented
            # deeper. If a name is defined more than once, the least indented definition is used.
            matches = sorted(
                re.finditer(pattern, text, re.MULTILINE), key=lambda match: len(match[1])
            )
            for match in matches:
                node = _parse_block(text, match.start(), match[1])
                if node is not None:
                    return node
        return None

    def _find_import(self, module: str, name: str) -> str | None:
        """Return the path of what a module imports under a name."""
        pattern = re.compile(
            rf"^[ \t]*from[ \t]+([\w.]+)[ \t]+import[ \t]+"
            rf"(\([^)]*?\b{re.escape(name)}\b[^)]*\)|[^(\n]*\b{re.escape(name)}\b[^\n]*)",
            re.MULTILINE,
        )
        for match in pattern.finditer(self._read(module)):
            names = re.sub(r"#.*", "", match[2]).strip("() \n\t")
            for entry in names.split(","):
                original, _, alias = entry.strip().partition(" as ")
                if (alias or original).strip() == name:
                    return f"{self._resolve_relative(module, match[1])}.{original.strip()}"
        for origin in re.findall(
            r"^from[ \t]+([\w.]+)[ \t]+import[ \t]+\*", self._read(module), re.M
        ):
            resolved = self._resolve_relative(module, origin)
            if self._find_top_level(resolved, name) is not None:
                return f"{resolved}.{name}"
        return None

    def _resolve_relative(self, module: str, origin: str) -> str:
        dots = len(origin) - len(origin.lstrip("."))
        if not dots:
            return origin
        parts = module.split(".")
        file = self._find_file(module)
        if file is not None and file.name == "__init__.py":
            parts.append("__init__")
        return ".".join([*parts[: len(parts) - dots], *filter(None, [origin[dots:]])])

    def _find_member(
        self, module: str, names: list[str], visited: frozenset[str]
    ) -> Definition | None:
        if not names:
            return Definition(module, ast.Module(body=[], type_ignores=[]))
        key = f"{module}.{names[0]}"
        if key in visited:
            return None
        node = self._find_top_level(module, names[0])
        if node is None:
            path = self._find_import(module, names[0])
            if path is None or not path.startswith("torch."):
                return None
            origin, rest = self._split(path)
            return self._find_member(origin, [*rest, *names[1:]], visited | {key})
        for name in names[1:]:
            if not isinstance(node, ast.ClassDef):
                return None
            definition = self._find_class_member(module, node, name, visited | {key})
            if definition is None:
                return None
            module, node = definition.module, definition.node
        return Definition(module, node)

    def _find_class_member(
        self, module: str, node: ast.ClassDef, name: str, visited: frozenset[str]
    ) -> Definition | None:
        for member in _iterate_members(node, name):
            return Definition(module, member)
        for base in node.bases:
            path = ast.unparse(base).split("[")[0].split(".")
            definition = self._find_member(module, path, visited) or self._find_in_import(
                module, path, visited
            )
            if definition is not None and isinstance(definition.node, ast.ClassDef):
                inherited = self._find_class_member(
                    definition.module, definition.node, name, visited
                )
                if inherited is not None:
                    return inherited
        return None

    def _find_in_import(
        self, module: str, path: list[str], visited: frozenset[str]
    ) -> Definition | None:
        """Resolve a base class that is an attribute of an imported module, such as `ir.Buffer`."""
        origin = self._find_import(module, path[0]) if len(path) > 1 else None
        if origin is None or not origin.startswith("torch."):
            return None
        return self._find_member(*self._split(".".join([origin, *path[1:]])), visited)


def _parse_block(text: str, start: int, indent: str) -> ast.AST | None:
    """Parse the statement at `start`, without its decorators."""
    block: list[str] = []
    for line in text[start:].split("\n"):
        inside = line.startswith((f"{indent} ", f"{indent}\t"))
        # The closing bracket of a signature is indented like its `def`.
        ends = block and line.strip() and not inside and line.strip()[0] not in ")]}#"
        # If the lines so far do not parse, this line is part of a multi-line string.
        if ends and (node := _parse(block)) is not None:
            return node
        block.append(line[len(indent) :] if line.startswith(indent) else line)
    return _parse(block)


def _parse(lines: list[str]) -> ast.AST | None:
    try:
        return ast.parse("\n".join(lines)).body[0]
    except SyntaxError:
        return None


def _iterate_members(node: ast.ClassDef, name: str) -> Iterator[ast.AST]:
    """Yield definitions of a name in a class body, and assignments to `self.<name>` in methods."""
    for statement in node.body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if statement.name == name:
                yield statement
        elif name in _list_targets(statement):
            yield statement
    for inner in ast.walk(node):
        if f"self.{name}" in _list_targets(inner):
            yield inner


def _list_targets(statement: ast.AST) -> list[str]:
    if isinstance(statement, ast.Assign):
        flat = [
            leaf
            for target in statement.targets
            for leaf in (target.elts if isinstance(target, ast.Tuple) else [target])
        ]
        return [ast.unparse(target) for target in flat]
    if isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
        return [ast.unparse(statement.target)]
    return []
