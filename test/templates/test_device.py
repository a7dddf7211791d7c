"""Known devices, their parts, and unknown ones."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from inductor_ext import exc
from inductor_ext.templates.device import KNOWN, Device
from test.support.gemm_strategies import device
from test.support.problem_examples import A100, H200, L4


class TestDevice:
    def test_the_h200_has_measured_constants(self) -> None:
        assert H200.half == pytest.approx(800e12)
        assert H200.bandwidth == pytest.approx(4.25e12)
        assert (H200.sms, H200.capability, H200.shared_memory) == (132, (9, 0), 232_448)

    @pytest.mark.parametrize("known", KNOWN, ids=lambda entry: entry.name)
    def test_a_known_device_is_found_by_its_properties(self, known: Device) -> None:
        result = Device.from_properties(
            known.name, known.capability, known.sms, known.shared_memory, known.l2
        )
        assert result == known

    def test_names_are_unique(self) -> None:
        assert len({entry.name for entry in KNOWN}) == len(KNOWN)

    def test_a_slice_of_a_known_device_has_its_part(self) -> None:
        part = Device.from_properties("NVIDIA H200 MIG 1g.18gb", (9, 0), 16, 232_448, 8 << 20)
        assert part.half == pytest.approx(H200.half * 16 / 132)
        assert part.bandwidth == pytest.approx(H200.bandwidth * 16 / 132)
        assert part.l2 == 8 << 20

    def test_an_unknown_device_is_scaled_from_its_nearest_relative(self) -> None:
        result = Device.from_properties("NVIDIA L40S", (8, 9), 142, 101_376, 96 << 20)
        relative = device("NVIDIA GeForce RTX 4090")
        assert result.half == pytest.approx(relative.half * 142 / 128)
        assert result.capability == (8, 9)
        # Of the next lower capability if there is none of the same.
        newer = Device.from_properties("NVIDIA B300", (10, 3), 148, 232_448, 126 << 20)
        assert newer.half == device("NVIDIA B200").half
        older = Device.from_properties("NVIDIA A10G", (8, 6), 80, 101_376, 6 << 20)
        assert older.half == pytest.approx(A100.half * 80 / 108)
        assert older.fp8 == 0

    def test_driver_bandwidth_is_for_unknown_devices_only(self) -> None:
        arguments = ((9, 0), 78, 232_448, 60 << 20)
        unknown = Device.from_properties("NVIDIA H20", *arguments, bandwidth=4.8e12)
        assert unknown.bandwidth == pytest.approx(4.25e12)
        known = Device.from_properties("NVIDIA H200", *arguments, bandwidth=1e12)
        assert known.bandwidth == pytest.approx(H200.bandwidth * 78 / 132)

    def test_capability_8_0_has_no_fp8(self) -> None:
        assert A100.throughput("fp8") == 0
        assert L4.throughput("fp8") > L4.throughput("half")

    @pytest.mark.parametrize(
        ("field", "value"), [("sms", 0), ("l2", 0), ("bandwidth", -1.0), ("half", math.nan)]
    )
    def test_invalid_devices_are_refused(self, field: str, value: float) -> None:
        with pytest.raises(exc.BadGemmError, match=field):
            replace(H200, **{field: value})

    def test_time_scales_with_the_number_of_sms(self) -> None:
        twice = H200.with_sms(264)
        for rate in ("half", "tf32", "fp8", "int8", "fma", "bandwidth"):
            assert getattr(twice, rate) == pytest.approx(2 * getattr(H200, rate))
        assert (twice.shared_memory, twice.sms) == (H200.shared_memory, 264)
