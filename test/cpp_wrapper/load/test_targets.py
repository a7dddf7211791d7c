"""A package with several CPU targets: which one runs, and what the targets share."""

from __future__ import annotations

import os
import pathlib
import platform
import types
from typing import Any

import pytest
import torch
import torch._inductor

import inductor_ext
from inductor_ext import exc, targets
from inductor_ext.cpp_wrapper.build import cpu_isa, cpu_target
from inductor_ext.cpp_wrapper.build.artifact import Artifact
from inductor_ext.cpp_wrapper.codegen import weights_layout
from inductor_ext.cpp_wrapper.package import build_results, manifest, zip_reader
from inductor_ext.reports import package_report
from test.support.altered_packages import contents, manifest_of, seal

LEVELS = ("x86-64-v2", "x86-64-v3", "x86-64-v4")

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="levels of x86-64")


class Net(torch.nn.Module):
    """Weights that are much larger than the code, and a reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 4096), torch.nn.Linear(4096, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.nn.functional.gelu(self.up(x)))
        return torch.softmax(y, -1) + torch.exp(x)


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def program(net: Net) -> Any:
    shapes = ({0: torch.export.Dim("batch", max=64)},)
    return torch.export.export(net, (torch.randn(4, 64),), dynamic_shapes=shapes)


@pytest.fixture(scope="module")
def path(program: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    target = str(tmp_path_factory.mktemp("targets") / "net.pt2")
    inductor_ext.aoti_compile_and_package(
        program, package_path=target, cpu_targets=[LEVELS[2], LEVELS[0], LEVELS[1], LEVELS[0]]
    )
    return target


def make_machine(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    """Let this machine have a CPU of a level."""
    monkeypatch.setattr(cpu_isa, "machine_features", lambda: cpu_isa.features_of(level))


def artifact_of(constants: dict[str, torch.Tensor]) -> Artifact:
    """The build outputs of a model without inputs that has these constants."""
    return Artifact(
        shared_object="a.so",
        files=(),
        weights_path="a.weights",
        plan=weights_layout.plan(constants),
        signature=types.SimpleNamespace(to_json=dict),  # type: ignore[arg-type]
        kernels=(),
        index_inputs={},
        constants=constants,
        fqns={name: name for name in constants},
        frozen=(),
        mutated_buffers=(),
        mutates_inputs=False,
        device_type="cpu",
        features=(),
        machine="x86_64",
    )


def runnable() -> list[str]:
    return [level for level in LEVELS if not cpu_isa.missing(cpu_isa.features_of(level))]


def test_the_highest_level_of_this_cpu_runs(path: str, net: Net) -> None:
    model = inductor_ext.load(path)
    x = torch.randn(7, 64)
    torch.testing.assert_close(model(x), net(x))
    assert model.manifest is not None
    chosen = model.manifest.models["model"]
    assert chosen.target == runnable()[-1]
    assert set(chosen.cpu_features) == cpu_isa.features_of(runnable()[-1])
    with pytest.raises(exc.InputMismatchError, match="dimension 0 is 65"):
        model(torch.randn(65, 64))


def test_a_lower_level_runs_on_an_older_cpu(
    path: str, net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_machine(monkeypatch, "x86-64-v2")
    model, x = inductor_ext.load(path), torch.randn(7, 64)
    assert model.manifest is not None
    assert model.manifest.models["model"].target == "x86-64-v2"
    torch.testing.assert_close(model(x), net(x))


def test_an_older_cpu_is_refused_with_all_targets(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_machine(monkeypatch, "x86-64")
    with pytest.raises(exc.IncompatibleArtifactError, match="targets x86-64-v2, x86-64-v3, x86"):
        inductor_ext.load(path)


def test_the_library_of_a_level_that_this_cpu_lacks_is_not_run(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "x86-64-v4" in runnable():
        pytest.skip("this CPU has the highest level")
    make_machine(monkeypatch, "x86-64-v4")
    with pytest.raises(exc.IncompatibleArtifactError, match="avx512f"):
        inductor_ext.load(path)


def test_torch_s_own_loader_runs_the_lowest_level(path: str, net: Net) -> None:
    x = torch.randn(7, 64)
    torch.testing.assert_close(torch._inductor.aoti_load_package(path)(x), net(x))


def test_there_is_one_copy_of_the_weights(path: str, net: Net) -> None:
    weights = sum(tensor.nbytes for tensor in net.state_dict().values())
    with zip_reader.open_package(path) as package:
        sizes = {name: entry.size for name, entry in package.entries.items()}
        content, _ = manifest.verify(package)  # type: ignore[misc]
    assert [size for name, size in sizes.items() if name.endswith(".weights")] == [weights]
    libraries = [size for name, size in sizes.items() if name.endswith(".so")]
    assert len(libraries) == len(LEVELS)
    others = sum(sizes.values()) - weights - sum(libraries)
    # The weights begin at a multiple of 64 KiB.
    assert os.path.getsize(path) < weights + sum(libraries) + others + (1 << 17)
    assert others < 1 << 18
    model = content.models["model"]
    assert model.target == "x86-64-v2"
    assert [variant.target for variant in model.variants] == ["x86-64-v3", "x86-64-v4"]


def test_inspect_lists_the_targets(path: str) -> None:
    report = package_report.read(path)
    assert report.misfits == {"model": None}
    text = package_report.text(report)
    lines = text.split("targets\n")[1].splitlines()[:3]
    assert [line.split()[0] for line in lines] == list(LEVELS)


@pytest.mark.parametrize("damaged", LEVELS)
def test_only_the_chosen_target_has_to_be_intact(
    path: str, damaged: str, tmp_path: pathlib.Path
) -> None:
    package = pathlib.Path(path).read_bytes()
    entries, content = contents(package), manifest_of(package)
    model = content["models"]["model"]
    described = {model["target"]: model, **{item["target"]: item for item in model["variants"]}}
    data = bytearray(pathlib.Path(path).read_bytes())
    code = entries[described[damaged]["library"]]
    data[package.index(code) + len(code) // 2] ^= 1
    other = tmp_path / "damaged.pt2"
    other.write_bytes(data)
    is_chosen = damaged == runnable()[-1]
    assert (package_report.read(str(other)).misfits["model"] is not None) == is_chosen
    if is_chosen:
        with pytest.raises(exc.BadPackageError, match="is damaged"):
            inductor_ext.load(other)
    else:
        inductor_ext.load(other)


def test_an_earlier_version_uses_the_lowest_level(
    path: str, net: Net, tmp_path: pathlib.Path
) -> None:
    package = pathlib.Path(path).read_bytes()
    content = manifest_of(package)
    # To a reader that does not know the fields, they are not there.
    for field in ("variants", "target"):
        del content["models"]["model"][field]
    other = tmp_path / "earlier.pt2"
    other.write_bytes(seal(contents(package), content))
    model, x = inductor_ext.load(other), torch.randn(7, 64)
    assert model.manifest is not None
    assert set(model.manifest.models["model"].cpu_features) == cpu_isa.features_of("x86-64-v2")
    torch.testing.assert_close(model(x), net(x))


def test_the_vector_isas_of_a_level_do_not_depend_on_this_machine() -> None:
    from torch._inductor import cpu_vec_isa

    found = {level: [str(isa) for isa in cpu_target.vector_isas(level)] for level in LEVELS}
    assert found == dict(zip(LEVELS, ([], ["avx2"], ["avx512", "avx2"]), strict=True))
    for level in LEVELS:
        with targets.Target(level, level).scope():
            assert cpu_vec_isa.valid_vec_isa_list() == cpu_target.vector_isas(level)
    assert cpu_vec_isa.valid_vec_isa_list() is not cpu_target.vector_isas("x86-64-v4")
    cpu_vec_isa.valid_vec_isa_list.cache_info()


@pytest.mark.parametrize(
    ("names", "error", "why"),
    [
        (["x86-64-v9"], exc.UnknownTargetError, "x86-64-v2, x86-64-v3, x86-64-v4, aarch64"),
        (["x86-64-v3", ""], exc.UnknownTargetError, "Unknown target ''"),
        ([], exc.BadArgumentError, "a list of one or more names"),
        ("x86-64-v3", exc.BadArgumentError, "a list of one or more names"),
        ([3], exc.BadArgumentError, "a list of one or more names"),
        (["aarch64"], exc.UnsupportedTargetError, "aarch64"),  # without a cross compiler or torch
    ],
)
def test_bad_names_are_refused(
    program: Any, names: Any, error: type[Exception], why: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(error) as caught:
        inductor_ext.aoti_compile_and_package(
            program, package_path=tmp_path / "m.pt2", cpu_targets=names
        )
    assert why in str(caught.value)
    assert not (tmp_path / "m.pt2").exists()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"aot_inductor.package_cpp_only": True}, "package_cpp_only does not support"),
        ({"enabled": False}, "the extension is disabled"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    program: Any, options: dict[str, Any], why: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(exc.UnsupportedTargetError, match=why):
        inductor_ext.aoti_compile_and_package(
            program,
            package_path=tmp_path / "m.pt2",
            inductor_configs=options,
            cpu_targets=["x86-64-v3"],
        )
    assert not (tmp_path / "m.pt2").exists()


def test_a_package_for_another_machine_only(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A level that this machine lacks can be compiled alone, and is refused at load."""
    (target,) = targets.parse(None, ["x86-64-v4"])
    make_machine(monkeypatch, "x86-64-v3")
    assert target.options({})["max_autotune"] is False
    assert target.settings() == {"aot_isa": "x86-64-v4"}
    make_machine(monkeypatch, "x86-64-v4")
    assert "max_autotune" not in target.options({})


def test_different_constants_are_refused() -> None:
    one = artifact_of({"w": torch.ones(4, 3)})
    builds = [
        build_results.Build(target=name, artifacts={"m": artifact}, options={}, memory={})
        for name, artifact in (
            ("a", one),
            ("b", artifact_of({"w": torch.ones(4, 3)})),
            ("c", artifact_of({"w": torch.zeros(4, 3)})),
            ("d", artifact_of({"w": torch.ones(3, 4).t()})),
            ("e", artifact_of({"v": torch.ones(4, 3)})),
        )
    ]
    build_results.check_shared(builds[0], builds[1])
    reasons = ("has another value", "has other strides", "has other constants")
    for build, why in zip(builds[2:], reasons, strict=True):
        with pytest.raises(exc.TargetMismatchError, match=why):
            build_results.check_shared(builds[0], build)
