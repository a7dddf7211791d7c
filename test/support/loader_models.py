"""Models that the tests of `inductor_ext.load` share, and changed copies of their package."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch._inductor
from torch.utils import _pytree as pytree

from inductor_ext.cpp_wrapper.load.model import Model
from inductor_ext.cpp_wrapper.load.native import NativeLibrary
from inductor_ext.cpp_wrapper.package import manifest, zip_reader
from test.support import altered_packages


class Plain(torch.nn.Module):
    """One tensor in, one out; a dynamic batch; constants too large to be inlined."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 16)
        self.register_buffer("scale", torch.rand(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x)) * self.scale


class Point(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


pytree._register_namedtuple(Point, serialized_type_name="test.support.loader_models.Point")


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


torch.export.register_dataclass(Pair, serialized_type_name="test.support.loader_models.Pair")


class Nested(torch.nn.Module):
    """All kinds of containers and of non-tensor values."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(10, 16)

    def forward(
        self,
        batch: dict[str, Any],
        point: Point,
        pair: Pair,
        times: int,
        flag: None,
        *,
        bias: torch.Tensor,
        mode: str,
    ) -> dict[str, Any]:
        total = self.table(batch["ids"][0]) * times + bias
        return {
            "total": total,
            "nothing": flag,
            "count": times,
            "rows": batch["ids"][0].shape[0],
            "point": Point(point.x - point.y, pair.left - pair.right),
            "rest": (batch["mask"] * 2, [batch["ids"][1] + 1]),
        }


def nested_inputs(rows: int = 3) -> tuple[tuple[Any, ...], dict[str, Any]]:
    ids = [torch.arange(rows) % 10, torch.arange(4)]
    batch = {"ids": ids, "mask": torch.ones(2)}
    point = Point(torch.ones(3), torch.full((3,), 2.0))
    pair = Pair(torch.ones(2), torch.zeros(2))
    return (batch, point, pair, 3, None), {"bias": torch.ones(16), "mode": "add"}


def find_weights(path: str | pathlib.Path) -> tuple[manifest.Model, int, int]:
    """Return the manifest's "model" of a package, and the offset and size of its weights."""
    with zip_reader.open_package(path) as package:
        content = manifest.loads(package.read(manifest.PATH), str(path))
        model = content.models["model"]
        place = package.locate(str(model.weights))
    assert place is not None
    return model, place[1], place[2]


def changed(path: str, change: Callable[[dict[str, Any], dict[str, bytes]], None]) -> io.BytesIO:
    """The package with another manifest or other contents, and right checksums."""
    data = pathlib.Path(path).read_bytes()
    content, entries = altered_packages.manifest_of(data), altered_packages.contents(data)
    change(content, entries)
    return io.BytesIO(altered_packages.seal(entries, content))


def check(model: Callable[..., Any], plain: Plain, rows: tuple[int, ...] = (2, 5, 64)) -> None:
    for count in rows:
        x = torch.randn(count, 8)
        torch.testing.assert_close(model(x), plain(x))


X = torch.ones(4, 8)


def library_of(model: Model) -> NativeLibrary:
    """The shared library of a loaded model."""
    return model._instance.library
