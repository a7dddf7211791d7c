"""Results of classes that the loading process has not registered with pytree."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

CLASSES = '''
import collections, dataclasses, typing
import torch
from torch.utils import _pytree

@dataclasses.dataclass
class Output(collections.OrderedDict):
    """Stores its fields like transformers' ModelOutput, and is registered in the same way."""

    logits: torch.Tensor = None
    loss: torch.Tensor = None
    states: tuple = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) is not None:
                self[field.name] = value

_pytree.register_pytree_node(
    Output,
    lambda output: (list(output.values()), list(output.keys())),
    lambda values, keys: Output(**dict(zip(keys, values))),
    serialized_type_name=f"{Output.__module__}.{Output.__name__}",
)

@dataclasses.dataclass
class Pair:
    values: torch.Tensor
    right: torch.Tensor
    rest: object = None

torch.export.register_dataclass(Pair, serialized_type_name="fake_outputs.Pair")

class Point(typing.NamedTuple):
    x: torch.Tensor
    y: torch.Tensor

_pytree._register_namedtuple(Point, serialized_type_name="fake_outputs.Point")

class Opaque:
    def __init__(self, value):
        self._value = value

_pytree.register_pytree_node(
    Opaque,
    lambda opaque: ([opaque._value], ["value"]),
    lambda values, _: Opaque(*values),
    serialized_type_name="fake_outputs.Opaque",
)
'''

COMPILE = """
import sys, torch, inductor_ext
from fake_outputs import *

class Returns(torch.nn.Module):
    def forward(self, x):
        pair = Pair(x + 3, right=x + 4)
        return {"output": Output(logits=x + 1, states=(x + 2, pair)), "point": Point(x + 5, x + 6)}

class ReturnsOpaque(torch.nn.Module):
    def forward(self, x):
        return Opaque(x + 1)

x = torch.zeros(2)
programs = {
    "model": torch.export.export(Returns(), (x,)),
    "opaque": torch.export.export(ReturnsOpaque(), (x,)),
}
inductor_ext.aoti_compile_and_package(programs, package_path=sys.argv[1])
"""

CALL = """
import copy, pickle, sys
import torch, inductor_ext
from torch.utils import _pytree

def equal(tensor, number):
    return torch.equal(tensor, torch.full((2,), float(number)))

model = inductor_ext.load(sys.argv[1])
result = inductor_ext.load(sys.argv[1])(torch.zeros(2))
assert list(result) == ["output", "point"]
output, point = result.values()
"""

REPLACED = """
from inductor_ext.cpp_wrapper.load.result_record import ResultRecord
assert "fake_outputs" not in sys.modules
for record in (output, copy.deepcopy(output), pickle.loads(pickle.dumps(output))):
    assert type(record) is ResultRecord
    assert list(record) == ["logits", "states"] and len(record) == 2
    assert equal(record.logits, 1) and record["logits"] is record.logits is record[0]
    assert record.loss is None and "loss" not in record
    try:
        record.other
        raise SystemExit("no error")
    except AttributeError as error:
        assert "'other'" in str(error)
    assert equal(record.states[0], 2)
    pair = record.states[1]
    assert type(pair) is ResultRecord
    assert equal(pair["values"], 3) and equal(pair.right, 4) and pair.rest is None
    assert record[:] == (record.logits, record.states)
assert type(point).__name__ == "Point" and type(point)._fields == ("x", "y")
x, y = point
assert equal(point.x, 5) and equal(y, 6)
doubled = _pytree.tree_map(lambda tensor: tensor * 2, output)
assert type(doubled) is ResultRecord and equal(doubled.logits, 2)
assert repr(output).startswith("ResultRecord<fake_outputs.Output>(logits=tensor(")
try:
    inductor_ext.load(sys.argv[1], "opaque")
    raise SystemExit("no error")
except inductor_ext.exc.UnknownNodeError as error:
    assert "fake_outputs.Opaque" in str(error) and "import the module" in str(error)
"""

KEPT = """
assert type(output) is fake_outputs.Output and equal(output.logits, 1)
assert type(output.states[1]) is fake_outputs.Pair and equal(output.states[1].values, 3)
assert type(point) is fake_outputs.Point
assert type(inductor_ext.load(sys.argv[1], "opaque")(torch.zeros(2))) is fake_outputs.Opaque
"""


def run(code: str, package: pathlib.Path, folder: pathlib.Path | None) -> str:
    """Run Python code with a package as its argument, and return its stderr."""
    environment = dict(os.environ)
    if folder is not None:
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    done = subprocess.run(
        [sys.executable, "-c", code, str(package)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with the module `fake_outputs` and a package that returns its classes."""
    folder = tmp_path_factory.mktemp("classes")
    (folder / "fake_outputs.py").write_text(CLASSES)
    run(COMPILE, folder / "model.pt2", folder)
    return folder


@pytest.mark.parametrize("importable", [False, True])
def test_a_class_that_is_not_registered_is_replaced(folder: pathlib.Path, importable: bool) -> None:
    errors = run(CALL + REPLACED, folder / "model.pt2", folder if importable else None)
    for name in ("Output", "Pair", "Point"):
        assert errors.count(f"returns fake_outputs.{name}, which is not registered") == 1
    assert errors.count("Import fake_outputs before loading the package") == 3


def test_a_class_that_is_registered_is_returned(folder: pathlib.Path) -> None:
    errors = run(f"import fake_outputs{CALL}{KEPT}", folder / "model.pt2", folder)
    assert "not registered" not in errors
