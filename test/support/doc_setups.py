"""What the code blocks of pages need: models, inputs and files with the names that pages use.

Each function gets the variables of the page's Python blocks, and writes files into the current
folder. All models are tiny.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

Names = dict[str, Any]

_MODEL = """\
import torch

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


def make():
    batch = torch.export.Dim("batch", max=64)
    return model, (torch.randn(3, 8),), ({0: batch},)
"""

_PROGRAM = """\
import torch
from model import model

with torch.no_grad():
    torch.compile(model, backend="inductor_ext")(torch.randn(3, 8))
"""


def model(names: Names) -> None:
    """`model`, its input `x`, torch and inductor_ext."""
    import torch

    import inductor_ext

    names.update(torch=torch, inductor_ext=inductor_ext)
    names["model"] = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
    )
    names["x"] = torch.randn(3, 8)
    names["inputs"] = (names["x"],)


def program_file(names: Names) -> None:
    """model.py with a function `make`, and script.py and train.py, which compile the model."""
    Path("model.py").write_text(_MODEL, encoding="utf-8")
    for name in ("script.py", "train.py"):
        Path(name).write_text(_PROGRAM, encoding="utf-8")


def package(names: Names) -> None:
    """The model with model.py, and its package as model.pt2."""
    model(names)
    program_file(names)
    torch, extension = names["torch"], names["inductor_ext"]
    program = torch.export.export(names["model"], names["inputs"])
    extension.aoti_compile_and_package(program, package_path="model.pt2")


def self_test(names: Names) -> None:
    """The package with a self test."""
    with names["inductor_ext"].config.patch(aot_self_test=True):
        package(names)


def saved_program(names: Names) -> None:
    """program.pt2, written by `torch.export.save`, and the `module` that was exported."""
    torch = names["torch"]
    names["module"] = names["model"]
    dynamic = ({0: torch.export.Dim("batch", max=64)},)
    program = torch.export.export(names["model"], (names["x"],), dynamic_shapes=dynamic)
    torch.export.save(program, "program.pt2")


def new_package(names: Names) -> None:
    """new.pt2, a copy of model.pt2, and `run`, the loaded model."""
    shutil.copy("model.pt2", "new.pt2")
    names["run"] = names["inductor_ext"].load("model.pt2")


def exported_program(names: Names) -> None:
    """program.pt2 with any batch size, written by `torch.export.save`."""
    import torch

    dynamic = ({0: torch.export.Dim("batch", min=2)},)
    exported: Names = {}
    model(exported)
    program = torch.export.export(exported["model"], (exported["x"],), dynamic_shapes=dynamic)
    torch.export.save(program, "program.pt2")


def own_cache(names: Names) -> None:
    """A cache of packages that no other test uses."""
    os.environ["INDUCTOR_EXT_ARTIFACT_CACHE_DIR"] = str(Path("artifacts").resolve())


def results(names: Names) -> None:
    """The folder of the benchmarks."""
    Path("benchmarks").symlink_to(Path(__file__).parents[2] / "benchmarks")


def two_packages(names: Names) -> None:
    """one.pt2 and other.pt2, which are equal."""
    for name in ("one.pt2", "other.pt2"):
        shutil.copy("model.pt2", name)


def batch_model(names: Names) -> None:
    """A model that returns the loss of a batch of images, and an example."""
    model(names)
    torch = names["torch"]

    class Classifier(torch.nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Flatten(), torch.nn.Linear(48, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
            )

        def forward(self, images: Any, labels: Any) -> Any:
            return torch.nn.functional.cross_entropy(self.layers(images), labels)

    names.update(model=Classifier(), images=torch.randn(2, 3, 4, 4), labels=torch.tensor([0, 3]))
    names["optimizer_bytes"] = 1 << 20


def training(names: Names) -> None:
    """A model whose result is a loss, with a dynamic batch, and a train step of it."""
    import copy

    model(names)
    program_file(names)
    torch = names["torch"]

    class Loss(torch.nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Any) -> Any:
            return self.inner(x).square().mean()

    names["model"] = Loss(names["model"])
    names["x"] = torch.randn(6, 8)
    torch._dynamo.mark_dynamic(names["x"], 0)
    names["copy"] = copy
    eager = copy.deepcopy(names["model"])

    def train_step() -> None:
        names["compiled"](names["x"]).backward()

    def eager_step() -> None:
        eager(names["x"]).backward()

    names.update(train_step=train_step, eager_step=eager_step)


def commands(names: Names) -> None:
    """The files that the examples of the commands name."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    # One of the commands runs the self test of the package that another one has built.
    os.environ["INDUCTOR_EXT_AOT_SELF_TEST"] = "1"
    package(names)
    for name in ("old.pt2", "new.pt2"):
        shutil.copy("model.pt2", name)
    key = Ed25519PrivateKey.generate()
    Path("private.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    Path("team.pem").write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    torch = names["torch"]
    # A graph that comes from a cache is not planned.
    with torch._inductor.config.patch(force_disable_caches=True):
        options = {"event_log": "events.jsonl"}
        torch.compile(names["model"], backend="inductor_ext", options=options)(names["x"])
    problem(names)


def problem(names: Names) -> None:
    """A problem of the planner as buffers.csv."""
    rows = "id,lower,upper,size\na,0,2,4096\nb,1,3,5120\nc,2,4,4096\n"
    Path("buffers.csv").write_text(rows, encoding="utf-8")


def shell_scripts(names: Names) -> None:
    """script.py, and buffers.csv."""
    program_file(names)
    problem(names)
