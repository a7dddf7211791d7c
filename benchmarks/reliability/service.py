"""The service example under many clients: every answer is checked, and memory is watched.

    python -m benchmarks.reliability.service --requests 100000 --clients 32 --json-out DIR

The example runs under uvicorn in a process of its own. Clients of another process send samples, one
of 20 with a wrong number of features, and check each score against the models whose weights were in
use between the request and the answer. Meanwhile the weights are replaced. Memory is that of the
server, without pages of files, in the second half of the requests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.aot.soak import make_rows
from benchmarks.harness import measure, results

_FOLDER = Path(__file__).resolve().parents[2] / "examples" / "service"
_TOLERANCE = 1e-5
_WIDTH = 4


def _make_model(seed: int) -> nn.Module:
    """Return a model of the structure of the example's."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(_WIDTH, 32), nn.Tanh(), nn.Linear(32, 1))


def _find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def _serve(folder: Path) -> Iterator[tuple[int, int]]:
    """Run the example; yield the port and the process."""
    port = _find_port()
    program = (
        "import sys, uvicorn, app\n"
        "app.scorer.write_package(sys.argv[1])\n"
        "uvicorn.run(app.make_app(sys.argv[1]), port=int(sys.argv[2]), log_level='error')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program, str(folder / "model.pt2"), str(port)],
        cwd=_FOLDER,
    )
    try:
        yield port, process.pid
    finally:
        process.terminate()
        process.wait()


class Clients:
    """Clients of one service, and what they found."""

    def __init__(self, client: Any, requests: int, folder: Path) -> None:
        self.client, self.left, self.folder = client, requests, folder
        self.counts: Counter[str] = Counter()
        self.models: list[nn.Module] = []
        """The models whose weights may be in use, the last one last."""

    async def use_weights(self, seed: int) -> None:
        """Replace the weights of the service; both models may answer meanwhile."""
        model = _make_model(seed)
        path = self.folder / f"weights{seed}.pt"
        torch.save(model.state_dict(), path)
        self.models.append(model)
        answer = await self.client.post("/weights", params={"file": str(path)})
        assert answer.json() == {"replaced": 4}, answer.text
        path.unlink()

    async def send(self, seed: int) -> None:
        """Send requests until all are sent."""
        generator = random.Random(seed)
        while self.left > 0:
            self.left -= 1
            is_wrong = generator.random() < 0.05
            features = [generator.uniform(-2, 2) for _ in range(_WIDTH - is_wrong)]
            first = len(self.models) - 2  # The one before may still answer.
            answer = await self.client.post("/predict", json={"features": features})
            self.counts[self._check(answer, features, first)] += 1

    def _check(self, answer: Any, features: list[float], first: int) -> str:
        if len(features) != _WIDTH:
            text = f"dimension 1 is {len(features)}, but the model takes {_WIDTH}"
            is_right = answer.status_code == 400 and text in answer.text
            return "refused" if is_right else "wrong"
        if answer.status_code != 200:
            return "dropped"
        score = answer.json()["score"]
        with torch.no_grad():
            expected = [float(model(torch.tensor([features]))) for model in self._used(first)]
        return "right" if any(abs(score - x) < _TOLERANCE for x in expected) else "wrong"

    def _used(self, first: int) -> Sequence[nn.Module]:
        return self.models[max(first, 0) :]


async def _run(
    port: int, process: int, requests: int, clients: int, swaps: int, folder: Path
) -> Any:
    import httpx

    limits = httpx.Limits(max_connections=clients + 1)
    base = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=base, timeout=120, limits=limits) as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                assert (await client.get("/health")).json() == {"status": "ok"}
                break
            await asyncio.sleep(0.1)
        group = Clients(client, requests, folder)
        await group.use_weights(0)
        begin = time.perf_counter()
        tasks = [asyncio.create_task(group.send(seed)) for seed in range(clients)]
        half, done = None, 0
        while group.left > 0:
            if done * requests <= swaps * (requests - group.left) and done < swaps:
                done += 1
                await group.use_weights(done)
            await asyncio.sleep(0.01)
            if half is None and group.left <= requests // 2:
                half = measure.read_private_mib(process)
        await asyncio.gather(*tasks)
        seconds = time.perf_counter() - begin
        end = measure.read_private_mib(process)
        samples = (await client.get("/metrics")).json()["samples"]
    return {
        **{name: group.counts[name] for name in ("right", "refused", "wrong", "dropped")},
        "swaps": done,
        "samples": samples,
        "growth": end - (half if half is not None else end),
        "seconds": seconds,
    }


def run(requests: int, clients: int, swaps: int) -> dict[str, float]:
    """Serve the requests; return what was counted, and the growth of memory in MiB."""
    with tempfile.TemporaryDirectory() as name, _serve(Path(name)) as (port, process):
        return asyncio.run(_run(port, process, requests, clients, swaps, Path(name)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; return 1 if a request was answered wrongly or dropped."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--swaps", type=int, default=100)
    parser.add_argument("--json-out", type=Path, help="folder of results")
    options = parser.parse_args(arguments)
    header = results.collect_header("service", results.format_command())
    found = run(options.requests, options.clients, options.swaps)
    rows = make_rows(f"{options.clients} clients", found)
    results.report(header, rows, options.json_out)
    return int(found["wrong"] + found["dropped"] > 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
