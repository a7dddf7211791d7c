"""One package for all ranks, and for several GPUs of one process."""

from __future__ import annotations

import concurrent.futures
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import inductor_ext
from inductor_ext import exc

ROOT = pathlib.Path(__file__).parent.parent.parent

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch lacks torch.distributed")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, two_gpus])])
def test_ranks_share_a_package_and_a_file_of_weights(device: str, tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "test.support.children.package_rank"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path), device],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err[-3000:]
        found = json.loads(out.splitlines()[-1])
        assert found["error"] < 1e-4
        assert found["is_shared"]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(128, 256)
        self.second = nn.Linear(256, 128)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.second(torch.nn.functional.gelu(self.first(x)))


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("compiled_on", [0, 1])
@torch.no_grad()
def test_no_device_index_is_compiled_in(compiled_on: int, tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    exact = Mlp().eval().double()
    place = torch.device("cuda", compiled_on)
    model = Mlp().eval()
    model.load_state_dict(exact.state_dict())
    with torch.cuda.device(place):
        program = torch.export.export(model.to(place), (torch.randn(4, 128, device=place),))
        path = tmp_path / "mlp.pt2"
        inductor_ext.aoti_compile_and_package(program, package_path=path)
    loaded = [
        inductor_ext.load(path, device=f"cuda:{index}", num_runners=2, warm_up=True)
        for index in (0, 1, 0)
    ]
    assert [str(model.device) for model in loaded] == [  # type: ignore[attr-defined]
        "cuda:0",
        "cuda:1",
        "cuda:0",
    ]
    wrong: list[Any] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for number in range(50):
                model = loaded[(seed + number) % 3]
                x = torch.randn(4, 128, generator=generator)
                y = model(x.to(model.device))  # type: ignore[attr-defined]
                expected = exact.second(torch.nn.functional.gelu(exact.first(x.double())))
                if str(y.device) != str(model.device):  # type: ignore[attr-defined]
                    wrong.append((seed, number, y.device))
                elif not torch.allclose(y.cpu().double(), expected, rtol=1e-2, atol=1e-2):
                    wrong.append((seed, number))

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert wrong == []
    calls = [int(model.constants()["calls"].item()) for model in loaded]
    assert sum(calls) == 300


@pytest.mark.gpu
@two_gpus
def test_an_input_on_another_gpu_is_refused(tmp_path: pathlib.Path) -> None:

    program = torch.export.export(
        nn.Linear(8, 8).eval().cuda(0), (torch.randn(2, 8, device="cuda:0"),)
    )
    path = tmp_path / "linear.pt2"
    inductor_ext.aoti_compile_and_package(program, package_path=path)
    model = inductor_ext.load(path, device="cuda:1")
    with pytest.raises(exc.InputMismatchError, match="cuda:1"):
        model(torch.randn(2, 8, device="cuda:0"))
