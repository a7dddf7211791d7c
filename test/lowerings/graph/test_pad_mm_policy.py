"""Padded matmuls keep strides and other results. Padding is simulated on a CPU."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
import torch._inductor
from torch._inductor import config as inductor_config
from torch._inductor.fx_passes import pad_mm

import inductor_ext
from inductor_ext import config
from inductor_ext.autotune import decide
from inductor_ext.hooks import activate, compile_fx, scope
from inductor_ext.lowerings.graph import pad_mm_policy
from test.support import aot_util


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Pad every matmul that may be padded, as if it were faster; yields those matmuls."""
    matmuls: list[Any] = []

    def should_pad(match: Any, mat1: Any, mat2: Any, *_: Any) -> bool:
        matmuls.append((tuple(mat1.shape), tuple(mat2.shape)))
        return True

    for name in ("check_device", "has_triton"):
        monkeypatch.setattr(pad_mm, name, lambda *_: True)
    monkeypatch.setattr(pad_mm, "_should_pad", should_pad)
    return matmuls


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_results_of_an_artifact_have_the_strides_of_the_program(
    padded: list[Any], tmp_path: pathlib.Path
) -> None:
    model, x = Linear(), torch.randn(3, 6)
    program = aot_util.export(model, (x,))
    path = str(tmp_path / "linear.pt2")
    inductor_ext.aoti_compile_and_package(program, package_path=path)
    y = inductor_ext.load(path)(x)
    assert padded == [((3, 6), (6, 5))]
    assert y.stride() == (5, 1)
    torch.testing.assert_close(y, model(x))


def test_inductor_returns_strides_of_the_padded_matmul(
    padded: list[Any], tmp_path: pathlib.Path
) -> None:
    model, x = Linear(), torch.randn(3, 6)
    path = str(tmp_path / "linear.pt2")
    torch._inductor.aoti_compile_and_package(aot_util.export(model, (x,)), package_path=path)
    if aot_util.crashes_at_load(path):
        pytest.skip("stock's packages crash at load on this machine")
    y = torch._inductor.aoti_load_package(path)(x)
    assert padded
    assert y.stride() == (8, 1)


def test_branches_are_not_padded(padded: list[Any]) -> None:
    """Only one branch has a matmul to pad, so that their strides would differ."""
    yes, no = torch.nn.Linear(6, 5), torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh())

    class Chosen(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.yes, self.no = torch.nn.Linear(6, 6), yes, no

        def forward(self, p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(p, self.yes, self.no, (self.before(x),))

    model, x = Chosen(), torch.randn(3, 6)
    artifact = aot_util.compile_model(model, (torch.tensor(True), x))
    artifact.check(torch.tensor(True), x)
    artifact.check(torch.tensor(False), x)
    assert padded == [((3, 6), (6, 6))]


@pytest.mark.parametrize("recorded_before_passes", [False, True])
@pytest.mark.parametrize(
    ("before", "after", "copied"),
    [
        ((5, 1), (8, 1), True),
        ((1, 5), (1, 8), True),
        # Another order is another layout, which may be the compiler's choice.
        ((30, 6, 1), (30, 1, 5), False),
        # Smaller strides are not padding.
        ((8, 1), (5, 1), False),
        (None, (8, 1), False),
        ((5, 1), None, False),
    ],
)
def test_strides_that_padding_has_changed(
    before: Any, after: Any, copied: bool, recorded_before_passes: bool
) -> None:
    """Torch 2.14 records results' strides before the passes, older ones after them."""
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    x.meta["val"] = torch.empty(1)
    y.meta["val"] = None if after is None else torch.empty_strided((2,) * len(after), after)
    graph.output((x, y))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    (output,) = module.graph.find_nodes(op="output")
    kept = before if recorded_before_passes else after
    output.meta["original_output_strides"] = [(1,), kept]
    pad_mm_policy.record_strides(module, [(1,), before])
    pad_mm_policy.restore_strides(module)
    assert output.meta["original_output_strides"] == [(1,), before if copied else kept]
    copies = module.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    assert output.args[0] == ((x, *copies) if copied else (x, y))
    assert len(copies) == copied


def test_strides_of_results() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, 3).t()
    graph.output((x, 3, None))
    assert pad_mm_policy.result_strides(torch.fx.GraphModule(torch.nn.Module(), graph)) == [
        (1, 3),
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("mat1", "mat2", "rows_alone"),
    [
        (torch.empty(3, 8), torch.empty(8, 4), True),
        (torch.empty(2, 3, 8), torch.empty(2, 8, 4), True),
        (torch.empty(3, 8), torch.empty(8, 5), False),
        (torch.empty(3, 7), torch.empty(7, 4), False),
        # Rows with a stride of 3 elements, which no kernel loads efficiently.
        (torch.empty(8, 3).t(), torch.empty(8, 4), False),
    ],
)
def test_m_alone_is_not_padded_if_extension_kernels_compete(
    mat1: torch.Tensor, mat2: torch.Tensor, rows_alone: bool, padded: list[Any]
) -> None:
    compile_fx.install_hooks(activate.requested)
    problems = mat1, mat2, torch.ops.aten.mm if mat1.dim() == 2 else torch.ops.aten.bmm
    assert pad_mm.can_pad(*problems)
    with scope.compile_scope(config.snapshot({})):
        assert pad_mm.can_pad(*problems)
        for comparing in (
            decide.force_config(lambda _: None),
            inductor_config.patch(max_autotune=True),
        ):
            with comparing:
                assert pad_mm.can_pad(*problems) is not rows_alone
    with (
        scope.compile_scope(config.snapshot({"gemm_templates": False})),
        decide.force_config(lambda _: None),
    ):
        assert pad_mm.can_pad(*problems)
