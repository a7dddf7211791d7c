"""The one reversible switch: what turns a compile by Inductor into a compile by the extension.

`activate` (for a block of code in this thread), `install` (for the process) and the dynamo backend
only record a wish. It takes effect at the one place through which every way into Inductor passes,
`torch._inductor.compile_fx.compile_fx`: torch.compile, AOT compilation, `standalone_compile` and
`torch._inductor.compile`. A permanent dispatcher stands there from the first activation on. Where
no activation holds it calls stock's function with the very same arguments. Where one holds, it
freezes the settings and makes an `ExtChoices` this thread's InductorChoices handler (`V.choices`)
while stock's function runs and, since a backward graph is compiled after that has returned, while
`inner_compile` runs as well.

That handler is a subclass of whatever class was there and carries the frozen settings. Its presence
is what "the extension is at work in this thread" means (`current`) to the other dispatchers: of the
cache keys, which tell our entries from stock's, and of each operator that has a lowering of ours in
Inductor's process-wide table. Inductor sends the handler along when it compiles in a subprocess, so
that the answer is the same there. Nothing else of torch's is set, so there is nothing for another
thread to see.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from inductor_ext import (
    cache,
    compat,
    config,
    events,
    exc,
    kernel_order,
    lowerings,
    memory_plans,
    padding,
    reductions,
)
from inductor_ext.settings import Settings

__all__ = ["ExtChoices", "activate", "current", "install", "requested", "uninstall"]

Overrides = Mapping[str, object]

_active: ContextVar[Overrides | None] = ContextVar("inductor_ext_active", default=None)
_installed: Overrides | None = None

_dispatcher_lock = threading.Lock()
_dispatched_lowerings: dict[Any, Callable[..., Any]] = {}

_aot_graph: ContextVar[bool] = ContextVar("inductor_ext_aot_graph", default=False)
"""Whether this thread compiles an artifact's graph, whose constants may change later."""

_SCOPED = "_inductor_ext_scoped"


def requested() -> Overrides | None:
    """The settings asked for by the innermost `activate`, else by `install`; None for stock."""
    active = _active.get()
    return _installed if active is None else active


def current() -> Settings | None:
    """The settings of the extension's compile under way in this thread; None in a stock compile."""
    handler = compat.peek_choices()
    return handler.settings if isinstance(handler, ExtChoices) else None


@contextlib.contextmanager
def activate(**overrides: object) -> Iterator[None]:
    """Inside, in this thread, everything that Inductor compiles is compiled by the extension.

    Includes the stock entry points (`torch.compile`, `torch._inductor.aoti_compile_and_package`).
    Activations nest: an inner one adds its overrides to the outer one's. Compiling is what counts,
    not calling: a function compiled inside stays compiled when called outside, its backward graph
    included, and dynamo reuses for `backend="inductor"` what it compiled under that name.

    Args:
        overrides: settings (see `inductor_ext.settings`) for the compiles inside.

    Raises:
        exc.UnsupportedTorchError, exc.UnknownOptionError, exc.BadOptionError: before anything else.
    """
    token = _active.set(_prepare({**(requested() or {}), **overrides}))
    try:
        yield
    finally:
        _active.reset(token)


def install(**overrides: object) -> None:
    """Activate the extension for the whole process, all its threads, until `uninstall`.

    A second call replaces the overrides of the first. Raises as `activate` does.
    """
    global _installed
    _installed = _prepare(overrides)


def uninstall() -> None:
    """Undo `install`. Without one, nothing happens."""
    global _installed
    _installed = None


def _prepare(overrides: Overrides) -> Overrides:
    settings = config.snapshot(overrides)
    compat.check_torch(override=settings.allow_unsupported_torch or not settings.enabled)
    _ensure_dispatchers()
    return overrides


# --- the scope of one compile -------------------------------------------------------------------


class ExtChoices:
    """Mixed into the InductorChoices class at hand: the extension's say in Inductor's choices."""

    settings: Settings

    def get_template_configs(
        self, kernel_inputs: Any, templates: Any, op_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Stock's candidates for a product, without those of which it is known that others win."""
        from inductor_ext.lowerings import gemm

        templates = gemm.sole_candidates(templates)
        stock: Any = super()
        return stock.get_template_configs(kernel_inputs, templates, op_name, *args, **kwargs)

    def should_use_persistent_reduction(self, features: Any, cooperative_reduction: bool) -> bool:
        """Whether a kernel holds its rows: where stock's do, and where more pays; or as a user's
        own class says.
        """
        from torch._inductor import config as inductor_config
        from torch._inductor.choices import InductorChoices

        stock: Any = super()
        if stock.should_use_persistent_reduction(features, cooperative_reduction):
            return True
        decided = _stock_part(self)[0].should_use_persistent_reduction
        return (
            self.settings.persistent_rows
            and decided is InductorChoices.should_use_persistent_reduction
            and inductor_config.triton.persistent_reductions
            and not cooperative_reduction
            and reductions.keeps_rows(features)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_choices, (*_stock_part(self), self.settings)


def _stock_part(handler: Any) -> tuple[type[Any], dict[str, Any]]:
    """The class and the attributes of a handler without what we have added."""
    if not isinstance(handler, ExtChoices):
        return type(handler), vars(handler)
    state = {key: value for key, value in vars(handler).items() if key != "settings"}
    return type(handler).__mro__[2], state


@functools.cache
def _choices_class(base: type[Any]) -> type[Any]:
    return type("ExtChoices", (ExtChoices, base), {})


def _make_choices(base: type[Any], state: dict[str, Any], settings: Settings) -> Any:
    handler = object.__new__(_choices_class(base))  # type: ignore[arg-type]  # a class is hashable
    handler.__dict__.update(state, settings=settings)
    return handler


def _restore_choices(base: type[Any], state: dict[str, Any], settings: Settings) -> Any:
    """Unpickle an ExtChoices: Inductor's compile subprocess is about to compile for us."""
    _ensure_code_dispatchers()
    return _make_choices(base, state, settings)


def _choices(settings: Settings) -> Any:
    """An ExtChoices over the handler that stock would use in this thread."""
    from torch._inductor import config as inductor_config
    from torch._inductor.choices import InductorChoices

    handler = compat.peek_choices()
    if handler is None:
        handler = (inductor_config.inductor_choices_class or InductorChoices)()
    return _make_choices(*_stock_part(handler), settings)


@contextlib.contextmanager
def _scope(settings: Settings) -> Iterator[None]:
    """Make this thread compile by the extension; re-entrant."""
    if current() == settings:
        yield
        return
    _ensure_code_dispatchers()
    with compat.choices_handler(_choices(settings)):
        yield


# --- the dispatchers ----------------------------------------------------------------------------


def _ensure_dispatchers() -> None:
    """Put the dispatchers in front of Inductor's entry point and of its cache keys, once."""
    from torch._inductor import codecache, output_code
    from torch._inductor import compile_fx as module

    with _dispatcher_lock:
        if not hasattr(module.compile_fx, _SCOPED):
            details = codecache.FxGraphHashDetails
            details.__init__ = _key_dispatcher(details.__init__)  # type: ignore[method-assign]
            graph = output_code.CompiledFxGraph
            graph.post_compile = _graph_dispatcher(graph.post_compile)  # type: ignore[method-assign]
            module.compile_fx = _entry_dispatcher(module.compile_fx)


def _key_dispatcher(stock: Callable[..., None]) -> Callable[..., None]:
    # What a key is made from is collected in the attributes of one object, for the FX graph cache
    # and, in a subclass, for the AOTAutograd cache. torch.compiler.config.cache_key_tag would be
    # the hook for this, but torch 2.11 keeps it for the process: another thread's stock compile
    # would take our tag, and leave its code where we would find it.
    from inductor_ext.lowerings import gemm_pass

    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        settings = current()
        if settings is not None:
            parts = [cache.source_key(), settings.cache_key(), lowerings.registry_key()]
            self.inductor_ext = "-".join([*parts, gemm_pass.cache_key(settings)])

    return __init__


def _graph_dispatcher(stock: Callable[..., None]) -> Callable[..., None]:
    # Of a graph that comes with its backward from the AOTAutograd cache nothing else tells the key.
    @functools.wraps(stock)
    def post_compile(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        if current() is not None:
            memory_plans.loaded(self._fx_graph_cache_key)

    return post_compile


def _entry_dispatcher(stock: Callable[..., Any]) -> Callable[..., Any]:
    # Inductor has no hook around a whole compile: a registered backend does not see AOT compiles,
    # and config patches do not reach the choices handler. So this one function is replaced.
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def compile_fx(*args: Any, **kwargs: Any) -> Any:
        overrides = requested()
        if overrides is None:
            return stock(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        inner_compile = call.arguments["inner_compile"]
        if hasattr(inner_compile, _SCOPED):
            # stock's compile_fx calls itself after applying config patches.
            return stock(*args, **kwargs)
        settings = config.snapshot(overrides)
        if not settings.enabled:
            return stock(*args, **kwargs)
        compile_ = memory_plans.begin()
        call.arguments["inner_compile"] = _scoped_inner_compile(inner_compile, settings, compile_)
        hits = _autograd_cache_hits()
        start = time.perf_counter()
        with _scope(settings), memory_plans.linking(compile_), _artifact_of(call):
            output = stock(*call.args, **call.kwargs)
        if _autograd_cache_hits() > hits:
            # inner_compile, which records each graph, was not asked.
            record = events.CompileRecord(
                kind="whole",
                operators=_operators(call.arguments["model_"]),
                seconds=round(time.perf_counter() - start, 3),
                cache="hit",
                cache_key=None,
                settings=settings.non_default(),
            )
            events.emit(record, event_log=settings.event_log)
        return output

    setattr(compile_fx, _SCOPED, True)
    return compile_fx


@contextlib.contextmanager
def _artifact_of(call: inspect.BoundArguments) -> Iterator[None]:
    """Around a compile, which may be one ahead of time, by whatever way it is asked for."""
    from torch._inductor.virtualized import V

    model = call.arguments["model_"]
    if V.aot_compilation is not True or not hasattr(model, "graph"):
        yield
        return
    from inductor_ext.cpp_wrapper import graph_signature

    with graph_signature.module_given(model):
        yield


def _check_compile_mode(kind: str) -> None:
    """Refuse what stock cannot do in its asynchronous and progressive compile modes.

    In torch 2.11 to 2.13 stock fails there with an error from its depths: the output of either
    cannot be put into the FX graph cache (it has no set_triton_bundle), and a progressive output is
    called with the wrong arguments when it is differentiated (TypeError).
    """
    import torch
    from torch._inductor import compile_fx as module
    from torch._inductor import config as inductor_config

    caching = inductor_config.fx_graph_cache and not torch.compiler.config.force_disable_caches
    if caching and (module.fx_compile_async or module.fx_compile_progressive):
        why = "its output cannot be cached, and the FX graph cache is on"
        mend = "Set TORCHINDUCTOR_FX_GRAPH_CACHE=0, or unset the variable"
    elif module.fx_compile_progressive and kind in ("forward", "backward"):
        why = "Inductor's progressive compile cannot run a graph that is differentiated"
        mend = "Unset the variable, or compile under torch.no_grad()"
    else:
        return
    mode = os.environ.get("TORCHINDUCTOR_FX_COMPILE_MODE")
    raise exc.UnsupportedCompileModeError(mode=mode, why=why, mend=mend)


def _autograd_cache_hits() -> int:
    from torch._dynamo.utils import counters

    return counters["aot_autograd"]["autograd_cache_hit"]


def _operators(gm: Any) -> int:
    from torch._dynamo.utils import count_calls

    return count_calls(gm.graph) if hasattr(gm, "graph") else 0


def _scoped_inner_compile(
    inner: Callable[..., Any], settings: Settings, compile_: memory_plans.Compile
) -> Callable[..., Any]:
    """`inner_compile`, which compiles one graph, inside the scope and with a record of it."""

    @functools.wraps(inner)
    def inner_compile(gm: Any, example_inputs: Any, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.utils import counters
        from torch._inductor.virtualized import V

        from inductor_ext.lowerings import frozen

        if V.aot_compilation is True:
            kind = "aot"
        elif kwargs.get("is_backward"):
            kind = "backward"
        else:
            kind = "inference" if kwargs.get("is_inference") else "forward"
        if kind != "aot":
            _check_compile_mode(kind)
        before = _cache_counters(counters)
        operators = _operators(gm)
        start = time.perf_counter()
        aot_graph = _aot_graph.set(kind == "aot")
        try:
            with _scope(settings), events.capture(this_thread=True) as records:
                frozen.run(gm, settings)
                output = inner(gm, example_inputs, *args, **kwargs)
        finally:
            _aot_graph.reset(aot_graph)
        after = _cache_counters(counters)
        state = next((state for state in after if after[state] > before[state]), "off")
        key = getattr(output, "_fx_graph_cache_key", None)
        if kind != "aot":
            compile_.add(key, None if state == "hit" else records)
        record = events.CompileRecord(
            kind=kind,
            operators=operators,
            seconds=round(time.perf_counter() - start, 3),
            cache=state,
            cache_key=key,
            settings=settings.non_default(),
        )
        events.emit(record, event_log=settings.event_log)
        return output

    setattr(inner_compile, _SCOPED, True)
    return inner_compile


def _cache_counters(counters: Any) -> dict[str, int]:
    inductor = counters["inductor"]
    return {state: inductor[f"fxgraph_cache_{state}"] for state in ("hit", "miss", "bypass")}


def _ensure_code_dispatchers() -> None:
    """Put the dispatchers in front of what decides about code, once.

    One is before the pass that orders kernels, one before the pass that plans memory, and one in
    Inductor's table for every operator with a lowering of ours.
    """
    from torch._inductor import lowering as module

    from inductor_ext.lowerings import (  # noqa: F401  # register lowerings
        error_function,
        gemm,
        out_variants,
    )

    with _dispatcher_lock:
        _ensure_order_dispatcher()
        _ensure_wrapper_dispatcher()
        _ensure_artifact_dispatchers()
        _ensure_predicate_dispatcher()
        _ensure_padding_dispatchers()
        _ensure_pass_dispatcher()
        for operator in lowerings.registered():
            if operator not in _dispatched_lowerings:
                _dispatched_lowerings[operator] = module.lowerings[operator]
                module.lowerings[operator] = _lowering_dispatcher(operator)


def _ensure_wrapper_dispatcher() -> None:
    """Put a dispatcher before the pass in which generated code decides how buffers share memory."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    stock = PythonWrapperCodegen.run_wrapper_ir_passes
    if not hasattr(stock, _SCOPED):
        # Subclasses of every device inherit this method, and none overrides it; registering wrapper
        # classes of ours would replace those of the device's for the process.
        PythonWrapperCodegen.run_wrapper_ir_passes = _wrapper_dispatcher(stock)  # type: ignore[method-assign]


def _wrapper_dispatcher(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def run_wrapper_ir_passes(self: Any, is_inference: bool) -> None:
        settings = current()
        if settings is None:
            stock(self, is_inference)
            return
        from inductor_ext import memory_planning

        memory_planning.plan_wrapper(stock, self, is_inference, settings)

    setattr(run_wrapper_ir_passes, _SCOPED, True)
    return run_wrapper_ir_passes


def _ensure_artifact_dispatchers() -> None:
    """Put dispatchers before the choice of a generator of C++ and the compile of its code, and
    before what an exported program's compile takes for its inputs and for numbers it knows."""
    from torch._inductor import codecache
    from torch._inductor import compile_fx as entry
    from torch._inductor import graph as module
    from torch._subclasses import fake_tensor

    if not hasattr(module.get_wrapper_codegen_for_device, _SCOPED):
        # Registering generators of ours would replace those of the device for the process, and the
        # function that compiles artifacts has no hook at all.
        module.get_wrapper_codegen_for_device = _generator_dispatcher(
            module.get_wrapper_codegen_for_device
        )
        compiler = codecache.AotCodeCompiler
        compiler.compile = _artifact_dispatcher(compiler.compile)  # type: ignore[method-assign]
        entry._extract_inputs_from_exported_gm = _inputs_dispatcher(
            entry._extract_inputs_from_exported_gm
        )
        mode = fake_tensor.FakeTensorMode
        mode.may_turn_const = _constant_dispatcher(mode.may_turn_const)  # type: ignore[method-assign]


def _constant_dispatcher(stock: Callable[..., bool]) -> Callable[..., bool]:
    # The attributes of an artifact's graph are real tensors, which fake tensors compute with: what
    # `item` reads of a buffer would be the same number in all calls, though the buffer changes.
    @functools.wraps(stock)
    def may_turn_const(self: Any, tensor: Any) -> bool:
        return not _aot_graph.get() and stock(self, tensor)

    return may_turn_const


def _inputs_dispatcher(stock: Callable[..., Any]) -> Callable[..., Any]:
    # Stock replaces by None what is no tensor, and fails where the graph uses it.
    @functools.wraps(stock)
    def extract_inputs(gm: Any, example_inputs: Any) -> Any:
        inputs = stock(gm, example_inputs)
        if current() is None:
            return inputs
        from inductor_ext.cpp_wrapper import exported

        return exported.with_numbers(gm, inputs)

    return extract_inputs


def _ensure_predicate_dispatcher() -> None:
    """Let a cond say that it needs the numbers in its predicate, which stock forgets.

    A condition such as u0 > 2 is no sympy expression but a relation, in which stock looks for no
    symbols: the code that computes u0 is then taken for dead, and the branch asks for a variable
    that nobody declares.
    """
    node_class = compat.branch_node()
    stock = node_class.get_free_symbol_uses
    if hasattr(stock, _SCOPED):
        return

    @functools.wraps(stock)
    def get_free_symbol_uses(self: Any, unbacked_only: bool = False) -> Any:
        found = stock(self, unbacked_only)
        if current() is None:
            return found
        from torch._inductor.utils import OrderedSet
        from torch.utils._sympy.symbol import SymT, symbol_is_type

        unbacked = (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)
        symbols = getattr(getattr(compat.branch_selector(self), "expr", None), "free_symbols", ())
        return found | OrderedSet(
            symbol
            for symbol in sorted(symbols, key=str)
            if not unbacked_only or symbol_is_type(symbol, unbacked)
        )

    setattr(get_free_symbol_uses, _SCOPED, True)
    node_class.get_free_symbol_uses = get_free_symbol_uses


def _ensure_padding_dispatchers() -> None:
    """Put dispatchers before the padding of products and what it changes; see `padding`."""
    from torch._inductor import compile_fx as entry
    from torch._inductor.fx_passes import pad_mm

    if hasattr(pad_mm.can_pad, _SCOPED):
        return
    entry._recursive_joint_graph_passes = _joint_passes_dispatcher(
        entry._recursive_joint_graph_passes
    )
    entry.record_original_output_strides = _strides_dispatcher(entry.record_original_output_strides)
    pad_mm.can_pad = _pad_dispatcher(pad_mm.can_pad)


def _joint_passes_dispatcher(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def _recursive_joint_graph_passes(gm: Any, *args: Any, **kwargs: Any) -> Any:
        from torch._inductor.virtualized import V

        if current() is None:
            return stock(gm, *args, **kwargs)
        # Elsewhere results are dynamo's, which goes by their own strides; and a graph in the FX
        # graph cache is known by what it is after the passes.
        before = padding.strides(gm) if V.aot_compilation is True else None
        with padding.guarded(gm):
            passed = stock(gm, *args, **kwargs)
        if before is not None:
            padding.keep_strides(passed, before)
        return passed

    return _recursive_joint_graph_passes


def _strides_dispatcher(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def record_original_output_strides(gm: Any) -> None:
        stock(gm)
        if current() is not None:
            padding.recorded(gm)

    return record_original_output_strides


def _pad_dispatcher(stock: Callable[..., bool]) -> Callable[..., bool]:
    from inductor_ext.selection import choose

    @functools.wraps(stock)
    def can_pad(mat1: Any, mat2: Any, *args: Any, **kwargs: Any) -> bool:
        settings = current()
        if settings is not None:
            if not padding.allowed():
                return False
            if choose.compares(settings) and padding.rows_alone(mat1, mat2):
                return False
        return stock(mat1, mat2, *args, **kwargs)

    setattr(can_pad, _SCOPED, True)
    return can_pad


def _generator_dispatcher(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def get_wrapper_codegen_for_device(*args: Any, **kwargs: Any) -> Any:
        generator = stock(*args, **kwargs)
        settings = current()
        if settings is None:
            return generator
        from inductor_ext.cpp_wrapper import codegen

        return codegen.generator(generator, settings)

    setattr(get_wrapper_codegen_for_device, _SCOPED, True)
    return get_wrapper_codegen_for_device


def _artifact_dispatcher(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def compile_code(graph: Any, *args: Any, **kwargs: Any) -> Any:
        from inductor_ext.cpp_wrapper import build, codegen

        settings = current()
        if settings is None or not isinstance(graph.wrapper_code, codegen.AotWrapper):
            return stock(graph, *args, **kwargs)
        return build.compile_artifact(graph, *args, **kwargs, values=settings)

    return compile_code


def _ensure_pass_dispatcher() -> None:
    """Put a dispatcher around the last passes over a graph, to plan its products after them."""
    from torch._inductor import compile_fx as entry

    # The hook at their end, config.post_grad_custom_post_pass, is the user's, and in torch 2.11 the
    # process's.
    if not hasattr(entry._recursive_post_grad_passes, _SCOPED):
        entry._recursive_post_grad_passes = _pass_dispatcher(entry._recursive_post_grad_passes)


_passed: ContextVar[Any] = ContextVar("inductor_ext_passed", default=None)
"""The graph, with its subgraphs, that stock's last passes are at work on in this thread."""


def _pass_dispatcher(stock: Callable[..., None]) -> Callable[..., None]:
    from torch._inductor import config as inductor_config

    @functools.wraps(stock)
    def _recursive_post_grad_passes(gm: Any, *args: Any, **kwargs: Any) -> None:
        outer = _passed.get()
        settings = current()
        if settings is None or (outer is not None and gm in outer.modules()):
            # The passes over a graph trace its subgraphs, which have to be of operators until then.
            stock(gm, *args, **kwargs)
            return
        token = _passed.set(gm)
        try:
            stock(gm, *args, **kwargs)
        finally:
            _passed.reset(token)
        if inductor_config.use_post_grad_passes:
            from inductor_ext.lowerings import gemm_pass

            gemm_pass.run(gm, settings)

    setattr(_recursive_post_grad_passes, _SCOPED, True)
    return _recursive_post_grad_passes


def _ensure_order_dispatcher() -> None:
    """Put a dispatcher before the pass that chooses the order of kernels."""
    from torch._inductor import memory

    # The scheduler looks the function up each time. The hook before it,
    # config._post_fusion_custom_pass, is the user's, and what it orders the pass orders anew.
    if not hasattr(memory.reorder_for_peak_memory, _SCOPED):
        memory.reorder_for_peak_memory = _order_dispatcher(memory.reorder_for_peak_memory)


def _order_dispatcher(stock: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def reorder_for_peak_memory(*args: Any, **kwargs: Any) -> Any:
        order = stock(*args, **kwargs)
        settings = current()
        if settings is None or not settings.memory_reorder:
            return order
        call = signature.bind(*args, **kwargs)
        return kernel_order.improve(order, call.arguments["graph_outputs"])

    setattr(reorder_for_peak_memory, _SCOPED, True)
    return reorder_for_peak_memory


def _lowering_dispatcher(operator: Any) -> Callable[..., Any]:
    stock = _dispatched_lowerings[operator]

    @functools.wraps(stock)
    def lower(*args: Any, **kwargs: Any) -> Any:
        ours = lowerings.registered().get(operator)
        if ours is None or current() is None:
            return stock(*args, **kwargs)
        return ours(stock, *args, **kwargs)

    return lower
