"""What torch loads for `torch.compile(backend="inductor_ext")`: the entry point of the backend.

Besides the backend itself, threads can look it up at the same time from then on. Nothing else
imports this module, because its import replaces an object of torch.
"""

from __future__ import annotations

from inductor_ext.backend import inductor_ext
from inductor_ext.hooks import backend_lookup

__all__ = ["inductor_ext"]

backend_lookup.install_hooks(inductor_ext)
