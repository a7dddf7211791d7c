"""Serialized fallback nodes: enumeration values differ between export and the executor."""

from __future__ import annotations

import pathlib

import pytest
import torch
import torch._inductor

import inductor_ext
from inductor_ext import exc
from inductor_ext.cpp_wrapper.codegen import extern_nodes
from test.support.built_models import uncached_packages


def test_enumeration_values_for_executors_without_conversion() -> None:
    from torch._export.serde import schema

    nodes = {
        "inputs": [
            {"name": "dtype", "arg": {"as_scalar_type": int(schema.ScalarType.DOUBLE)}},
            {"name": "other", "arg": {"as_scalar_type": int(schema.ScalarType.BFLOAT16)}},
            {"name": "layout", "arg": {"as_layout": int(schema.Layout.Strided)}},
            {"name": "format", "arg": {"as_memory_format": int(schema.MemoryFormat.ChannelsLast)}},
            {"name": "number", "arg": {"as_int": 8}},
        ]
    }
    numbers = [next(iter(item["arg"].values())) for item in extern_nodes.renumber(nodes)["inputs"]]
    # c10's Double, BFloat16, Strided and ChannelsLast.
    assert numbers == [7, 15, 0, 2, 8]


@pytest.mark.parametrize("takes_dtype", [False, True])
def test_a_torch_with_other_dtype_numbers_is_rejected(
    takes_dtype: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the artifact itself, because torch's loaders do not check its torch version."""

    def convert(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return x.to(dtype).sin() if dtype is not None else x.sin()

    with torch.library._scoped_library("test_aot_build", "DEF") as library:
        library.define("convert(Tensor x, ScalarType? dtype=None) -> Tensor")
        library.impl("convert", convert, "CPU")
        torch.library.register_fake("test_aot_build::convert", convert, lib=library)

        class Converted(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                arguments = (torch.float64,) if takes_dtype else ()
                return torch.ops.test_aot_build.convert(x + 1, *arguments) * 2

        other = not extern_nodes.takes_export_numbers()
        monkeypatch.setattr(extern_nodes, "takes_export_numbers", lambda: other)
        x, path = torch.randn(3), str(tmp_path / "m.pt2")
        program = torch.export.export(Converted(), (x,))
        # The key of a cached package does not depend on what is replaced here.
        with uncached_packages():
            inductor_ext.aoti_compile_and_package(program, package_path=path)
        if not takes_dtype:
            torch.testing.assert_close(inductor_ext.load(path)(x), Converted()(x))
            return
        with pytest.raises(exc.ArtifactLoadError) as error:
            inductor_ext.load(path)
        version = ".".join(torch.__version__.split(".")[:2])
        assert f"compiled with torch {torch.__version__}, but this is torch {version}" in str(
            error.value
        )
