"""Threads look up the backend at the same time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from torch._dynamo.backends import registry

from inductor_ext import backend, entry_point


@pytest.fixture
def lookup(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Look up the backend while another thread does, which ends between the load of the entry
    point and the registration.
    """
    assert entry_point.inductor_ext is backend.inductor_ext
    registry._lazy_import()
    registry._COMPILER_FNS.pop("inductor_ext", None)
    entry = registry._BACKENDS["inductor_ext"]
    assert entry is not None

    def load_late() -> Any:
        with mock.patch.dict(registry._BACKENDS, inductor_ext=entry):
            registry.lookup_backend("inductor_ext")
        return entry.load()

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
    monkeypatch.setattr(registry, "_COMPILER_FNS", dict(registry._COMPILER_FNS))
    with pytest.raises(AssertionError, match="duplicate name: inductor_ext"):
        lookup()


def test_other_backends_are_registered_once() -> None:
    assert "inductor" in registry._COMPILER_FNS
    with pytest.raises(AssertionError, match="duplicate name: inductor"):
        registry.register_backend(backend.inductor_ext, name="inductor")
    assert {"inductor", "inductor_ext"} <= set(registry.list_backends())
