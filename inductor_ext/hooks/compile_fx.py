"""Hooks into Inductor's entry point, and into the compile of one graph.

`torch._inductor.compile_fx.compile_fx` is the one function that torch.compile, AOT compilation,
`standalone_compile` and `torch._inductor.compile` all call. While an activation is in effect, the
dispatcher freezes the settings and opens the scope of the compile around Inductor's function. A
backward graph is compiled after that function has returned, often in another thread, so
`inner_compile` opens the scope again.
"""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from inductor_ext import events, exc, progress
from inductor_ext.cpp_wrapper.hooks import use_exported_ranges
from inductor_ext.hooks import (
    cache_keys,
    compile_again,
    context,
    direct_compiles,
    failure_repro,
    registry,
    scope,
)
from inductor_ext.hooks.direct_compiles import Request
from inductor_ext.hooks.records import CompileRecord
from inductor_ext.hooks.registry import Hook
from inductor_ext.memory import budget_search, compiled_callables, saved_tensors
from inductor_ext.settings import Settings

_FX = "torch._inductor.compile_fx"

HOOKS = (
    Hook(
        "compile_fx",
        "replaced",
        (f"{_FX}.compile_fx",),
        "hooks.compile_fx",
        "Every Inductor entry point calls this function: torch.compile, AOT compilation, "
        "standalone_compile, torch._inductor.compile. Inductor has no hook around a whole "
        "compile.",
        parameters=("model_", "example_inputs_", "inner_compile"),
        relies_on=(
            f"{_FX}.compile_fx_inner",
            f"{_FX}.fx_compile_mode",
            f"{_FX}.fx_compile_async",
            f"{_FX}.fx_compile_progressive",
            "torch._inductor.virtualized._V.aot_compilation",
            "torch._dynamo.utils.counters",
            "torch._dynamo.utils.count_calls",
            "torch._dynamo.utils.dynamo_timed",
            "torch._logging.trace_structured",
        ),
    ),
)

_SCOPED = "_inductor_ext_scoped"


def install_hooks(requested: Request) -> None:
    """Install the dispatchers of the entry point and of the cache keys, once per process.

    Args:
        requested: `activate.requested`, which returns the settings that an activation requests.
    """
    cache_keys.install_hooks()
    registry.install(HOOKS, {"compile_fx": functools.partial(_dispatch_compile_fx, requested)})
    direct_compiles.install_hooks(requested)


def _dispatch_compile_fx(requested: Request, stock: Callable[..., Any]) -> Callable[..., Any]:
    # `config` imports torch, but reading the declarations must not.
    from inductor_ext import config

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
            # compile_fx calls itself after applying config patches.
            return stock(*args, **kwargs)
        settings = config.snapshot(overrides)
        if not settings.enabled:
            return stock(*args, **kwargs)
        if _has_negated_inputs(call.arguments["example_inputs_"]):
            return call.arguments["model_"]
        model = call.arguments["model_"]

        def compile_model(model: Any) -> Any:
            return _compile(stock, call, model, inner_compile, settings)

        try:
            if settings.memory_budget is None or not _may_compile_again(model):
                return compile_model(model)
            return budget_search.compile_within(
                lambda: compile_model(compile_again.copy_graph(model)), settings
            )
        except Exception as error:
            inputs, patches = (
                call.arguments[name] for name in ("example_inputs_", "config_patches")
            )
            failure_repro.report(error, model, inputs, patches, settings)
            raise

    return compile_fx


def _may_compile_again(model: Any) -> bool:
    """Whether a model may be compiled several times: if it is a graph that can be copied."""
    from torch import fx

    return isinstance(model, fx.GraphModule) and compile_again.copy_graph(model) is not None


def _compile(
    stock: Callable[..., Any],
    call: inspect.BoundArguments,
    model: Any,
    inner_compile: Callable[..., Any],
    settings: Settings,
) -> Any:
    """Call Inductor's entry point in the scope of a compile; return its result.

    Args:
        stock: the entry point.
        call: its arguments.
        model: the model to compile, in place of the one of the call.
        inner_compile: the call's function that compiles one graph.
        settings: of the compile.
    """
    compile_ = compiled_callables.begin_compile()
    inner = scoped_inner_compile(inner_compile, settings, compile_)
    arguments = {**call.arguments, "model_": model, "inner_compile": inner}
    call = inspect.BoundArguments(call.signature, arguments)
    hits = _count_autograd_cache_hits()
    start = time.perf_counter()
    try:
        with (
            scope.compile_scope(settings),
            compiled_callables.link_cached_graphs(compile_),
            use_exported_ranges(model),
            progress.stage("compiling", shown=settings.progress),
        ):
            output = stock(*call.args, **call.kwargs)
    except BaseException:
        compiled_callables.forget_compile(compile_)
        raise
    if _count_autograd_cache_hits() > hits:
        # inner_compile, which records each graph, was not called.
        record = CompileRecord(
            kind="whole",
            operators=_count_operators(model),
            seconds=round(time.perf_counter() - start, 3),
            cache="hit",
            cache_key=None,
            settings=settings.non_default(),
        )
        events.emit(record, event_log=settings.event_log)
    return output


def _has_negated_inputs(inputs: Any) -> bool:
    """Whether torch.compile compiles a graph for inputs that are negated views; warns once.

    `x.conj().imag` is a view of the memory of `x` with a bit that says that its values are negated.
    Inductor's kernels ignore the bit. Dynamo compiles a graph of its own for inputs with the bit.
    """
    import torch
    from torch._inductor.virtualized import V

    if V.aot_compilation is True or not any(
        isinstance(x, torch.Tensor) and x.is_neg() for x in inputs
    ):
        return False
    events.warn_once(
        "negated_inputs",
        "inputs with is_neg(), such as x.conj().imag: Inductor would ignore the sign. Graphs with "
        "such inputs run in eager mode; call resolve_neg() on the inputs to compile them.",
    )
    return True


def scoped_inner_compile(
    inner: Callable[..., Any], settings: Settings, compile_: compiled_callables.Compile
) -> Callable[..., Any]:
    """Wrap `inner_compile`, which compiles one graph, to run inside the scope and emit a record.

    Args:
        inner: Inductor's function, `compile_fx_inner`, or one passed by the caller.
        settings: settings of the compile.
        compile_: the call of the entry point that the graph belongs to.
    """

    @functools.wraps(inner)
    def inner_compile(gm: Any, example_inputs: Any, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.utils import counters

        from inductor_ext.hooks.upstream_fixes import cpp_wrapper_options, returned_views
        from inductor_ext.lowerings.graph import chunks, concat_frozen_weights

        kind = _find_kind(kwargs)
        if kind != "aot":
            _check_compile_mode(kind)
        if kind == "forward":
            static_inputs = kwargs.get("static_input_idxs", ())
            compile_.saved_memory = saved_tensors.find_memory(gm.graph, static_inputs)
        before = _read_cache_counters(counters)
        operators = _count_operators(gm)
        start = time.perf_counter()
        with (
            events.capture(this_thread=True) as records,
            context.enter(
                is_aot=kind == "aot", records=records, saved_memory=compile_.saved_memory
            ),
            scope.compile_scope(settings),
            cpp_wrapper_options.use_options(kwargs),
            progress.stage(f"{kind} graph of {operators} operators", shown=settings.progress),
        ):
            if kind in ("inference", "forward"):
                returned_views.view_inputs(gm)
            concat_frozen_weights.concat_frozen_weights(gm, settings)
            budget_search.reduce_peak(kind, gm, chunks.chunk_graph)
            budget_search.note_graph(kind, gm)
            output = inner(gm, example_inputs, *args, **kwargs)
        after = _read_cache_counters(counters)
        state = next((state for state in after if after[state] > before[state]), "off")
        key = getattr(output, "_fx_graph_cache_key", None)
        if kind != "aot":
            compile_.add(key, None if state == "hit" else records)
        record = CompileRecord(
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


def _find_kind(arguments: Mapping[str, Any]) -> str:
    """Return the kind of a graph from the keyword arguments of `inner_compile`."""
    from torch._inductor.virtualized import V

    if V.aot_compilation is True:
        return "aot"
    if arguments.get("is_backward"):
        return "backward"
    return "inference" if arguments.get("is_inference") else "forward"


def _check_compile_mode(kind: str) -> None:
    """Raise an error for graphs that Inductor's async and progressive compile modes do not support.

    In torch 2.11 to 2.13 Inductor fails there with an internal error: the output of either mode
    cannot be put into the FX graph cache (it has no set_triton_bundle), and a progressive output is
    called with the wrong arguments when it is differentiated (TypeError).
    """
    import torch
    from torch._inductor import compile_fx as module
    from torch._inductor import config as inductor_config

    caching = inductor_config.fx_graph_cache and not torch.compiler.config.force_disable_caches
    if caching and (module.fx_compile_async or module.fx_compile_progressive):
        why = "its output cannot be cached, but the FX graph cache is enabled"
        fix = "Set TORCHINDUCTOR_FX_GRAPH_CACHE=0, or unset the variable"
    elif module.fx_compile_progressive and kind in ("forward", "backward"):
        why = "Inductor's progressive compile does not support graphs that are differentiated"
        fix = "Unset the variable, or compile under torch.no_grad()"
    else:
        return
    mode = os.environ.get("TORCHINDUCTOR_FX_COMPILE_MODE")
    raise exc.UnsupportedCompileModeError(mode=mode, why=why, fix=fix)


def _count_autograd_cache_hits() -> int:
    from torch._dynamo.utils import counters

    return counters["aot_autograd"]["autograd_cache_hit"]


def _read_cache_counters(counters: Any) -> dict[str, int]:
    inductor = counters["inductor"]
    return {state: inductor[f"fxgraph_cache_{state}"] for state in ("hit", "miss", "bypass")}


def _count_operators(gm: Any) -> int:
    from torch._dynamo.utils import count_calls

    return count_calls(gm.graph) if hasattr(gm, "graph") else 0
