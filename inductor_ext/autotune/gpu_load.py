"""How busy a GPU is, from NVIDIA's management library, which needs no CUDA context."""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable

IDLE = 10
"""Percent of the time in which kernels run, up to which a GPU counts as idle."""

_SAMPLES = 5
_PAUSE = 0.2
"""Seconds between samples; the driver's own period is between 1/6 and 1 second."""

_SUCCESS = 0


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the initialized library; None if there is none."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == _SUCCESS else None


def utilization(uuid: str) -> int | None:
    """Return the percent of the last sample period in which kernels of any process ran.

    Args:
        uuid: of the GPU, such as "GPU-6a1f...".

    Returns:
        None if it is not known: without the library, and for parts of a GPU (MIG).
    """
    library = _library()
    if library is None:
        return None
    handle, rates = ctypes.c_void_p(), _Utilization()
    if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != _SUCCESS:
        return None
    if library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)) != _SUCCESS:
        return None
    return int(rates.gpu)


def is_idle(
    uuid: str,
    read: Callable[[str], int | None] = utilization,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Whether a GPU is idle for about a second; True if that cannot be known."""
    for _ in range(_SAMPLES):
        load = read(uuid)
        if load is None:
            return True
        if load > IDLE:
            return False
        sleep(_PAUSE)
    return True
