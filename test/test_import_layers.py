"""The direction of imports within the package, and what an import may bring with it.

The imports are read from the source, also those inside functions: a lazy import upwards is an
import upwards all the same.
"""

from __future__ import annotations

import ast
import graphlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "inductor_ext"

LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"_compat", "config", "exc", "flops", "numerics", "progress", "settings", "storage"}),
    frozenset(
        {
            "hooks.context",
            "hooks.lowering_table",
            "hooks.registry",
            "hooks.torch_source",
            "hooks.wrapper_codegen",
        }
    ),
    frozenset({"events", "memory", "memory_planning", "options", "templates", "toolchain"}),
    frozenset({"autotune", "cpp_wrapper", "lowerings"}),
    frozenset({"cpp_wrapper.hooks", "lowerings.hooks", "memory.hooks"}),
    frozenset({"hooks"}),
    frozenset({"aot", "backend", "entry_point", "targets"}),
    frozenset({"__main__", "cli", "reports"}),
)
"""The units, lowest layer first: modules and subpackages directly in the package, and single
modules of a subpackage that belong to a lower layer than the rest of it.

A unit imports from its own layer and from lower ones, and no two units import each other.
"""

FEATURES: dict[str, frozenset[str]] = {
    "matmul kernels": frozenset({"autotune", "lowerings", "lowerings.hooks", "templates"}),
    "memory": frozenset({"memory", "memory.hooks", "memory_planning"}),
    "packages": frozenset({"cpp_wrapper", "cpp_wrapper.hooks"}),
}
"""The features, which never import each other; what they share is in lower layers."""

IMPORTERS: dict[str, frozenset[str]] = {
    "backend": frozenset({"aot", "cli", "entry_point", "__main__"}),
    "cli": frozenset({"__main__"}),
    "entry_point": frozenset(),
}
"""The units that only the ones named here may import."""

PURE = (
    "autotune.accuracy",
    "autotune.candidate_run",
    "autotune.decision",
    "autotune.distributed",
    "autotune.reference",
    "autotune.results",
    "autotune.results_db",
    "autotune.results_folder",
    "autotune.timing",
    "cpp_wrapper.build.cmake_project",
    "cpp_wrapper.build.cpu_isa",
    "cpp_wrapper.client",
    "cpp_wrapper.codegen.cpp_statements",
    "cpp_wrapper.codegen.input_checks",
    "cpp_wrapper.codegen.split_units",
    "cpp_wrapper.package.manifest",
    "cpp_wrapper.package.zip_directory",
    "cpp_wrapper.package.zip_format",
    "cpp_wrapper.package.zip_reader",
    "cpp_wrapper.package.zip_structure",
    "cpp_wrapper.package.zip_writer",
    "cpp_wrapper.signature.expression",
    "cpp_wrapper.signature.signature",
    "hooks.context",
    "hooks.hook_table",
    "hooks.lowering_table",
    "hooks.registry",
    "hooks.torch_source",
    "memory.arena_runtime",
    "memory.budget_runtime",
    "memory.planner.arena_plan",
    "memory.planner.arenas",
    "memory.planner.csv_io",
    "memory.planner.greedy",
    "memory.planner.interval",
    "memory.planner.kernel_order",
    "memory.planner.kernel_order.list_schedule",
    "memory.planner.kernel_order.lower_bound",
    "memory.planner.kernel_order.problem",
    "memory.planner.kernel_order.search",
    "memory.planner.kernel_order.state",
    "memory.planner.kernel_order.window",
    "memory.planner.live_sums",
    "memory.planner.local_search",
    "memory.planner.peak_report",
    "memory.planner.placement_policy",
    "memory.planner.resized_plan",
    "memory.planner.size_expression",
    "memory.planner.solver",
    "memory.planner.symbolic",
    "memory.planner.symbolic.algebra",
    "memory.planner.symbolic.evaluator",
    "memory.planner.symbolic.runtime_replanner",
    "memory.planner.symbolic.stacking",
    "templates.cutlass.alignment",
    "templates.cutlass.aot_link",
    "templates.cutlass.background_build",
    "templates.cutlass.build_slots",
    "templates.cutlass.compiler_process",
    "templates.cutlass.config",
    "templates.cutlass.constraints",
    "templates.cutlass.cost_model",
    "templates.cutlass.epilogue",
    "templates.cutlass.evt",
    "templates.cutlass.find_headers",
    "templates.cutlass.launch",
    "templates.cutlass.nvcc_build",
    "templates.cutlass.runtime",
    "templates.cutlass.source",
    "templates.cutlass.source.common",
    "templates.cutlass.source.grouped",
    "templates.cutlass.source.interface",
    "templates.cutlass.source.mixed_input",
    "templates.cutlass.source.multistage",
    "templates.cutlass.source.sm90",
    "templates.cutlass.source.specialized",
    "templates.device",
    "templates.format",
    "templates.kernels",
    "templates.fused_ops",
    "templates.problem",
    "templates.tensors",
    "templates.triton.config",
    "templates.triton.constraint",
    "templates.triton.constraints",
    "templates.triton.cost_model",
    "templates.triton.kernels.common",
    "templates.triton.kernels.dequant_a_stationary",
    "templates.triton.kernels.dequant_register",
    "templates.triton.kernels.dequantize",
    "templates.triton.kernels.gemv",
    "templates.triton.kernels.grouped",
    "templates.triton.kernels.persistent_tma",
    "templates.triton.kernels.tile",
    "templates.triton.ranking",
    "templates.triton.search_space",
    "templates.triton.semaphores",
    "templates.triton.small_m_constraints",
    "templates.triton.templates",
    "templates.versions",
)
"""Pure modules: neither they nor their imports load one of `COMPILERS`."""

COMPILERS = ("torch._inductor", "triton", "cutlass_library", "cutlass_cppgen", "cutlass")


@dataclass(frozen=True)
class Import:
    """One imported module or name, as a dotted path, and its position."""

    path: str
    line: int
    typing_only: bool


def module_name(package: Path, file: Path) -> str:
    """The dotted name of `file` below `package`; empty for the package itself."""
    parts = file.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(package: Path) -> dict[str, Path]:
    return {module_name(package, file): file for file in sorted(package.rglob("*.py"))}


def imports(package: Path, file: Path) -> list[Import]:
    """Every import statement and every `import_module` of a literal in `file`."""
    imported: list[Import] = []
    inside = [package.name, *file.relative_to(package).parent.parts]

    def visit(node: ast.AST, typing_only: bool) -> None:
        if isinstance(node, ast.Import):
            imported.extend(Import(alias.name, node.lineno, typing_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = inside[: len(inside) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            imported.extend(
                Import(f"{origin}.{alias.name}", node.lineno, typing_only) for alias in node.names
            )
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith("import_module")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            imported.append(Import(str(node.args[0].value), node.lineno, typing_only))
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in node.body:
                visit(child, True)
            for child in node.orelse:
                visit(child, typing_only)
            return
        for child in ast.iter_child_nodes(node):
            visit(child, typing_only)

    visit(ast.parse(file.read_text(encoding="utf-8")), False)
    return imported


def room(name: str) -> str:
    """The unit of a module, or of a name in it."""
    first, *rest = name.split(".")
    single = ".".join([first, *rest[:1]])
    return single if any(single in layer for layer in LAYERS) else first


def imported_room(package: Path, path: str) -> str | None:
    """The unit of an imported path; None outside the package, empty for its top."""
    first, _, rest = path.partition(".")
    if first != package.name:
        return None
    candidate = room(rest)
    path = package.joinpath(*candidate.split("."))
    exists = path.is_dir() or path.with_suffix(".py").is_file()
    return candidate if candidate and exists else ""


def violations(package: Path) -> list[str]:
    """Violations of the rules above, one line each."""
    layer_of = {name: index for index, layer in enumerate(LAYERS) for name in layer}
    feature_of = {name: feature for feature, rooms in FEATURES.items() for name in rooms}
    problems = [
        f"{name} stands in no layer: add it to LAYERS in test/test_import_layers.py, in the lowest "
        "layer that holds all it imports (docs/architecture.md describes them)"
        for name in sorted({room(name) for name in sources(package)} - {""})
        if name not in layer_of
    ]
    if problems:
        return problems

    runtime: dict[str, set[str]] = {name: set() for name in layer_of}
    for name, file in sources(package).items():
        importer = room(name)
        if not importer:
            continue  # the package's own __init__ has a test of its own
        for imported in imports(package, file):
            target = imported_room(package, imported.path)
            if target is None or target == importer:
                continue
            where = f"{file.relative_to(package.parent)}:{imported.line}"
            if imported.path == f"{package.name}.__version__":
                continue  # defined there, not loaded through the table
            if not target:
                problems.append(
                    f"{where}: {imported.path} goes through the package's lazy table; import the "
                    "module that defines it"
                )
                continue
            if layer_of[target] > layer_of[importer]:
                problems.append(f"{where}: {importer} imports {target}, a higher layer")
            features = {feature_of.get(importer, ""), feature_of.get(target, "")} - {""}
            if len(features) > 1:
                problems.append(f"{where}: {importer} imports {target}, of another feature")
            if importer not in IMPORTERS.get(target, layer_of):
                problems.append(f"{where}: {importer} imports {target}, which is not for it")
            if not imported.typing_only:
                runtime[importer].add(target)
    try:
        graphlib.TopologicalSorter(runtime).prepare()
    except graphlib.CycleError as error:
        problems.append("rooms import each other: " + " <- ".join(error.args[1]))
    return problems


def loaded_by(statement: str) -> set[str]:
    """The modules that a new interpreter has loaded after `statement`."""
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    return set(json.loads(run.stdout))


def loaded_by_each(names: list[str]) -> dict[str, set[str]]:
    """The modules that are loaded after importing each of `names` alone.

    The interpreter is forked after the imports that take long and load none of `COMPILERS`.
    """
    code = """
import importlib, json, os, sys
import torch, sympy
for name in sys.argv[1:]:
    if os.fork() == 0:
        importlib.import_module(name)
        print(json.dumps([name, sorted(sys.modules)]), flush=True)
        os._exit(0)
    os.wait()
"""
    run = subprocess.run(
        [sys.executable, "-c", code, *names],
        capture_output=True,
        text=True,
        check=True,
        cwd=PACKAGE.parent,
    )
    return {name: set(loaded) for name, loaded in map(json.loads, run.stdout.splitlines())}


def within(modules: set[str], *packages: str) -> list[str]:
    return sorted(name for name in modules for p in packages if f"{name}.".startswith(f"{p}."))


def test_imports_point_down() -> None:
    assert violations(PACKAGE) == []


def test_importing_the_package_loads_only_its_table() -> None:
    loaded = loaded_by("import inductor_ext")
    assert within(loaded, "torch", "sympy", "numpy", "triton") == []
    assert within(loaded, "inductor_ext") == ["inductor_ext"]


def test_generated_code_of_earlier_versions_finds_its_modules() -> None:
    code = "from inductor_ext import arena_runtime, counters_runtime, cutlass_runtime"
    names: dict[str, object] = {}
    exec(
        f"{code}\nused = arena_runtime.poison, counters_runtime.counters, cutlass_runtime.load",
        names,
    )
    assert all(map(callable, names["used"]))  # type: ignore[call-overload]


def test_the_package_imports_its_modules_for_types_only() -> None:
    eager = [
        imported
        for imported in imports(PACKAGE, PACKAGE / "__init__.py")
        if not imported.typing_only and imported_room(PACKAGE, imported.path) is not None
    ]
    assert eager == []


def test_pure_modules_import_no_compiler() -> None:
    files = sources(PACKAGE)
    loaded = loaded_by_each([f"inductor_ext.{name}" for name in PURE])
    for name in PURE:
        named = {i.path for i in imports(PACKAGE, files[name]) if not i.typing_only}
        assert within(named, *COMPILERS) == [], name
        assert within(loaded[f"inductor_ext.{name}"], *COMPILERS) == [], name


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A package with an empty module for every unit."""
    package = tmp_path / "inductor_ext"
    package.mkdir()
    names = {name for layer in LAYERS for name in layer}
    for name in ["__init__", *sorted(names)]:
        path = package.joinpath(*name.split("."))
        is_folder = any(other.startswith(f"{name}.") for other in names)
        file = path / "__init__.py" if is_folder else path.with_suffix(".py")
        file.parent.mkdir(exist_ok=True)
        file.write_text("")
    return package


@pytest.mark.parametrize(
    ("importer", "statement", "complaint"),
    [
        ("exc", "import inductor_ext.events", "exc imports events, a higher layer"),
        ("lowerings", "import inductor_ext.memory", "lowerings imports memory, of another feature"),
        ("exc", "from inductor_ext import events", "exc imports events, a higher layer"),
        ("exc", "from inductor_ext.events import emit", "exc imports events, a higher layer"),
        ("exc", "from . import events", "exc imports events, a higher layer"),
        ("exc", "from .events import emit", "exc imports events, a higher layer"),
        ("exc", "def f():\n    from inductor_ext import events", "exc imports events"),
        (
            "exc",
            "if TYPE_CHECKING:\n    from inductor_ext import events",
            "exc imports events, a higher layer",
        ),
        (
            "exc",
            "import importlib\nimportlib.import_module('inductor_ext.events')",
            "exc imports events, a higher layer",
        ),
        ("reports", "from inductor_ext import backend", "reports imports backend, which is not"),
        ("reports", "from inductor_ext import cli", "reports imports cli, which is not for it"),
        ("cli", "from inductor_ext import activate", "goes through the package's lazy table"),
    ],
)
def test_a_wrong_import_is_found(
    house: Path, importer: str, statement: str, complaint: str
) -> None:
    (house / f"{importer}.py").write_text(statement)
    (problem,) = violations(house)
    assert complaint in problem


def test_a_right_import_is_not(house: Path) -> None:
    (house / "cli.py").write_text(
        "import torch\nfrom inductor_ext import __version__, backend, events, reports"
    )
    (house / "reports.py").write_text("from .events import emit\nfrom inductor_ext.exc import E")
    assert violations(house) == []


def test_folders_that_import_each_other_are_found(house: Path) -> None:
    (house / "aot.py").write_text("from inductor_ext import backend")
    (house / "backend.py").write_text("def f():\n    from inductor_ext import aot")
    (problem,) = violations(house)
    assert problem.startswith("rooms import each other")
    (house / "backend.py").write_text("if TYPE_CHECKING:\n    from inductor_ext import aot")
    assert violations(house) == []


def test_relative_imports_are_resolved_from_their_own_package(house: Path) -> None:
    (house / "templates.py").unlink()
    folder = house / "templates" / "triton"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("from . import triton")
    (folder / "__init__.py").write_text(
        "from .. import problem\nfrom ...hooks.activate import requested"
    )
    (problem,) = violations(house)
    assert "templates imports hooks, a higher layer" in problem
    assert problem.startswith(str(Path("inductor_ext/templates/triton/__init__.py:2")))


def test_an_unknown_folder_is_reported_with_the_fix(house: Path) -> None:
    (house / "attic.py").write_text("")
    (problem,) = violations(house)
    assert problem.startswith(
        "attic stands in no layer: add it to LAYERS in test/test_import_layers.py"
    )
