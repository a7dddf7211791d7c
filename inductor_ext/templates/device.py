"""Hardware description of a GPU for the GEMM cost model.

`Device` holds sizes as the driver reports them and sustained rates (what kernels reach, not what
the datasheet states). `KNOWN` lists devices with the source of each number.
`Device.from_properties` looks up a device there by name; for an unknown device it scales the rates
of the nearest known device by the number of multiprocessors (SMs), which covers MIG slices and
boards that are not listed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from inductor_ext import exc

SUSTAINED_COMPUTE = 800 / 989.4
"""Sustained over datasheet tensor core throughput: 800 of 989.4 TFLOP/s bf16 on an H200
[measured]."""

SUSTAINED_BANDWIDTH = 4.25 / 4.8
"""Sustained over datasheet DRAM bandwidth: 4.25 of 4.8 TB/s on an H200 [measured].

An H100 SXM agrees: 3.0 of 3.35 TB/s in a copy, 798 TFLOP/s in a bf16 GEMM of 8192^3 [measured]."""

_KIB = 1024
_MIB = 1024 * _KIB


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU. Rates are sustained rates, and 0 where the hardware does not support the dtype.

    Raises:
        exc.BadGemmError: a size or rate is out of range.
    """

    name: str
    """As returned by torch.cuda.get_device_name."""
    capability: tuple[int, int]
    sms: int
    """Number of multiprocessors."""
    shared_memory: int
    """Maximum shared memory per block with opt-in, bytes."""
    shared_memory_sm: int
    """Shared memory per SM, bytes."""
    registers_sm: int
    """32-bit registers per SM."""
    l2: int
    """L2 cache size, bytes."""
    bandwidth: float
    """DRAM bandwidth, bytes/s."""
    half: float
    """Dense bfloat16 or float16 tensor core throughput with float32 accumulators, FLOP/s."""
    tf32: float
    """FLOP/s."""
    fp8: float
    """FLOP/s."""
    int8: float
    """Operations/s."""
    fma: float
    """float32 throughput without tensor cores, FLOP/s."""
    launch: float = 4.0
    """Launch overhead in microseconds: from the end of the previous kernel to the first
    instruction, and from the last instruction to the end [measured on an H200 with CUDA events
    around one kernel]."""

    def __post_init__(self) -> None:
        sizes = ("sms", "shared_memory", "shared_memory_sm", "registers_sm", "l2", "bandwidth")
        for name in (*sizes, "fma"):
            if not getattr(self, name) > 0:
                raise self._make_error(name, "positive")
        for name in ("half", "tf32", "fp8", "int8", "launch"):
            if not getattr(self, name) >= 0:
                raise self._make_error(name, "0 or more")

    def _make_error(self, field: str, allowed: str) -> exc.BadGemmError:
        return exc.BadGemmError(
            record="device", field=field, value=getattr(self, field), allowed=allowed
        )

    def throughput(self, kind: str) -> float:
        """Return the throughput in FLOP/s of `half`, `tf32`, `fp8`, `int8` or `fma`."""
        return float(getattr(self, kind))

    def with_sms(self, sms: int) -> Device:
        """Return a device with the same SMs but `sms` of them; rates and L2 scale in proportion."""
        ratio = sms / self.sms
        return replace(
            self,
            sms=sms,
            l2=max(1, round(self.l2 * ratio)),
            bandwidth=self.bandwidth * ratio,
            half=self.half * ratio,
            tf32=self.tf32 * ratio,
            fp8=self.fp8 * ratio,
            int8=self.int8 * ratio,
            fma=self.fma * ratio,
        )

    @classmethod
    def from_torch(cls, properties: Any) -> Device:
        """Return the device for the result of `torch.cuda.get_device_properties`."""
        return cls.from_properties(
            properties.name,
            (properties.major, properties.minor),
            properties.multi_processor_count,
            properties.shared_memory_per_block_optin,
            properties.L2_cache_size,
            shared_memory_sm=properties.shared_memory_per_multiprocessor,
            registers_sm=properties.regs_per_multiprocessor,
        )

    @classmethod
    def from_properties(
        cls,
        name: str,
        capability: tuple[int, int],
        sms: int,
        shared_memory: int,
        l2: int,
        *,
        shared_memory_sm: int | None = None,
        registers_sm: int = 65536,
        bandwidth: float | None = None,
    ) -> Device:
        """Return the device with the given driver properties.

        Rates come from `KNOWN`: from the device of the same name, else from the nearest device,
        scaled by the number of SMs. The nearest device has the same capability if there is one,
        else the next lower capability, else the lowest; among those, it has the closest number of
        SMs.

        Args:
            name: as the driver reports it.
            capability: compute capability, major and minor.
            sms: number of multiprocessors.
            shared_memory: maximum shared memory per block with opt-in, bytes.
            l2: L2 cache size, bytes.
            shared_memory_sm: shared memory per SM, bytes; defaults to `shared_memory` plus the 1
                KiB that the driver reserves.
            registers_sm: 32-bit registers per SM.
            bandwidth: theoretical DRAM bandwidth in bytes/s (twice the memory clock times the bus
                width) if the driver reports it; used only for devices that are not in `KNOWN`.

        Raises:
            exc.BadGemmError: a size is out of range.
        """
        if sms < 1:
            raise exc.BadGemmError(record="device", field="sms", value=sms, allowed="positive")
        match = _find_by_name(name)
        reference = match or _find_most_similar(capability, sms)
        rates = reference if reference.sms == sms else reference.with_sms(sms)
        if bandwidth is not None and match is None:
            rates = replace(rates, bandwidth=bandwidth * SUSTAINED_BANDWIDTH)
        if capability < (8, 9):
            rates = replace(rates, fp8=0.0)
        return replace(
            rates,
            name=name,
            capability=capability,
            shared_memory=shared_memory,
            shared_memory_sm=shared_memory_sm or shared_memory + _KIB,
            registers_sm=registers_sm,
            l2=l2,
        )


def _device(
    name: str,
    *,
    capability: tuple[int, int],
    sms: int,
    shared: int,
    l2: float,
    bandwidth: float,
    tflops: tuple[float, float, float, float],
    fma: float,
) -> Device:
    """Return a `KNOWN` entry from datasheet numbers.

    Args:
        name: as the driver reports it.
        capability: compute capability, major and minor.
        sms: number of multiprocessors.
        shared: maximum shared memory per block with opt-in, KiB; an SM has 1 KiB more.
        l2: MiB.
        bandwidth: TB/s (1e12 bytes/s).
        tflops: dense half, tf32, fp8, int8; TFLOP/s.
        fma: float32 without tensor cores, TFLOP/s.
    """
    half, tf32, fp8, int8 = (value * 1e12 * SUSTAINED_COMPUTE for value in tflops)
    return Device(
        name=name,
        capability=capability,
        sms=sms,
        shared_memory=shared * _KIB,
        shared_memory_sm=(shared + 1) * _KIB,
        registers_sm=65536,
        l2=round(l2 * _MIB),
        bandwidth=bandwidth * 1e12 * SUSTAINED_BANDWIDTH,
        half=half,
        tf32=tf32,
        fp8=fp8,
        int8=int8,
        fma=fma * 1e12 * SUSTAINED_COMPUTE,
    )


# Shared memory per capability: CUDA C++ programming guide, table of technical specifications (8.0:
# 163 KiB per block, 8.9: 99, 9.0 and 10.0: 227). Since Ada and Hopper, NVIDIA's datasheets state
# throughput with 2:4 sparsity; it is halved here.
_ampere = functools.partial(_device, capability=(8, 0), shared=163)
_ada = functools.partial(_device, capability=(8, 9), shared=99)
_hopper = functools.partial(_device, capability=(9, 0), shared=227)
_blackwell = functools.partial(_device, capability=(10, 0), shared=227)

# NVIDIA A100 datasheet (2021): 312 / 156 / - / 624, float32 19.5. 40 MB of L2, 108 SMs: A100
# whitepaper.
_a100 = functools.partial(_ampere, sms=108, l2=40, tflops=(312, 156, 0, 624), fma=19.5)

# NVIDIA H100 datasheet: 1979 / 989 / 3958 / 3958 sparse, float32 67. 132 SMs: H100 whitepaper and
# the driver.
_h100_sxm = functools.partial(_hopper, sms=132, tflops=(989.4, 494.7, 1979, 1979), fma=67)

KNOWN: tuple[Device, ...] = (
    # A100 datasheet: 1.555 TB/s with 40 GB, 2.039 with 80 GB (SXM), 1.935 with 80 GB (PCIe).
    _a100("NVIDIA A100-SXM4-40GB", bandwidth=1.555),
    _a100("NVIDIA A100-SXM4-80GB", bandwidth=2.039),
    _a100("NVIDIA A100-PCIE-40GB", bandwidth=1.555),
    _a100("NVIDIA A100 80GB PCIe", bandwidth=1.935),
    # H100 datasheet: SXM 3.35 TB/s; PCIe 1513 / 756 / 3026 / 3026 sparse, float32 51, 2.0 TB/s; NVL
    # 1671 / 835 / 3341 / 3341 sparse, 60, 3.9 TB/s. 114 SMs (PCIe), 132 (NVL), 50 MB of L2: H100
    # whitepaper and the driver.
    _h100_sxm("NVIDIA H100 80GB HBM3", l2=50, bandwidth=3.35),
    _hopper(
        "NVIDIA H100 PCIe", sms=114, l2=50, bandwidth=2.0, tflops=(756, 378, 1513, 1513), fma=51
    ),
    _hopper(
        "NVIDIA H100 NVL", sms=132, l2=50, bandwidth=3.9, tflops=(835, 417, 1670, 1670), fma=60
    ),
    # NVIDIA H200 datasheet: throughput of the H100 SXM, 4.8 TB/s. 60 MB of L2: the driver. The
    # sustained rates (800 TFLOP/s, 4.25 TB/s) were measured on this device.
    _h100_sxm("NVIDIA H200", l2=60, bandwidth=4.8),
    # NVIDIA L4 datasheet: 242 / 120 / 485 / 485 sparse, float32 30.3, 300 GB/s. 58 SMs and 48 MB of
    # L2: Ada whitepaper.
    _ada("NVIDIA L4", sms=58, l2=48, bandwidth=0.3, tflops=(121, 60, 242.5, 242.5), fma=30.3),
    # NVIDIA Ada GPU architecture whitepaper, appendix A: 165.2 with float32 accumulators (twice
    # that with float16 ones), tf32 82.6, fp8 330.3, int8 660.6, float32 82.6; 1.008 TB/s, 72 MB of
    # L2, 128 SMs.
    _ada(
        "NVIDIA GeForce RTX 4090",
        sms=128,
        l2=72,
        bandwidth=1.008,
        tflops=(165.2, 82.6, 330.3, 660.6),
        fma=82.6,
    ),
    # NVIDIA HGX B200 datasheet, one of eight: 4.5 / 2.2 / 9 / 9 PFLOP/s sparse, float32 75. 148
    # SMs, 126.5 MB of L2 and 7.67 TB/s (7680 bits at 3996 MHz): the driver.
    _blackwell(
        "NVIDIA B200", sms=148, l2=126.5, bandwidth=7.67, tflops=(2250, 1100, 4500, 4500), fma=75
    ),
)


def _find_by_name(name: str) -> Device | None:
    """Return the known device with this name; the name of a MIG slice starts with that of the
    GPU.
    """
    for device in KNOWN:
        if name == device.name or name.startswith(f"{device.name} MIG"):
            return device
    return None


def _find_most_similar(capability: tuple[int, int], sms: int) -> Device:
    """Return the known device that is most similar to an unknown one."""
    capabilities = {device.capability for device in KNOWN}
    nearest = max((c for c in capabilities if c <= capability), default=min(capabilities))
    relatives = [device for device in KNOWN if device.capability == nearest]
    return min(relatives, key=lambda device: abs(device.sms - sms))
