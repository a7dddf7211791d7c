"""Self tests of packages: what is recorded, what passes, and what fails."""

from __future__ import annotations

import copy
import json
import pathlib
import struct
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

import inductor_ext
from inductor_ext import exc
from inductor_ext.cli import main
from inductor_ext.cpp_wrapper.package import manifest, self_test, zip_reader
from inductor_ext.storage import json_codec
from test.support import altered_packages


class Model(torch.nn.Module):
    """All kinds of inputs and results, a buffer that calls change, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(6, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(
        self, x: torch.Tensor, ids: dict[str, torch.Tensor], *, scale: float, none: None = None
    ) -> dict[str, Any]:
        self.calls.add_(1)
        hidden = self.linear(x) * scale
        return {
            "hidden": hidden,
            "half": hidden.to(torch.bfloat16),
            "ids": ids["a"] + 1,
            "large": ids["a"] > 2,
            "random": torch.rand(3),
            "calls": self.calls.clone(),
            "spectrum": torch.complex(x, x),
            "infinite": x.new_tensor([float("nan"), float("inf"), 1.0]) + self.calls,
            "none": None,
            "three": 3,
        }


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x * scale


def export() -> ExportedProgram:
    # With gaps, and with elements that several indices share.
    x = (torch.arange(40.0) / 40).reshape(5, 8)[:, 1:7]
    ids = {"a": torch.arange(4).expand(3, 4)}
    return torch.export.export(Model(), (x, ids), {"scale": 0.5})


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("self_test") / "model.pt2"
    inductor_ext.aoti_compile_and_package(
        export(), package_path=path, inductor_configs={"aot_self_test": True}
    )
    return path


def decoded(recording: tuple[dict[str, Any], bytes]) -> self_test.Recording:
    result: self_test.Recording = json_codec.decode(self_test.Recording, recording[0])
    return result


def test_a_recording_changes_nothing() -> None:
    program = export()
    before = copy.deepcopy((program.example_inputs, program.state_dict, program.constants))
    torch.manual_seed(3)
    recording = decoded(self_test.record("model", program))
    assert torch.initial_seed() == 3
    drawn = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(2))
    after = (program.example_inputs, program.state_dict, program.constants)
    for one, other in zip(*map(pytree.tree_leaves, (before, after)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert [leaf.is_compared for leaf in recording.results] == [
        *(True, True, True, True, False, True, True, True, True, True)
    ]
    assert recording == decoded(self_test.record("model", program))


def test_strides_and_gaps_are_recorded() -> None:
    recording = decoded(self_test.record("model", export()))
    x, ids, *_ = recording.inputs
    assert (x.shape, x.stride, x.bytes) == ((5, 6), (8, 1), 4 * (4 * 8 + 6))
    assert (ids.shape, ids.stride, ids.bytes) == ((3, 4), (0, 1), 8 * 4)


def test_conjugated_inputs() -> None:
    x = torch.complex(torch.arange(3.0), torch.ones(3)).conj().expand(2, 3)
    program = torch.export.export(Scaled(), (x, 2.0))
    program._example_inputs = ((x, 2.0), {})
    form, content = self_test.record("model", program)
    leaf = decoded((form, content)).inputs[0]
    assert torch.equal(self_test._restore(leaf, content, torch.device("cpu"), ""), x)


def test_the_package_passes(package: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = self_test.run(package)
    assert outcome.compared == 9
    assert outcome.difference < 1e-2
    assert main.main(["verify", str(package), "--run"]) == 0
    assert 'model "model": 9 results as recorded' in capsys.readouterr().out
    assert main.main(["inspect", str(package)]) == 0
    assert "self test    9 results" in capsys.readouterr().out


def altered(package: pathlib.Path, change: Any, tmp_path: pathlib.Path) -> pathlib.Path:
    """The package with another recording; `change` gets its JSON and its content."""
    data = package.read_bytes()
    files, content = altered_packages.contents(data), altered_packages.manifest_of(data)
    described = content["models"]["model"]["self_test"]
    recorded = bytearray(files[described["file"]])
    change(described, recorded)
    files[described["file"]] = bytes(recorded)
    path = tmp_path / "altered.pt2"
    path.write_bytes(altered_packages.seal(files, content, "altered"))
    return path


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, struct.pack("<f", 9.0), "result 0 differs by .* of its largest value, allowed are"),
        (2, struct.pack("<q", 77), "result 2 differs by inf of its largest value, allowed are 0"),
        (3, b"\1", "result 3 differs"),
        (6, struct.pack("<f", 9.0), "result 6 differs"),
        (7, struct.pack("<f", 1.0), "result 7 differs by inf"),
    ],
)
def test_another_result_is_found(
    package: pathlib.Path, tmp_path: pathlib.Path, index: int, value: bytes, message: str
) -> None:
    def change(described: dict[str, Any], recorded: bytearray) -> None:
        offset = described["results"][index]["offset"]
        recorded[offset : offset + len(value)] = value

    path = altered(package, change, tmp_path)
    with pytest.raises(exc.SelfTestError, match=message):
        self_test.run(path)
    assert main.main(["verify", str(path), "--run"]) == 2


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda form, _: form["results"].pop(),
            exc.SelfTestError,
            "it returns 10 values and not 9",
        ),
        (
            lambda form, _: form["results"][0].update(shape=[20], stride=[1]),
            exc.SelfTestError,
            r"result 0 has the shape \(5, 4\) and not \(20,\)",
        ),
        (
            lambda form, _: form["results"][0].update(dtype="int32"),
            exc.SelfTestError,
            "result 0 has the dtype torch.float32 and not torch.int32",
        ),
        (
            lambda form, _: form["results"][9].update(value=4),
            exc.SelfTestError,
            "result 9 is 3 and not 4",
        ),
        (lambda form, _: form.pop("in_spec"), exc.BadPackageError, "its self test is damaged"),
        (
            lambda form, _: form["inputs"][0].update(dtype="float9"),
            exc.BadPackageError,
            "its self test is damaged",
        ),
        (lambda _, data: data.clear(), exc.BadPackageError, "its self test is damaged"),
        (
            lambda form, _: form["inputs"][0].update(shape=[6], stride=[1]),
            exc.InputMismatchError,
            "the model takes",
        ),
    ],
)
def test_a_recording_that_does_not_fit(
    package: pathlib.Path, tmp_path: pathlib.Path, change: Any, error: type[Exception], message: str
) -> None:
    path = altered(package, change, tmp_path)
    with pytest.raises(error, match=message):
        self_test.run(path)


def test_a_damaged_recording(package: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with zip_reader.open_package(package) as opened:
        offset = opened.entries[self_test.entry("model")].offset
    data = bytearray(package.read_bytes())
    data[offset] ^= 1
    path = tmp_path / "model.pt2"
    path.write_bytes(data)
    with pytest.raises(exc.BadPackageError, match="is damaged"):
        self_test.run(path)


def test_without_a_self_test(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {
        "format": 1,
        "models": {"model": {"device": "cpu", "library": None, "signature": {}}},
        "versions": {},
        "platform": {},
    }
    path = tmp_path / "net.pt2"
    path.write_bytes(altered_packages.seal({"data/empty": b""}, content))
    with pytest.raises(exc.NoSelfTestError, match="aot_self_test=True"):
        self_test.run(path)
    assert main.main(["verify", str(path), "--run"]) == 2
    assert "has no self test" in capsys.readouterr().err


def test_programs_that_cannot_be_recorded(tmp_path: pathlib.Path) -> None:
    program = export()
    program._example_inputs = None
    with pytest.raises(exc.UnrecordableSelfTestError, match="has no example inputs"):
        self_test.record("model", program)

    for value in (float("nan"), float("inf")):
        program = torch.export.export(Scaled(), (torch.ones(2), 2.0))
        program._example_inputs = ((torch.ones(2), value), {})
        with pytest.raises(exc.UnrecordableSelfTestError, match="float cannot be stored"):
            self_test.record("model", program)

    class Checked(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._check(x.sum().item() < 3)
            return x + 1

    program = torch.export.export(Checked(), (torch.ones(2, dtype=torch.int64),))
    program._example_inputs = ((torch.tensor([9, 9]),), {})
    path = tmp_path / "model.pt2"
    with pytest.raises(exc.UnrecordableSelfTestError, match="eager mode raised RuntimeError"):
        inductor_ext.aoti_compile_and_package(
            program, package_path=path, inductor_configs={"aot_self_test": True}
        )
    assert not path.exists()


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.pt2"
    model, x = torch.nn.Linear(24, 16).cuda(), torch.randn(5, 24, device="cuda")
    inductor_ext.aoti_compile_and_package(
        torch.export.export(model, (x,)),
        package_path=path,
        inductor_configs={"aot_self_test": True},
    )
    assert self_test.run(path, device_index=0).compared == 1


def test_manifests_keep_it(package: pathlib.Path) -> None:
    with zip_reader.open_package(package) as opened:
        contents = manifest.read(opened)
    assert contents is not None
    content, data = contents
    assert manifest.dumps(content) == data
    assert json.loads(data)["models"]["model"]["self_test"]["file"] == self_test.entry("model")
