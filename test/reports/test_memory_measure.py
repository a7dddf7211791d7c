"""Measured memory: growth, predictions, and which graph each call belongs to."""

from __future__ import annotations

import dataclasses

from inductor_ext.reports import memory_measure
from inductor_ext.reports.memory_measure import Allocation, Measured
from test.support.memory_plans import plan, storage


class TestMeasure:
    def test_growth(self) -> None:
        changes = [(1, 100), (2, 50), (9, -30), (1, -100), (3, 90), (1, 20), (1, -20)]
        allocations = [Allocation(t, "cpu", p, b) for t, (p, b) in enumerate(changes)]
        assert memory_measure.growth(allocations) == (150, [30])

    def test_inputs_count_as_freed_where_the_run_frees_them(self) -> None:
        record = plan(
            (
                storage("kept", 4096, 0, 1, kind="input"),
                storage("donated", 1024, 0, 1, kind="input"),
                storage("buf", 2048, 1, 2),
                storage("out", 1024, 0, 2, kind="output"),
            )
        )
        assert memory_measure.predict(record, "cpu", [1000]) == 2048
        assert memory_measure.predict(record, "cpu", []) == 3072
        assert memory_measure.predict(record, "cpu", [4096, 1024]) == 1024
        assert memory_measure.predict(record, "cpu", [999_999]) == 3072

    def test_freed_blocks_belong_to_inputs_in_order(self) -> None:
        """Of inputs with one size, those whose neighbors were freed around them are freed."""
        names, sizes = "abcdef", (512, 1024, 512, 2048, 512, 4096)
        inputs = [
            storage(name, size, 0, end, kind="input")
            for end, (name, size) in enumerate(zip(names, sizes, strict=True), 1)
        ]

        def find(*blocks: int) -> str:
            return "".join(sorted(s.name for s in memory_measure.find_freed(inputs, blocks)))

        assert find(1024, 512, 2048, 512, 4096) == "bcdef"
        assert find(512, 1024, 512, 2048) == "abcd"
        assert find(512, 1024, 2000, 512) == "abde"  # blocks before they are rounded up
        assert find(512) == "e"  # the later ones, if the order does not tell
        assert find(4096, 2048, 1024) == "bdf"  # out of order
        assert find(512, 512, 512, 512) == "ace"
        assert find() == find(999_999) == ""

    def test_gradients_are_kept_if_other_inputs_fit_as_well(self) -> None:
        sizes = {"saved": 512, "tangents_1": 512, "primals_1": 512, "tangents_2": 512}
        inputs = [
            storage(name, size, 0, end, kind="input")
            for end, (name, size) in enumerate(sizes.items(), 1)
        ]
        for blocks, names in (
            ((512,), ["primals_1"]),
            ((512, 512), ["saved", "primals_1"]),
            ((512, 512, 512), ["saved", "primals_1", "tangents_2"]),
        ):
            assert [s.name for s in memory_measure.find_freed(inputs, blocks)] == names

    def test_large_blocks_of_a_gpu_exceed_their_tensors(self) -> None:
        """The allocator keeps up to 1 MiB with a block of more than 1 MiB."""
        mib = 1 << 20
        for device, size, block, is_found in (
            ("cuda:0", 32 * mib - 4096, 32 * mib, True),
            ("cuda:0", 32 * mib, 33 * mib, True),
            ("cuda:0", 32 * mib, 33 * mib + 512, False),
            ("cuda:0", mib // 2, mib, False),
            ("cpu", 32 * mib - 4096, 32 * mib, False),
            ("cuda:0", 32 * mib, 32 * mib - 500, True),
            ("cuda:0", 32 * mib, 32 * mib - 512, False),
        ):
            inp = dataclasses.replace(storage("x", size, 0, 1, kind="input"), device=device)
            assert bool(memory_measure.find_freed([inp], [block])) == is_found

    def test_an_input_that_is_kept_counts_until_the_end(self) -> None:
        record = plan(
            (
                storage("gradient", 1024, 0, 1, kind="input"),
                storage("saved", 1024, 0, 3, kind="input"),
                storage("small", 512, 0, 2, kind="input"),
                storage("buf", 2048, 1, 4),
            )
        )
        assert memory_measure.predict(record, "cpu", [512, 1024]) == 2048
        assert memory_measure.predict(record, "cpu", [1024, 512]) == 1024

    def test_deviation(self) -> None:
        measured = Measured("call", "forward", None, "cpu", 1000, 1025)
        assert measured.deviation == 2.5
        assert measured.describe().endswith("measured 1.00 KiB, deviation +2.5 %")
        assert Measured("call", "forward", None, "cpu", 0, 0).deviation == 0

    def test_graphs_without_a_key_are_identified_by_order(self) -> None:
        windows = [("None", 0, 1), ("key", 2, 3), ("None", 4, 5)]
        first, second = plan(()), plan(())
        identify = memory_measure.identify_calls
        assert identify(windows, {"None0": [first], "None1": [second], "key": []}) == [
            ("key", 2, 3),
            ("None0", 0, 1),
            ("None1", 4, 5),
        ]
        assert identify(windows, {"None0": [first]}) == [
            ("key", 2, 3),
            ("None0", 0, 1),
            ("None0", 4, 5),
        ]
        more = {"None0": [first], "None1": [second], "None2": [first]}
        assert identify(windows, more) == [("key", 2, 3)]

    def test_backwards_without_a_key_are_not_identified_among_several_forwards(self) -> None:
        kinds = ("forward", "backward", "forward", "backward")
        plans = {
            f"None{i}": [dataclasses.replace(plan(()), kind=kind)] for i, kind in enumerate(kinds)
        }
        windows = [("None", time, time + 1) for time in range(4)]
        assert memory_measure.identify_calls(windows, plans) == []
        pair = dict(list(plans.items())[:2])
        assert memory_measure.identify_calls(windows[:2], pair) == [
            ("None0", 0, 1),
            ("None1", 1, 2),
        ]
