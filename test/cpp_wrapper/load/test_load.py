"""`inductor_ext.load`: what it needs, what it gives, what it refuses, and what it leaves behind."""

from __future__ import annotations

import collections
import concurrent.futures
import copy
import ctypes
import gc
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch._inductor
from torch._subclasses import FakeTensorMode
from torch.export import Dim
from torch.utils import _pytree as pytree

import inductor_ext
from inductor_ext import exc
from inductor_ext.cpp_wrapper.build import compiler
from inductor_ext.cpp_wrapper.load import package_files
from inductor_ext.cpp_wrapper.load.model import LoadedModel, Model
from inductor_ext.cpp_wrapper.load.native import ErrorCode, NativeLibrary
from inductor_ext.cpp_wrapper.package import manifest, zip_format, zip_reader, zip_writer
from test.fuzz import aot_packages as artifact_fuzz
from test.support import aot_util


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


pytree._register_namedtuple(Point, serialized_type_name="test.cpp_wrapper.load.test_load.Point")


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


torch.export.register_dataclass(Pair, serialized_type_name="test.cpp_wrapper.load.test_load.Pair")


class Nested(torch.nn.Module):
    """All kinds of containers and of values that are no tensors."""

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


@pytest.fixture(scope="module")
def plain() -> Plain:
    torch.manual_seed(0)
    return Plain().eval()


@pytest.fixture(scope="module")
def nested() -> Nested:
    return Nested().eval()


@pytest.fixture(scope="module")
def path(plain: Plain, nested: Nested, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A package of ours with the models "model" and "nested"."""
    rows = {0: Dim("rows", min=2, max=64)}
    shapes = {
        "batch": {"ids": [rows, None], "mask": None},
        "point": Point(None, None),  # type: ignore[arg-type]
        "pair": [None, None],
        "times": None,
        "flag": None,
        "bias": None,
        "mode": None,
    }
    args, kwargs = nested_inputs()
    programs = {
        "model": torch.export.export(plain, (torch.randn(4, 8),), dynamic_shapes=(rows,)),
        "nested": torch.export.export(nested, args, kwargs, dynamic_shapes=shapes),
    }
    target = tmp_path_factory.mktemp("loader") / "net.pt2"
    inductor_ext.aoti_compile_and_package(programs, package_path=target)
    return str(target)


@pytest.fixture(scope="module")
def stock_path(plain: Plain, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A package of stock's of the model `plain`, for batches of 4."""
    program = torch.export.export(plain, (torch.randn(4, 8),))
    target = str(tmp_path_factory.mktemp("stock") / "net.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=target)
    return target


@pytest.fixture(scope="module")
def stock_loads(stock_path: str) -> None:
    """Skip what loads packages of stock's where they crash the process."""
    if aot_util.crashes_at_load(stock_path):
        pytest.skip("stock's packages crash at load on this machine")


@pytest.fixture
def model(path: str) -> LoadedModel:
    return inductor_ext.load(path)


@pytest.fixture(autouse=True)
def temporary(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The folder for temporary files, empty before each test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def changed(path: str, change: Callable[[dict[str, Any], dict[str, bytes]], None]) -> io.BytesIO:
    """The package with another manifest or other contents, and right checksums."""
    data = pathlib.Path(path).read_bytes()
    content, entries = artifact_fuzz.manifest_of(data), artifact_fuzz.contents(data)
    change(content, entries)
    return io.BytesIO(artifact_fuzz.seal(entries, content))


def check(model: Callable[..., Any], plain: Plain, rows: tuple[int, ...] = (2, 5, 64)) -> None:
    for count in rows:
        x = torch.randn(count, 8)
        torch.testing.assert_close(model(x), plain(x))


# What it takes


def test_it_loads_a_file_a_folder_and_a_buffer(
    path: str, plain: Plain, tmp_path: pathlib.Path, temporary: pathlib.Path
) -> None:
    folder = tmp_path / "unpacked"
    zipfile.ZipFile(path).extractall(folder)
    compressed = tmp_path / "compressed.pt2"
    with zipfile.ZipFile(path) as given, zipfile.ZipFile(compressed, "w") as made:
        for name in given.namelist():
            made.writestr(name, given.read(name), zipfile.ZIP_DEFLATED)
    buffer = io.BytesIO(pathlib.Path(path).read_bytes())
    for source in (path, pathlib.Path(path), folder, folder / "net", buffer, compressed):
        check(inductor_ext.load(source), plain)
        assert list(temporary.iterdir()) == []


def test_a_model_outlives_what_it_came_from(
    path: str, plain: Plain, tmp_path: pathlib.Path
) -> None:
    copied = tmp_path / "copy.pt2"
    shutil.copy(path, copied)
    model = inductor_ext.load(copied)
    copied.unlink()
    check(model, plain)


CHILD = """
import sys, torch
before = set(sys.modules)
import inductor_ext
model = inductor_ext.load(sys.argv[1])
print(model(torch.ones(3, 8)).shape)
found = ("torch._inductor", "torch._dynamo", "torch.export", "torch._export", "sympy", "triton")
print([name for name in set(sys.modules) - before if name.startswith(found)])
"""


@pytest.mark.parametrize("whose", ["ours", "stock's"])
def test_it_needs_neither_inductor_nor_a_compiler(
    whose: str, path: str, request: pytest.FixtureRequest
) -> None:
    code, package = CHILD, path
    if whose == "stock's":
        request.getfixturevalue("stock_loads")
        package = request.getfixturevalue("stock_path")
        code = CHILD.replace("torch.ones(3, 8)", "torch.ones(4, 8)")
    environment = {**os.environ, "PATH": "", "CXX": "/nonexistent"}
    run = subprocess.run(
        [sys.executable, "-c", code, package], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "[]"


def test_weights_are_mapped_where_they_lie(path: str, model: LoadedModel) -> None:
    with zip_reader.open_package(path) as package:
        content = manifest.loads(package.read(manifest.PATH), path)
        place = package.locate(str(content.models["model"].weights))
    assert place is not None
    mapped = [line.split() for line in pathlib.Path("/proc/self/maps").read_text().splitlines()]
    offsets = [int(line[2], 16) for line in mapped if line[-1] == path]
    assert place[1] in offsets
    assert all(line[1][3] == "p" for line in mapped if line[-1] == path)


def test_libraries_go_with_their_models(path: str) -> None:
    def libraries() -> int:
        return pathlib.Path("/proc/self/maps").read_text().count("wrapper.so")

    before = libraries()
    models = [inductor_ext.load(path) for _ in range(3)]
    assert libraries() > before
    del models
    assert libraries() == before


# Calls


def test_nested_inputs_and_outputs_are_those_of_the_model(path: str, nested: Nested) -> None:
    model = inductor_ext.load(path, "nested")
    for rows in (3, 7):
        args, kwargs = nested_inputs(rows)
        ours, eager = model(*args, **kwargs), nested(*args, **kwargs)
        assert list(ours) == list(eager)
        assert type(ours["point"]) is Point
        flat, spec = pytree.tree_flatten(ours)
        known, known_spec = pytree.tree_flatten(eager)
        assert spec == known_spec
        for one, other in zip(flat, known, strict=True):
            assert type(one) is type(other)
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_the_order_of_a_dicts_keys_means_nothing(path: str, nested: Nested) -> None:
    model = inductor_ext.load(path, "nested")
    (batch, *args), kwargs = nested_inputs()
    eager = nested(batch, *args, **kwargs)
    backwards = dict(reversed(list(batch.items())))
    for given in (backwards, collections.OrderedDict(backwards)):
        ours = model(given, *args, **dict(reversed(list(kwargs.items()))))
        torch.testing.assert_close(ours["total"], eager["total"])
        torch.testing.assert_close(ours["rest"], eager["rest"])


X = torch.ones(4, 8)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, "takes 1 positional argument (x), and was called with 0"),
        ((X, X), {}, "takes 1 positional argument (x), and was called with 2"),
        ((), {"x": X}, "takes 1 positional argument (x), and was called with 0"),
        ((X,), {"y": X}, "takes no keyword arguments; y is not one of them"),
        ((3,), {}, "input 'x' is 3, and the artifact takes a tensor (float32, ["),
        ((None,), {}, "input 'x' is None"),
        (([X],), {}, "input 'x' is of type list"),
        ((X.numpy(),), {}, "input 'x' is of type ndarray"),
        ((X.double(),), {}, "float64"),
        ((X[:, :4],), {}, "dimension 1 is 4"),
        ((X[:1],), {}, "dimension 0 is 1"),
        ((X[0],), {}, "1"),
    ],
)
def test_a_wrong_call_names_the_input(
    model: LoadedModel, args: tuple[Any, ...], kwargs: dict[str, Any], words: str
) -> None:
    with pytest.raises(exc.InputMismatchError) as caught:
        model(*args, **kwargs)
    assert words in str(caught.value)
    assert torch.equal(model(X), model(X))


def _with(at: int | str, value: object) -> Callable[[list[Any], dict[str, Any]], None]:
    def change(args: list[Any], kwargs: dict[str, Any]) -> None:
        if isinstance(at, int):
            args[at] = value
        else:
            kwargs[at] = value

    return change


def _without_mask(args: list[Any], kwargs: dict[str, Any]) -> None:
    del args[0]["mask"]


def _deep(args: list[Any], kwargs: dict[str, Any]) -> None:
    args[0]["ids"][1] = "four"


def _short(args: list[Any], kwargs: dict[str, Any]) -> None:
    args[0]["ids"].pop()


def _no_bias(args: list[Any], kwargs: dict[str, Any]) -> None:
    del kwargs["bias"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_with(3, 5), "input 'times' is 5, and the artifact was compiled for 3"),
        (_with(3, 3.0), "input 'times' is 3.0, and the artifact was compiled for 3"),
        (_with(3, True), "input 'times' is True"),
        (_with(3, torch.tensor(3)), "input 'times' is a tensor (int64, [])"),
        (_with(4, X), "input 'flag' is a tensor (float32, [4, 8]), and the artifact was compiled"),
        (_with("mode", "sub"), "input 'mode' is 'sub', and the artifact was compiled for 'add'"),
        (_with(0, [X]), "input 'batch' is of type list, and the artifact takes a dict with 'ids'"),
        (_with(1, (X, X)), "input 'point' is of type tuple, and the artifact takes a Point"),
        (_with(2, X), "input 'pair' is a tensor (float32, [4, 8]), and the artifact takes a Pair"),
        (_with(2, Pair(X, 3)), "input 'pair.right' is 3"),
        (_without_mask, "input 'batch' has the keys 'ids', and the artifact takes a dict with"),
        (_deep, "input 'batch['ids'][1]' is 'four', and the artifact takes a tensor (int64, [4])"),
        (_short, "input 'batch['ids']' is a list of 1, and the artifact takes a list of 2"),
        (_no_bias, "takes the keyword arguments bias, mode; bias is missing"),
        (_with("more", 1), "more is not one of them"),
    ],
)
def test_a_wrong_part_of_a_nested_call_is_named(
    path: str, change: Callable[[list[Any], dict[str, Any]], None], words: str
) -> None:
    args, kwargs = nested_inputs()
    changed_args = list(args)
    change(changed_args, kwargs)
    with pytest.raises(exc.InputMismatchError) as caught:
        inductor_ext.load(path, "nested")(*changed_args, **kwargs)
    assert words in str(caught.value)


def test_a_failure_while_running_is_no_mismatch(
    path: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model = inductor_ext.load(path, "nested")
    args, kwargs = nested_inputs()
    args[0]["ids"][0] = torch.tensor([1, 2, 1000])
    with pytest.raises(exc.ArtifactRunError, match="out of bounds") as caught:
        model(*args, **kwargs)
    assert not isinstance(caught.value, exc.InputMismatchError)
    assert capfd.readouterr().err == ""
    good_args, good_kwargs = nested_inputs()
    assert model(*good_args, **good_kwargs)["rows"] == 3


def test_threads_share_a_model(path: str, plain: Plain) -> None:
    model = inductor_ext.load(path, num_runners=2)

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(50):
            x = torch.randn(2 + seed, 8, generator=generator)
            torch.testing.assert_close(model(x), plain(x))
            with pytest.raises(exc.InputMismatchError, match=f"is {8 + seed}"):
                model(torch.ones(2, 8 + seed))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(1, 9)))


CALLBACK = """
import concurrent.futures, sys, threading
import torch
import inductor_ext

entered, go_on = threading.Event(), threading.Event()

@torch.library.custom_op("test_aot_loader::wait", mutates_args=())
def wait(x: torch.Tensor) -> torch.Tensor:
    entered.set()
    go_on.wait()
    return x + 1

@wait.register_fake
def _(x):
    return torch.empty_like(x)

class Waits(torch.nn.Module):
    def forward(self, x):
        return wait(x) * 2

x = torch.ones(4)
program = torch.export.export(Waits(), (x,))
inductor_ext.aoti_compile_and_package(program, package_path=sys.argv[1])
for runners in (1, 2):
    model = inductor_ext.load(sys.argv[1], num_runners=runners)
    entered.clear(), go_on.clear()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        first = pool.submit(model, x)
        entered.wait()
        others = [pool.submit(model, x + at) for at in (1, 2)]
        go_on.set()
        for at, each in enumerate([first, *others]):
            assert torch.equal(each.result(), (x + at + 1) * 2)
"""


def test_a_model_may_call_python_while_threads_wait(
    tmp_path: pathlib.Path,
) -> None:
    """Waiting for a runner with the interpreter's lock held would never end."""
    run = subprocess.run(
        [sys.executable, "-c", CALLBACK, str(tmp_path / "waits.pt2")],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


def test_without_what_lets_threads_in_results_are_the_same(path: str, plain: Plain) -> None:
    check(inductor_ext.load(path, run_single_threaded=True), plain)


def test_gradients_are_not_recorded(model: LoadedModel) -> None:
    assert not model(torch.ones(3, 8, requires_grad=True)).requires_grad


# What a model says of itself


def test_signature_and_manifest(path: str, model: LoadedModel) -> None:
    assert model.signature is not None
    assert [given.name for given in model.signature.inputs] == ["x"]
    assert model.manifest is not None
    assert set(model.manifest.models) == {"model", "nested"}
    assert model.get_metadata()["AOTI_DEVICE_KEY"] == "cpu"
    assert repr(model) == f"<Model 'model' of {path}>"
    assert copy.deepcopy(model) is model
    with pytest.raises(exc.ModelNotFoundError, match="no model 'other'; it has model, nested"):
        inductor_ext.load(path, "other")


# Constants


def test_constants_are_those_of_the_model(model: LoadedModel, plain: Plain) -> None:
    state = plain.state_dict()
    assert sorted(model.get_constant_fqns()) == sorted(state)
    live = model.constants()
    assert sorted(live) == sorted(state)
    for name, tensor in state.items():
        assert torch.equal(live[name], tensor)


def test_constants_outlive_the_model_and_are_its_memory(path: str, plain: Plain) -> None:
    model = inductor_ext.load(path)
    row = model.constants()["linear.weight"][3]
    before = model(X)
    row.zero_()
    assert not torch.equal(model(X), before)
    del model
    gc.collect()
    assert torch.equal(row, torch.zeros(8))
    row = inductor_ext.load(path).constants()["linear.weight"].t()[3]
    gc.collect()
    assert torch.equal(row, plain.linear.weight.t()[3])


def test_constants_are_updated_swapped_and_freed(path: str, plain: Plain) -> None:
    model, other = inductor_ext.load(path), copy.deepcopy(plain)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.mul_(2).add_(1)
    model.update_constants(other.state_dict(), inactive=True, partial=False)
    check(model, plain)
    model.fold_constants(inactive=True)
    model.swap_constants()
    check(model, other)
    model.swap_constants()
    check(model, plain)
    model.free_inactive_constants()
    check(model, plain)
    model.update_constants({"scale": other.scale})
    mixed = copy.deepcopy(plain)
    mixed.scale.copy_(other.scale)
    check(model, mixed)
    model.load_constants(other.state_dict(), check_full_update=True)
    check(model, other)


def test_an_update_does_not_reach_other_models_or_the_file(path: str, plain: Plain) -> None:
    before = pathlib.Path(path).read_bytes()
    one, other = inductor_ext.load(path), inductor_ext.load(path)
    one.update_constants({"scale": torch.zeros(16)})
    assert torch.equal(one(X), torch.zeros(4, 16))
    check(other, plain)
    assert pathlib.Path(path).read_bytes() == before


def test_user_managed_constants_are_used_in_place(model: LoadedModel) -> None:
    scale = torch.ones(16)
    model.load_constants({"scale": scale}, check_full_update=False, user_managed=True)
    first = model(X)
    scale.mul_(2)
    torch.testing.assert_close(model(X), first * 2)
    del scale  # the model keeps it
    torch.testing.assert_close(model(X), first * 2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"bias": torch.ones(16)}, "it has no constant 'bias'"),
        ({"scale": torch.ones(15)}, "'scale'"),
        ({"scale": torch.ones(16, dtype=torch.float64)}, "float64"),
        ({"scale": 3}, "'scale' is of type int"),
        ({"scale": torch.ones(16).to_sparse()}, "'scale' has another layout"),
        ({"scale": FakeTensorMode().from_tensor(torch.ones(16))}, "'scale' is a fake tensor"),
    ],
)
def test_a_wrong_constant_is_named_and_nothing_changes(
    model: LoadedModel, plain: Plain, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(exc.ConstantMismatchError, match=re.escape(words)):
        model.update_constants({"linear.weight": torch.zeros(16, 8), **given})
    check(model, plain)


def test_user_managed_constants_are_what_their_memory_holds(model: LoadedModel) -> None:
    x = torch.randn(3, 8)
    scale = torch.full((16,), 2.0)
    model.load_constants({"scale": scale}, check_full_update=False, user_managed=True)
    expected = model(x)
    negative = torch._neg_view(torch.ones(16))
    with pytest.raises(exc.ConstantMismatchError, match="resolve_neg"):
        model.load_constants({"scale": negative}, check_full_update=False, user_managed=True)
    with pytest.raises(exc.ConstantMismatchError, match="another layout"):
        model.update_constants({"scale": torch.ones(16).to_sparse()})
    assert model.constants()["scale"].data_ptr() == scale.data_ptr()
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    model.update_constants({"scale": negative})
    assert model.constants()["scale"].tolist() == [-1] * 16


def test_a_full_update_needs_all(model: LoadedModel, plain: Plain) -> None:
    with pytest.raises(exc.ConstantMismatchError):
        model.update_constants({"scale": torch.ones(16)}, partial=False)
    check(model, plain)


# Error codes


@pytest.fixture
def native(path: str, tmp_path: pathlib.Path) -> Iterator[NativeLibrary]:
    """The library of "model", which has a file of weights beside it."""
    library = _write_library(path, tmp_path / "native.so")
    native = NativeLibrary(library)
    native.prepare(None, False)
    assert native.last_error_code() is ErrorCode.NONE
    yield native
    native.close()


def _write_library(path: str, target: pathlib.Path) -> str:
    with zip_reader.open_package(path) as package:
        content, _ = manifest.read(package) or pytest.fail("no manifest")
        model = content.models["model"]
        package.extract(str(model.library), target)
        package.extract(str(model.weights), target.with_suffix(".weights"))
    return str(target)


def _create(native: NativeLibrary, device: bytes = b"cpu") -> int:
    create = native._library.AOTInductorModelContainerCreateWithDevice
    container = ctypes.c_void_p()
    return int(create(ctypes.byref(container), ctypes.c_size_t(1), device, None))


def test_python_and_cpp_have_the_same_error_codes() -> None:
    text = (compiler.RUNTIME / "error.h").read_text()
    codes = {name.upper(): int(value) for name, value in re.findall(r"(\w+) = (\d+),", text)}
    assert {code.name: code.value for code in ErrorCode if code is not ErrorCode.UNKNOWN} == codes


def test_a_failed_creation_has_the_code_of_its_reason(native: NativeLibrary) -> None:
    assert _create(native, b"tpu") == 1
    assert native.last_error_code() is ErrorCode.FAILURE
    native.prepare(("/nowhere/model.weights", 0, 8), False)
    assert _create(native) == 1
    assert native.last_error_code() is ErrorCode.WEIGHTS
    assert _create(native) == 0
    assert (native.last_error_code(), native.last_error()) == (ErrorCode.NONE, "")


def test_a_cpu_that_lacks_features_has_its_own_code(path: str, tmp_path: pathlib.Path) -> None:
    library = pathlib.Path(_write_library(path, tmp_path / "other.so"))
    with zip_reader.open_package(path) as package:
        content, _ = manifest.read(package) or pytest.fail("no manifest")
    features = ",".join(content.models["model"].cpu_features).encode()
    if not features:
        pytest.skip("the model needs no CPU features")
    data = library.read_bytes()
    assert data.count(features + b"\0") == 1
    library.write_bytes(data.replace(features, b"x" * len(features)))
    native = NativeLibrary(str(library))
    native.prepare(None, False)
    assert _create(native) == 1
    assert native.last_error_code() is ErrorCode.CPU
    native.close()


def test_calls_and_updates_have_the_code_of_their_reason(path: str) -> None:
    model = inductor_ext.load(path)
    assert isinstance(model, Model)
    with pytest.raises(exc.InputMismatchError, match="float64"):
        model(X.double())
    assert model._library.last_error_code() is ErrorCode.INPUT
    model(X)
    assert model._library.last_error_code() is ErrorCode.NONE
    with pytest.raises(exc.ConstantMismatchError, match="no new value"):
        model.update_constants({"scale": torch.ones(16)}, partial=False)
    assert model._library.last_error_code() is ErrorCode.CONSTANT
    nested = inductor_ext.load(path, "nested")
    assert isinstance(nested, Model)
    args, kwargs = nested_inputs()
    args[0]["ids"][0] = torch.tensor([1, 2, 1000])
    with pytest.raises(exc.ArtifactRunError, match="out of bounds"):
        nested(*args, **kwargs)
    assert nested._library.last_error_code() is ErrorCode.FAILURE


def test_a_library_without_error_codes_is_told_by_its_texts(path: str, plain: Plain) -> None:
    def rename(content: dict[str, Any], entries: dict[str, bytes]) -> None:
        for name in [name for name in entries if name.endswith(".so")]:
            old, new = b"inductor_ext_last_error_code", b"inductor_ext_last_error_kind"
            assert old in entries[name]
            entries[name] = entries[name].replace(old, new)

    package = changed(path, rename)
    model = inductor_ext.load(package)
    assert isinstance(model, Model)
    check(model, plain)
    with pytest.raises(exc.InputMismatchError, match="float64"):
        model(X.double())
    assert model._library.last_error_code() is ErrorCode.INPUT
    with pytest.raises(exc.ConstantMismatchError, match="no new value"):
        model.update_constants({"scale": torch.ones(16)}, partial=False)
    assert model._library.last_error_code() is ErrorCode.UNKNOWN
    args, kwargs = nested_inputs()
    args[0]["ids"][0] = torch.tensor([1, 2, 1000])
    with pytest.raises(exc.ArtifactRunError, match="out of bounds") as caught:
        inductor_ext.load(package, "nested")(*args, **kwargs)
    assert not isinstance(caught.value, exc.InputMismatchError)


# Weights elsewhere


@pytest.fixture
def without_weights(path: str, tmp_path: pathlib.Path) -> tuple[str, str]:
    """A package without the weights of "model", and the file that has them."""
    kept = tmp_path / "shared.weights"

    def change(content: dict[str, Any], entries: dict[str, bytes]) -> None:
        model = content["models"]["model"]
        name = model["weights"]
        model["outside"] = content["files"][name]
        model["weights"] = None
        kept.write_bytes(entries.pop(name))

    package = tmp_path / "small.pt2"
    package.write_bytes(changed(path, change).getvalue())
    return str(package), str(kept)


def test_weights_may_live_in_a_file_or_another_package(
    without_weights: tuple[str, str], path: str, plain: Plain
) -> None:
    package, kept = without_weights
    models = [
        inductor_ext.load(package, weights=weights) for weights in (kept, pathlib.Path(kept), path)
    ]
    for model in models:
        check(model, plain)
    assert "shared.weights" in pathlib.Path("/proc/self/maps").read_text()


def test_other_weights_are_refused(
    without_weights: tuple[str, str], path: str, stock_path: str, tmp_path: pathlib.Path
) -> None:
    package, kept = without_weights
    with pytest.raises(exc.ArtifactLoadError, match="its weights are in a separate file"):
        inductor_ext.load(package)
    data = bytearray(pathlib.Path(kept).read_bytes())
    data[3] ^= 1
    other = tmp_path / "other.weights"
    other.write_bytes(data)
    for weights in (other, tmp_path / "none.weights", stock_path):
        with pytest.raises(exc.ArtifactLoadError, match=re.escape(str(weights))):
            inductor_ext.load(package, weights=weights)
    assert inductor_ext.load(package, weights=other, verify=False) is not None
    other.write_bytes(data[:-1])
    with pytest.raises(exc.ArtifactLoadError, match="has other weights"):
        inductor_ext.load(package, weights=other, verify=False)
    with pytest.raises(exc.ArtifactLoadError, match="its weights are in the package"):
        inductor_ext.load(stock_path, weights=kept)


# Refusals


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (("versions", "torch"), "2.0.1", "compiled for torch 2.0.1, and this is torch"),
        (("platform", "machine"), "riscv64", "compiled for riscv64"),
        (("models", "model", "cpu_features"), ["avx9999"], "needs avx9999, which this CPU lacks"),
        (("models", "model", "device"), "cuda", "CUDA"),
        (("format",), 99, "has format 99"),
    ],
)
def test_what_does_not_fit_here_is_refused_at_once(
    path: str, key: tuple[str, ...], value: object, words: str
) -> None:
    def change(content: dict[str, Any], entries: dict[str, bytes]) -> None:
        for part in key[:-1]:
            content = content[part]
        content[key[-1]] = value

    if words == "CUDA" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(exc.IncompatibleArtifactError, match=words):
        inductor_ext.load(changed(path, change))


def flipped(path: str, ending: str) -> io.BytesIO:
    """The package with one bit of an entry's content changed, in the middle."""
    data = bytearray(pathlib.Path(path).read_bytes())
    with zip_reader.open_package(path) as package:
        (entry,) = [
            entry
            for name, entry in package.entries.items()
            if name.startswith("data/aotinductor/model/") and name.endswith(ending)
        ]
    data[entry.offset + entry.size // 2] ^= 1
    return io.BytesIO(data)


@pytest.mark.parametrize("ending", ["wrapper.so", ".weights", "wrapper_metadata.json"])
def test_a_flipped_bit_is_found(path: str, temporary: pathlib.Path, ending: str) -> None:
    with pytest.raises(exc.BadPackageError, match="is damaged: its content does not match"):
        inductor_ext.load(flipped(path, ending))
    assert list(temporary.iterdir()) == []


def test_large_weights_are_verified_by_their_constants(
    path: str, plain: Plain, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package_files, "_LARGE", 0)
    check(inductor_ext.load(path), plain)
    damaged = tmp_path / "damaged.pt2"
    with zip_reader.open_package(path) as package:
        found = manifest.read(package)
        assert found is not None
        model = found[0].models["model"]
        place = package.locate(str(model.weights))
    assert place is not None
    for constant in model.constants:
        for at in (0, constant.bytes - 1):
            data = bytearray(pathlib.Path(path).read_bytes())
            data[place[1] + (constant.offset or 0) + at] ^= 1
            damaged.write_bytes(data)
            with pytest.raises(exc.BadPackageError, match="does not match its SHA-256"):
                inductor_ext.load(damaged)


def test_verification_can_be_left_out(path: str, plain: Plain, tmp_path: pathlib.Path) -> None:
    """Then weights are not even read before they are used."""
    damaged = tmp_path / "damaged.pt2"
    damaged.write_bytes(flipped(path, ".weights").getvalue())
    with pytest.raises(exc.BadPackageError):
        inductor_ext.load(damaged)
    model = inductor_ext.load(damaged, verify=False)
    assert not all(
        torch.equal(tensor, model.constants()[name]) for name, tensor in plain.state_dict().items()
    )


def test_a_manifest_of_another_package_is_refused(path: str) -> None:
    """Its own checksums are right, and what it says of the calls is not."""

    def change(content: dict[str, Any], entries: dict[str, bytes]) -> None:
        models = content["models"]
        models["model"]["signature"] = models["nested"]["signature"]

    with pytest.raises(exc.BadPackageError, match="differs from its manifest"):
        inductor_ext.load(changed(path, change))


def test_a_manifest_without_its_seal_is_refused(path: str, tmp_path: pathlib.Path) -> None:
    copied = tmp_path / "altered.pt2"
    with zipfile.ZipFile(path) as given, zipfile.ZipFile(copied, "w") as made:
        for name in given.namelist():
            data = given.read(name)
            if name.endswith(manifest.PATH):
                content = json.loads(data)
                content["models"]["model"]["signature"]["symbols"] = {}
                data = json.dumps(content).encode()
            made.writestr(name, data)
    with pytest.raises(exc.BadPackageError, match="not the one that it was written with"):
        inductor_ext.load(copied)


def test_packages_without_manifest_are_not_inductors(
    path: str, tmp_path: pathlib.Path, temporary: pathlib.Path
) -> None:
    copied = tmp_path / "bare.pt2"
    with zipfile.ZipFile(path) as given, zipfile.ZipFile(copied, "w") as made:
        for name in given.namelist():
            if not name.endswith(manifest.PATH):
                made.writestr(name, given.read(name))
    with pytest.raises(exc.BadPackageError, match="its manifest is missing"):
        inductor_ext.load(copied)
    assert list(temporary.iterdir()) == []


def test_libraries_that_the_system_refuses_are_told_of(
    path: str, temporary: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(content: dict[str, Any], entries: dict[str, bytes]) -> None:
        entries[content["models"]["model"]["library"]] = b"no library"

    with pytest.raises(exc.ArtifactLoadError, match="too short"):
        inductor_ext.load(changed(path, change))
    assert list(temporary.iterdir()) == []


def test_wrong_arguments_are_refused(path: str) -> None:
    for number in (0, -1, True, "2"):
        with pytest.raises(exc.BadOptionError, match="num_runners"):
            inductor_ext.load(path, num_runners=number)  # type: ignore[arg-type]
    with pytest.raises(exc.BadPackageError, match="No such file"):
        inductor_ext.load(path + ".none")
    for wrong in (None, 3):
        with pytest.raises(exc.BadArgumentError, match="expected a path, or a readable buffer"):
            inductor_ext.load(wrong)  # type: ignore[arg-type]


def test_what_is_no_package_is_told_from_a_damaged_one(tmp_path: pathlib.Path) -> None:
    with pytest.raises(exc.BadPackageError, match="has no file of a package in it"):
        inductor_ext.load(tmp_path)
    exported = tmp_path / "exported.pt2"
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), exported)
    with pytest.raises(exc.NoModelError, match=r"exported\.pt2 contains no compiled model"):
        inductor_ext.load(exported)


def test_classes_that_are_not_registered_are_named(path: str) -> None:
    code = "import sys, inductor_ext; inductor_ext.load(sys.argv[1], 'nested')"
    run = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert "UnknownNodeError" in run.stderr
    assert "test.cpp_wrapper.load.test_load.Point" in run.stderr


# Stock's packages and stock's loaders


def test_inductor_loads_packages_of_the_extension(path: str, plain: Plain) -> None:
    check(torch._inductor.aoti_load_package(path), plain)
    stock = torch._C._aoti.AOTIModelPackageLoader(path, "model", False, 1, -1)
    check(lambda x: stock.run([x])[0], plain)


@pytest.mark.usefixtures("stock_loads")
def test_inductor_loads_its_own_files_from_our_archive(
    stock_path: str, plain: Plain, tmp_path: pathlib.Path
) -> None:
    target = tmp_path / "rewritten.pt2"
    with zip_reader.open_package(stock_path) as package, open(target, "wb") as file:
        writer = zip_writer.Writer(file, "rewritten")
        for name, entry in package.entries.items():
            if name not in zip_format.BOOKKEEPING:
                parts = zip_writer.Chunks(entry.size, package.read_chunks(name))
                writer.add(name, parts, aligned=name.endswith(".so"))
        writer.finish()
    check(torch._inductor.aoti_load_package(str(target)), plain, (4,))
    stock = torch._C._aoti.AOTIModelPackageLoader(str(target), "model", False, 1, -1)
    check(lambda x: stock.run([x])[0], plain, (4,))


@pytest.mark.usefixtures("stock_loads")
def test_it_loads_inductors_packages(
    stock_path: str, plain: Plain, tmp_path: pathlib.Path, temporary: pathlib.Path
) -> None:
    folder = tmp_path / "unpacked"
    zipfile.ZipFile(stock_path).extractall(folder)
    buffer = io.BytesIO(pathlib.Path(stock_path).read_bytes())
    for source in (stock_path, folder, buffer):
        model = inductor_ext.load(source)
        check(model, plain, (4,))
        assert list(temporary.iterdir()) == []
    assert model.signature is None
    assert model.manifest is None
    assert model.get_metadata()["AOTI_DEVICE_KEY"] == "cpu"
    with pytest.raises(exc.InputMismatchError, match="called with 2"):
        model(X, X)
    with pytest.raises(exc.UnsupportedArtifactError, match="Swapping constants is not supported"):
        model.swap_constants()
    other = {"linear.weight": torch.zeros(16, 8), "linear.bias": torch.ones(16)}
    model.update_constants(other)
    torch.testing.assert_close(model(X), plain.scale.expand(4, 16))
    with pytest.raises(exc.ConstantMismatchError):
        model.update_constants({"none": torch.ones(1)})
    with pytest.raises(exc.ModelNotFoundError, match="no model 'other'; it has model"):
        inductor_ext.load(stock_path, "other")


def test_damage_to_inductors_packages_is_found(stock_path: str, tmp_path: pathlib.Path) -> None:
    damaged = tmp_path / "damaged.pt2"
    data = bytearray(pathlib.Path(stock_path).read_bytes())
    with zip_reader.open_package(stock_path) as package:
        (library,) = [entry for name, entry in package.entries.items() if name.endswith(".so")]
    data[library.offset + library.size // 2] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(exc.BadPackageError, match="does not match its CRC-32"):
        inductor_ext.load(damaged)


def test_unsafe_names_never_reach_inductors_loader(stock_path: str, tmp_path: pathlib.Path) -> None:
    """It writes such entries where they point."""
    evil = tmp_path / "evil.pt2"
    with zipfile.ZipFile(stock_path) as given, zipfile.ZipFile(evil, "w") as made:
        for name in given.namelist():
            made.writestr(name, given.read(name))
        made.writestr("net/data/aotinductor/model/../../../../evil.txt", b"evil")
    with pytest.raises(exc.BadPackageError, match="leads out of its folder"):
        inductor_ext.load(evil)


# On a GPU


@pytest.mark.gpu
def test_a_model_on_a_gpu_keeps_its_kernels_until_it_goes(
    tmp_path: pathlib.Path, temporary: pathlib.Path
) -> None:
    plain = Plain().eval().cuda()
    rows = {0: Dim("rows", min=2, max=64)}
    x = torch.randn(4, 8, device="cuda")
    program = torch.export.export(plain, (x,), dynamic_shapes=(rows,))
    target = tmp_path / "gpu.pt2"
    inductor_ext.aoti_compile_and_package(program, package_path=target)
    for index in (-1, 0):
        model = inductor_ext.load(target, device_index=index)
        assert len(list(temporary.iterdir())) == 1
        for count in (2, 5, 64):
            x = torch.randn(count, 8, device="cuda")
            torch.testing.assert_close(model(x), plain(x))
        with pytest.raises(exc.InputMismatchError, match="cpu"):
            model(x.cpu())
        assert all(constant.is_cuda for constant in model.constants().values())
        model.update_constants({"scale": torch.zeros(16)})
        assert not model(x).any()
        del model
        gc.collect()
        assert list(temporary.iterdir()) == []


# Damaged and forged packages


@pytest.mark.slow
def test_damaged_packages_are_refused_or_right(tmp_path: pathlib.Path) -> None:
    """See `test.fuzz.aot_packages`, whose command line goes on for longer."""
    package = str(tmp_path / "net.pt2")
    artifact_fuzz.make_package(package)
    outcomes = list(artifact_fuzz.run_cases(package, 0, range(600)))
    assert [outcome for outcome in outcomes if not artifact_fuzz.is_good(outcome[2])] == []
    kinds = {(kind, outcome.split(":")[0]) for _, kind, outcome in outcomes}
    assert {
        ("flip", "refused"),
        ("flip", "right"),
        ("rename", "refused"),
        ("forge", "right"),
    } <= kinds
