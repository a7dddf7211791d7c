"""Mistakes of users, each provoked through the public interface.

`MISTAKES` has, by area and name, a function that makes the mistake in a `Place`. `COMMANDS` has the
arguments of mistakes on the command line.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

import inductor_ext
from inductor_ext import config

__all__ = ["COMMANDS", "MISTAKES", "Net", "Place", "prepare"]


X, IDS = torch.ones(4, 8), torch.zeros(4, dtype=torch.int64)


class Net(nn.Module):
    """A model of two tensors, a table and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.up = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.up(x + self.table(ids)))


class Other(nn.Module):
    """A model with another input."""

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return y * 2


@dataclasses.dataclass(frozen=True)
class Place:
    """A folder with files that the mistakes use."""

    folder: Path
    program: ExportedProgram
    model: inductor_ext.LoadedModel | Any

    @property
    def package(self) -> Path:
        """A package of `program`."""
        return self.folder / "model.pt2"


def export(model: nn.Module) -> ExportedProgram:
    """Export a model for a batch of 2 to 64."""
    batch = Dim("batch", min=2, max=64)
    return torch.export.export(model.eval(), (X, IDS), dynamic_shapes=({0: batch}, {0: batch}))


def prepare(folder: Path) -> Place:
    """Write the files: packages, programs, and files that are something else."""
    program = export(Net())
    other = torch.export.export(Other(), (torch.randn(4, 8),))
    package = folder / "model.pt2"
    inductor_ext.aoti_compile_and_package(program, package_path=package)
    inductor_ext.aoti_compile_and_package(other, package_path=folder / "other.pt2")
    torch.export.save(program, folder / "exported.pt2")
    data = bytearray(package.read_bytes())
    (folder / "cut.pt2").write_bytes(data[: len(data) // 2])
    data[data.index(b"\x7fELF") + 4096] ^= 1
    (folder / "damaged.pt2").write_bytes(data)
    (folder / "notes.pt2").write_text("not a package\n")
    (folder / "empty").mkdir()
    (folder / "bad.csv").write_text("id,lower,upper,size\n0,3,2,64\n")
    (folder / "words.csv").write_text("id,lower,upper,size\n0,1,two,64\n")
    (folder / "events.jsonl").write_text("{}\n")
    (folder / "no_model.py").write_text("def make():\n    return 3\n")
    (folder / "fine.py").write_text("print('fine')\n")
    (folder / "key.pem").write_text("no key\n")
    return Place(folder, program, inductor_ext.load(package))


def _compile(options: dict[str, Any] | None = None, **choices: Any) -> None:
    torch.compile(Net(), backend="inductor_ext", options=options, **choices)(X, IDS)


def _activate(**settings: Any) -> None:
    with inductor_ext.activate(**settings):
        pass


def _package(place: Place, name: str = "new.pt2", program: Any = None, **rest: Any) -> None:
    program = place.program if program is None else program
    inductor_ext.aoti_compile_and_package(program, package_path=place.folder / name, **rest)


def _load(place: Place, name: str = "model.pt2", *args: Any, **rest: Any) -> None:
    inductor_ext.load(place.folder / name, *args, **rest)


def _set(name: str, value: Any) -> None:
    setattr(config, name, value)


def _scalar(x: torch.Tensor) -> torch.Tensor:
    return x * 2


_Mistake = Callable[[Place], Any]

_OPTIONS: dict[str, _Mistake] = {
    "option: misspelled": lambda _: _compile({"max_autotun": True}),
    "option: of Inductor, of another type": lambda _: _compile({"max_autotune": "yes"}),
    "option: not one of the values": lambda _: _compile({"memory_arenas": "sometimes"}),
    "option: size in words": lambda _: _compile({"memory_budget": "8 gigs"}),
    "option: negative size": lambda _: _compile({"memory_budget": -1}),
    "option: no name": lambda _: _compile({3: True}),  # type: ignore[dict-item]
    "option: not a mapping": lambda _: torch.compile(
        Net(),
        backend="inductor_ext",
        options=[("max_autotune", True)],  # type: ignore[arg-type]
    )(X, IDS),
    "mode: misspelled": lambda _: torch.compile(
        Net(), backend=functools.partial(_backend(), mode="max-autotun")
    )(X, IDS),
    "activate: misspelled": lambda _: _activate(memory_arena="never"),
    "activate: of another type": lambda _: _activate(gemm_templates="on"),
    "activate: out of range": lambda _: _activate(tuning_budget=-5.0),
    "config: misspelled": lambda _: _set("gemm_template", False),
    "config: of another type": lambda _: _set("gemm_rows", 1.5),
    "mode options: misspelled": lambda _: inductor_ext.list_mode_options("fastest"),
    "budget: too small": lambda _: _compile({"memory_budget": "64B"}),
}


def _backend() -> Any:
    return torch._dynamo.lookup_backend("inductor_ext")


_PACKAGES: dict[str, _Mistake] = {
    "package: of a module": lambda p: _package(p, program=Net()),
    "package: no programs": lambda p: _package(p, program={}),
    "package: suffix": lambda p: _package(p, "model.zip"),
    "package: folder is missing": lambda p: _package(p, "absent/model.pt2"),
    "package: path is a folder": lambda p: _package(p, "."),
    "package: model name": lambda p: _package(p, program={"my model": p.program}),
    "package: option": lambda p: _package(p, inductor_configs={"max_autotun": 1}),
    "package: CPU target": lambda p: _package(p, cpu_targets=["x86-64-v9"]),
    "package: GPU target": lambda p: _package(p, targets=["sm_91"]),
    "package: targets are a text": lambda p: _package(p, targets="sm_90"),
    "package: level": lambda p: _package(p, inductor_configs={"aot_isa": "sse9"}),
    "package: weights file": lambda p: _package(
        p, inductor_configs={"aot_weights_file": str(p.folder / "absent" / "weights.bin")}
    ),
    "package: names of sizes": lambda p: _package(p, dynamic_shapes=({0: Dim("batch")},)),
    "package: budget": lambda p: _package(p, inductor_configs={"memory_budget": "64B"}),
}

_LOADS: dict[str, _Mistake] = {
    "load: no file": lambda p: _load(p, "absent.pt2"),
    "load: other file": lambda p: _load(p, "notes.pt2"),
    "load: empty folder": lambda p: _load(p, "empty"),
    "load: cut off": lambda p: _load(p, "cut.pt2"),
    "load: damaged": lambda p: _load(p, "damaged.pt2"),
    "load: exported, not compiled": lambda p: _load(p, "exported.pt2"),
    "load: model name": lambda p: _load(p, "model.pt2", "decoder"),
    "load: device of another type": lambda p: _load(p, device="cuda"),
    "load: unknown device": lambda p: _load(p, device="gpu"),
    "load: no runners": lambda p: _load(p, num_runners=0),
    "load: no path": lambda _: inductor_ext.load(3),  # type: ignore[arg-type]
    "load: weights": lambda p: _load(p, weights=3),
    "load: not signed": lambda p: _load(p, require_signature=_public_key()),
    "load: no key": lambda p: _load(p, require_signature=str(p.folder / "key.pem")),
    "load: warm-up": lambda p: _load(p, warm_up=[(X,)]),
    "load: CUDA graphs on a CPU": lambda p: _load(p, cuda_graphs=[(X, IDS)]),
    "reload: no file": lambda p: p.model.reload(p.folder / "absent.pt2"),
    "reload: other inputs": lambda p: p.model.reload(p.folder / "other.pt2"),
    "pickle": lambda p: pickle.dumps(p.model),
}


def _public_key() -> bytes:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32))).public_key()
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


_CALLS: dict[str, _Mistake] = {
    "call: dtype": lambda p: p.model(X.double(), IDS),
    "call: dimensions": lambda p: p.model(X[0], IDS),
    "call: size": lambda p: p.model(X[:, :7], IDS),
    "call: size above the range": lambda p: p.model(torch.ones(65, 8), IDS),
    "call: sizes differ": lambda p: p.model(X, IDS[:3]),
    "call: device": lambda p: p.model(X.to("meta"), IDS),
    "call: too few": lambda p: p.model(X),
    "call: too many": lambda p: p.model(X, IDS, IDS),
    "call: unknown keyword": lambda p: p.model(X, indices=IDS),
    "call: no tensor": lambda p: p.model([[1.0] * 8] * 4, IDS),
    "call: sparse": lambda p: p.model(X.to_sparse(), IDS),
    "call: index out of range": lambda p: p.model(X, IDS + 10),
    "constants: unknown": lambda p: p.model.update_constants({"up.weigth": torch.ones(16, 8)}),
    "constants: shape": lambda p: p.model.update_constants({"up.weight": torch.ones(8, 16)}),
    "constants: dtype": lambda p: p.model.update_constants(
        {"up.weight": torch.ones(16, 8, dtype=torch.int32)}
    ),
    "constants: no tensor": lambda p: p.model.update_constants({"up.weight": 1.0}),
    "constants: missing": lambda p: p.model.load_state_dict({"up.bias": torch.ones(16)}),
}

_REPORTS: dict[str, _Mistake] = {
    "memory report: not callable": lambda _: inductor_ext.memory_report(3),
    "memory report: not compiled": lambda _: inductor_ext.memory_report(
        torch.compile(_scalar, backend="inductor_ext")
    ),
    "report: folder is missing": lambda p: inductor_ext.report(
        Net(), X, IDS, path=p.folder / "absent" / "page.html"
    ),
    "report: not callable": lambda _: inductor_ext.report(3, path=None),  # type: ignore[call-overload]
    "report: package with inputs": lambda p: inductor_ext.report(  # type: ignore[call-overload]
        str(p.package), X, path=None
    ),
    "fit batch: no budget": lambda _: inductor_ext.fit_batch(Net(), (X, IDS)),
    "fit batch: budget in words": lambda _: inductor_ext.fit_batch(Net(), (X, IDS), "much"),
    "fit batch: no tensors": lambda _: inductor_ext.fit_batch(Net(), (), "1GiB"),
    "fit batch: nothing fits": lambda _: inductor_ext.fit_batch(_scalar, (X,), "8B"),
}

MISTAKES = {
    "options": _OPTIONS,
    "packages": _PACKAGES,
    "loads": _LOADS,
    "calls": _CALLS,
    "reports": _REPORTS,
}

COMMANDS: dict[str, Sequence[str]] = {
    "inspect: no file": ["inspect", "absent.pt2"],
    "verify: damaged": ["verify", "damaged.pt2"],
    "verify: no self test": ["verify", "--run", "model.pt2"],
    "diff: other file": ["diff", "model.pt2", "notes.pt2"],
    "sign: no key": ["sign", "model.pt2", "--key", "key.pem"],
    "build: no program": ["build", "notes.pt2"],
    "build: no model": ["build", "no_model.py:make"],
    "build: absent name": ["build", "no_model.py:net"],
    "bench: no model": ["bench", "no_model.py:make"],
    "bench: no file": ["bench", "absent.py"],
    "explain: no program": ["explain", "absent.py"],
    "report: no folder": ["report", "-o", "absent/page.html", "fine.py"],
    "memory: no plans": ["memory", "events.jsonl"],
    "plan: no file": ["plan", "absent.csv"],
    "plan: live range": ["plan", "bad.csv"],
    "plan: no number": ["plan", "words.csv"],
    "minify: does not fail": ["minify", "fine.py"],
    "tune: import no file": ["tune", "import", "absent.json"],
    "cache: no action": ["cache", "remove"],
    "completion: shell": ["completion", "dos"],
    "unknown command": ["inspekt", "model.pt2"],
}
