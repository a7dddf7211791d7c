"""A compiled package beside its model, library and generated code."""

from __future__ import annotations

import contextlib
import pathlib
import subprocess
import zipfile
from typing import Any
from unittest import mock

import torch
import torch._inductor
from torch._inductor.utils import run_and_get_cpp_code

import inductor_ext
from inductor_ext.cpp_wrapper.build import artifact
from inductor_ext.cpp_wrapper.cache import cache


class Tied(torch.nn.Module):
    """Parameters that share memory, a view into a buffer, an empty one, and a mutated counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 16)
        self.second = torch.nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.rand(40, 16))
        self.register_buffer("rows", self.table[3:7])
        self.register_buffer("empty", torch.empty(0, 16))
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        hidden = torch.relu(self.first(x)) + self.table.sum(0)
        both = torch.cat([self.second(hidden), self.rows, self.empty])
        return both * self.calls[0]


def uncached_packages() -> contextlib.AbstractContextManager[object]:
    """Compile packages even if the cache has them, with the runtime and headers from the cache.

    The setting `artifact_cache` and torch's `force_disable_caches` would compile these as well.
    """
    return mock.patch.object(cache, "_find_obstacle", return_value="compiled by a test")


class Built:
    """A package, with its library and sources taken out.

    It is compiled each time: a package from the cache would come without generated code. The
    runtime and the precompiled headers are those that all models share, unless `artifact_cache` is
    False.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        model: torch.nn.Module,
        *inputs: torch.Tensor,
        **options: Any,
    ) -> None:
        self.model, self.inputs = model, inputs
        self.path = str(folder / "m.pt2")
        with artifact.collecting() as artifacts, uncached_packages():
            program = torch.export.export(model, inputs)
            _, self.code = run_and_get_cpp_code(
                inductor_ext.aoti_compile_and_package,
                program,
                package_path=self.path,
                inductor_configs=options,
            )
        assert artifacts == []
        self.loaded = inductor_ext.load(self.path)
        with zipfile.ZipFile(self.path) as file:
            (name,) = [name for name in file.namelist() if name.endswith(".so")]
            self.library = folder / "model.so"
            self.library.write_bytes(file.read(name))


def elf(*arguments: str) -> str:
    return subprocess.run(arguments, check=True, capture_output=True, text=True).stdout
