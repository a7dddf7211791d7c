"""The CPU target of a compiled model, and the CPU features that it requires."""

from __future__ import annotations

import pathlib
import platform
import subprocess

import pytest
import torch
import torch._inductor

import inductor_ext
from inductor_ext import exc
from inductor_ext.cpp_wrapper.build import compiler, cpu_isa, cpu_target
from test.support.built_models import elf


@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels are those of x86-64")
class TestTarget:
    @pytest.mark.parametrize(
        ("flags", "level", "beyond"),
        [
            ("", "x86-64-v2", set()),
            ("-mavx2 -mfma -mf16c", "x86-64-v3", set()),
            ("-mavx512f -mavx512dq -mavx512vl -mavx512bw -mfma", "x86-64-v4", set()),
            ("-mavx512f -mfma -mavx512vnni -mavx512vl", "x86-64-v4", {"avx512vnni"}),
            ("-mavx512f -mamx-tile -mamx-int8", "x86-64-v4", {"amx-tile", "amx-int8"}),
        ],
    )
    def test_flags(self, flags: str, level: str, beyond: set[str]) -> None:
        target = cpu_target.of(flags, "x86_64", frozenset())
        assert target.flags[0] == f"-march={level}"
        assert "-march=native" not in target.flags
        assert set(target.features) == cpu_isa.features_of(level) | beyond

    def test_a_named_level_is_not_tuned_for_this_machine(self) -> None:
        assert "-mtune=native" in cpu_target.current().flags
        assert "-mtune=generic" in cpu_target.current("x86-64-v3").flags

    def test_the_artifact_checks_every_feature(self) -> None:
        source = (compiler.RUNTIME / "cpu_features.cpp").read_text()
        names = {
            name for level in ("x86-64-v2", "x86-64-v4") for name in cpu_isa.features_of(level)
        }
        for name in {*names, *cpu_target.FURTHER_FEATURES}:
            assert f'{{"{name}", ' in source, name

    def test_a_level_that_this_machine_lacks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cpu_isa, "machine_features", lambda: frozenset({"sse3"}))
        with pytest.raises(exc.UnsupportedLevelError, match=r"lacks .*avx2"):
            cpu_target.inductor_options("x86-64-v3")

    def test_a_lower_level(self, tmp_path: pathlib.Path) -> None:
        model, x = torch.nn.Softmax(-1), torch.randn(5, 33)
        path = str(tmp_path / "m.pt2")
        inductor_ext.aoti_compile_and_package(
            torch.export.export(model, (x,)),
            package_path=path,
            inductor_configs={"aot_isa": "x86-64-v3"},
        )
        loaded = inductor_ext.load(path)
        torch.testing.assert_close(loaded(x), model(x))
        (entry,) = loaded.manifest.models.values()
        assert set(entry.cpu_features) == cpu_isa.features_of("x86-64-v3")


FEATURES = """
#include "cpu_features.h"
#include <cstdio>
int main(int, char** argv) {
  char text[1024];
  inductor_ext::missing_cpu_features(argv[1], text, sizeof(text));
  std::puts(text);
}
"""


def test_the_artifact_and_the_kernel_agree_on_this_cpu(tmp_path: pathlib.Path) -> None:
    (tmp_path / "main.cpp").write_text(FEATURES)
    sources = [str(tmp_path / "main.cpp"), str(compiler.RUNTIME / "cpu_features.cpp")]
    program = str(tmp_path / "main")
    command = ["g++", "-std=c++20", f"-I{compiler.RUNTIME}", *sources, "-o", program]
    subprocess.run(command, check=True)
    features = sorted({*cpu_isa.features_of("x86-64-v4"), *cpu_target.FURTHER_FEATURES})
    missing = elf(program, ",".join([*features, "no-such-thing"])).strip().split(",")
    assert missing == [*cpu_isa.missing(features), "no-such-thing"]
