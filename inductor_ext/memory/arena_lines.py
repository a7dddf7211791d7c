"""Lines of the generated wrapper that allocate an arena, create a buffer in it, and free it.

They are for arenas what Inductor's AllocateLine and FreeIfNotReusedLine are for separately
allocated buffers, in Python and in C++. In Python an arena is a flat tensor of its members' most
frequent dtype, with a typed alias for every other dtype. A member is then one `reinterpret_tensor`,
the cheapest call available (0.59 us on a CPU where a plain allocation takes 0.49 and
`alloc_from_pool` 3.1). In C++ a member is `aoti_torch__alloc_from_pool`, whose handle is owned in
the next line. The existing lines drop the variable of a member after its last use. The memory is
freed when the arena and all members are dropped.

With `debug` a member is checked against its arena's bounds when it is created, and its range is
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


@dataclasses.dataclass(frozen=True)
class ArenaVariable:
    """The variable of an arena in the generated code."""

    name: str
    device: torch.device
    bytes: Any
    """Size: int or sympy expression, a multiple of 16."""
    dtypes: tuple[torch.dtype, ...]
    """Dtypes of the members, most frequent first."""
    definitions: tuple[tuple[sympy.Symbol, sympy.Expr], ...] = ()
    """Variables that the size and the offsets use, in the order of assignment."""
    replan: tuple[Replanner, tuple[Any, ...]] | None = None
    """The run-time planner and the sizes to call it with (Python only)."""

    def alias(self, dtype: torch.dtype) -> str:
        """Return the Python variable that views the arena as `dtype`."""
        if dtype == self.dtypes[0]:
            return self.name
        return f"{self.name}_{str(dtype).removeprefix('torch.')}"


@dataclasses.dataclass(frozen=True)
class MemberPlace:
    """The location of a buffer in its arena."""

    index: int
    """Index among the arena's members."""
    offset: Any
    """Bytes: int or sympy expression. Not valid if the arena is planned at run time."""

    def python(self, arena: ArenaVariable, wrapper: Any, itemsize: int) -> str:
        """Return the offset in elements of `itemsize` bytes, as a Python expression."""
        if arena.replan is not None:
            offset = f"{arena.name}_offsets[{self.index}]"
            return offset if itemsize == 1 else f"{offset} // {itemsize}"
        code: str = wrapper.codegen_python_sizevar(_elements(self.offset, itemsize))
        return code


def _elements(nbytes: Any, itemsize: int) -> Any:
    size = sympy.sympify(nbytes)
    quotient = size / itemsize
    # sympy may know that half of an even maximum is an integer, but it prints as a Python float.
    whole = all(number.is_Integer for number in quotient.atoms(sympy.Number))
    return quotient if whole else FloorDiv(size, itemsize)


class _Line(MemoryPlanningLine):
    def codegen_fx(self, converter: Any) -> Any:
        raise RuntimeError("arenas are not supported by the FX wrapper")


@dataclasses.dataclass
class ArenaLine(_Line):
    """A line that allocates the arena."""

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
        code_text = wrapper.make_allocation(arena.name, arena.device, dtype, shape, (sympy.S.One,))
        code.writeline(f"{code_text}  {wrapper.comment} arena of {self.members} buffers")
        if not V.graph.cpp_wrapper:
            for other in arena.dtypes[1:]:
                code.writeline(f"{arena.alias(other)} = {arena.name}.view({other})")

    def _replan(self, code: IndentedBuffer, replan: tuple[Replanner, tuple[Any, ...]]) -> Any:
        """Write the call that plans the arena; return the size in bytes."""
        planner, sizes = replan
        name, wrapper = self.arena.name, self.wrapper
        wrapper.add_import_once("from inductor_ext.memory.planner.symbolic import Replanner")
        wrapper.header.writeline(f"plan_{name} = {planner!r}.plan")
        arguments = wrapper.codegen_python_shape_tuple(tuple(map(sympy.sympify, sizes)))
        code.writeline(f"{name}_bytes, {name}_offsets = plan_{name}({arguments})")
        return sympy.Symbol(f"{name}_bytes", integer=True, nonnegative=True)


@dataclasses.dataclass
class MemberLine(_Line):
    """A line that creates a buffer in the arena."""

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
            code_text, before = wrapper.codegen_alloc_from_pool(
                arena.name, self.place.offset, dtype, shape, stride
            )
            code.writelines(before)
            code.writeline(f"{wrapper.declare}{name} = {code_text}{wrapper.ending}")
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
    """A line that overwrites the range of a freed buffer (debugging)."""

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
        code_text, before = wrapper.codegen_alloc_from_pool(
            arena.name, self.place.offset, torch.uint8, (sympy.sympify(self.bytes),), (sympy.S.One,)
        )
        code.writelines(before)
        code.writeline(
            f"AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_{arena.device.type}_fill__Scalar("
            f"{code_text}, {POISON}));"
        )


@dataclasses.dataclass
class ArenaEndLine(_Line):
    """A line that drops the arena."""

    arena: ArenaVariable

    def codegen(self, code: IndentedBuffer) -> None:
        """Write the line."""
        if V.graph.cpp_wrapper:
            code.writeline(f"{self.arena.name}.reset();")
        else:
            names = [self.arena.alias(dtype) for dtype in self.arena.dtypes]
            code.writeline(f"del {', '.join(names)}")
