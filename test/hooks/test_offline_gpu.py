"""What torch reports inside and outside of the compile for a GPU that need not exist."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from inductor_ext import targets
from inductor_ext.hooks import context, offline_gpu, registry

pytest.importorskip("triton")

H100 = targets.gpu_properties("H100")


def reported() -> dict[str, Any]:
    from torch._dynamo.device_interface import CudaInterface

    if not torch.cuda.is_available():
        return {"available": False}
    return {
        "available": True,
        "count": torch.cuda.device_count(),
        "name": torch.cuda.get_device_name(),
        "capability": torch.cuda.get_device_capability(0),
        "interface": CudaInterface.get_compute_capability(),
    }


EXPECTED = {
    "available": True,
    "count": 1,
    "name": "NVIDIA H100 80GB HBM3",
    "capability": (9, 0),
    "interface": 90,
}


def test_the_gpu_is_reported_in_this_thread_only() -> None:
    before, others = reported(), []
    with offline_gpu.report(H100):
        thread = threading.Thread(target=lambda: others.append(reported()))
        thread.start()
        thread.join()
        assert reported() == EXPECTED
    assert others == [before]
    assert reported() == before


def test_triton_finds_a_driver_in_this_thread_only() -> None:
    from triton.runtime import driver

    found = []

    def look() -> None:
        try:
            found.append(type(driver.active).__name__)
        except RuntimeError as error:  # without a GPU
            found.append(str(error))

    look()
    with offline_gpu.report(H100):
        assert driver.active.get_current_target().arch == 90
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    look()
    assert len(set(found)) == 1
    assert context.current().target_gpu is None


def test_reports_nest_and_end_after_an_error() -> None:
    before = reported()
    with offline_gpu.report(H100):
        with pytest.raises(ZeroDivisionError):
            _fail_inside_a100()
        assert reported() == EXPECTED
    assert reported() == before


def _fail_inside_a100() -> None:
    with offline_gpu.report(targets.gpu_properties("A100")):
        assert torch.cuda.get_device_capability() == (8, 0)
        raise ZeroDivisionError


def test_the_description_of_the_device_is_not_cached() -> None:
    from torch._inductor.runtime.hints import DeviceProperties

    device = torch.device("cuda", 0)
    created: Any = DeviceProperties.create
    before = created.cache_info().currsize
    found = []
    for name in ("H100", "A100", "B200"):
        with offline_gpu.report(targets.gpu_properties(name)):
            properties = DeviceProperties.create(device)
            found.append((properties.cc, properties.multi_processor_count))
    assert found == [(90, 132), (80, 108), (100, 148)]
    assert created.cache_info().currsize <= before + torch.cuda.device_count()


def test_fake_tensors_do_not_initialize_cuda() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with offline_gpu.report(H100), FakeTensorMode() as mode:
        assert mode.avoid_device_init
        x = torch.ones(4, 3, device="cuda")
        assert (x @ torch.tensor([1.0, 2.0, 3.0], device="cuda")).device.type == "cuda"


def test_properties_are_those_of_the_driver() -> None:
    if not torch.cuda.is_available():
        names = [name for name in vars(H100) if name != "emits_ptx"]
        assert {"name", "major", "warp_size", "L2_cache_size"} <= set(names)
        return
    actual = torch.cuda.get_device_properties(0)
    for name, value in vars(H100).items():
        if name != "emits_ptx":
            assert isinstance(getattr(actual, name), type(value)), name


PROBE = """
import json, sys, torch
import inductor_ext
from inductor_ext import targets
from inductor_ext.hooks import registry
from inductor_ext.hooks.offline_gpu import HOOKS
with inductor_ext.activate():
    pass
def installed():
    places = [registry.find_owner(hook) for hook in HOOKS if registry.has_target(hook)]
    return sum(hasattr(getattr(*place), "_inductor_ext_hook") for place in places)
before = installed()
with targets.Target("sm_90", "x86-64-v3", targets.gpu_properties("H100")).scope():
    pass
print(json.dumps([before, installed(), sum(map(registry.has_target, HOOKS))]))
"""


def test_dispatchers_are_installed_at_the_first_use() -> None:
    process = subprocess.run(
        [sys.executable, "-c", PROBE], check=True, capture_output=True, text=True
    )
    before, after, existing = json.loads(process.stdout.splitlines()[-1])
    assert before == 0
    assert after == existing > 20


def test_functions_of_c_and_nested_classes_can_be_replaced() -> None:
    paths = {hook.targets[0] for hook in offline_gpu.HOOKS if registry.has_target(hook)}
    assert "torch._dynamo.device_interface.CudaInterface.Worker.current_device" in paths
    assert "torch.cuda._exchange_device" in paths
