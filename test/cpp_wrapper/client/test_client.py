"""The C++ client: values as in eager mode, the checks of `inductor_ext.load`, and kinds of errors.

The driver is built once, with the address sanitizer, so that no test passes with a memory error.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import inductor_ext
from inductor_ext import exc
from inductor_ext.cpp_wrapper.build import cpu_isa
from inductor_ext.cpp_wrapper.load import instance
from inductor_ext.cpp_wrapper.package import machine
from test.support import altered_packages, cpp_client
from test.support.cpp_client import Driver, Kind, Reply

pytestmark = pytest.mark.slow

BUDGET = 1 << 20


class Net(nn.Module):
    """A dynamic batch, a buffer, and a hidden layer that determines the memory of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 16)
        self.wide = nn.Linear(16, 64)
        self.register_buffer("scale", torch.rand(64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.wide(torch.relu(self.linear(x)))
        return hidden * self.scale, hidden.softmax(-1)


class Lookup(nn.Module):
    """An index that may be out of bounds, scalars as inputs and results, and other values."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 16)

    def forward(self, ids: torch.Tensor, times: int, mode: str) -> dict[str, Any]:
        assert mode == "sum"
        rows = self.table(ids) * times
        return {"sum": rows.sum(0), "none": None, "three": 3, "count": ids.shape[0] * 2}


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def lookup() -> Lookup:
    torch.manual_seed(1)
    return Lookup().eval()


@pytest.fixture(scope="module")
def path(net: Net, lookup: Lookup, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A package with both models, their self tests and a memory budget."""
    batch, count = Dim("batch", min=2, max=100_000), Dim("count", min=2, max=64)
    programs = {
        "model": torch.export.export(net, (torch.randn(4, 8),), dynamic_shapes=({0: batch},)),
        "lookup": torch.export.export(
            lookup, (torch.arange(6), 3, "sum"), dynamic_shapes=({0: count}, Dim.DYNAMIC, None)
        ),
    }
    target = tmp_path_factory.mktemp("cpp client") / "model.pt2"
    configs = {"aot_self_test": True, "memory_budget": BUDGET}
    inductor_ext.aoti_compile_and_package(programs, package_path=target, inductor_configs=configs)
    return target


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The driver's folder for temporary files."""
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory, temporary: pathlib.Path) -> Iterator[Driver]:
    # CUDA cannot be initialized where the sanitizer has its shadow memory.
    is_checked = cpp_client.has_sanitizer("address") and not torch.cuda.is_available()
    sanitizer = "address" if is_checked else None
    program = cpp_client.build_driver(tmp_path_factory.mktemp("driver"), sanitizer)
    process = Driver(program, TMPDIR=str(temporary))
    yield process
    process.close()


@pytest.fixture(scope="module")
def entries(path: pathlib.Path) -> dict[str, bytes]:
    return altered_packages.contents(path.read_bytes())


@pytest.fixture(autouse=True)
def _nothing_remains(temporary: pathlib.Path) -> Iterator[None]:
    """The folder for temporary files is empty after each test."""
    yield
    assert list(temporary.iterdir()) == []


def write(folder: pathlib.Path, data: bytes) -> pathlib.Path:
    target = folder / "altered.pt2"
    target.write_bytes(data)
    return target


def altered(
    path: pathlib.Path,
    entries: dict[str, bytes],
    folder: pathlib.Path,
    change: Callable[[dict[str, Any]], object],
) -> pathlib.Path:
    """A copy of the package with another manifest and correct checksums."""
    content = altered_packages.manifest_of(path.read_bytes())
    change(content)
    return write(folder, altered_packages.seal(entries, content))


def refusal(driver: Driver, package: object, **options: object) -> Reply:
    """The error of a load."""
    (reply,) = driver.run(("load", package, options))
    assert reply.kind is not None
    return reply


def make_targets_package(net: Net, target: pathlib.Path, *levels: str) -> dict[str, str]:
    """Write a package with CPU targets, and return the library of each."""
    program = torch.export.export(net, (torch.randn(4, 8),))
    inductor_ext.aoti_compile_and_package(program, package_path=target, cpu_targets=levels)
    model = altered_packages.manifest_of(target.read_bytes())["models"]["model"]
    return {code["target"]: code["library"] for code in (model, *model["variants"])}


@pytest.mark.skipif(
    bool(cpu_isa.missing(cpu_isa.features_of("x86-64-v3"))), reason="needs a CPU with AVX2"
)
def test_the_highest_target_of_this_cpu_runs(
    driver: Driver, net: Net, tmp_path: pathlib.Path
) -> None:
    package = tmp_path / "targets.pt2"
    libraries = make_targets_package(net, package, "x86-64-v2", "x86-64-v3")
    x = torch.randn(4, 8)
    torch.testing.assert_close(tuple(driver.call(package, [x], tmp_path)), net(x))
    data = package.read_bytes()
    entries = altered_packages.contents(data)
    supported = [level for level in libraries if not cpu_isa.missing(cpu_isa.features_of(level))]
    for level, library in libraries.items():
        # Only the file that is used is checked.
        at = data.index(entries[library]) + len(entries[library]) // 2
        damaged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        (reply,) = driver.run(("load", write(tmp_path, damaged)))
        assert reply.kind == (Kind.BAD_PACKAGE if level == supported[-1] else None), level


class TestResults:
    def test_equal_those_of_eager_mode(
        self, driver: Driver, path: pathlib.Path, net: Net, tmp_path: pathlib.Path
    ) -> None:
        for batch in (2, 5, 64):
            x = torch.randn(batch, 8)
            results = driver.call(path, [x], tmp_path)
            torch.testing.assert_close(tuple(results), net(x))

    def test_another_model_with_scalars(
        self, driver: Driver, path: pathlib.Path, lookup: Lookup, tmp_path: pathlib.Path
    ) -> None:
        ids = torch.tensor([1, 9, 3])
        inputs = [ids, torch.tensor(7)]
        results = driver.call(path, inputs, tmp_path, model_name="lookup")
        torch.testing.assert_close(results[0], lookup(ids, 7, "sum")["sum"])
        assert (results[1], int(results[3])) == (None, 6)

    @pytest.mark.parametrize("map_weights", [True, False])
    def test_the_file_may_change_if_weights_are_copied(
        self,
        driver: Driver,
        path: pathlib.Path,
        net: Net,
        tmp_path: pathlib.Path,
        map_weights: bool,
    ) -> None:
        copy = shutil.copy(path, tmp_path / "copy.pt2")
        x = torch.randn(3, 8)
        results = driver.call(copy, [x], tmp_path, map_weights=map_weights, verify=map_weights)
        torch.testing.assert_close(tuple(results), net(x))

    def test_weights_that_are_not_aligned(
        self,
        driver: Driver,
        path: pathlib.Path,
        entries: dict[str, bytes],
        net: Net,
        tmp_path: pathlib.Path,
    ) -> None:
        """Another zip program has packed the files without alignment."""
        target = tmp_path / "repacked.pt2"
        with zipfile.ZipFile(path) as source, zipfile.ZipFile(target, "w") as packed:
            for name in source.namelist():
                packed.writestr(name, source.read(name))
        x = torch.randn(3, 8)
        torch.testing.assert_close(tuple(driver.call(target, [x], tmp_path)), net(x))

    def test_weights_outside(
        self,
        driver: Driver,
        path: pathlib.Path,
        entries: dict[str, bytes],
        net: Net,
        tmp_path: pathlib.Path,
    ) -> None:
        weights = tmp_path / "net.weights"
        rest = dict(entries)

        def change(content: dict[str, Any]) -> None:
            model = content["models"]["model"]
            data = rest.pop(model["weights"])
            weights.write_bytes(data)
            digest = hashlib.sha256(data).hexdigest()
            model["outside"] = {"bytes": len(data), "sha256": digest}
            model["weights"] = None

        content = altered_packages.manifest_of(path.read_bytes())
        change(content)
        package = write(tmp_path, altered_packages.seal(rest, content))
        x = torch.randn(3, 8)
        for options in (
            {"weights": weights},
            {"weights": path},
            {"weights": weights, "map_weights": False},
        ):
            results = driver.call(package, [x], tmp_path, **options)
            torch.testing.assert_close(tuple(results), net(x))
        reply = refusal(driver, package)
        assert reply.kind is Kind.LOAD
        assert reply.text.endswith(
            "its weights are in a separate file. Pass the path of that file as the option weights."
        )
        weights.write_bytes(bytes(weights.stat().st_size))
        reply = refusal(driver, package, weights=weights)
        assert (reply.kind, "has other weights" in reply.text) == (Kind.LOAD, True)
        reply = refusal(driver, path, weights=tmp_path / "missing")
        assert reply.kind is Kind.LOAD
        assert "cannot be read (No such file or directory)" in reply.text

    def test_signature(self, driver: Driver, path: pathlib.Path) -> None:
        _, first, _, second = driver.run(
            ("load", path),
            ("signature",),
            ("load", path, {"model_name": "lookup"}),
            ("signature",),
        )
        assert first.value().splitlines() == [
            "input x: float32 [batch, 8] on cpu",
            "output [0]: float32 [batch, 64] on cpu",
            "output [1]: float32 [batch, 64] on cpu",
            "batch: 2 to 100000",
            "Float strides 8 1",
        ]
        text = re.sub(r"\bs\d+", "s", second.value())
        assert text.splitlines()[:6] == [
            "input ids: int64 [count] on cpu",
            "input times: int64 scalar s",
            "output ['sum']: float32 [16] on cpu",
            "output ['none']: constant",
            "output ['three']: constant",
            "output ['count']: int64 scalar",
        ]

    def test_the_manifest_is_that_of_the_package(self, driver: Driver, path: pathlib.Path) -> None:
        _, reply = driver.run(("load", path), ("manifest",))
        with zipfile.ZipFile(path) as file:
            text = file.read("model/extra/inductor_ext/manifest.json").decode()
        assert reply.value() == text.replace("\\n", "\n")

    def test_threads(
        self, driver: Driver, path: pathlib.Path, net: Net, tmp_path: pathlib.Path
    ) -> None:
        torch.save([torch.randn(5, 8)], tmp_path / "inputs.pt")
        _, reply = driver.run(
            ("load", path, {"num_runners": 4}), ("threads", 8, 200, tmp_path / "inputs.pt")
        )
        assert reply.value() == "0 wrong"

    def test_documented_code(self, driver: Driver, path: pathlib.Path) -> None:
        """docs/user/aot_packages.md."""
        (reply,) = driver.run(("documented", path.parent))
        *_, difference, sizes, error = reply.value().splitlines()
        assert float(difference) < 1e-5
        assert sizes == "[5, 64]"
        assert error == "6: input 'x': dimension 1 is 7, but the model takes 8."

    @pytest.mark.gpu
    @pytest.mark.parametrize("targets", [None, ["sm_80", "sm_90", "sm_100", "ptx"]])
    def test_on_gpus(
        self, driver: Driver, net: Net, targets: list[str] | None, tmp_path: pathlib.Path
    ) -> None:
        model = net.cuda()
        x = torch.randn(3, 8, device="cuda")
        package = tmp_path / "model.pt2"
        program = torch.export.export(model, (x,))
        inductor_ext.aoti_compile_and_package(program, package_path=package, targets=targets)
        expected = model(x)
        net.cpu()
        for index in range(torch.cuda.device_count()):
            device = f"cuda:{index}"
            results = driver.call(package, [x.to(device)], tmp_path, device=device)
            assert {result.device for result in results} == {torch.device(device)}
            torch.testing.assert_close(tuple(result.to(x.device) for result in results), expected)
        driver.run(("close",))  # kernels are read from the temporary folder at their first use


class TestSelfTest:
    def test_passes(self, driver: Driver, path: pathlib.Path) -> None:
        for name, compared in (("model", 2), ("lookup", 2)):
            _, reply = driver.run(("load", path, {"model_name": name}), ("self_test",))
            count, difference = reply.value().split()
            assert int(count) == compared
            assert float(difference) < 1e-5

    def test_fails_with_other_weights(
        self, driver: Driver, path: pathlib.Path, tmp_path: pathlib.Path
    ) -> None:
        torch.save({"scale": torch.zeros(64)}, tmp_path / "state.pt")
        *_, reply = driver.run(
            ("load", path), ("update", tmp_path / "state.pt", False, True), ("self_test",)
        )
        assert reply.kind is Kind.SELF_TEST
        assert re.search(
            r"'model' in the package .* failed: result 0 differs by 1 of its largest value, "
            r"allowed are 0\.001\. Do not use the model on this machine",
            reply.text,
        )

    def test_is_missing(
        self,
        driver: Driver,
        path: pathlib.Path,
        entries: dict[str, bytes],
        tmp_path: pathlib.Path,
    ) -> None:
        package = altered(
            path, entries, tmp_path, lambda content: content["models"]["model"].pop("self_test")
        )
        _, reply = driver.run(("load", package), ("self_test",))
        assert reply.kind is Kind.UNSUPPORTED
        assert reply.text == str(exc.NoSelfTestError(path=str(package), name="model"))


class TestConstants:
    def test_names_and_values(
        self, driver: Driver, path: pathlib.Path, net: Net, tmp_path: pathlib.Path
    ) -> None:
        _, names, same = driver.run(
            ("load", path), ("names",), ("constants", tmp_path / "constants.pt", False)
        )
        assert names.value().split(",") == sorted(net.state_dict())
        assert same == names
        values = torch.load(tmp_path / "constants.pt")
        for name, value in zip(names.value().split(","), values, strict=True):
            torch.testing.assert_close(value, net.state_dict()[name], rtol=0, atol=0)

    def test_update_and_swap(
        self, driver: Driver, path: pathlib.Path, net: Net, tmp_path: pathlib.Path
    ) -> None:
        torch.manual_seed(2)
        other = Net().eval()
        x = torch.randn(4, 8)
        inputs, state = tmp_path / "inputs.pt", tmp_path / "state.pt"
        torch.save([x], inputs)
        torch.save(dict(other.state_dict()), state)
        commands = [
            ("load", path),
            ("update", state, True, False),
            ("fold", True),
            ("run", inputs, tmp_path / "0.pt"),
            ("swap",),
            ("run", inputs, tmp_path / "1.pt"),
            ("swap",),
            ("run", inputs, tmp_path / "2.pt"),
            ("free",),
            ("update", state, False, True),
            ("run", inputs, tmp_path / "3.pt"),
        ]
        assert [reply.kind for reply in driver.run(*commands)] == [None] * len(commands)
        for index, model in enumerate((net, other, net, other)):
            results = torch.load(tmp_path / f"{index}.pt")
            torch.testing.assert_close(tuple(results), model(x))

    @pytest.mark.parametrize(
        ("state", "why"),
        [
            ({"bias": torch.zeros(16)}, "it has no constant 'bias'. It has linear.bias, linear."),
            (
                {"scale": torch.zeros(64).double()},
                "'scale' is a tensor (float64, [64]), but the model needs (float32, [64]).",
            ),
            (
                {"scale": torch.zeros(63)},
                "'scale' is a tensor (float32, [63]), but the model needs (float32, [64]).",
            ),
            ({"scale": None}, "'scale' has no memory. Pass a tensor with data."),
        ],
    )
    def test_refused_updates(
        self, driver: Driver, path: pathlib.Path, state: Any, why: str, tmp_path: pathlib.Path
    ) -> None:
        torch.save(state, tmp_path / "state.pt")
        _, reply = driver.run(("load", path), ("update", tmp_path / "state.pt", False, True))
        assert reply.kind is Kind.CONSTANT
        assert f"Cannot update the constants of the model: {why}" in reply.text

    def test_a_full_update_needs_all(
        self, driver: Driver, path: pathlib.Path, tmp_path: pathlib.Path
    ) -> None:
        torch.save({"scale": torch.zeros(64)}, tmp_path / "state.pt")
        _, reply = driver.run(("load", path), ("update", tmp_path / "state.pt", False, False))
        assert reply.kind is Kind.CONSTANT
        model = inductor_ext.load(path)
        with pytest.raises(exc.ConstantMismatchError) as error:
            model.update_constants({"scale": torch.zeros(64)}, partial=False)
        assert reply.text == str(error.value)


class TestCallErrors:
    @pytest.mark.parametrize(
        ("inputs", "arguments"),
        [
            ([torch.randn(5, 7)], None),
            ([torch.randn(5, 8).double()], None),
            ([torch.randn(1, 8)], None),
            ([torch.randn(8, 5).T], None),
            ([], "The model takes 1 tensors, but was called with 0."),
            ([torch.randn(5, 8)] * 2, "The model takes 1 tensors, but was called with 2."),
            ([None], "input 'x' is an undefined tensor."),
        ],
    )
    def test_wrong_inputs(
        self,
        driver: Driver,
        path: pathlib.Path,
        inputs: Any,
        arguments: str | None,
        tmp_path: pathlib.Path,
    ) -> None:
        """With the text of Python where Python calls the compiled model."""
        reply = driver.call(path, inputs, tmp_path)
        if arguments is None:
            with pytest.raises(exc.InputMismatchError) as error:
                inductor_ext.load(path)(*inputs)
            arguments = str(error.value)
        assert (reply.kind, reply.text) == (Kind.INPUT, arguments)

    def test_an_index_out_of_bounds(
        self, driver: Driver, path: pathlib.Path, tmp_path: pathlib.Path
    ) -> None:
        inputs = [torch.tensor([1, 10, 2]), torch.tensor(2)]
        reply = driver.call(path, inputs, tmp_path, model_name="lookup")
        with pytest.raises(exc.ArtifactRunError) as error:
            inductor_ext.load(path, "lookup")(inputs[0], 2, "sum")
        assert (reply.kind, reply.text) == (Kind.RUN, str(error.value))
        assert re.fullmatch(r"An index .*is out of bounds for a dimension of size 10\.", reply.text)
        assert "Exception raised from" in reply.details

    def test_more_memory_than_the_budget(
        self, driver: Driver, path: pathlib.Path, tmp_path: pathlib.Path
    ) -> None:
        x = torch.randn(20_000, 8)
        reply = driver.call(path, [x], tmp_path)
        with pytest.raises(exc.MemoryBudgetCallError) as error:
            inductor_ext.load(path)(x)
        assert (reply.kind, reply.text) == (Kind.BUDGET, str(error.value))


class TestPackageErrors:
    def test_the_kinds_are_documented(self) -> None:
        header = cpp_client.include_folder() / "inductor_ext" / "error.hpp"
        body = header.read_text().partition("enum class ErrorKind")[2].partition("};")[0]
        declared = {name: int(value) for name, value in re.findall(r"(\w+) = (\d+),", body)}
        assert declared == {kind.name.lower(): kind for kind in Kind if kind}
        rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", cpp_client.DOCS.read_text(), re.MULTILINE)
        assert {name: int(value) for value, name in rows} == declared

    def test_no_file(self, driver: Driver, tmp_path: pathlib.Path) -> None:
        reply = refusal(driver, tmp_path / "missing.pt2")
        assert reply.kind is Kind.NOT_FOUND
        assert reply.text.startswith(f"There is no package at {tmp_path}/missing.pt2. ")

    def test_other_files(self, driver: Driver, tmp_path: pathlib.Path) -> None:
        (tmp_path / "text.pt2").write_text("no zip file")
        (tmp_path / "empty.pt2").write_text("")
        for name in ("text.pt2", "empty.pt2"):
            reply = refusal(driver, tmp_path / name)
            assert (reply.kind, "is not a package" in reply.text) == (Kind.BAD_PACKAGE, True)
        assert refusal(driver, tmp_path).kind is Kind.UNSUPPORTED

    def test_options(self, driver: Driver, path: pathlib.Path) -> None:
        reply = refusal(driver, path, num_runners=0)
        assert reply.kind is Kind.OPTION
        assert "num_runners" in reply.text
        for device in ("cuda:1", "cpu:0", "cuda:", "gpu"):
            reply = refusal(driver, path, device=device)
            assert (reply.kind, f"'{device}'" in reply.text) == (Kind.OPTION, True)
        reply = refusal(driver, path, model_name="other")
        assert reply.kind is Kind.MODEL_NOT_FOUND
        expected = exc.ModelNotFoundError(path=str(path), name="other", models="lookup, model")
        assert reply.text == str(expected)

    @pytest.mark.parametrize("share", [0.0001, 0.3, 0.99])
    def test_a_truncated_file(
        self, driver: Driver, path: pathlib.Path, share: float, tmp_path: pathlib.Path
    ) -> None:
        data = path.read_bytes()
        reply = refusal(driver, write(tmp_path, data[: max(4, int(len(data) * share))]))
        assert reply.kind is Kind.BAD_PACKAGE
        assert "it was truncated, or other bytes were appended to it" in reply.text

    @pytest.mark.parametrize("suffix", [".so", ".weights", "manifest.json", "serialization_id"])
    def test_a_flipped_byte(
        self, driver: Driver, path: pathlib.Path, suffix: str, tmp_path: pathlib.Path
    ) -> None:
        data = bytearray(path.read_bytes())
        with zipfile.ZipFile(path) as file:
            names = [item for item in file.infolist() if item.filename.endswith(suffix)]
        for item in names:
            place = data.find(item.filename.encode())  # in the local header
            header = place - 30
            extra = int.from_bytes(data[header + 28 : header + 30], "little")
            begin = place + len(item.filename) + extra
            data[begin + item.file_size // 2] ^= 1
        reply = refusal(driver, write(tmp_path, bytes(data)))
        assert reply.kind is Kind.BAD_PACKAGE
        assert "damaged" in reply.text

    def test_a_changed_library_with_its_crc(
        self,
        driver: Driver,
        path: pathlib.Path,
        entries: dict[str, bytes],
        tmp_path: pathlib.Path,
    ) -> None:
        """The CRC-32 is right, and the manifest is the old one."""
        package = path.read_bytes()
        content = altered_packages.manifest_of(package)
        library = content["models"]["model"]["library"]
        changed = dict(entries)
        changed[library] = changed[library][:-1] + b"\1"
        with zipfile.ZipFile(path) as file:
            name = next(name for name in file.namelist() if name.endswith("manifest.json"))
            changed["extra/inductor_ext/manifest.json"] = file.read(name)
        data = altered_packages.write(changed, "net")
        reply = refusal(driver, write(tmp_path, data))
        assert reply.kind is Kind.BAD_PACKAGE
        assert "its manifest is not the one that it was written with" in reply.text

    def test_entries_that_the_manifest_does_not_list(
        self,
        driver: Driver,
        path: pathlib.Path,
        entries: dict[str, bytes],
        tmp_path: pathlib.Path,
    ) -> None:
        target = tmp_path / "more.pt2"
        shutil.copy(path, target)
        with zipfile.ZipFile(target, "a") as file:
            file.writestr("model/data/aotinductor/model/evil.so", b"")
        reply = refusal(driver, target)
        assert reply.kind is Kind.BAD_PACKAGE
        assert "'data/aotinductor/model/evil.so' that its manifest does not list" in reply.text

    @pytest.mark.parametrize(
        ("name", "why"),
        [
            ("model/../evil", 'has an empty part, or a part "." or ".."'),
            ("/model/data/evil", "is absolute"),
            ("model/data/a\\b", "has a backslash or a control character"),
            ("other/data/evil", "its entries are below several root folders"),
            ("model/evil", "is outside the folders of a .pt2 archive"),
            ("model/byteorder", "it has two entries 'byteorder'"),
        ],
    )
    def test_unsafe_entries(
        self, driver: Driver, path: pathlib.Path, name: str, why: str, tmp_path: pathlib.Path
    ) -> None:
        target = tmp_path / "unsafe.pt2"
        shutil.copy(path, target)
        with zipfile.ZipFile(target, "a") as file:
            info = zipfile.ZipInfo("x" * len(name))
            file.writestr(info, b"")
        data = target.read_bytes().replace(b"x" * len(name), name.encode())
        reply = refusal(driver, write(tmp_path, data))
        assert (reply.kind, why in reply.text) == (Kind.BAD_PACKAGE, True), reply.text
        with pytest.raises(exc.BadPackageError) as error:
            inductor_ext.load(tmp_path / "altered.pt2")
        assert reply.text == str(error.value)

    def test_compressed_entries(
        self, driver: Driver, path: pathlib.Path, tmp_path: pathlib.Path
    ) -> None:
        target = tmp_path / "compressed.pt2"
        with (
            zipfile.ZipFile(path) as source,
            zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as packed,
        ):
            for name in source.namelist():
                packed.writestr(name, source.read(name))
        reply = refusal(driver, target)
        assert (reply.kind, "is compressed" in reply.text) == (Kind.UNSUPPORTED, True)

    def test_overlapping_entries(
        self, driver: Driver, path: pathlib.Path, tmp_path: pathlib.Path
    ) -> None:
        """Two records of the central directory have one local header."""
        target = tmp_path / "overlap.pt2"
        with zipfile.ZipFile(target, "w") as file:
            file.writestr("net/data/aa", b"1")
            file.writestr("net/data/bb", b"1")
        data = bytearray(target.read_bytes())
        first = data.find(b"PK\1\2")
        second = data.find(b"PK\1\2", first + 1)
        data[second : second + 46] = data[first : first + 46]
        data = bytearray(bytes(data).replace(b"net/data/bb", b"net/data/aa"))
        reply = refusal(driver, write(tmp_path, bytes(data)))
        assert reply.kind is Kind.BAD_PACKAGE

    def test_a_package_of_inductor(
        self, driver: Driver, entries: dict[str, bytes], tmp_path: pathlib.Path
    ) -> None:
        own = {name: data for name, data in entries.items() if not name.startswith("extra/")}
        reply = refusal(driver, write(tmp_path, altered_packages.write(own, "net")))
        assert reply.kind is Kind.UNSUPPORTED
        assert "it was compiled by Inductor (default)" in reply.text


class TestManifest:
    @pytest.mark.parametrize(
        ("change", "kind", "why"),
        [
            (
                lambda content: content["versions"].update(torch="2.0.1"),
                Kind.INCOMPATIBLE,
                "it was compiled for torch 2.0.1, and this is torch ",
            ),
            (
                lambda content: content["platform"].update(machine="riscv64", system="plan9"),
                Kind.INCOMPATIBLE,
                "it was compiled for plan9, and this is linux; it was compiled for riscv64, and ",
            ),
            (
                lambda content: content.update(format=2),
                Kind.INCOMPATIBLE,
                "its manifest has format 2, and this inductor_ext reads up to 1. Install a newer ",
            ),
            (
                lambda content: content["models"]["model"].update(device="cuda"),
                Kind.INCOMPATIBLE,
                "it runs on CUDA",
            ),
            (
                lambda content: content["models"]["model"].update(library=None),
                Kind.UNSUPPORTED,
                "contains only the sources of model 'model', no shared library. ",
            ),
            (
                lambda content: content["models"]["model"].pop("constants"),
                Kind.BAD_PACKAGE,
                "its manifest is damaged: models['model'].constants is missing, expected a list.",
            ),
            (
                lambda content: content["models"]["model"].update(library="data/x.so"),
                Kind.BAD_PACKAGE,
                "needs the file 'data/x.so', which is not listed",
            ),
            (
                lambda content: content["models"]["model"]["signature"].update(in_spec="[1]"),
                Kind.BAD_PACKAGE,
                "the signature of its library differs from its manifest",
            ),
            (
                lambda content: content["models"]["model"]["constants"][0].update(fqn="other"),
                Kind.BAD_PACKAGE,
                "the constants of its library differ from its manifest",
            ),
        ],
    )
    def test_is_checked(
        self,
        driver: Driver,
        path: pathlib.Path,
        entries: dict[str, bytes],
        change: Callable[[dict[str, Any]], object],
        kind: Kind,
        why: str,
        tmp_path: pathlib.Path,
    ) -> None:
        reply = refusal(driver, altered(path, entries, tmp_path, change))
        assert (reply.kind, why in reply.text) == (kind, True), reply.text

    def test_a_library_of_another_compiler(
        self,
        driver: Driver,
        path: pathlib.Path,
        entries: dict[str, bytes],
        tmp_path: pathlib.Path,
    ) -> None:
        content = altered_packages.manifest_of(path.read_bytes())
        changed = {**entries, content["models"]["model"]["library"]: b"not ELF"}
        reply = refusal(driver, write(tmp_path, altered_packages.seal(changed, content)))
        assert reply.kind is Kind.LOAD
        assert "Cannot load model 'model' of the package" in reply.text

    @pytest.mark.parametrize(
        "text",
        [b"", b"{", b"[]", b'{"format": 1}', b'{"files": NaN}', b"[" * 100_000, b'{"a": "\xff"}'],
    )
    def test_is_not_json(
        self, driver: Driver, entries: dict[str, bytes], text: bytes, tmp_path: pathlib.Path
    ) -> None:
        changed = {**entries, "extra/inductor_ext/manifest.json": text}
        reply = refusal(driver, write(tmp_path, altered_packages.write(changed, "net")))
        assert reply.kind is Kind.BAD_PACKAGE
        assert "its manifest is damaged: " in reply.text

    def test_is_missing(
        self, driver: Driver, entries: dict[str, bytes], tmp_path: pathlib.Path
    ) -> None:
        reply = refusal(driver, write(tmp_path, altered_packages.write(entries, "net")))
        assert reply.kind is Kind.BAD_PACKAGE
        assert "it was written by inductor_ext, but its manifest is missing" in reply.text


class TestParts:
    @pytest.mark.parametrize("size", [0, 1, 55, 56, 63, 64, 65, 119, 128, 5000])
    def test_sha256(self, driver: Driver, size: int, tmp_path: pathlib.Path) -> None:
        data = bytes(i * i % 251 for i in range(size))
        (tmp_path / "data").write_bytes(data)
        (reply,) = driver.run(("sha256", tmp_path / "data"))
        assert reply.value().split(",") == [hashlib.sha256(data).hexdigest()] * 2

    def test_cuda_architectures(self, driver: Driver) -> None:
        """The same answers as in Python."""
        architectures = ("sm_80", "sm_90", "sm_90a", "sm_100f", "compute_90", "compute_90a", "x_9")
        for architecture in architectures:
            for device in ((8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)):
                (reply,) = driver.run(("has_kernels", architecture, *device))
                expected = machine._has_kernels_for([architecture], device)
                assert reply.value() == str(expected), (architecture, device)
        (reply,) = driver.run(("has_kernels", "sm_80,sm_90", 9, 0))
        assert reply.value() == "True"

    def test_failed_asserts_of_a_gpu(self, driver: Driver) -> None:
        """The same text as in Python."""
        for why in ("CUDA driver error: device-side assert triggered", "out of memory"):
            for inputs in ((), ("ids",), ("row", "ids", "row")):
                (reply,) = driver.run(("describe_assert", why, *inputs))
                assert reply.value() == instance._describe_assert(why, set(inputs))

    def test_versions(self, driver: Driver) -> None:
        for version, prefix in (("2.13.0+cpu", "2.13"), ("2.14", "2.14"), ("13", "13")):
            (reply,) = driver.run(("version_prefix", version, 2))
            assert reply.value() == prefix

    def test_paths(self, driver: Driver) -> None:
        """The same paths as in Python."""
        (current,) = driver.run(("absolute_path", "."))
        assert current.value().startswith("/")
        for path in ("a", "./a//b/.", "../a", "a/../b/", "/a/./b", "/a/../../b", "/.."):
            (reply,) = driver.run(("absolute_path", path))
            assert reply.value() == os.path.normpath(os.path.join(current.value(), path)), path

    def test_folders_are_deleted_and_targets_of_links_are_not(
        self, driver: Driver, tmp_path: pathlib.Path
    ) -> None:
        kept, folder = tmp_path / "kept", tmp_path / "folder"
        kept.mkdir()
        (kept / "file").write_text("")
        (folder / "inner").mkdir(parents=True)
        (folder / "inner" / "file").write_text("")
        (folder / "inner" / "link").symlink_to(kept)
        (folder / "dangling").symlink_to(tmp_path / "missing")
        for _ in range(2):  # also a folder that is not there
            (reply,) = driver.run(("remove_folder", folder))
            assert reply.value() == ""
        assert list(tmp_path.iterdir()) == [kept]
        assert (kept / "file").exists()

    def test_the_folder_of_temporary_files(
        self, driver: Driver, temporary: pathlib.Path, tmp_path: pathlib.Path
    ) -> None:
        """The first variable that is set counts, as in std::filesystem."""
        try:
            for variables, folder in (
                ({"TMPDIR": temporary, "TMP": tmp_path}, str(temporary)),
                ({"TMPDIR": tmp_path / "missing"}, "/tmp"),
                ({"TMPDIR": None}, str(tmp_path)),
            ):
                for name, value in variables.items():
                    driver.run(("unsetenv", name) if value is None else ("setenv", name, value))
                assert driver.run(("temporary_folder",))[0].value() == folder
        finally:
            driver.run(("setenv", "TMPDIR", temporary), ("unsetenv", "TMP"))

    def test_no_function_of_the_filesystem_library_is_called(self, driver: Driver) -> None:
        """libtorch.so of torch 2.11 for CUDA defines them again, and remove_all crashes."""
        command = ["nm", "--dynamic", "--undefined-only", "--demangle", driver.path]
        symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "torch::inductor::" in symbols
        assert "std::filesystem" not in symbols


def test_a_folder_that_cannot_be_written(
    driver: Driver, path: pathlib.Path, temporary: pathlib.Path
) -> None:
    _, reply, _ = driver.run(
        ("setenv", "TMPDIR", "/proc"), ("load", path), ("setenv", "TMPDIR", temporary)
    )
    assert reply.kind is Kind.LOAD
    assert "while writing to" in reply.text
    assert reply.text.endswith("(mount option noexec), set TMPDIR to another.")
