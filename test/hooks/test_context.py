"""The context of a compile: fields nest, are restored, and stay in their thread."""

from __future__ import annotations

import threading

import pytest

from inductor_ext.hooks import context
from inductor_ext.hooks.context import CompileContext


def test_fields_nest_and_are_restored() -> None:
    with context.enter(is_aot=True):
        with context.enter(in_control_flow=True) as inner:
            assert inner == CompileContext(is_aot=True, in_control_flow=True)
            assert context.current() is inner
        with context.enter(is_aot=False):
            assert context.current() == CompileContext()
        assert context.current() == CompileContext(is_aot=True)
    assert context.current() == CompileContext()


def test_an_exception_restores_the_fields() -> None:
    with pytest.raises(KeyError), context.enter(is_aot=True):
        raise KeyError
    assert context.current() == CompileContext()


def test_a_thread_starts_with_the_defaults() -> None:
    seen: list[CompileContext] = []
    with context.enter(is_aot=True):
        thread = threading.Thread(target=lambda: seen.append(context.current()))
        thread.start()
        thread.join()
    assert seen == [CompileContext()]


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="is_aott"), context.enter(is_aott=True):
        raise AssertionError("the block must not run")
    assert context.current() == CompileContext()


def test_the_package_has_one_context_variable() -> None:
    from pathlib import Path

    import inductor_ext

    package = Path(inductor_ext.__file__).parent
    users = [
        str(file.relative_to(package))
        for file in sorted(package.rglob("*.py"))
        if "ContextVar(" in file.read_text(encoding="utf-8")
    ]
    assert users == ["hooks/context.py"]
