"""Hooks into the C++ codegen of AOT packages: the wrapper class, and the compile of its code."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from inductor_ext.hooks import registry, scope


def install_hooks() -> None:
    """Install the dispatchers, once per process."""
    registry.replace("wrapper_class", _dispatch_wrapper_class)
    registry.replace("aot_compile", _dispatch_compile)


@contextlib.contextmanager
def exported_module(model: Any) -> Iterator[None]:
    """Wrap a `compile_fx` call, which may be an AOT compile: read what export left on the module.

    Used for every entry point, since all of them call `compile_fx`. Does nothing for a JIT compile.

    Args:
        model: the `model_` argument of compile_fx.
    """
    from torch._inductor.virtualized import V

    if V.aot_compilation is not True or not hasattr(model, "graph"):
        yield
        return
    from inductor_ext.cpp_wrapper.signature import from_graph

    with from_graph.use_exported_ranges(model):
        yield


def _dispatch_wrapper_class(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def get_wrapper_codegen_for_device(*args: Any, **kwargs: Any) -> Any:
        generator = stock(*args, **kwargs)
        settings = scope.settings()
        if settings is None:
            return generator
        from inductor_ext.cpp_wrapper.codegen import cpp_wrapper

        return cpp_wrapper.generator(generator, settings)

    return get_wrapper_codegen_for_device


def _dispatch_compile(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def compile_code(graph: Any, *args: Any, **kwargs: Any) -> Any:
        from inductor_ext.cpp_wrapper.build import artifact
        from inductor_ext.cpp_wrapper.codegen import cpp_wrapper

        settings = scope.settings()
        if settings is None or not isinstance(graph.wrapper_code, cpp_wrapper.AotWrapper):
            return stock(graph, *args, **kwargs)
        return artifact.compile_artifact(graph, *args, **kwargs, values=settings)

    return compile_code
