"""Without a compiler, Triton or CUTLASS: one warning by name, and compiles fall back."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest
import torch
import torch._inductor.config as inductor_config

from inductor_ext import events, exc
from inductor_ext.backend import EagerFallbackRecord
from inductor_ext.toolchain import components, requirements


def test_a_cpu_graph_runs_in_eager_mode(
    no_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(5, requires_grad=True)
    for shift in (1, 2):
        torch._dynamo.reset()
        with events.capture() as records:
            compiled = torch.compile(lambda x: torch.sinh(x) + shift, backend="inductor_ext")  # noqa: B023
            out = compiled(x)
        torch.testing.assert_close(out, torch.sinh(x) + shift)
        (gradient,) = torch.autograd.grad(out.sum(), x)
        torch.testing.assert_close(gradient, torch.cosh(x))
        (record,) = records
        assert isinstance(record, EagerFallbackRecord)
        assert (record.part, record.operators) == ("C++ compiler", 2)
        assert "g++" in record.install
    ours = [message for message in caplog.messages if "eager mode" in message]
    assert len(ours) == 1
    assert "\n" not in ours[0]


def test_a_cpu_graph_fails_without_fallback_to_eager(no_compiler: None) -> None:
    compiled = torch.compile(
        torch.sinh, backend="inductor_ext", options={"fallback_to_eager": False}
    )
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="MissingToolchainError"):
        compiled(torch.ones(2))


@pytest.mark.separate_kernels
def test_the_disabled_extension_fails_as_inductor_does(no_compiler: None) -> None:
    errors = []
    for backend, options in (("inductor", None), ("inductor_ext", {"enabled": False})):
        torch._dynamo.reset()
        compiled = torch.compile(torch.sinh, backend=backend, options=options)
        # The error depends on what Inductor has cached about the compiler.
        with (
            inductor_config.patch(force_disable_caches=True),
            pytest.raises(Exception, match=r"InvalidCxxCompiler|FileNotFoundError") as caught,
        ):
            compiled(torch.ones(2))
        errors.append((type(caught.value), str(caught.value).splitlines()[0]))
    assert errors[0] == errors[1]


def test_in_a_process_without_compilers(tmp_path: pathlib.Path) -> None:
    code = """
        import torch
        f = torch.compile(lambda x: torch.sinh(x) + 1, backend="inductor_ext")
        g = torch.compile(lambda x: torch.cosh(x) + 1, backend="inductor_ext")
        x = torch.ones(3)
        assert torch.equal(f(x), torch.sinh(x) + 1)
        assert torch.equal(g(x), torch.cosh(x) + 1)
    """
    environment = {**os.environ, "PATH": str(tmp_path)}
    for variable in ("CXX", "CC"):
        environment.pop(variable, None)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    ours = [line for line in done.stderr.splitlines() if "C++ compiler is missing" in line]
    assert len(ours) == 1


class FakeParts:
    """Stand-in for components.probe: components in `absent` are missing."""

    def __init__(self, *absent: str) -> None:
        self.absent = absent

    def __call__(self, name: str) -> components.Component:
        if name in self.absent:
            return components.Component(name, name, False, why=f"no {name}", install=f"get {name}")
        return components.Component(name, name, True)


@pytest.mark.parametrize(
    ("use", "devices", "absent", "missing"),
    [
        ("jit", {"cpu"}, "cxx", "cxx"),
        ("jit", {"cpu"}, "python_headers", "python_headers"),
        ("jit", {"cpu"}, "triton", None),
        ("jit", {"cpu"}, "cutlass", None),
        ("jit", {"cpu"}, "nvcc", None),
        ("jit", {"cuda"}, "triton", "triton"),
        ("jit", {"cuda"}, "cc", "cc"),
        ("jit", {"cuda"}, "cxx", None),
        ("jit", {"cuda"}, "cutlass", None),
        ("jit", {"cuda"}, "nvcc", None),
        ("jit", {"cpu", "cuda"}, "cxx", "cxx"),
        ("jit", {"meta"}, "cxx", None),
        ("jit", set(), "cxx", None),
        ("aot", {"cpu"}, "cxx", "cxx"),
        ("aot", set(), "cxx", "cxx"),
        ("aot", {"cpu"}, "triton", None),
        ("aot", {"cuda"}, "triton", "triton"),
        ("aot", {"cuda"}, "cuda_headers", "cuda_headers"),
    ],
)
def test_requirements_of_a_graph(
    monkeypatch: pytest.MonkeyPatch, use: str, devices: set[str], absent: str, missing: str | None
) -> None:
    monkeypatch.setattr(components, "probe", FakeParts(absent))
    part = requirements.find_missing(use, devices)  # type: ignore[arg-type]
    assert (part.name if part else None) == missing
    if part is not None:
        with pytest.raises(exc.MissingToolchainError, match=f"get {missing}"):
            part.require()


def test_requirements_are_components() -> None:
    assert {name for needs in requirements.NEEDS.values() for name in needs} <= set(
        components.names()
    )


@pytest.mark.usefixtures("repeated_warnings")
@pytest.mark.parametrize(
    ("patches", "devices", "absent", "warned"),
    [
        ({"max_autotune": True}, {"cuda"}, "cutlass", True),
        ({"max_autotune_gemm": True}, {"cuda"}, "nvcc", True),
        ({"max_autotune": True}, {"cpu"}, "cutlass", False),
        ({}, {"cuda"}, "cutlass", False),
        ({"max_autotune": True, "max_autotune_gemm_backends": "ATEN"}, {"cuda"}, "cutlass", False),
        ({"max_autotune": True}, {"cuda"}, "nothing", False),
    ],
)
def test_missing_cutlass_warns_if_requested(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    patches: dict[str, object],
    devices: set[str],
    absent: str,
    warned: bool,
) -> None:
    monkeypatch.setattr(components, "probe", FakeParts(absent))
    with inductor_config.patch({"max_autotune_gemm_backends": "aten, cutlass", **patches}):
        for _ in range(2):
            requirements.warn_about_gemm_backends(devices)
    assert len(caplog.messages) == warned
    if warned:
        assert f"get {absent}" in caplog.text
