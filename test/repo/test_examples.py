"""The examples: each runs at the size at which it is in the repository, on the CPU.

The quickstart has tests of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import ProcessExitedException

from inductor_ext import events
from inductor_ext.hooks.records import CompileRecord

NUMBER = re.compile(r"\d[\d.e-]*")
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def compiles() -> Iterator[list[object]]:
    """Records of the extension in this process."""
    with events.capture() as records:
        yield records


def load(name: str, *packages: str) -> Any:
    """Import an example, or skip the test if what it needs is not installed."""
    for package in packages:
        pytest.importorskip(package, reason=f"not installed: {package}, see requirements/")
    return importlib.import_module(f"examples.{name}")


def compiled_graphs(records: list[object]) -> list[str]:
    """The kinds of the graphs that the extension compiled."""
    return [record.kind for record in records if isinstance(record, CompileRecord)]


def call_main(example: Any) -> Any:
    """Call an example's `main`, again if a process that it started has ended by a signal.

    torch may end a process with gloo by a signal when Python exits, in eager mode too.
    """
    for _ in range(3):
        with contextlib.suppress(ProcessExitedException):
            return example.main()
    return example.main()


def run(name: str, *packages: str) -> Any:
    """Run an example and return what its `main` returns. It prints what its docstring shows."""
    example = load(name, *packages)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        result = call_main(example)
    shown = [line[4:] for line in example.__doc__.splitlines() if line.startswith("    ")]
    lines = printed.getvalue().splitlines()[-len(shown) :]
    assert [NUMBER.sub("#", line) for line in lines] == [NUMBER.sub("#", line) for line in shown]
    return result


def test_they_are_short() -> None:
    files = list(EXAMPLES.glob("*/*.py"))
    assert len(files) == 12
    for path in files:
        assert len(path.read_text().splitlines()) < 80, path


class TestPretrained:
    def test_generate(self, compiles: list[object]) -> None:
        assert run("pretrained.generate", "transformers")
        assert compiled_graphs(compiles)

    def test_encoders(self, compiles: list[object]) -> None:
        differences = run("pretrained.encoders", "transformers")
        assert list(differences) == ["BERT", "ViT", "Whisper"]
        assert max(differences.values()) < 1e-5
        assert compiled_graphs(compiles) == ["inference"] * 3


class TestTraining:
    def test_trainer(self, compiles: list[object]) -> None:
        inductor, ours = run("training.trainer", "transformers", "accelerate")
        assert len(ours) == 8
        assert ours == pytest.approx(inductor, abs=2e-4)
        assert {"forward", "backward"} <= set(compiled_graphs(compiles))

    def test_accelerate_does_not_know_the_name(self) -> None:
        """When this fails, the recipe for accelerate and the Trainer has become unnecessary."""
        utils = pytest.importorskip("accelerate.utils")
        with pytest.raises(ValueError, match="'INDUCTOR_EXT' is not a valid DynamoBackend"):
            utils.TorchDynamoPlugin(backend="inductor_ext")

    @pytest.mark.parametrize("name", ["mixed_precision", "lightning_module"])
    def test_loops(self, name: str, compiles: list[object]) -> None:
        needed = ["pytorch_lightning"] if name == "lightning_module" else []
        eager, compiled = run(f"training.{name}", *needed)
        assert compiled == pytest.approx(eager, rel=2e-3)
        assert {"forward", "backward"} <= set(compiled_graphs(compiles))

    def test_data_parallel(self) -> None:
        assert run("training.data_parallel") < 1e-6

    def test_fully_shard(self) -> None:
        alone, sharded = run("training.fully_shard")
        assert sharded == pytest.approx(alone, abs=1e-4)
        assert sharded[-1] < sharded[0]


QUANTIZATION = """\
from inductor_ext import events
from test.repo import test_examples

with events.capture() as records:
    print(*test_examples.run("quantization.int8_weights"))
print(test_examples.compiled_graphs(records))
"""


def test_quantization() -> None:
    """In a process of its own, so that transformers finds no torchao in the others."""
    folder = Path(sys.prefix, "torchao")
    if not folder.exists() and importlib.util.find_spec("torchao") is None:
        pytest.skip("not installed: torchao, see requirements/")
    paths = [str(EXAMPLES.parent), str(folder)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", QUANTIZATION],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result, kinds = done.stdout.splitlines()[-2:]
    difference, size = map(float, result.split())
    assert difference < 0.01
    assert 0.5 < size < 0.51
    assert kinds == "['inference']"


def test_diffusion(compiles: list[object]) -> None:
    difference, _ = run("diffusion.transformer", "diffusers")
    assert difference < 1e-5
    # The input of the first block has other strides than those of the other blocks.
    assert compiled_graphs(compiles) == ["inference"] * 2


class TestService:
    @pytest.fixture(scope="class")
    def app(self, tmp_path_factory: pytest.TempPathFactory) -> Any:
        for package in ("fastapi", "httpx"):
            pytest.importorskip(package)
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(EXAMPLES / "service")
            app = importlib.import_module("app")
            package = str(tmp_path_factory.mktemp("service") / "model.pt2")
            torch.manual_seed(0)
            app.scorer.write_package(package)
            yield app, app.make_app(package)
        for name in ("app", "batcher", "scorer"):
            del sys.modules[name]

    @pytest.mark.filterwarnings("ignore:Using `httpx`")
    def test_requests(self, app: Any, tmp_path: Path) -> None:
        from fastapi.testclient import TestClient

        module, application = app
        torch.manual_seed(0)
        model = module.scorer.make_model()
        with TestClient(application) as client:
            assert client.get("/health").json() == {"status": "ok"}
            samples = torch.randn(64, 4)
            with ThreadPoolExecutor(8) as pool:
                bodies = [{"features": row} for row in samples.tolist()]
                answers = list(pool.map(lambda body: client.post("/predict", json=body), bodies))
            scores = torch.tensor([[answer.json()["score"]] for answer in answers])
            torch.testing.assert_close(scores, model(samples), rtol=1e-5, atol=1e-6)

            refused = client.post("/predict", json={"features": [1, 2, 3]})
            assert refused.status_code == 400
            assert refused.json() == {
                "detail": "input 'input': dimension 1 is 3, but the model takes 4."
            }
            metrics = client.get("/metrics").json()
            assert metrics["samples"] == 64
            assert metrics["batches"] <= 64

            other = module.scorer.make_model()
            torch.save(other.state_dict(), tmp_path / "weights.pt")
            replaced = client.post("/weights", params={"file": str(tmp_path / "weights.pt")})
            assert replaced.json() == {"replaced": 4}
            answer = client.post("/predict", json={"features": samples[0].tolist()})
            assert answer.json()["score"] == pytest.approx(float(other(samples[:1])), abs=1e-6)
