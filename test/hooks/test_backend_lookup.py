"""Threads look up the backend at the same time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from torch._dynamo.backends import registry

from inductor_ext import backend, entry_point
from inductor_ext.hooks import backend_lookup


def others() -> dict[str, Any]:
    """The registered backends without the extension's."""
    assert entry_point.inductor_ext is backend.inductor_ext
    registry._lazy_import()
    return {name: f for name, f in registry._COMPILER_FNS.items() if name != "inductor_ext"}


@pytest.fixture
def lookup(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Look up the backend, which is not registered, while another thread does, which ends between
    the load of the entry point and the registration.
    """
    registered = backend_lookup._Backends(backend.inductor_ext, others())
    monkeypatch.setattr(registry, "_COMPILER_FNS", registered)
    entry = mock.Mock(load=lambda: entry_point.inductor_ext)

    def load_late() -> Any:
        with mock.patch.dict(registry._BACKENDS, inductor_ext=entry):
            registry.lookup_backend("inductor_ext")
        return entry_point.inductor_ext

    late = mock.Mock(load=load_late)
    monkeypatch.setitem(registry._BACKENDS, "inductor_ext", late)
    return lambda: registry.lookup_backend("inductor_ext")


def test_both_threads_get_the_backend(lookup: Callable[[], Any]) -> None:
    assert lookup() is backend.inductor_ext
    assert registry.lookup_backend("inductor_ext") is backend.inductor_ext


def test_torch_alone_rejects_the_second_thread(
    lookup: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once this test fails, the hook is no longer needed."""
    monkeypatch.setattr(registry, "_COMPILER_FNS", others())
    with pytest.raises(AssertionError, match="duplicate name: inductor_ext"):
        lookup()


def test_it_is_found_between_the_two_steps_of_a_registration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch first forgets the entry point, and then registers the function."""
    registered = backend_lookup._Backends(backend.inductor_ext, others())
    monkeypatch.setattr(registry, "_COMPILER_FNS", registered)
    monkeypatch.setitem(registry._BACKENDS, "inductor_ext", None)
    assert registry.lookup_backend("inductor_ext") is backend.inductor_ext
    with pytest.raises(KeyError, match="unknown"):
        registry._COMPILER_FNS["unknown"]


def test_other_backends_are_registered_once() -> None:
    assert "inductor" in registry._COMPILER_FNS
    with pytest.raises(AssertionError, match="duplicate name: inductor"):
        registry.register_backend(backend.inductor_ext, name="inductor")
    assert {"inductor", "inductor_ext"} <= set(registry.list_backends())
