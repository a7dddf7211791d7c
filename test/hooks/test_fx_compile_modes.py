"""TORCHINDUCTOR_FX_COMPILE_MODE: Inductor's ways to compile elsewhere, or later.

The variable is read when Inductor is imported, so the tests set what it sets.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor import compile_fx, compile_fx_subproc
from torch._inductor.virtualized import V

from inductor_ext import exc
from test.support.children.lowering import Choices

MODES = {
    "NORMAL": (compile_fx.FxCompileMode.NORMAL, False, False),
    "SERIALIZE": (compile_fx.FxCompileMode.SERIALIZE, False, False),
    "SUBPROCESS": (compile_fx.FxCompileMode.SUBPROCESS, False, False),
    "async+SUBPROCESS": (compile_fx.FxCompileMode.SUBPROCESS, True, False),
    "progressive+SUBPROCESS": (compile_fx.FxCompileMode.SUBPROCESS, False, True),
}


@pytest.fixture
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    kind, asynchronous, progressive = MODES[name]
    monkeypatch.setenv("TORCHINDUCTOR_FX_COMPILE_MODE", name)
    monkeypatch.setattr(compile_fx, "fx_compile_mode", kind)
    monkeypatch.setattr(compile_fx, "fx_compile_async", asynchronous)
    monkeypatch.setattr(compile_fx, "fx_compile_progressive", progressive)
    return name


def function(x: torch.Tensor) -> torch.Tensor:
    return torch.asinh(x).sum(-1) * 2


def compile_and_train(path: pathlib.Path) -> None:
    x = torch.randn(3, 5, requires_grad=True)
    reference = x.detach().clone().requires_grad_()
    options = {"fallback_to_eager": False, "fx_graph_cache": False}
    with (
        torch._functorch.config.patch(enable_autograd_cache=False),
        V.set_choices_handler(Choices(str(path))),
    ):
        out = torch.compile(function, backend="inductor_ext", options=options)(x)
        out.sum().backward()
    expected = function(reference)
    expected.sum().backward()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(x.grad, reference.grad)


def processes(path: pathlib.Path) -> set[int]:
    """The processes in which the lowering ran, with the settings of the compile."""
    lines = [line.split(" ", 1) for line in path.read_text().splitlines()]
    assert {settings for _, settings in lines} == {"{'fallback_to_eager': False}"}
    return {int(pid) for pid, _ in lines}


@pytest.mark.parametrize("mode", ["NORMAL", "SERIALIZE"], indirect=True)
def test_compiles_here(mode: str, tmp_path: pathlib.Path) -> None:
    compile_and_train(tmp_path / "log")
    assert processes(tmp_path / "log") == {os.getpid()}


@pytest.mark.parametrize("mode", ["SUBPROCESS"], indirect=True)
def test_compiles_in_a_subprocess(mode: str, tmp_path: pathlib.Path) -> None:
    """The extension lowers there, with the settings and the handler of this process."""
    compile_and_train(tmp_path / "log")
    (process,) = processes(tmp_path / "log")
    assert process != os.getpid()


@pytest.mark.parametrize("mode", ["async+SUBPROCESS"], indirect=True)
def test_compiles_here_and_again_in_a_subprocess(
    mode: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    futures: list[Any] = []
    send = compile_fx_subproc._SubprocessFxCompile._send_to_child_async

    def spy(*args: Any, **kwargs: Any) -> Any:
        futures.append(send(*args, **kwargs))
        return futures[-1]

    monkeypatch.setattr(compile_fx_subproc._SubprocessFxCompile, "_send_to_child_async", spy)
    compile_and_train(tmp_path / "log")
    for future in futures:
        future.result()
    here = os.getpid()
    assert len(futures) == 2
    assert len(processes(tmp_path / "log") - {here}) == 1


@pytest.mark.parametrize("mode", ["progressive+SUBPROCESS"], indirect=True)
def test_progressive_inference_works(mode: str) -> None:
    x = torch.randn(3, 5)
    with torch._functorch.config.patch(enable_autograd_cache=False):
        compiled = torch.compile(
            function, backend="inductor_ext", options={"fx_graph_cache": False}
        )
        torch.testing.assert_close(compiled(x), function(x))
        torch.testing.assert_close(compiled(x + 1), function(x + 1))


@pytest.mark.parametrize("mode", ["progressive+SUBPROCESS"], indirect=True)
def test_progressive_training_is_refused(mode: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(Exception, match="differentiated") as caught:
        compile_and_train(tmp_path / "log")
    assert mode in str(caught.value)


@pytest.mark.parametrize("mode", ["async+SUBPROCESS", "progressive+SUBPROCESS"], indirect=True)
def test_uncacheable_modes_are_refused_with_the_cache_on(mode: str) -> None:
    compiled = torch.compile(function, backend="inductor_ext")
    with (
        inductor_config.patch(fx_graph_cache=True),
        torch.compiler.config.patch(force_disable_caches=False),  # type: ignore[attr-defined]
        pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught,
    ):
        compiled(torch.randn(3, 5))
    cause: Any = caught.value.__cause__ or caught.value.inner_exception
    assert isinstance(cause, exc.UnsupportedCompileModeError)
    assert cause.fields["mode"] == mode
    assert "TORCHINDUCTOR_FX_GRAPH_CACHE=0" in str(cause)
