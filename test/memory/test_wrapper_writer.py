"""Generated code with arenas: Python and C++, JIT and AOT."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch._inductor.utils import run_and_get_code, run_and_get_cpp_code
from torch.testing import FileCheck

import inductor_ext
from test.support.memory_compiles import check, compiled, matmuls, planning, squares


def arena_lines(code: str) -> list[str]:
    """The lines of code with arenas, without indentation and comments."""
    lines = [line.split("  #")[0].strip() for line in code.splitlines()]
    return [line for line in lines if "pool0" in line]


class TestGeneratedCode:
    """One arena with a symbolic size, and views at symbolic aligned offsets."""

    @torch.no_grad()
    def test_python(self) -> None:
        with planning(memory_planning=True) as records:
            run = compiled(matmuls, dynamic=True)
            _, (code,) = run_and_get_code(run, *squares(32))
        ((arena,),) = (record.arenas for record in records)
        symbol = re.fullmatch(r"4\*align\(4\*(s\d+)\*\*2\)", arena.size)[1]  # type: ignore[index]
        view = f"reinterpret_tensor(pool0, ({symbol}, {symbol}), ({symbol}, 1), "
        slot = f"align(4*{symbol}*{symbol})"
        assert arena_lines(code) == [
            f"pool0 = empty_strided_cpu(({slot}, ), (1, ), torch.float32)",
            f"buf0 = {view}0)",
            f"buf1 = {view}({slot}) // 4)",
            f"buf2 = {view}(3*{slot}) // 4)",
            f"buf3 = {view}({slot}) // 2)",
        ]
        FileCheck().check("# arena of 6 buffers").check("buf4 = buf0; del buf0  # reuse").run(code)
        assert code.count(" = empty_strided_cpu(") == 2, "the arena and the output"
        for size in (1, 7, 32, 65):
            check(run, matmuls, *squares(size))

    @torch.no_grad()
    def test_cpp(self) -> None:
        with planning(memory_planning=True, cpp_wrapper=True) as records:
            run = compiled(matmuls, dynamic=True)
            _, code = run_and_get_cpp_code(run, *squares(32))
        assert [len(record.arenas) for record in records] == [1]
        self.check_cpp(code)
        for size in (1, 7, 32, 65):
            check(run, matmuls, *squares(size))

    @staticmethod
    def check_cpp(code: str) -> None:
        FileCheck().check("RAIIAtenTensorHandle pool0(pool0_handle);  // arena of 6 buffers").check(
            "aoti_torch__alloc_from_pool(pool0, 0,"
        ).check("auto buf0 = RAIIAtenTensorHandle(tmp_tensor_handle_").check(
            "aoti_torch__alloc_from_pool(pool0, align(4L*"
        ).check("aoti_torch__alloc_from_pool(pool0, 3L*align(4L*").check(
            "auto buf4 = std::move(buf0);  // reuse"
        ).run(code)

    def test_aot(self, tmp_path: Path) -> None:
        class Module(torch.nn.Module):
            def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
                return matmuls(x, y, z)

        size = torch.export.Dim("size", min=2, max=4096)
        program = torch.export.export(
            Module(), tuple(squares(32)), dynamic_shapes=[{0: size, 1: size}] * 3
        )
        with planning(memory_planning=True) as records:
            _, code = run_and_get_cpp_code(
                inductor_ext.aoti_compile_and_package, program, package_path=tmp_path / "m.pt2"
            )
        assert [(record.kind, len(record.arenas)) for record in records] == [("aot", 1)]
        self.check_cpp(code)
        run = torch._inductor.aoti_load_package(str(tmp_path / "m.pt2"))
        for n in (2, 32, 65):
            check(run, matmuls, *squares(n))

    @torch.no_grad()
    def test_inductor_backend_is_left_alone(self) -> None:
        with planning(memory_planning=True) as records, inductor_ext.config.patch(enabled=False):
            _, (code,) = run_and_get_code(compiled(matmuls), *squares(32))
        assert records == []
        FileCheck().check("alloc_from_pool(pool").run(code)

    @torch.no_grad()
    def test_other_element_types_get_a_typed_alias(self) -> None:
        def mixed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            a = x @ y
            b = (x.double() @ y.double()) @ y.double()
            c = a @ y
            return ((c @ a) @ c).double() @ b

        with planning(memory_arenas="always"):
            run = compiled(mixed)
            _, (code,) = run_and_get_code(run, *squares(32, 2))
        alias = re.search(r"(pool0_float\d\d) = pool0\.view\(torch\.float\d\d\)", code)
        assert alias is not None
        FileCheck().check(alias[0]).check(f"reinterpret_tensor({alias[1]}, ").run(code)
        check(run, mixed, *squares(32, 2))
