"""Sources of CUTLASS kernels: goldens of what differs between classes, and what does not."""

from __future__ import annotations

import difflib
from dataclasses import replace

import pytest

from inductor_ext.templates.cutlass.epilogue import NotExpressible, Packed, identity
from inductor_ext.templates.cutlass.source import Source, source
from test.support.cutlass_sources import ACTIVATED, BASE, BF16, CLASSES, OLD, biased
from test.support.goldens import assert_matches_golden, golden_names


def lines(result: Source) -> list[str]:
    """A source without its own name, and without functions of epilogues, which have tests of their
    own.
    """
    kept = []
    inside = False
    for line in result.text.replace(result.name, "NAME").splitlines():
        inside = inside or line == "template <class Fragment>"
        if not inside:
            kept.append(line)
        inside = inside and line != "};"
    return kept


def changes(name: str) -> list[str]:
    """The lines of a class that differ from the plain matmul of its family."""
    plain = "old_mm" if name.startswith("old_") else "mm"
    first, second = lines(source(*CLASSES[plain])), lines(source(*CLASSES[name]))
    if name == plain:
        return second
    matcher = difflib.SequenceMatcher(None, first, second, autojunk=False)
    return [
        line
        for tag, _, _, begin, end in matcher.get_opcodes()
        if tag in ("insert", "replace")
        for line in second[begin:end]
    ]


@pytest.mark.parametrize("name", CLASSES)
def test_difference_from_the_plain_matmul(name: str) -> None:
    assert_matches_golden("\n".join(changes(name)) + "\n", "cutlass", name)


def test_there_are_no_other_goldens() -> None:
    assert golden_names("cutlass") == CLASSES.keys()


class TestSource:
    def test_a_launch_makes_no_other_source(self) -> None:
        config, epilogue = CLASSES["mm_stream_k"]
        launched = replace(config, split_k=4, swizzle=8, raster="along_n")
        assert source(launched, epilogue) == source(config, epilogue)

    def test_no_size_is_part_of_it(self) -> None:
        for name in CLASSES:
            assert "4096" not in source(*CLASSES[name]).text

    def test_names_distinguish_epilogues(self) -> None:
        results = [source(BASE, epilogue) for epilogue in (identity(BF16), ACTIVATED)]
        assert results[0].name != results[1].name
        for entry in results:
            assert entry.name.startswith(BASE.name)
            # The name in a profiler.
            assert f"    {entry.name}(__grid_constant__ " in entry.text
            assert "@" not in entry.text

    def test_sources_are_for_one_architecture(self) -> None:
        assert source(BASE, identity(BF16)).architecture == "90a"
        assert source(OLD, identity(BF16)).architecture == "80"
        assert source(*CLASSES["old_scaled"]).architecture == "89"

    def test_older_kernels_are_built_for_their_device(self) -> None:
        results = {
            value: source(replace(OLD, target=value), identity(BF16)) for value in (80, 86, 90, 120)
        }
        assert {key: item.architecture for key, item in results.items()} == {
            80: "80",
            86: "86",
            90: "90",
            120: "120",
        }
        # Each has a name of its own.
        assert len({value.name for value in results.values()}) == 4

    def test_sources_include_no_cutlass_utilities(self) -> None:
        for name in CLASSES:
            text = source(*CLASSES[name]).text
            assert "cutlass/util" not in text
            assert "EXTENDED_MMA_SHAPES" not in text
            assert text.count("#include") <= 13
            # CUTLASS's launchers would compile the kernel for the host, too.
            assert "gemm/device/" not in text

    @pytest.mark.parametrize(
        ("alignment", "dtype", "access"),
        [(8, BF16, 8), (2, BF16, 2), (4, "float32", 8), (2, "float32", 2), (1, BF16, 1)],
    )
    def test_older_kernels_access_rows_by_the_least_alignment(
        self, alignment: int, dtype: str, access: int
    ) -> None:
        text = source(OLD, biased("matrix", dtype, alignment)).text
        assert f"Tile, Warp, cutlass::bfloat16_t, {access}, 1>;" in text

    def test_unsupported_epilogues_are_refused(self) -> None:
        with pytest.raises(NotExpressible):
            source(BASE, identity("float64"))

    def test_a_kernel_for_other_4_bit_weights_is_refused(self) -> None:
        config, epilogue = CLASSES["mixed_uint4"]
        for other in (
            replace(epilogue, packed=None),
            replace(epilogue, inputs=epilogue.inputs[:1]),
        ):
            with pytest.raises(NotExpressible, match="do not match the kernel"):
                source(config, other)
        with pytest.raises(NotExpressible, match="do not match the kernel"):
            source(replace(config, group=None), epilogue)

    def test_each_kind_of_4_bit_weight_has_a_kernel(self) -> None:
        config, epilogue = CLASSES["mixed_uint4"]
        kinds = [Packed(first, zero) for first in (False, True) for zero in (0, 8)]
        results = {source(config, replace(epilogue, packed=kind)).name for kind in kinds}
        assert len(results) == 4
        text = source(config, replace(epilogue, packed=Packed(zero=8))).text
        assert "offset = 0x43084308;" in text
        # Inverting the highest bit of two's complement adds 8.
        signed = source(replace(config, a="int4"), replace(epilogue, packed=Packed(zero=3))).text
        assert "offset = 0x430b430b;" in signed
        assert "^ 0x88888888;" in signed
