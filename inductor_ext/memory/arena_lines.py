"""Lines of the generated wrapper that make an arena, a buffer inside it, and the arena's end.

They are to arenas what Inductor's AllocateLine and FreeIfNotReusedLine are to memory of a buffer's
own, in Python and in C++. In Python an arena is a flat tensor of the element type that most members
have, with a typed alias for every other one, so that a member is one `reinterpret_tensor`, the
cheapest call there is (0.59 us on a CPU where a plain allocation takes 0.49 and `alloc_from_pool`
3.1). In C++ a member is `aoti_torch__alloc_from_pool`, its handle owned in the next line. The
variable of a member is dropped where it is not used any more, by the lines that are there anyway;
the memory goes when arena and members are gone.

With `debug` a member is checked against its arena's bounds when it is made, and its range is
overwritten when it is freed (`arena_runtime`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._inductor.codegen.wrapper import MemoryPlanningLine
from torch._inductor.utils import IndentedBuffer
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import FloorDiv

from inductor_ext.memory.arena_runtime import POISON
from inductor_ext.memory.planner.symbolic import Replanner

__all__ = [
    "ArenaEndLine",
    "ArenaLine",
    "ArenaVariable",
    "MemberEndLine",
    "MemberLine",
    "MemberPlace",
]


@dataclasses.dataclass(frozen=True)
class ArenaVariable:
    """An arena in the generated code."""

    name: str
    device: torch.device
    bytes: Any
    """Size: int or sympy expression, a multiple of 16."""
    dtypes: tuple[torch.dtype, ...]
    """Of its members, the most frequent first."""
    definitions: tuple[tuple[sympy.Symbol, sympy.Expr], ...] = ()
    """Variables that size and offsets use, in the order in which to assign them."""
    replan: tuple[Replanner, tuple[Any, ...]] | None = None
    """What plans it at run time, and the sizes to call that with (Python only)."""

    def alias(self, dtype: torch.dtype) -> str:
        """The Python variable of the arena as elements of `dtype`."""
        if dtype == self.dtypes[0]:
            return self.name
        return f"{self.name}_{str(dtype).removeprefix('torch.')}"


@dataclasses.dataclass(frozen=True)
class MemberPlace:
    """Where in its arena a buffer lies."""

    index: int
    """Among the arena's members."""
    offset: Any
    """Bytes: int or sympy expression. It does not hold where the arena is planned at run time."""

    def python(self, arena: ArenaVariable, wrapper: Any, itemsize: int) -> str:
        """The offset in elements of `itemsize` bytes, as a Python expression."""
        if arena.replan is not None:
            offset = f"{arena.name}_offsets[{self.index}]"
            return offset if itemsize == 1 else f"{offset} // {itemsize}"
        code: str = wrapper.codegen_python_sizevar(_elements(self.offset, itemsize))
        return code


def _elements(nbytes: Any, itemsize: int) -> Any:
    size = sympy.sympify(nbytes)
    quotient = size / itemsize
    # sympy may know that half of an even maximum is an integer; printed as Python it is a float.
    whole = all(number.is_Integer for number in quotient.atoms(sympy.Number))
    return quotient if whole else FloorDiv(size, itemsize)


class _Line(MemoryPlanningLine):
    def codegen_fx(self, converter: Any) -> Any:
        raise RuntimeError("arenas are not planned for the FX wrapper")


@dataclasses.dataclass
class ArenaLine(_Line):
    """Allocate the arena."""

    arena: ArenaVariable
    members: int

    def codegen(self, code: IndentedBuffer) -> None:
        """Write the line."""
        arena, wrapper = self.arena, self.wrapper
        dtype = torch.uint8 if V.graph.cpp_wrapper else arena.dtypes[0]
        size = arena.bytes
        if arena.replan is not None:
            size = self._replan(code, arena.replan)
        else:
            for symbol, value in arena.definitions:
                declare = "int64_t " if V.graph.cpp_wrapper else ""
                code.writeline(
                    f"{declare}{symbol} = {wrapper.codegen_sizevar(value)}{wrapper.ending}"
                )
        shape = (_elements(size, dtype.itemsize),)
        made = wrapper.make_allocation(arena.name, arena.device, dtype, shape, (sympy.S.One,))
        code.writeline(f"{made}  {wrapper.comment} arena of {self.members} buffers")
        if not V.graph.cpp_wrapper:
            for other in arena.dtypes[1:]:
                code.writeline(f"{arena.alias(other)} = {arena.name}.view({other})")

    def _replan(self, code: IndentedBuffer, replan: tuple[Replanner, tuple[Any, ...]]) -> Any:
        """Write the call that plans the arena, and return its size in bytes."""
        planner, sizes = replan
        name, wrapper = self.arena.name, self.wrapper
        wrapper.add_import_once(f"from {Replanner.__module__} import Replanner")
        wrapper.header.writeline(f"plan_{name} = {planner!r}.plan")
        arguments = wrapper.codegen_python_shape_tuple(tuple(map(sympy.sympify, sizes)))
        code.writeline(f"{name}_bytes, {name}_offsets = plan_{name}({arguments})")
        return sympy.Symbol(f"{name}_bytes", integer=True, nonnegative=True)


@dataclasses.dataclass
class MemberLine(_Line):
    """Make a buffer at its place in the arena."""

    node: Any
    arena: ArenaVariable
    place: MemberPlace
    bytes: Any
    debug: bool = False

    def codegen(self, code: IndentedBuffer) -> None:
        """Write the line."""
        node, wrapper, arena = self.node, self.wrapper, self.arena
        name, dtype = node.get_name(), node.get_dtype()
        shape, stride = tuple(node.get_size()), tuple(node.get_stride())
        if V.graph.cpp_wrapper:
            if self.debug:
                end = wrapper.codegen_sizevar(self.place.offset + self.bytes)
                size = f"{name}_arena_bytes"
                code.writeline(f"int64_t {size};")
                code.writeline(
                    "AOTI_TORCH_ERROR_CODE_CHECK("
                    f"aoti_torch_get_storage_size({arena.name}, &{size}));"
                )
                code.writeline(
                    f"if ({end} > {size}) throw std::runtime_error("
                    f'"inductor_ext: {name} ends beyond its arena {arena.name}");'
                )
            made, before = wrapper.codegen_alloc_from_pool(
                arena.name, self.place.offset, dtype, shape, stride
            )
            code.writelines(before)
            code.writeline(f"{wrapper.declare}{name} = {made}{wrapper.ending}")
            return
        arguments = ", ".join(
            (
                arena.alias(dtype),
                wrapper.codegen_python_shape_tuple(shape),
                wrapper.codegen_python_shape_tuple(stride),
                self.place.python(arena, wrapper, dtype.itemsize),
            )
        )
        if self.debug:
            wrapper.add_import_once(_RUNTIME_IMPORT)
            code.writeline(f"{name} = arena_runtime.checked_view({arguments})")
        else:
            code.writeline(f"{name} = reinterpret_tensor({arguments})")


_RUNTIME_IMPORT = "from inductor_ext.memory import arena_runtime"


@dataclasses.dataclass
class MemberEndLine(_Line):
    """Overwrite the range of a buffer that is not used any more (debugging)."""

    arena: ArenaVariable
    place: MemberPlace
    bytes: Any

    def codegen(self, code: IndentedBuffer) -> None:
        """Write the line."""
        wrapper, arena = self.wrapper, self.arena
        if not V.graph.cpp_wrapper:
            wrapper.add_import_once(_RUNTIME_IMPORT)
            offset = self.place.python(arena, wrapper, 1)
            size = wrapper.codegen_python_sizevar(self.bytes)
            code.writeline(f"arena_runtime.poison({arena.name}, {offset}, {size})")
            return
        made, before = wrapper.codegen_alloc_from_pool(
            arena.name, self.place.offset, torch.uint8, (sympy.sympify(self.bytes),), (sympy.S.One,)
        )
        code.writelines(before)
        code.writeline(
            f"AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_{arena.device.type}_fill__Scalar("
            f"{made}, {POISON}));"
        )


@dataclasses.dataclass
class ArenaEndLine(_Line):
    """Drop the arena."""

    arena: ArenaVariable

    def codegen(self, code: IndentedBuffer) -> None:
        """Write the line."""
        if V.graph.cpp_wrapper:
            code.writeline(f"{self.arena.name}.reset();")
        else:
            names = [self.arena.alias(dtype) for dtype in self.arena.dtypes]
            code.writeline(f"del {', '.join(names)}")
