"""Generated C++ that calls operators by torch's C shims, and describes the call in an error."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from inductor_ext.cpp_wrapper.codegen.input_names import describe_tensor

_CHECK = "AOTI_TORCH_ERROR_CODE_CHECK"


class ShimCalls:
    """Mixin for torch's C++ wrapper codegen classes, placed before them in the MRO."""

    reports_operators = False
    """Whether the code includes runtime/model.h, whose functions name the operator that fails."""

    def name_input(self, expression: str) -> str | None:
        """Return the model's input that a C++ expression is a view of; None if not known."""

    def generate_c_shim_extern_kernel_call(
        self: Any, kernel: str, args: list[str], device: str, **options: Any
    ) -> None:
        """Generate a call of an operator by its C shim; see torch's method."""
        shim = self.get_c_shim_func_name(kernel, device)
        name = shim.removeprefix("aoti_torch_").removeprefix(f"{device}_")
        with self._checked_calls(f"{shim}(", name, args):
            super().generate_c_shim_extern_kernel_call(  # type: ignore[misc]
                kernel, args, device, **options
            )

    def _generate_scatter_fallback(
        self: Any, output: Any, inputs: Sequence[Any], *args: Any, **kwargs: Any
    ) -> None:
        with self._checked_calls("aoti_torch_", "scatter_reduce_", [str(i) for i in inputs]):
            super()._generate_scatter_fallback(output, inputs, *args, **kwargs)  # type: ignore[misc]

    def _generate_index_put_fallback(
        self: Any, kernel: str, x: str, indices: Sequence[str], values: str, accumulate: str
    ) -> None:
        args = [x, *indices, values, accumulate]
        with self._checked_calls(f"{kernel}(", "index_put_", args):
            super()._generate_index_put_fallback(  # type: ignore[misc]
                kernel, x, indices, values, accumulate
            )

    @contextlib.contextmanager
    def _checked_calls(self: Any, prefix: str, name: str, args: Sequence[str]) -> Iterator[None]:
        """Check what the C shim returns whose call the wrapper writes as a statement.

        Until torch 2.13, `scatter` and `index_put` ignore it: with an index that is out of bounds,
        the program goes on with a tensor that was not written. Also free each handle only once.

        Args:
            prefix: how the call begins.
            name: the name of the operator.
            args: the C++ expressions of its arguments.
        """
        write = self.writeline

        def write_checked(line: Any) -> None:
            call = _called(line) if isinstance(line, str) else ""
            if call.startswith(prefix):
                call = _own_once(call)
                reports = self.reports_operators
                line = (
                    _reporting_call(call, name, args, self.name_input)
                    if reports
                    else f"{_CHECK}({call});"
                )
            write(line)

        with mock.patch.object(self, "writeline", write_checked):
            yield


def _reporting_call(
    call: str, name: str, args: Sequence[str], name_input: Callable[[str], str | None]
) -> str:
    """Return the statement that calls a C shim, and describes the call in an error.

    Args:
        call: the C++ expression.
        name: the name of the operator.
        args: the C++ expressions of its arguments.
        name_input: returns the model's input that an argument is a view of.
    """
    # The other arguments of this form are variables of results.
    shown = [arg for arg in args if _is_tensor(arg) or not arg.endswith("_handle")]
    values = [
        describe_tensor(name_input(arg)) if _is_tensor(arg) else _show_argument(arg)
        for arg in shown
    ]
    text = quote(f"aten::{name}({', '.join(values)})")
    tensors = [arg for arg in args if _is_tensor(arg)]
    return f"INDUCTOR_EXT_CALL_OPERATOR({', '.join((call, text, *tensors))});"


def _called(statement: str) -> str:
    """The call that a statement makes, whether it checks the result or not."""
    call = statement.strip().removesuffix(";")
    return call[len(_CHECK) + 1 : -1] if call.startswith(f"{_CHECK}(") else call


def _own_once(call: str) -> str:
    """Return a call in which each temporary handle is freed by one argument only.

    torch passes the operand of `scatter_` and `index_put_` twice, as the result and as the operand.
    If it is a view, both arguments are objects that free the same handle. An object lives until the
    call has returned, so that the others can be the handle itself.
    """
    for owner, handle in set(re.findall(r"(RAIIAtenTensorHandle\((\w+)\))", call)):
        call = call.replace(owner, handle, call.count(owner) - 1)
    return call


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
