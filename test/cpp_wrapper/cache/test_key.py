"""The cache key of a compiled artifact: equal for equal programs, different for any difference."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.export import Dim, ExportedProgram
from torch.utils._sympy.value_ranges import ValueRanges

from inductor_ext import lowerings, settings
from inductor_ext.cpp_wrapper.cache import key as artifact_key
from inductor_ext.cpp_wrapper.cache.fingerprint import UnkeyableError
from inductor_ext.storage import digest as storage_digest
from inductor_ext.toolchain import components
from test.support.children import artifact_key as child_artifact_key
from test.support.compile_util import threads

CHECKOUT = Path(__file__).parents[3]

SETTINGS = settings.Settings()


def digest(program: ExportedProgram, ours: settings.Settings = SETTINGS, **patches: Any) -> str:
    """The key of a program that can be cached."""
    key = artifact_key.compute_key(program, ours, patches)
    assert len(key) == 64
    return key


def refusal(program: ExportedProgram, **patches: Any) -> str:
    """Why a program has no key."""
    with pytest.raises(UnkeyableError) as error:
        artifact_key.compute_key(program, SETTINGS, patches)
    return str(error.value)


# --- the same program ---


def test_other_processes_find_the_same_key() -> None:
    """Regardless of hash seeds and object addresses."""
    digests = []
    for seed, objects in (("1", 0), ("2", 100_000)):
        run = subprocess.run(
            [sys.executable, str(Path(child_artifact_key.__file__)), str(objects)],
            cwd=CHECKOUT,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(CHECKOUT)},
            capture_output=True,
            text=True,
            check=True,
        )
        digests.append(json.loads(run.stdout))
    assert digests[0] == digests[1]
    assert len(set(digests[0].values())) == len(digests[0])


@pytest.fixture(scope="module")
def rich() -> ExportedProgram:
    return child_artifact_key.programs()["branches"]


def test_the_order_of_dictionaries_does_not_matter(rich: ExportedProgram) -> None:
    other = copy.copy(rich)
    other._state_dict = dict(reversed(rich.state_dict.items()))
    other._constants = dict(reversed(rich.constants.items()))
    assert digest(other) == digest(rich)
    first = digest(rich, max_autotune=True, epilogue_fusion=False)
    assert digest(rich, epilogue_fusion=False, max_autotune=True) == first


def test_a_saved_and_loaded_program_keeps_its_content(
    rich: ExportedProgram, tmp_path: Path
) -> None:
    torch.export.save(rich, tmp_path / "model.pt2")
    loaded = [torch.export.load(tmp_path / "model.pt2") for _ in range(2)]
    assert digest(loaded[0]) == digest(loaded[1])


# --- another program ---


class Net(torch.nn.Module):
    """The model that the variants below differ from."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(8, 8)
        self.other = torch.nn.Linear(8, 8)
        self.register_buffer("scale", torch.arange(8.0))
        self.step = 1.0

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        x = torch.relu(self.other(self.linear(x))) * self.scale + self.step
        return x if y is None else x + y


class Tied(Net):
    """Equal weights in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.other.weight = self.linear.weight


class Equal(Net):
    """The values of `Tied`, in two tensors."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.other.weight.copy_(self.linear.weight)


class Renamed(Net):
    """An input of another name."""

    def forward(self, z: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        return Net.forward(self, z, y)


class Sigmoid(Net):
    """Another operator."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        return torch.sigmoid(self.other(self.linear(x))) * self.scale + self.step


class Twice(Net):
    """The same results in another structure."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        return [super().forward(x, y)]


class Pair(Twice):
    """The same results in a third structure."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        return tuple(super().forward(x, y))


class Conditional(Net):
    """A branch whose constant is a parameter of the test."""

    inside = 1.0

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        inside = self.inside
        return torch.cond(x.sum() > 0, lambda x: x.sin() + inside, lambda x: x.cos(), (x,))


class ConditionalElse(Conditional):
    inside = 2.0


def changed(change: Callable[[Any], object], net: type[Net] = Net) -> Callable[[], Net]:
    """A function that returns a modified model."""

    def make() -> Net:
        module = net()
        with torch.no_grad():
            change(module)
        return module

    return make


def transpose_in_memory(net: Net) -> None:
    net.linear.weight.data = net.linear.weight.data.t().contiguous().t()


def with_an_offset(net: Net) -> None:
    net.scale = torch.arange(-1.0, 8.0)[1:]


X = torch.zeros(4, 8)
BATCH = Dim("batch", min=2, max=64)

MODELS: dict[str, Callable[[], ExportedProgram]] = {}


def variant(
    name: str,
    make: Callable[[], torch.nn.Module] = Net,
    args: tuple[Any, ...] = (X,),
    kwargs: dict[str, Any] | None = None,
    **shapes: Any,
) -> None:
    """Register a program that differs from all others."""
    MODELS[name] = lambda: torch.export.export(
        make().eval(), args, kwargs, dynamic_shapes=shapes or None
    )


variant("base")
variant(
    "a weight's last bit", changed(lambda net: net.linear.weight.view(torch.int32)[0, 0].add_(1))
)
variant("a bias", changed(lambda net: net.other.bias.add_(1)))
variant("a buffer", changed(lambda net: net.scale.neg_()))
variant("a zero's sign", changed(lambda net: net.scale[0].neg_()))
variant("two weights swapped", changed(lambda net: setattr(net, "linear", net.other)))
variant("tied weights", Tied)
variant("equal weights", Equal)
variant("a weight's strides", changed(transpose_in_memory))
variant("a buffer's offset", changed(with_an_offset))
variant("no gradient", changed(lambda net: net.requires_grad_(False)))
variant("a dtype", changed(lambda net: net.double()), (X.double(),))
variant("an input's name", Renamed)
variant("an operator", Sigmoid)
variant("a constant", changed(lambda net: setattr(net, "step", 2.0)))
variant("a constant's type", changed(lambda net: setattr(net, "step", 1)))
variant("a constant's truth", changed(lambda net: setattr(net, "step", True)))
variant("a list as output", Twice)
variant("a tuple as output", Pair)
variant("a branch", Conditional)
variant("a constant in a branch", ConditionalElse)
variant("another size", args=(torch.zeros(5, 8),))
variant("other strides", args=(torch.zeros(8, 4).t(),))
variant("two inputs", args=(X, X))
variant("a keyword", args=(X,), kwargs={"y": X})
variant("None as input", args=(X, None))
variant("a number as input", args=(X, 3))
variant("another number", args=(X, 4))
variant("a fraction", args=(X, 3.0))
variant("a dynamic size", x={0: BATCH})
variant("another range", x={0: Dim("batch", min=2, max=128)})
variant("another hint", args=(torch.zeros(9, 8),), x={0: BATCH})
variant("an even size", x={0: 2 * Dim("half", min=2, max=64)})
variant("two equal sizes", args=(X, X), x={0: BATCH}, y={0: BATCH})
variant("a size and one", args=(X, torch.zeros(1, 8)), x={0: BATCH}, y=None)


def test_every_difference_between_programs_counts() -> None:
    keys: dict[str, str] = {}
    for name, make in MODELS.items():
        key = digest(make())
        assert key not in keys, f"{name} has the key of {keys[key]}"
        keys[key] = name


def test_every_weight_of_a_program_counts(rich: ExportedProgram) -> None:
    keys = {digest(rich)}
    tensors = {**rich.state_dict, **rich.constants}
    for tensor in tensors.values():
        with torch.no_grad():
            before = tensor.clone()
            tensor.view(-1)[-1].add_(1)
            keys.add(digest(rich))
            tensor.copy_(before)
    # Two of the weights are one tensor.
    assert len(keys) == len(tensors)
    assert digest(rich) in keys


def test_every_node_of_a_graph_counts(rich: ExportedProgram) -> None:
    """Its name, arguments and value metadata, in subgraphs as well."""
    keys = {digest(rich)}
    count = 1
    for module in rich.graph_module.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            for change in (
                mock.patch.object(node, "name", node.name + "_x"),
                mock.patch.object(node, "_kwargs", {**node.kwargs, "added": 1}),
                mock.patch.dict(node.meta, val=(7, node.meta.get("val"))),
                mock.patch.dict(node.meta, custom={"note": 1}),
            ):
                with change:
                    keys.add(digest(rich))
                    count += 1
    assert len(keys) == count


@pytest.mark.parametrize("name", ["replacements", "var_to_range"])
def test_facts_about_symbols_count(rich: ExportedProgram, name: str) -> None:
    (env,) = {
        id(value.fake_mode.shape_env): value.fake_mode.shape_env
        for node in rich.graph.nodes
        if isinstance(value := node.meta.get("val"), torch.Tensor)
    }.values()
    before = digest(rich)
    with mock.patch.dict(getattr(env, name), {"s": "a value"}):
        assert digest(rich) != before


def test_guards_and_ranges_count(rich: ExportedProgram) -> None:
    before = digest(rich)
    with mock.patch.object(rich, "_guards_code", [*rich._guards_code, "L['x'].size()[0] > 2"]):
        assert digest(rich) != before
    for symbol, values in rich.range_constraints.items():
        narrow = ValueRanges(values.lower, 6)
        with mock.patch.dict(rich.range_constraints, {symbol: narrow}):
            assert digest(rich) != before


# --- other options, settings, states, tools and machines ---


@pytest.fixture(scope="module")
def base() -> ExportedProgram:
    return MODELS["base"]()


def test_every_option_of_inductor_counts(base: ExportedProgram) -> None:
    """Options that change code, whether patched, set in the process or in a group."""
    before = digest(base)
    unchanged = set()
    for name, value in inductor_config.get_config_copy().items():
        if isinstance(value, bool):
            other: Any = not value
        elif isinstance(value, (int, float)):
            other = value + 1
        elif isinstance(value, str):
            other = value + "x"
        elif value is None:
            other = "something"
        else:
            continue
        if digest(base, **{name: other}) == before:
            unchanged.add(name)
    assert {name for name in unchanged if not name.startswith("trace.")} <= {
        *artifact_key.IRRELEVANT_OPTIONS
    }
    assert "trace.provenance_tracking_level" not in unchanged
    with inductor_config.patch("aot_inductor.metadata", {"mine": "1"}):
        assert digest(base) != before
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        assert digest(base) != before


@pytest.mark.parametrize(
    ("name", "value"), [("cache_key_tag", "v2"), ("compile_on_one_rank", True)]
)
def test_options_of_the_compiler_count(base: ExportedProgram, name: str, value: Any) -> None:
    if not hasattr(torch.compiler.config, name):
        pytest.skip(f"this torch has no torch.compiler.config.{name}")
    first = digest(base)
    with mock.patch.object(torch.compiler.config, name, value):
        assert digest(base) != first
    assert digest(base) == first


def test_settings_and_source_of_the_extension_count(base: ExportedProgram) -> None:
    before = digest(base)
    assert digest(base, settings.Settings(memory_arenas="never")) != before
    assert digest(base, settings.Settings(event_log="somewhere")) == before
    with mock.patch.object(storage_digest, "source_key", return_value="another version"):
        assert digest(base) != before


def test_additions_of_the_caller_count(base: ExportedProgram) -> None:
    keys = [
        artifact_key.compute_key(base, SETTINGS, {}, extra)
        for extra in [(), ("a",), ("b",), (1, 2)]
    ]
    assert len(set(keys)) == 4


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def convolution_precision() -> Iterator[None]:
    """A precision for convolutions only, with which `allow_tf32` cannot be read."""
    settings: Any = torch.backends.cudnn
    before = settings.conv.fp32_precision
    settings.conv.fp32_precision = "ieee" if before != "ieee" else "tf32"
    try:
        yield
    finally:
        settings.conv.fp32_precision = before


STATES: dict[str, Callable[[], Any]] = {
    "threads": lambda: threads(torch.get_num_threads() + 1),
    "default dtype": lambda: default_dtype(torch.float64),
    "deterministic": deterministic,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "cudnn": lambda: torch.backends.cudnn.flags(enabled=False),
    "convolution precision": convolution_precision,
    "attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "device": lambda: torch.device("meta"),
    "threads' variable": lambda: mock.patch.dict(os.environ, OMP_NUM_THREADS="7"),
    "Inductor's variable": lambda: mock.patch.dict(os.environ, TORCHINDUCTOR_SOMETHING="1"),
    "include path": lambda: mock.patch.dict(os.environ, CPATH="elsewhere"),
    "torch": lambda: mock.patch.object(torch, "__version__", "2.12.0"),
    "torch's build": lambda: mock.patch.object(torch.version, "git_version", "0"),
    "torch's files": lambda: mock.patch.object(
        artifact_key, "identify_torch_files", return_value="edited"
    ),
    "CPU": lambda: mock.patch.object(artifact_key, "identify_cpu", return_value=("another",)),
    "compiler": lambda: mock.patch.object(
        components,
        "probe",
        lambda name: components.Component(name, "C++", True, "g++ 99", "/usr/bin/g++"),
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_process_state_and_software_count(base: ExportedProgram, name: str) -> None:
    before = digest(base)
    with STATES[name]():
        during = digest(base)
    assert during != before
    assert digest(base) == before


def test_options_that_change_no_code_do_not_count(base: ExportedProgram, tmp_path: Path) -> None:
    before = digest(base)
    with mock.patch.dict(os.environ, TORCH_LOGS="+inductor", TORCHINDUCTOR_CACHE_DIR=str(tmp_path)):
        assert digest(base, compile_threads=7) == before


# --- what has no key ---


class Pass(CustomGraphPass):
    """A user's pass with its own version."""

    def __init__(self, version: str | None) -> None:
        self.version = version

    def __call__(self, graph: torch.fx.Graph) -> None:
        pass

    def uuid(self) -> str | None:
        return self.version


def test_a_pass_without_uuid_gives_no_key(base: ExportedProgram) -> None:
    option = "post_grad_custom_post_pass"
    keys = {digest(base, **{option: Pass(version)}) for version in ("1", "2", "1")}
    assert len(keys | {digest(base)}) == 3
    assert option in refusal(base, **{option: Pass(None)})
    assert option in refusal(base, **{option: lambda graph: None})
    assert option in refusal(base, **{option: [Pass("1"), lambda graph: None]})


def test_unidentifiable_objects_have_no_key(base: ExportedProgram) -> None:
    other = copy.copy(base)
    other._constants = {"object": object()}
    assert "builtins.object" in refusal(other)
    other._constants = {"sparse": torch.eye(3).to_sparse()}
    assert "sparse" in refusal(other)
    other._constants = {"class": torch.eye(3).as_subclass(type("Mine", (torch.Tensor,), {}))}
    assert "Mine" in refusal(other)


def test_under_a_dispatch_mode_there_is_no_key(base: ExportedProgram) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    with TorchDispatchMode():
        assert "dispatch mode" in refusal(base)


def test_lowerings_from_elsewhere_have_no_key(base: ExportedProgram) -> None:
    """They have no version, except those in this package, whose source is in the key."""
    from torch._inductor import lowering

    def mine(*args: Any) -> Any:
        raise NotImplementedError

    before = digest(base)
    operator = torch.ops.aten.relu.default
    for function in (mine, functools.partial(mine, 1)):
        with mock.patch.dict(lowering.lowerings, {operator: function}):
            assert "lowering" in refusal(base)
    lowerings.register_lowering(torch.ops.aten.erfinv.default)(mine)
    try:
        assert digest(base) != before
    finally:
        lowerings.unregister_lowering(torch.ops.aten.erfinv.default)
    assert digest(base) == before


def test_decompositions_from_elsewhere_have_no_key(base: ExportedProgram) -> None:
    from torch._decomp import decomposition_table

    operator = torch.ops.aten.relu.default
    with mock.patch.dict(decomposition_table, {operator: lambda x: x}):
        assert "decomposition" in refusal(base)


def test_custom_operators_count_by_their_schema() -> None:
    """Except those composed of other operators, whose code would be compiled."""
    with torch.library._scoped_library("artifact_key_test", "FRAGMENT") as library:
        library.define("opaque(Tensor x) -> Tensor")
        library.define("made(Tensor x) -> Tensor")
        library.impl("opaque", lambda x: x + 1, "CompositeExplicitAutograd")
        library.impl("made", lambda x: x + 1, "CompositeImplicitAutograd")
        ops = torch.ops.artifact_key_test

        class Custom(torch.nn.Module):
            def __init__(self, operator: Any) -> None:
                super().__init__()
                self.operator = operator

            def forward(self, x: torch.Tensor) -> Any:
                return self.operator(x)

        program = torch.export.export(Custom(ops.opaque), (X,))
        assert "artifact_key_test::opaque" in repr(artifact_key.ingredients(program, SETTINGS, {}))
        assert "is decomposed by code from outside torch" in refusal(
            torch.export.export(Custom(ops.made), (X,))
        )
