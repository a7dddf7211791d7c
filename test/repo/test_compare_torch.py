"""scripts/compare_torch.py: what differs between two torch packages in the names that are used."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import compare_torch
import pytest
import torch
from compare_torch import Finding
from torch_names import TorchNames
from torch_uses import Use, find_uses

INSTALLED = Path(torch.__file__).parent

TORCH = {
    "__init__.py": "from torch._tensor import Tensor",
    "_tensor.py": "class Tensor: ...",
    "version.py": "__version__ = '1.0'",
    "_inductor/__init__.py": "",
    "_inductor/config.py": """
        import os
        import sys

        max_things = 4
        from_environment = os.environ.get("A") == "1"

        class triton:
            cudagraphs = False

        from torch.utils._config_module import install_config_module
        install_config_module(sys.modules[__name__])
    """,
    "utils/_config_module.py": """
        from types import ModuleType

        def install_config_module(module): ...

        class ConfigModule(ModuleType):
            def __getattr__(self, name): ...
            def patch(self, arg1=None, arg2=None, **kwargs): ...
    """,
    "_inductor/codegen/wrapper.py": """
        class WrapperLine: ...

        class AllocateLine(WrapperLine):
            def __init__(self, node):
                self.node = node
    """,
    "_inductor/ir.py": """
        class IRNode:
            def get_name(self): ...

        class ExternKernel(IRNode):
            def get_reads(self, all=False): ...
    """,
    "_inductor/scheduler.py": "class BaseSchedulerNode: ...",
    "_inductor/graph.py": """
        from torch._inductor import ir
        from torch._inductor.ir import ExternKernel

        class GraphLowering:
            def __init__(self, kernel: ir.ExternKernel):
                self.removed = set()
                self.kernel = kernel
    """,
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    return folder


def compare_packages(tmp_path: Path, ours: str, changes: dict[str, str]) -> list[Finding]:
    """The findings for a package with source `ours`; NEW is OLD except for the changed files."""
    package = write(tmp_path / "ours", {"module.py": ours})
    old = TorchNames(write(tmp_path / "old" / "torch", TORCH))
    newer = {**TORCH, "version.py": "__version__ = '1.1'", **changes}
    new = TorchNames(write(tmp_path / "new" / "torch", newer))
    return compare_torch.compare(old, new, find_uses(package).values())


def edit_file(name: str, *pairs: tuple[str, str]) -> dict[str, str]:
    """The file `name` with other text in it."""
    text = TORCH[name]
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return {name: text}


def summary(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.severity, finding.path) for finding in findings]


# --- the installed torch ------------------------------------------------------------------------


def test_equal_releases_have_no_findings(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_torch.main([str(INSTALLED), str(INSTALLED.parent), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["old"] == report["new"] == torch.__version__
    assert {item["severity"] for item in report["findings"]} <= {"guarded", "unresolved"}


def test_replaced_names_and_config_keys_are_found() -> None:
    uses = find_uses(Path(compare_torch.__file__).parent.parent / "inductor_ext")
    source = TorchNames(INSTALLED)
    # Declared by its path, in the table of hooks.
    assert uses["torch._inductor.compile_fx.compile_fx"].is_patched
    for path in (
        "torch._inductor.codegen.wrapper.AllocateLine",
        "torch._inductor.virtualized.V.graph.removed_buffers",
        "torch._inductor.config.triton.cudagraphs",
        "torch._inductor.config.max_autotune_gemm_backends",
        "torch._functorch.config.force_autograd_cache",
        "torch.compiler.config.force_disable_caches",
    ):
        assert not uses[path].is_weak, path
        assert source.resolve(path).status == "defined", path
    # Used so that a guard stands around one of the two, whatever the torch.
    assert uses["torch._inductor.ir.Conditional.get_free_symbol_uses"].is_guarded
    assert uses["torch._inductor.ir.Switch.get_free_symbol_uses"].is_guarded


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("torch.empty", "defined"),
        ("torch.float32", "defined"),
        ("torch._scaled_mm", "defined"),
        ("torch.ops.aten.mm.default", "defined"),
        ("torch._C._profiler._EventType", "defined"),
        ("torch._inductor.ir.FixedLayout.get_free_symbol_uses", "defined"),
        ("torch._inductor.virtualized.V.graph.scheduler", "defined"),
        ("torch._inductor.config.patch", "defined"),
        ("torch._inductor.config.no_such_key", "missing"),
        ("torch._inductor.ir.FixedLayout.no_such_method", "missing"),
        ("torch._inductor.no_such_module.f", "missing"),
        ("torch.ops.aten.no_such_operator", "unknown"),
    ],
)
def test_names_of_the_installed_torch_are_followed(path: str, status: str) -> None:
    assert TorchNames(INSTALLED).resolve(path).status == status


# --- each kind of finding -----------------------------------------------------------------------

GONE = edit_file("_inductor/ir.py", ("ExternKernel", "ForeignKernel"))


@pytest.mark.parametrize(
    "ours",
    [
        "from torch._inductor.ir import ExternKernel",
        "def f():\n    from torch._inductor import ir\n    return ir.ExternKernel()",
        "import torch._inductor.ir\ntorch._inductor.ir.ExternKernel.get_reads",
        "from torch._inductor import ir as other\nkernel = other.ExternKernel\nkernel.x = 1",
        "from torch._inductor import ir\nclass A(ir.ExternKernel): ...",
        "from torch._inductor import ir\ngetattr(ir, 'ExternKernel')",
        "from torch._inductor import ir\nmock.patch.object(ir, 'ExternKernel', f)",
        "HOOK = 'torch._inductor.ir:ExternKernel'",
        "HOOK = Hook('torch._inductor.ir', 'ExternKernel')",
        "IR = 'torch._inductor.ir'\nHOOK = Hook('name', 'read', (f'{IR}.ExternKernel',))",
    ],
)
def test_a_name_that_is_gone(tmp_path: Path, ours: str) -> None:
    findings = compare_packages(tmp_path, ours, GONE)
    gone = [finding for finding in findings if finding.severity == "gone"]
    assert [item.path for item in gone] == ["torch._inductor.ir.ExternKernel"]
    assert gone[0].detail == "not in 1.1"
    assert gone[0].places[0].startswith("ours/module.py:")


def test_a_local_name_that_hides_an_import_is_no_use(tmp_path: Path) -> None:
    ours = """
        from torch._inductor import ir

        def f(ir):
            return ir.ExternKernel

        def g():
            ir = h()
            return ir.ExternKernel
    """
    assert "gone" not in {item.severity for item in compare_packages(tmp_path, ours, GONE)}


def test_a_name_that_moved_and_is_imported_from_there(tmp_path: Path) -> None:
    ours = "from torch._inductor.ir import ExternKernel\nExternKernel.get_reads"
    changes = {
        "_inductor/ir.py": """
            try:
                from ._kernels.extern import *
            except ImportError:
                raise
        """,
        "_inductor/_kernels/__init__.py": "",
        "_inductor/_kernels/extern.py": TORCH["_inductor/ir.py"],
    }
    assert summary(compare_packages(tmp_path, ours, changes)) == []


def test_what_only_type_checkers_see_is_gone(tmp_path: Path) -> None:
    ours = "from torch._inductor.graph import ExternKernel"
    changes = edit_file(
        "_inductor/graph.py",
        (
            "from torch._inductor.ir import ExternKernel",
            "if TYPE_CHECKING:\n            from torch._inductor.ir import ExternKernel",
        ),
    )
    assert summary(compare_packages(tmp_path, ours, changes)) == [
        ("gone", "torch._inductor.graph.ExternKernel")
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("(self, all=False)", "(self, all=True)"),
        ("(self, all=False)", "(self, *, all=False)"),
        ("(self, all=False)", "(self, every=False)"),
        ("(self, all=False)", "(self)"),
    ],
)
def test_a_signature_that_changed(tmp_path: Path, before: str, after: str) -> None:
    ours = """
        from torch._inductor import ir

        class Ours(ir.ExternKernel):
            def get_reads(self, all=False): ...
    """
    changes = edit_file("_inductor/ir.py", (before, after))
    (finding,) = compare_packages(tmp_path, ours, changes)
    assert (finding.severity, finding.path) == (
        "signature",
        "torch._inductor.ir.ExternKernel.get_reads",
    )
    assert finding.detail.split("\n")[1:] == [f"- {before}", f"+ {after}"]


def test_a_signature_is_that_of_parameters_not_of_annotations(tmp_path: Path) -> None:
    ours = "from torch._inductor import ir\nir.ExternKernel.get_reads"
    changes = edit_file(
        "_inductor/ir.py", ("(self, all=False)", "(self, all: bool = False) -> int")
    )
    assert summary(compare_packages(tmp_path, ours, changes)) == []


def test_bases_that_changed(tmp_path: Path) -> None:
    ours = "from torch._inductor.ir import ExternKernel"
    changes = edit_file("_inductor/ir.py", ("(IRNode)", "(object)"))
    (finding,) = compare_packages(tmp_path, ours, changes)
    assert finding.severity == "signature"
    assert finding.detail == "\n- bases (IRNode)\n+ bases (object)"


def test_a_constructor_counts_where_it_is_called(tmp_path: Path) -> None:
    changes = edit_file("_inductor/codegen/wrapper.py", ("(self, node)", "(self, node, comment)"))
    imported = "from torch._inductor.codegen.wrapper import AllocateLine\n"
    assert summary(compare_packages(tmp_path / "a", imported, changes)) == []
    (finding,) = compare_packages(tmp_path / "b", imported + "AllocateLine(1)", changes)
    assert finding.severity == "signature"


@pytest.mark.parametrize(
    "ours",
    [
        "def f(graph: GraphLowering | None):\n    graph.removed.add(1)",
        "def f(x):\n    if isinstance(x, GraphLowering):\n        return x.removed",
        "class A(GraphLowering):\n    def f(self):\n        return self.removed",
        "class A(GraphLowering): ...\nclass B(A):\n    def f(self):\n        return self.removed",
    ],
)
def test_attributes_of_instances(tmp_path: Path, ours: str) -> None:
    ours = f"from torch._inductor.graph import GraphLowering\n{ours}"
    changes = edit_file("_inductor/graph.py", ("self.removed", "self.dropped"))
    assert summary(compare_packages(tmp_path, ours, changes)) == [
        ("gone", "torch._inductor.graph.GraphLowering.removed")
    ]


def test_an_attribute_of_an_attribute_is_followed_by_its_type(tmp_path: Path) -> None:
    ours = "from torch._inductor.graph import GraphLowering\nGraphLowering.kernel.get_reads"
    changes = edit_file("_inductor/ir.py", ("get_reads", "get_uses"))
    assert summary(compare_packages(tmp_path, ours, changes)) == [
        ("gone", "torch._inductor.graph.GraphLowering.kernel.get_reads")
    ]


@pytest.mark.parametrize(
    "ours",
    [
        "config.triton.cudagraphs, config.max_things",
        "config.patch(max_things=1)\nconfig.triton.cudagraphs",
        "OPTIONS = {'max_things': 1, 'triton.cudagraphs': True}",
        "config.patch({'max_things': 1})\nconfig.patch('triton.cudagraphs', True)",
    ],
)
def test_config_keys(tmp_path: Path, ours: str) -> None:
    changes = edit_file("_inductor/config.py", ("= 4", "= 8"), ("cudagraphs", "graphs"))
    ours = f"from torch._inductor import config\n{ours}"
    findings = compare_packages(tmp_path, ours, changes)
    assert summary(findings) == [
        ("gone", "torch._inductor.config.triton.cudagraphs"),
        ("default", "torch._inductor.config.max_things"),
    ]
    assert findings[1].detail == "\n- 4\n+ 8"


@pytest.mark.parametrize(
    "ours",
    [
        "ir.ExternKernel if hasattr(ir, 'ExternKernel') else None",
        "getattr(ir, 'ExternKernel', None)",
        "try:\n    ir.ExternKernel\nexcept AttributeError:\n    pass",
        "with contextlib.suppress(AttributeError):\n    ir.ExternKernel",
        "def f():\n    x = getattr(ir, 'Other', None)\n    return x if x else ir.ExternKernel",
        "if hasattr(ir, 'ExternKernel') and ir.ExternKernel.get_reads:\n    pass",
        "RELIED_ON = 'torch._inductor.ir.ExternKernel|torch._inductor.ir.ForeignKernel'",
        "IR = 'torch._inductor.ir'\nHook('a', 'read', (f'{IR}.ExternKernel', f'{IR}.Other'), why)",
        "Hook('a', 'read', ('torch._inductor.ir.ExternKernel',), why, until='1.1')",
    ],
)
def test_a_guarded_name_is_not_a_failure(tmp_path: Path, ours: str) -> None:
    findings = compare_packages(tmp_path, f"from torch._inductor import ir\n{ours}", GONE)
    assert ("guarded", "torch._inductor.ir.ExternKernel") in summary(findings)
    assert not {finding.severity for finding in findings} & set(compare_torch.FAILING)


def test_a_config_key_that_is_gone(tmp_path: Path) -> None:
    ours = "from torch._inductor import config\nconfig.max_things\nconfig.patch(max_things=1)"
    changes = edit_file("_inductor/config.py", ("max_things", "most_things"))
    findings = compare_packages(tmp_path, ours, changes)
    assert ("gone", "torch._inductor.config.max_things") in summary(findings)


def test_one_use_without_a_guard_is_a_failure(tmp_path: Path) -> None:
    ours = "from torch._inductor import ir\ngetattr(ir, 'ExternKernel', None)\nir.ExternKernel"
    assert ("gone", "torch._inductor.ir.ExternKernel") in summary(
        compare_packages(tmp_path, ours, GONE)
    )


def test_classes_to_decide_about(tmp_path: Path) -> None:
    changes = {
        **edit_file("_inductor/ir.py", ("class ExternKernel", "class ExternKernel")),
        "_inductor/codegen/more.py": """
            from torch._inductor.codegen import wrapper

            class PoolLine(wrapper.AllocateLine): ...

            if True:
                class Kernel(ExternKernel): ...

            class NodeOfNode(FirstNode): ...
            class FirstNode(BaseSchedulerNode): ...
            class Other: ...
        """,
    }
    assert summary(compare_packages(tmp_path, "", changes)) == [
        ("class", f"torch._inductor.codegen.more.{name}")
        for name in ("FirstNode", "Kernel", "NodeOfNode", "PoolLine")
    ]


def test_new_names_next_to_replaced_ones(tmp_path: Path) -> None:
    ours = "from torch._inductor import graph\ngraph.GraphLowering = f"
    changes = {
        **edit_file(
            "_inductor/graph.py", ("class Graph", "def passes(): ...\n\n        class Graph")
        ),
        **edit_file(
            "_inductor/config.py", ("max_things = 4", "max_things = 4\n        new_key = 1")
        ),
        **edit_file("_inductor/scheduler.py", ("class", "def unseen(): ...\nclass")),
    }
    findings = compare_packages(tmp_path, ours, changes)
    assert [
        (finding.path, finding.detail) for finding in findings if finding.severity == "name"
    ] == [
        ("torch._inductor.config", "new_key"),
        ("torch._inductor.graph", "passes"),
    ]


@pytest.mark.parametrize(
    ("ours", "path"),
    [
        ("getattr(config, name)", "torch._inductor.config.<name>"),
        ("config.from_environment.x.y", "torch._inductor.config.from_environment.x.y"),
        ("config.in_neither", "torch._inductor.config.in_neither"),
    ],
)
def test_unresolved_uses_are_listed(tmp_path: Path, ours: str, path: str) -> None:
    ours = f"from torch._inductor import config\n{ours}"
    assert summary(compare_packages(tmp_path, ours, {})) == [("unresolved", path)]


def test_a_module_in_later_syntax_is_listed(tmp_path: Path) -> None:
    ours = "from torch._inductor.scheduler import BaseSchedulerNode"
    changes = {"_inductor/scheduler.py": "class BaseSchedulerNode: ...\nof = yet unknown"}
    findings = compare_packages(tmp_path, ours, changes)
    assert [finding.severity for finding in findings] == ["unresolved", "unresolved"]
    assert findings[0].path.startswith("torch._inductor.scheduler (invalid syntax, line 2)")


def test_a_name_of_the_newer_torch_alone(tmp_path: Path) -> None:
    changes = edit_file("_inductor/scheduler.py", ("class", "def fresh(): ...\nclass"))
    ours = "from torch._inductor import scheduler\nscheduler.fresh()"
    assert summary(compare_packages(tmp_path, ours, changes)) == [
        ("added", "torch._inductor.scheduler.fresh")
    ]


# --- the command --------------------------------------------------------------------------------


def test_the_command_prints_findings_by_severity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = "from torch._inductor import ir, scheduler\nir.ExternKernel()\nscheduler.other"
    compare_packages(tmp_path, ours, GONE)
    arguments = [str(tmp_path / name) for name in ("old", "new")]
    assert compare_torch.main([*arguments, "--package", str(tmp_path / "ours")]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith(
        "torch 1.0 -> 1.1\n"
        "gone (1)\n"
        "  torch._inductor.ir.ExternKernel: not in 1.1  [ours/module.py:2]\n"
        "signature or bases changed: none\n"
    )
    assert printed.endswith(
        "unresolved: the source alone does not tell (1)\n"
        "  torch._inductor.scheduler.other: in neither  [ours/module.py:3]\n"
    )


def test_other_folders_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = tmp_path / "torch-2.99.whl"
    wheel.touch()
    text = tmp_path / "text.txt"
    text.touch()
    for argument, complaint in (
        (tmp_path, "contains no torch package"),
        (tmp_path / "nowhere", "contains no torch package"),
        (wheel, "is a wheel: unzip it"),
        (text, "is neither a folder nor a Python interpreter"),
    ):
        assert compare_torch.main([str(INSTALLED), str(argument)]) == 2
        assert f"compare_torch: {argument} {complaint}" in capsys.readouterr().err


def test_an_interpreter_stands_for_its_torch(tmp_path: Path) -> None:
    assert compare_torch.locate(sys.executable).samefile(INSTALLED)


def test_uses_are_collected_over_files(tmp_path: Path) -> None:
    text = "import torch\ntorch.compile(f)\n"
    package = write(tmp_path / "ours", {"a.py": text, "b/c.py": text})
    uses = find_uses(package)
    assert uses["torch.compile"] == Use(
        "torch.compile",
        places=["ours/a.py:2", "ours/b/c.py:2"],
        is_guarded=False,
        is_weak=False,
        is_constructed=True,
    )
