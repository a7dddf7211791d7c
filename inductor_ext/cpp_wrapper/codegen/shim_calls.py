"""Generated C++ that calls operators by torch's C shims, and describes the call in an error."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

_CHECK = "AOTI_TORCH_ERROR_CODE_CHECK"


class ShimCalls:
    """Mixin for torch's C++ wrapper codegen classes, placed before them in the MRO."""

    reports_operators = False
    """Whether the code includes runtime/model.h, whose functions name the operator that fails."""
    replaced_lines: Mapping[str, str] = {}
    """Lines of torch's codegen and what is written in place of them."""

    def generate_c_shim_extern_kernel_call(
        self: Any, kernel: str, args: list[str], device: str, **options: Any
    ) -> None:
        """Generate a call of an operator by its C shim; see torch's method."""
        if self.reports_operators:
            shim = self.get_c_shim_func_name(kernel, device)
            call = f"{shim}({', '.join(args)})"
            name = shim.removeprefix("aoti_torch_").removeprefix(f"{device}_")
            self.replaced_lines = {
                f"AOTI_TORCH_ERROR_CODE_CHECK({call});": _reporting_call(call, name, args)
            }
        super().generate_c_shim_extern_kernel_call(  # type: ignore[misc]
            kernel, args, device, **options
        )
        self.replaced_lines = {}

    def _generate_scatter_fallback(
        self: Any, output: Any, inputs: Sequence[Any], *args: Any, **kwargs: Any
    ) -> None:
        with self._checked_calls("scatter_reduce_", [str(value) for value in inputs]):
            super()._generate_scatter_fallback(output, inputs, *args, **kwargs)  # type: ignore[misc]

    def _generate_index_put_fallback(
        self: Any, kernel: str, x: str, indices: Sequence[str], values: str, accumulate: str
    ) -> None:
        with self._checked_calls("index_put_", [x, *indices, values, accumulate]):
            super()._generate_index_put_fallback(  # type: ignore[misc]
                kernel, x, indices, values, accumulate
            )

    @contextlib.contextmanager
    def _checked_calls(self: Any, name: str, args: Sequence[str]) -> Iterator[None]:
        """Check what the C shims return that the wrapper calls; see `_reporting_call`.

        Until torch 2.13 the result is ignored: with an index that is out of bounds, the program
        goes on with a tensor that was not written.
        """
        write = self.writeline

        def write_checked(line: Any) -> None:
            call = _shim_call(line) if isinstance(line, str) else None
            if call is not None:
                reports = self.reports_operators
                line = _reporting_call(call, name, args) if reports else f"{_CHECK}({call});"
            write(line)

        with mock.patch.object(self, "writeline", write_checked):
            yield

    def writelines(self, lines: Iterable[Any]) -> None:
        """Write lines, with those of `replaced_lines` replaced."""
        lines = [
            self.replaced_lines.get(line, line) if isinstance(line, str) else line for line in lines
        ]
        super().writelines(lines)  # type: ignore[misc]


def _reporting_call(call: str, name: str, args: Sequence[str]) -> str:
    """Return the statement that calls a C shim, and describes the call in an error.

    Args:
        call: the C++ expression.
        name: the name of the operator.
        args: the C++ expressions of its arguments.
    """
    # The other arguments of this form are variables of results.
    shown = [arg for arg in args if _is_tensor(arg) or not arg.endswith("_handle")]
    values = ["\1" if _is_tensor(arg) else _show_argument(arg) for arg in shown]
    text = quote(f"aten::{name}({', '.join(values)})")
    tensors = [arg for arg in args if _is_tensor(arg)]
    return f"INDUCTOR_EXT_CALL_OPERATOR({', '.join((call, text, *tensors))});"


def _shim_call(statement: str) -> str | None:
    """The call of a C shim, if a statement is one, whether it checks the result or not."""
    call = statement.strip().removesuffix(";")
    if call.startswith(f"{_CHECK}("):
        call = call[len(_CHECK) + 1 : -1]
    return call if call.startswith("aoti_torch_") else None


def _is_tensor(argument: str) -> bool:
    """Whether a C++ expression is a tensor, which can be evaluated again."""
    import sympy  # type: ignore[import-untyped]
    from torch._inductor.virtualized import V

    if argument.startswith(("wrap_with_raii_handle_if_needed(", "reinterpret_tensor_wrapper(")):
        return True
    graph = V.graph
    if argument in graph.graph_inputs:
        return not isinstance(graph.graph_inputs[argument], sympy.Basic)
    return argument in graph.name_to_buffer or argument in graph.constants


def _show_argument(argument: str) -> str:
    """Return a number of C++ for a message; an ellipsis for other expressions."""
    number = re.fullmatch(r"(-?\d[\d.e+-]*)(?:LL?)?|true|false", argument)
    if number is None:
        return "None" if argument == "nullptr" else "..."
    return number[1] or argument


def quote(text: str) -> str:
    """Return a C++ string literal."""
    # Octal escapes end after three digits, unlike hexadecimal ones.
    plain = {*range(32, 127)} - set(b'"\\?')
    return '"' + "".join(chr(b) if b in plain else f"\\{b:03o}" for b in text.encode()) + '"'
