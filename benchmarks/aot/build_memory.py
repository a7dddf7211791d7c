"""Host memory and disk space that the compile of a model with gigabytes of weights takes.

    python -m benchmarks.aot.build_memory --gigabytes 10

The weights are random float32 numbers, in linear layers. `peak` is the largest resident memory of
the process during export, compile and packaging, over the bytes of the weights, which are resident
themselves. `disk` is the largest size of the folder of temporary files and caches during the
compile, and of what stays there afterwards, without the package.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.harness import results

_WIDTH = 4096


def read_status(name: str) -> int:
    """Return a field of /proc/self/status in bytes: "VmHWM" or "VmRSS"."""
    text = Path("/proc/self/status").read_text()
    (kilobytes,) = re.findall(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(kilobytes) * 1024


def folder_bytes(folder: Path) -> int:
    """Return the size on disk of all files below a folder."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


class Disk(threading.Thread):
    """Samples the size of a folder until `stop` is called."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder = folder
        self.peak = 0
        self._stopped = threading.Event()

    def run(self) -> None:
        """Sample twice a second."""
        while not self._stopped.wait(0.5):
            self.peak = max(self.peak, folder_bytes(self.folder))

    def stop(self) -> int:
        """End the thread; return the largest size in bytes."""
        self._stopped.set()
        self.join()
        return self.peak


def measure(gigabytes: float, folder: Path) -> list[results.Row]:
    """Compile a model with this many 10^9 bytes of weights; temporary files go to `folder`."""
    import inductor_ext

    target = folder / "package"
    target.mkdir()
    torch.manual_seed(0)
    layers = max(1, round(gigabytes * 1e9 / (_WIDTH * _WIDTH * 4)))
    modules = [torch.nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers)]
    model = torch.nn.Sequential(*modules).eval()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    temporary = folder / "temporary"
    disk = Disk(temporary)
    disk.start()
    x = torch.ones(4, _WIDTH)
    program = torch.export.export(model, (x,))
    path = str(target / "model.pt2")
    inductor_ext.aoti_compile_and_package(
        program, package_path=path, inductor_configs={"artifact_cache": False}
    )
    peak = read_status("VmHWM")
    largest, left = disk.stop(), folder_bytes(temporary)
    loaded = inductor_ext.load(path)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), model(x))
    case = f"{weights / 1e9:.1f} GB of weights"
    return [
        results.make_row(case, "peak over weights", "ratio", ours=peak / weights),
        results.make_row(case, "peak", "GB", ours=peak / 1e9),
        results.make_row(
            case, "package over weights", "ratio", ours=os.path.getsize(path) / weights
        ),
        results.make_row(case, "temporary files at most", "MB", ours=largest / 1e6),
        results.make_row(case, "temporary files left", "MB", ours=left / 1e6),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aot.build_memory")
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--folder", help="folder for the package and temporary files")
    parser.add_argument("--json-out", type=Path, help="folder of results")
    options = parser.parse_args(arguments)
    header = results.collect_header("aot-build-memory", results.format_command())
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        (folder / "temporary").mkdir()
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "temporary" / "inductor")
        tempfile.tempdir = os.environ["TMPDIR"] = str(folder / "temporary")
        rows = measure(options.gigabytes, folder)
    results.report(header, rows, options.json_out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
