"""Ways to call torch.compile with the extension's backend, and torch's APIs around it.

Modes and options and how far they reach; stances, resets, regions, threads, copies; ahead-of-time
and caching front ends of dynamo; and torch's own paths, unaffected.
"""

from __future__ import annotations

import copy
import io
import threading
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

import inductor_ext
from inductor_ext import events, exc
from inductor_ext.backend import inductor_ext as backend_function
from inductor_ext.hooks.records import CompileRecord
from test.support import compile_util
from test.support.compile_util import (
    BACKEND,
    BACKENDS,
    INFERENCE,
    TRAINING,
    assert_same,
    check,
    compiled_graphs,
)
from test.support.small_net import Net, batch

pytestmark = pytest.mark.usefixtures("every_graph_compiles")

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


class ConfigSpy(CustomGraphPass):
    """A post-grad pass that notes the values of Inductor's settings while each graph compiles."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.seen: list[dict[str, Any]] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.seen.append({name: _setting(name) for name in self.names})

    def uuid(self) -> None:
        """No cache: a hit would not run the pass."""


def _setting(name: str) -> Any:
    return inductor_config.get_config_copy()[name]


class TestSpellings:
    def test_backend_is_listed(self) -> None:
        assert BACKEND in torch._dynamo.list_backends()
        assert BACKEND in torch.compiler.list_backends()

    def test_decorator(self) -> None:
        @torch.compile(backend=BACKEND, fullgraph=True)
        def f(x: torch.Tensor) -> torch.Tensor:
            """Doubles."""
            return x * 2

        with compiled_graphs() as kinds:
            assert_same(f(torch.ones(3)), torch.full((3,), 2.0))
        assert kinds == INFERENCE
        assert (f.__name__, f.__doc__) == ("f", "Doubles.")

    def test_module_compile_in_place(self) -> None:
        """nn.Module.compile: the module keeps its class and the names of its state."""
        net = Net()
        reference = copy.deepcopy(net)
        net.compile(backend=BACKEND)
        with compiled_graphs() as kinds:
            assert_same(net(*batch()), reference(*batch()))
        assert kinds == {"forward": 1}
        assert type(net) is Net
        assert list(net.state_dict()) == list(reference.state_dict())

    def test_backend_as_function(self) -> None:
        net = Net()
        check(net, batch, backward=True, compiled=torch.compile(net, backend=backend_function))

    def test_dynamo_optimize(self) -> None:
        net = Net()
        compiled = torch._dynamo.optimize(BACKEND, nopython=True)(net)
        check(net, batch, backward=True, compiled=compiled)

    @pytest.mark.skipif(
        not hasattr(torch.compiler, "set_default_backend"),
        reason="torch 2.11 has no default backend",
    )
    def test_default_backend(self) -> None:
        torch.compiler.set_default_backend(BACKEND)
        try:
            check(Net(), batch, backward=True, backend=None)
        finally:
            torch.compiler.set_default_backend(None)

    def test_disable(self) -> None:
        net = Net()
        compiled = torch.compile(net, backend=BACKEND, disable=True)
        check(net, batch, backward=True, compiled=compiled, graphs={})

    def test_explain(self) -> None:
        """dynamo.explain and a counter around the backend see its graphs."""

        def f(x: torch.Tensor) -> torch.Tensor:
            y = x.sin()
            torch._dynamo.graph_break()
            return y.cos() * 2

        counter = CompileCounterWithBackend(BACKEND)
        check(f, batch, compiled=torch.compile(f, backend=counter), graphs={"inference": 2})
        assert (counter.frame_count, counter.op_count) == (2, 3)


class TestModes:
    @pytest.mark.parametrize("mode", MODES)
    def test_values_and_reach(self, mode: str) -> None:
        """A mode's options apply to the forward and the later backward, and to no other compile."""
        expected = torch._inductor.list_mode_options(mode)
        before = inductor_config.get_config_copy()
        spy = ConfigSpy(*expected)
        with inductor_config.patch(post_grad_custom_post_pass=spy):
            compiled = check(Net(), batch, backward=True, mode=mode, fullgraph=True)
        assert spy.seen == [expected, expected]
        assert inductor_config.get_config_copy() == before
        assert_same(compiled(*batch()), compiled(*batch()))

    def test_each_mode_is_compiled_separately(self) -> None:
        net = Net()
        with torch.no_grad(), compiled_graphs() as kinds:
            outputs = [torch.compile(net, backend=BACKEND, mode=mode)(*batch()) for mode in MODES]
        assert kinds == {"inference": len(MODES)}
        for output in outputs[1:]:
            assert_same(output, outputs[0])

    def test_equal_calls_share_compiled_code(self) -> None:
        net = Net()
        with torch.no_grad(), compiled_graphs() as kinds:
            for _ in range(3):
                torch.compile(net, backend=BACKEND, mode="reduce-overhead")(*batch())
        assert kinds == INFERENCE

    def test_unknown_mode_is_rejected(self) -> None:
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
            torch.compile(Net(), backend=BACKEND, mode="max-autotun")(*batch())
        assert isinstance(caught.value.inner_exception, exc.UnknownModeError)
        assert "'max-autotun'" in str(caught.value)
        assert "max-autotune" in str(caught.value)


class TestOptions:
    def test_reach_the_forward_and_the_late_backward_only(self) -> None:
        """Also with dashes in names, and if an option's type is not that of its default."""
        before = inductor_config.get_config_copy()
        spy = ConfigSpy("max_fusion_size", "epilogue_fusion", "cpp.simdlen")
        options = {
            "max-fusion-size": 7,
            "epilogue_fusion": False,
            "cpp.simdlen": 1,
            "post_grad_custom_post_pass": spy,
        }
        check(Net(), batch, backward=True, options=options)
        effective = {"max_fusion_size": 7, "epilogue_fusion": False, "cpp.simdlen": 1}
        assert spy.seen == [effective, effective]
        assert inductor_config.get_config_copy() == before

    def test_both_backends_together(self) -> None:
        spy = ConfigSpy("max_fusion_size")
        options = {"enabled": False, "max_fusion_size": 9, "post_grad_custom_post_pass": spy}
        check(Net(), batch, backward=True, options=options, graphs={})
        assert spy.seen == [{"max_fusion_size": 9}] * 2

    def test_a_patch_around_the_forward_acts_as_in_inductor(self) -> None:
        seen = []
        for backend in BACKENDS:
            torch._dynamo.reset()
            spy = ConfigSpy("max_fusion_size")
            options = {"post_grad_custom_post_pass": spy}
            with inductor_config.patch(max_fusion_size=5):
                loss = torch.compile(Net(), backend=backend, options=options)(*batch()).sum()
            loss.backward()
            seen.append([settings["max_fusion_size"] for settings in spy.seen])
        stock, ours = seen
        assert ours == stock
        assert (len(ours), ours[0]) == (2, 5)

    @pytest.mark.parametrize(
        "options",
        [{"guard_filter_fn": lambda guards: [False] * len(guards)}, {"use_aoti": True}],
        ids=lambda options: next(iter(options)),
    )
    def test_options_of_torch_compile_itself(self, options: dict[str, Any]) -> None:
        """torch.compile removes them before a backend sees them; use_aoti is for Inductor only."""
        check(torch.sin, batch, options=options)

    @pytest.mark.parametrize(
        ("option", "value", "error"),
        [
            ("max_fusion_siz", 8, exc.UnknownOptionError),
            ("max_fusion_size", "8", exc.BadOptionError),
            ("enabled", 3, exc.BadOptionError),
        ],
    )
    def test_invalid_options_are_rejected(
        self, option: str, value: object, error: type[Exception]
    ) -> None:
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
            torch.compile(Net(), backend=BACKEND, options={option: value})(*batch())
        assert isinstance(caught.value.inner_exception, error)
        assert option in str(caught.value)
        assert repr(value) in str(caught.value)


class TestStances:
    """torch.compiler.set_stance changes what a compiled function does, not what it returns."""

    def test_force_eager(self) -> None:
        net = Net()
        compiled = torch.compile(net, backend=BACKEND)
        with torch.compiler.set_stance("force_eager"):
            check(net, batch, compiled=compiled, graphs={})
        check(net, batch, compiled=compiled, graphs={"forward": 1})

    def test_eager_on_recompile(self) -> None:
        compiled = check(torch.sin, lambda: batch(3))
        with torch.compiler.set_stance("eager_on_recompile"):
            check(torch.sin, lambda: batch(5), compiled=compiled, graphs={})
        check(torch.sin, lambda: batch(5), compiled=compiled)

    def test_fail_on_recompile(self) -> None:
        compiled = check(torch.cos, lambda: batch(3))
        with torch.compiler.set_stance("fail_on_recompile"):
            check(torch.cos, lambda: batch(3), compiled=compiled, graphs={})
            with pytest.raises(RuntimeError, match="recompile"):
                compiled(*batch(5))

    def test_eager_then_compile(self) -> None:
        """The first call runs eagerly and shows which sizes vary; the second compiles."""
        compiled = torch.compile(torch.tan, backend=BACKEND)
        with torch.compiler.set_stance("eager_then_compile"):
            check(torch.tan, lambda: batch(3), compiled=compiled, graphs={})
            check(torch.tan, lambda: batch(5), compiled=compiled)
            check(torch.tan, lambda: batch(9), compiled=compiled, graphs={})

    def test_force_backend(self) -> None:
        """Code compiled with backend="inductor" is compiled by the extension under the stance."""
        compiled = torch.compile(torch.exp)
        with torch.compiler.set_stance("default", force_backend=BACKEND):
            check(torch.exp, batch, compiled=compiled)


class TestReuse:
    def test_reset_forgets_compiled_code(self) -> None:
        compiled = check(torch.sin, batch)
        check(torch.sin, batch, compiled=compiled, graphs={})
        torch.compiler.reset()
        check(torch.sin, batch, compiled=compiled)

    def test_reset_drops_cuda_graphs_as_inductor_does(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from torch._inductor import cudagraph_trees

        dropped: list[str] = []
        monkeypatch.setattr(
            cudagraph_trees, "reset_cudagraph_trees", lambda: dropped.append(current[0])
        )
        current = [""]
        for backend in BACKENDS:
            torch._dynamo.reset()
            current[0] = backend
            compiled = torch.compile(torch.sin, backend=backend, mode="reduce-overhead")
            compiled(*batch())
            torch._dynamo.reset()
        # With a GPU, CUDA graphs of earlier tests may be dropped as well, and twice.
        assert set(BACKENDS) <= set(dropped)

    def test_reset_code_of_one_function(self) -> None:
        def f(x: torch.Tensor) -> torch.Tensor:
            return x * 3

        def g(x: torch.Tensor) -> torch.Tensor:
            return x * 4

        first, second = check(f, batch), check(g, batch)
        torch._dynamo.reset_code(g.__code__)
        check(f, batch, compiled=first, graphs={})
        check(g, batch, compiled=second)

    def test_both_backends_on_one_function(self) -> None:
        """Dynamo has one entry per backend for the same code; a call uses that of its backend."""

        def f(x: torch.Tensor) -> torch.Tensor:
            return x.sin() + 1

        stock, ours = (torch.compile(f, backend=backend) for backend in BACKENDS)
        check(f, batch, compiled=stock, graphs={})
        check(f, batch, compiled=ours)
        assert counters["stats"]["unique_graphs"] == 2
        for compiled in (stock, ours):
            check(f, batch, compiled=compiled, graphs={})
        assert counters["stats"]["unique_graphs"] == 2

    def test_several_models(self) -> None:
        """Two models of one class share compiled code but not weights."""
        first, second = Net(), Net()
        one = check(first, batch, backward=True)
        two = check(second, batch, backward=True, graphs={})
        assert not torch.equal(one(*batch()), two(*batch()))

        def both(x: torch.Tensor) -> torch.Tensor:
            return one(x) + two(x)

        assert_same(both(*batch()), first(*batch()) + second(*batch()))

    def test_region_of_a_model(self) -> None:
        """Only the submodule is compiled; the surrounding model stays eager."""
        model = torch.nn.Sequential(Net(), torch.nn.Tanh(), torch.nn.Linear(2, 2))
        reference = copy.deepcopy(model)
        model[0] = torch.compile(model[0], backend=BACKEND)
        with compiled_graphs() as kinds:
            actual = model(*batch())
            actual.sum().backward()
        expected = reference(*batch())
        expected.sum().backward()
        assert kinds == TRAINING
        assert_same(actual, expected)
        grads = [[p.grad for p in m.parameters()] for m in (model, reference)]
        assert_same(*grads)

    def test_repeated_layers_compiled_one_by_one(self) -> None:
        """Regional compilation: equal blocks share one compiled graph."""
        model = torch.nn.Sequential(*(Net(width=4) for _ in range(4)))
        reference = copy.deepcopy(model)
        for block in model:
            block.compile(backend=BACKEND)
        with compiled_graphs() as kinds, torch.no_grad():
            assert_same(model(*batch()), reference(*batch()))
        assert kinds == INFERENCE

    def test_train_and_eval(self) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
        compiled = torch.compile(model, backend=BACKEND, options={"fallback_random": True})
        check(model, batch, compiled=compiled, graphs={"forward": 1})
        model.eval()
        check(model, batch, compiled=compiled, graphs={"forward": 1})
        model.train()
        check(model, batch, compiled=compiled, graphs={})

    def test_recompile_limit_falls_back_to_eager(self) -> None:
        with torch._dynamo.config.patch(recompile_limit=2):
            compiled = check(torch.sin, lambda: (torch.ones(2),), dynamic=False)
            check(torch.sin, lambda: (torch.ones(3),), compiled=compiled)
            check(torch.sin, lambda: (torch.ones(4),), compiled=compiled, graphs={})


class TestThreads:
    def test_four_threads_share_one_compiled_model(self) -> None:
        net = Net().requires_grad_(False)
        compiled = torch.compile(net, backend=BACKEND)
        inputs = [batch(3)[0] * (i + 1) for i in range(4)]
        outputs: dict[int, torch.Tensor] = {}
        start = threading.Barrier(len(inputs))

        def work(i: int) -> None:
            start.wait()
            for _ in range(5):
                outputs[i] = compiled(inputs[i])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert_same([outputs[i] for i in range(4)], [net(x) for x in inputs])
        # As with Inductor (default), threads that wait for a compile then compile themselves.
        assert 1 <= counters["stats"]["unique_graphs"] <= 4
        check(net, batch, compiled=compiled, graphs={})

    def test_training_in_another_thread_than_the_first_compile(self) -> None:
        net = Net()
        compiled = torch.compile(net, backend=BACKEND)
        results: list[Any] = []

        def work() -> None:
            with compile_util.every_graph_compiles():
                results.append(compile_util.observe(compiled, batch(), net, backward=True))

        with compiled_graphs() as kinds:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        expected = compile_util.observe(copy.deepcopy(net), batch(), backward=True)
        assert_same(results[0].outputs, expected.outputs)
        assert kinds == TRAINING


class TestModuleState:
    def test_state_dict_and_attributes(self) -> None:
        net = Net()
        compiled = check(net, batch, backward=True)
        assert list(compiled.state_dict()) == [f"_orig_mod.{name}" for name in net.state_dict()]
        assert compiled.first is net.first
        assert compiled._orig_mod is net
        with torch.no_grad():
            net.second.bias.zero_()
            net.second.weight.zero_()
        check(net, batch, compiled=compiled, graphs={})
        assert compiled(*batch()).count_nonzero() == 0

    @pytest.mark.parametrize("how", ["deepcopy", "save"])
    def test_copies_compute_on_their_own_weights(self, how: str) -> None:
        compiled = check(Net(), batch, graphs={"forward": 1})
        if how == "deepcopy":
            twin = copy.deepcopy(compiled)
        else:
            buffer = io.BytesIO()
            torch.save(compiled, buffer)
            buffer.seek(0)
            twin = torch.load(buffer, weights_only=False)
        assert type(twin) is type(compiled)
        assert_same(twin(*batch()), compiled(*batch()))
        with torch.no_grad():
            twin.second.bias.add_(1)
            twin_output, output = twin(*batch()), compiled(*batch())
        assert_same(twin_output, output + 1)

    def test_module_hooks_run(self) -> None:
        """Hooks on the module (a graph of its own) and on a submodule; one added later."""
        net = Net()
        net.first.register_forward_hook(lambda module, args, out: out * 2)
        net.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
            compiled = check(net, batch, graphs={"inference": 1, "forward": 1})
            net.second.register_forward_hook(lambda module, args, out: out - 5)
            check(net, batch, compiled=compiled, graphs={"forward": 1})


class TestNextToTorchsOwnPaths:
    def test_export_is_unaffected(self) -> None:
        """Exporting the eager model gives the same program before and after compiling it."""
        net = Net().eval()
        before = torch.export.export(net, batch())
        compiled = check(net, batch, graphs={"forward": 1})
        after = torch.export.export(net, batch())
        assert after.graph_module.code == before.graph_module.code
        assert_same(after.module()(*batch()), compiled(*batch()))

    def test_the_inductor_backend_is_unchanged(self) -> None:
        net = Net()
        check(net, batch, backward=True, compiled=torch.compile(net), graphs={})

    def test_activation_redirects_the_inductor_backend(self) -> None:
        net = Net()
        with inductor_ext.activate():
            check(net, batch, backward=True, compiled=torch.compile(net))


class TestPrecompilation:
    def test_aot_compile_saves_and_loads(self, tmp_path: Any) -> None:
        """aot_compile: an artifact of the extension, loaded and run without compiling."""

        def f(x: torch.Tensor) -> torch.Tensor:
            return x.sin() + 1

        with (
            torch._dynamo.config.patch(enable_aot_compile=True),
            torch._functorch.config.patch(enable_autograd_cache=True),
        ):
            with compiled_graphs() as kinds:
                compiled = torch.compile(f, backend=BACKEND, fullgraph=True).aot_compile(
                    (batch(), {})
                )
            assert kinds == INFERENCE
            compiled.save_compiled_function(str(tmp_path / "f"))
            with compiled_graphs() as kinds, (tmp_path / "f").open("rb") as file:
                loaded = torch.compiler.load_compiled_function(file)
                assert_same(loaded(*batch()), f(*batch()))
            assert kinds == {}

    def test_cache_artifacts_travel(self) -> None:
        """What save_cache_artifacts packs, load_cache_artifacts puts into an empty cache."""
        from torch._inductor.utils import fresh_cache
        from torch.compiler._cache import CacheArtifactManager

        def f(x: torch.Tensor) -> torch.Tensor:
            return x.cos() * 3 - 1

        def run() -> int:
            torch._dynamo.reset()
            with torch._functorch.config.patch(enable_autograd_cache=True):
                assert_same(torch.compile(f, backend=BACKEND)(*batch()), f(*batch()))
            return counters["aot_autograd"]["autograd_cache_hit"]

        with fresh_cache(), CacheArtifactManager.with_fresh_cache():
            assert run() == 0
            packed, info = torch.compiler.save_cache_artifacts()
        assert len(info.inductor_artifacts) == len(info.aot_autograd_artifacts) == 1
        with fresh_cache():
            loaded = torch.compiler.load_cache_artifacts(packed)
            assert loaded.aot_autograd_artifacts == info.aot_autograd_artifacts
            assert run() == 1

    def test_caching_precompile(self) -> None:
        """Dynamo's own cache, guards included: the second start loads the extension's code."""
        self._precompile_twice(BACKEND)

    @pytest.mark.xfail(
        reason="DynamoCache knows an entry by the function's source alone, not by its backend",
        raises=AssertionError,
    )
    def test_caching_precompile_distinguishes_backends(self) -> None:
        """Entries of backend "inductor" in DynamoCache are not used for "inductor_ext"."""
        self._precompile_twice("inductor")

    @staticmethod
    def _precompile_twice(first: str) -> None:
        from torch._dynamo.precompile_context import PrecompileContext
        from torch._inductor.utils import fresh_cache

        def f(x: torch.Tensor) -> torch.Tensor:
            return x.tan() * 3

        with (
            fresh_cache(),
            torch._dynamo.config.patch(caching_precompile=True),
            torch._functorch.config.patch(enable_autograd_cache=True),
        ):
            check(f, batch, backend=first, graphs=INFERENCE if first == BACKEND else {})
            torch.compiler.save_cache_artifacts()
            PrecompileContext.clear()
            torch._dynamo.reset()
            counters.clear()
            check(f, batch, graphs={} if first == BACKEND else INFERENCE)
            assert counters["dynamo_cache"]["dynamo_cache_hit"] == (first == BACKEND)


def test_regional_inductor() -> None:
    """regional_inductor compiles only the annotated part; if active, the extension does so."""
    from torch._dynamo.backends.common import aot_autograd
    from torch.fx.passes.regional_inductor import regional_inductor

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        with torch.fx.traceback.annotate({"compile_with_inductor": 0}):
            z = (y * 2).cos()
        return z + 1

    backend = aot_autograd(fw_compiler=regional_inductor, bw_compiler=regional_inductor)
    with (
        torch.fx.traceback.preserve_node_meta(),
        inductor_ext.activate(),
        events.capture(CompileRecord) as records,
    ):
        check(f, batch, backend=backend, fullgraph=True)
    assert [record.operators for record in records] == [len(("mul", "cos"))]


@pytest.mark.skipif(
    "name" not in (torch.compile.__kwdefaults__ or {}), reason="no torch.compile(name=...)"
)
def test_name_of_a_region() -> None:
    """torch.compile passes the name only to Inductor's wrapper; other backends ignore it."""
    check(torch.sin, batch, name="region")
