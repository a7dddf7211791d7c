"""Activations in one process: where they apply, and that they end without a trace."""

from __future__ import annotations

import os
import pickle
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor import lowering as inductor_lowering
from torch._inductor import virtualized
from torch._inductor.choices import InductorChoices
from torch._inductor.codecache import FxGraphHashDetails
from torch.fx.experimental.proxy_tensor import make_fx

import inductor_ext
from inductor_ext import _compat, config, events, exc, lowerings
from inductor_ext.hooks import activate, compile_fx, context, lowering_table, scope
from inductor_ext.hooks.records import CompileRecord
from inductor_ext.storage import digest

ATEN_SINH = torch.ops.aten.sinh.default


@pytest.fixture
def sinh_lowerings() -> Iterator[list[tuple[int, Any]]]:
    """A lowering of aten.sinh that records its thread and settings and calls Inductor's."""
    calls: list[tuple[int, Any]] = []

    def sinh(inductor: Callable[..., Any], x: Any) -> Any:
        calls.append((threading.get_ident(), context.settings()))
        return inductor(x)

    lowerings.register_lowering(ATEN_SINH)(sinh)
    yield calls
    lowerings.unregister_lowering(ATEN_SINH)


def uncached() -> Any:
    """Compile every graph, whatever was compiled before."""
    return inductor_config.patch(force_disable_caches=True)


def run(backend: str = "inductor", **compile_kwargs: Any) -> None:
    """Compile and check the result."""
    x = torch.randn(5)
    # A separate code object, because dynamo caches by code object.
    function = eval("lambda x: torch.sinh(x) + 1", {"torch": torch})
    compiled = torch.compile(function, backend=backend, **compile_kwargs)
    # Not a fixture: torch 2.13 keeps configuration per thread.
    with uncached():
        torch.testing.assert_close(compiled(x), torch.sinh(x) + 1)


def kinds(records: list[events.Record]) -> list[str]:
    return [record.kind for record in records if isinstance(record, CompileRecord)]


def test_activate_holds_inside_and_not_outside(sinh_lowerings: list[Any]) -> None:
    with events.capture(CompileRecord) as records:
        run()
        assert kinds(records) == []
        with inductor_ext.activate():
            run()
        assert kinds(records) == ["inference"]
        run()
        assert kinds(records) == ["inference"]
    assert len(sinh_lowerings) == 1
    assert activate.requested() is None
    assert context.settings() is None


def test_backend_activates_itself(sinh_lowerings: list[Any]) -> None:
    run("inductor_ext")
    assert [settings for _, settings in sinh_lowerings] == [config.snapshot()]


def test_nested_activations_add_their_overrides() -> None:
    with inductor_ext.activate(event_log="a", fallback_to_eager=False):
        with inductor_ext.activate(event_log="b"):
            assert activate.requested() == {"event_log": "b", "fallback_to_eager": False}
        assert activate.requested() == {"event_log": "a", "fallback_to_eager": False}
    assert activate.requested() is None


def test_inner_activation_can_disable_the_extension(sinh_lowerings: list[Any]) -> None:
    with inductor_ext.activate():
        with inductor_ext.activate(enabled=False):
            run()
        assert sinh_lowerings == []
        run()
    assert len(sinh_lowerings) == 1


def test_activation_inside_a_compile_keeps_the_outer_scope(sinh_lowerings: list[Any]) -> None:
    with inductor_ext.activate(fallback_to_eager=False):
        run("inductor_ext")
    assert [settings.fallback_to_eager for _, settings in sinh_lowerings] == [False]


def test_activate_works_as_decorator(sinh_lowerings: list[Any]) -> None:
    @inductor_ext.activate()
    def compile_it() -> None:
        run()

    compile_it()
    compile_it()
    assert len(sinh_lowerings) == 2


def test_install_holds_in_every_thread_until_uninstall(sinh_lowerings: list[Any]) -> None:
    inductor_ext.install(fallback_to_eager=False)
    try:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        run()
    finally:
        inductor_ext.uninstall()
    assert {ident for ident, _ in sinh_lowerings} == {thread.ident, threading.get_ident()}
    assert all(not settings.fallback_to_eager for _, settings in sinh_lowerings)
    run()
    assert len(sinh_lowerings) == 2


def test_uninstall_without_install_does_nothing() -> None:
    inductor_ext.uninstall()
    assert activate.requested() is None


def test_activation_does_not_reach_other_threads() -> None:
    seen = []
    with inductor_ext.activate():
        thread = threading.Thread(target=lambda: seen.append(activate.requested()))
        thread.start()
        thread.join()
    assert seen == [None]


@pytest.mark.parametrize("entry", ["backend", "activate"])
def test_threads_do_not_share_activations(entry: str) -> None:
    """Inductor (default) compiles in another thread while the extension is lowering."""
    graph = make_fx(lambda x: (torch.sinh(x) + 3,))(torch.randn(7))
    calls: list[int] = []
    stock_keys: list[tuple[str, ...]] = []
    stock_handler: list[Any] = []

    def compile_by_stock() -> None:
        # Not by torch.compile, which would wait for dynamo's lock until the other compile ends.
        with uncached():
            compiled = torch._inductor.compile(graph, [torch.randn(7)])
        x = torch.randn(7)
        torch.testing.assert_close(compiled(x)[0], torch.sinh(x) + 3)
        stock_handler.append(_compat.peek_choices())
        details = FxGraphHashDetails(graph, [x], {}, [])
        stock_keys.append(tuple(sorted(vars(details))))

    def sinh(inductor: Callable[..., Any], x: Any) -> Any:
        calls.append(threading.get_ident())
        thread = threading.Thread(target=compile_by_stock)
        thread.start()
        thread.join()
        assert context.settings() == config.snapshot()
        return inductor(x)

    without_ours = tuple(sorted(vars(FxGraphHashDetails(graph, [torch.randn(7)], {}, []))))
    lowerings.register_lowering(ATEN_SINH)(sinh)
    try:
        if entry == "backend":
            run("inductor_ext")
        else:
            with inductor_ext.activate():
                run()
    finally:
        lowerings.unregister_lowering(ATEN_SINH)
    assert calls == [threading.get_ident()]
    assert {type(handler) for handler in stock_handler} <= {InductorChoices, type(None)}
    assert [set(keys) ^ set(without_ours) for keys in stock_keys] == [set()]
    assert len(stock_handler) == 1


def test_backward_compiled_after_the_block() -> None:
    x = torch.randn(5, requires_grad=True)
    with events.capture(CompileRecord) as records, uncached():
        with inductor_ext.activate(fallback_to_eager=False):
            out = torch.compile(lambda x: torch.sinh(x).sum())(x)
        assert kinds(records) == ["forward"]
        out.backward()
        assert kinds(records) == ["forward", "backward"]
    assert records[1].settings == {"fallback_to_eager": False}
    torch.testing.assert_close(x.grad, torch.cosh(x.detach()))


def test_backward_compiled_in_another_thread() -> None:
    x = torch.randn(5, requires_grad=True)
    with uncached():
        out = torch.compile(lambda x: torch.sinh(x).sum(), backend="inductor_ext")(x)
    with events.capture(CompileRecord) as records:
        thread = threading.Thread(target=out.backward)
        thread.start()
        thread.join()
    assert kinds(records) == ["backward"]
    torch.testing.assert_close(x.grad, torch.cosh(x.detach()))


def test_exception_inside_the_block_deactivates() -> None:
    with pytest.raises(KeyError), inductor_ext.activate():
        raise KeyError
    assert activate.requested() is None


def test_exception_inside_a_compile_restores_everything(sinh_lowerings: list[Any]) -> None:
    before = _compat.peek_choices()

    def fail(*args: Any) -> Any:
        raise ArithmeticError("from the lowering")

    lowerings.unregister_lowering(ATEN_SINH)
    lowerings.register_lowering(ATEN_SINH)(fail)
    with pytest.raises(Exception, match="from the lowering"):
        run("inductor_ext")
    assert context.settings() is None
    assert _compat.peek_choices() is before
    run("inductor")
    assert sinh_lowerings == []


def test_the_choices_handler_is_restored() -> None:
    """Inductor reads config.inductor_choices_class when a thread first needs its handler."""
    seen: list[Any] = []

    class Custom(InductorChoices):
        def uuid(self) -> str:
            return "custom"

    def work() -> None:
        run("inductor_ext")
        seen.append(_compat.peek_choices())
        with inductor_config.patch(inductor_choices_class=Custom):
            seen.append(type(virtualized.V.choices))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None, Custom]


class CustomChoices(InductorChoices):
    """A user's handler, with state."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def uuid(self) -> str:
        return "custom"

    def should_use_cooperative_reduction(self, *args: Any, **kwargs: Any) -> bool:
        self.calls.append("cooperative")
        return InductorChoices.should_use_cooperative_reduction(*args, **kwargs)


def test_a_users_choices_handler_is_extended() -> None:
    handler = CustomChoices()
    with virtualized.V.set_choices_handler(handler), scope.compile_scope(config.snapshot()):
        extension = virtualized.V.choices
        assert isinstance(extension, CustomChoices)
        assert extension.uuid() == "custom"
        extension.calls.append("x")
    assert handler.calls == ["x"]


class _Contributor:
    """A contributor that a user registers with `register_inductor_choices` (torch 2.15)."""

    calls: list[str]

    def __init__(self) -> None:
        self.calls = []

    def should_use_cooperative_reduction(self, *args: Any, **kwargs: Any) -> bool:
        self.calls.append("cooperative")
        return False


class _Composed(InductorChoices):
    """A composed handler of torch 2.15: attributes are looked up in the contributors first."""

    def __init__(self, contributors: list[Any]) -> None:
        object.__getattribute__(self, "__dict__")["contributors"] = contributors

    def __getattribute__(self, name: str) -> Any:
        state = object.__getattribute__(self, "__dict__")
        for contributor in state.get("contributors", ()):
            if name in vars(type(contributor)) and not name.startswith("__"):
                return getattr(contributor, name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("make", [CustomChoices, None], ids=["users-class", "contributors"])
def test_a_fresh_thread_uses_the_handler_that_inductor_would(
    monkeypatch: pytest.MonkeyPatch, sinh_lowerings: list[Any], make: Any
) -> None:
    contributor = _Contributor()
    handlers: list[Any] = []

    def sinh(inductor: Callable[..., Any], x: Any) -> Any:
        handlers.append(virtualized.V.choices)
        return inductor(x)

    def create(users_class: Any) -> Any:
        return users_class() if users_class is not None else _Composed([contributor])

    # torch 2.15 has registered choices; earlier releases have only the config key.
    monkeypatch.setattr("torch._inductor.choices.create_inductor_choices", create, raising=False)
    lowerings.unregister_lowering(ATEN_SINH)
    lowerings.register_lowering(ATEN_SINH)(sinh)
    x = torch.randn(300, 700, dtype=torch.float64)
    results: list[torch.Tensor] = []

    def work() -> None:
        function = eval("lambda x: torch.sinh(x).sum(-1)", {"torch": torch})
        with uncached(), inductor_config.patch(inductor_choices_class=make):
            results.append(torch.compile(function, backend="inductor_ext")(x))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.testing.assert_close(results, [torch.sinh(x).sum(-1)])
    (handler,) = handlers
    assert isinstance(handler, scope.ExtChoices)
    if make is None:
        assert isinstance(handler, _Composed)
        assert handler.should_use_cooperative_reduction() is False
        assert contributor.calls[-1] == "cooperative"
    else:
        assert isinstance(handler, CustomChoices)
    assert handler.settings == config.snapshot()


def test_a_composed_handler_survives_pickling() -> None:
    original = scope.make_choices(_Composed, {"contributors": [_Contributor()]}, config.snapshot())
    restored = pickle.loads(pickle.dumps(original))
    assert type(restored) is type(original)
    assert restored.should_use_cooperative_reduction() is False
    assert [type(contributor) for contributor in restored.contributors] == [_Contributor]


def test_a_scope_inside_a_scope_has_its_own_settings() -> None:
    """A user's pass may compile with other options."""
    outer, inner = config.snapshot(), config.snapshot({"fallback_to_eager": False})
    with virtualized.V.set_choices_handler(CustomChoices()), scope.compile_scope(outer):
        with scope.compile_scope(inner):
            assert context.settings() == inner
            assert isinstance(virtualized.V.choices, CustomChoices)
        assert context.settings() == outer


def test_choices_handler_survives_pickling() -> None:
    settings = config.snapshot({"fallback_to_eager": False})
    original = scope.make_choices(CustomChoices, {"calls": ["a"]}, settings)
    restored = pickle.loads(pickle.dumps(original))
    assert type(restored) is type(original)
    assert (restored.calls, restored.settings) == (["a"], settings)


def test_other_operators_keep_their_lowerings() -> None:
    before = dict(inductor_lowering.lowerings)
    run("inductor_ext")
    changed = {op for op, value in inductor_lowering.lowerings.items() if before.get(op) != value}
    assert changed <= set(lowerings.registered())


def test_lowering_dispatcher_keeps_inductors_attributes(sinh_lowerings: list[Any]) -> None:
    run("inductor_ext")
    dispatcher = inductor_lowering.lowerings[ATEN_SINH]
    inductor = dispatcher.__wrapped__
    expected = {**vars(inductor), "__wrapped__": inductor}
    assert vars(dispatcher) == expected
    assert dispatcher.__name__ == inductor.__name__


def test_an_operator_has_one_lowering(sinh_lowerings: list[Any]) -> None:
    with pytest.raises(ValueError, match="sinh"):
        lowerings.register_lowering(ATEN_SINH)(lambda inductor, x: inductor(x))


def test_registry_key_distinguishes_lowerings() -> None:
    keys = {lowering_table.registry_key()}
    for function in (run, kinds):
        lowerings.register_lowering(ATEN_SINH)(function)
        keys.add(lowering_table.registry_key())
        lowerings.unregister_lowering(ATEN_SINH)
    assert len(keys) == 3


def test_a_lowering_without_source_is_never_reused() -> None:
    keys = set()
    for _ in range(2):
        function = eval("lambda stock, x: stock(x)")
        lowerings.register_lowering(ATEN_SINH)(function)
        keys.add(lowering_table.registry_key())
        lowerings.unregister_lowering(ATEN_SINH)
    assert len(keys) == 2


def test_cache_keys_are_marked_inside_compiles_only() -> None:
    compile_fx.install_hooks(activate.requested)
    module = torch.fx.symbolic_trace(torch.nn.ReLU())
    with scope.compile_scope(config.snapshot()):
        inside = vars(FxGraphHashDetails(module, [], {}, []))
        tag = torch.compiler.config.cache_key_tag
    outside = vars(FxGraphHashDetails(module, [], {}, []))
    assert set(inside) - set(outside) == {"inductor_ext"}
    assert inside["inductor_ext"].startswith(digest.source_key())
    assert tag == torch.compiler.config.cache_key_tag


def test_patched_config_applies_to_the_backward() -> None:
    x = torch.randn(5, requires_grad=True)
    with events.capture(CompileRecord) as records, uncached():
        with config.patch(fallback_to_eager=False):
            out = torch.compile(lambda x: torch.sinh(x).sum(), backend="inductor_ext")(x)
        out.backward()
    assert [record.settings for record in records] == [{"fallback_to_eager": False}] * 2


def test_invalid_overrides_are_refused_at_once() -> None:
    unknown = pytest.raises(exc.UnknownOptionError, match="'fallback_to_eager'")
    with unknown, inductor_ext.activate(fallback_to_eagre=True):
        raise AssertionError("the block must not run")
    with pytest.raises(exc.BadOptionError, match="'enabled'"):
        inductor_ext.install(enabled="yes")
    assert activate.requested() is None


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0", "3.0.0+cu140"])
def test_unsupported_torch_is_refused_with_an_override(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(_compat, "torch_version", lambda: version)
    with pytest.raises(exc.UnsupportedTorchError) as caught, inductor_ext.activate():
        raise AssertionError("the block must not run")
    text = str(caught.value)
    assert "2.11 to 2.15" in text
    assert version in text
    assert "INDUCTOR_EXT_ALLOW_UNSUPPORTED_TORCH=1" in text
    with inductor_ext.activate(enabled=False):
        assert activate.requested() == {"enabled": False}
    with inductor_ext.activate(allow_unsupported_torch=True):
        assert activate.requested() == {"allow_unsupported_torch": True}


@pytest.mark.parametrize(
    "version", ["2.11.0+cu130", "2.12.1", "2.13.0+cpu", "2.14.1", "2.15.0a0+git1"]
)
def test_supported_torch_is_accepted(version: str) -> None:
    assert _compat.is_in_range(version)


def test_standalone_compile_follows_the_activation() -> None:
    x = torch.randn(5)
    graph = make_fx(lambda x: (torch.sinh(x),), tracing_mode="fake")(x)
    with events.capture(CompileRecord) as records, uncached():
        with inductor_ext.activate():
            compiled = torch._inductor.standalone_compile(
                graph, [x], dynamic_shapes="from_example_inputs"
            )
        torch.testing.assert_close(compiled(x)[0], torch.sinh(x))
    assert kinds(records) == ["inference"]


@pytest.mark.parametrize("threads", [1, 2])
def test_compile_threads_and_worker_processes(threads: int) -> None:
    patches = {"compile_threads": threads, "worker_start_method": "subprocess"}
    with events.capture(CompileRecord) as records:
        run("inductor_ext", options=patches)
    assert kinds(records) == ["inference"]


def test_environment_is_left_alone() -> None:
    before = dict(os.environ)
    run("inductor_ext")
    changed = {name for name in os.environ if os.environ[name] != before.get(name)}
    # Inductor sets these at its first compile.
    assert changed <= {
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    }


def test_two_lowerings_of_the_package_for_one_operator_are_an_error() -> None:
    """The second would never be called."""

    def lowering(stock: Any, *args: Any) -> Any:
        return stock(*args)

    first, second = (types.FunctionType(lowering.__code__, {}, name) for name in ("a", "b"))
    first.__module__ = second.__module__ = "inductor_ext.lowerings"
    operator = torch.ops.aten.lgamma.default
    lowering_table.register_once(first, operator)
    try:
        lowering_table.register_once(first, operator)
        with pytest.raises(ValueError, match="already has a lowering"):
            lowering_table.register_once(second, operator)
    finally:
        lowering_table.unregister_lowering(operator)
