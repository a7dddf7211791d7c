"""Generated C++ that calls operators by name: custom operators, and ATen's without a C shim.

torch's C++ for such a call fails, or passes other values, for many schemas: omitted arguments,
complex numbers, booleans and symbolic numbers as Scalar, empty lists, numbers in place of tensors,
strings with quotes. `FallbackCalls` replaces it. In an AOT package it calls torch's proxy executor
if that can pass all arguments, and otherwise the dispatcher, whose interface ties the package to
one torch release (which the code checks). `generator` adds the mixin to torch's wrapper classes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from inductor_ext import exc
from inductor_ext.cpp_wrapper.codegen import fallback_arguments as arguments
from inductor_ext.cpp_wrapper.codegen.input_names import describe_tensor
from inductor_ext.cpp_wrapper.codegen.shim_calls import quote

_TYPES = {
    "TensorType": "c10::TensorType::get()",
    "IntType": "c10::IntType::get()",
    "SymIntType": "c10::IntType::get()",
    "FloatType": "c10::FloatType::get()",
    "SymFloatType": "c10::FloatType::get()",
    "BoolType": "c10::BoolType::get()",
    "SymBoolType": "c10::BoolType::get()",
    "NumberType": "c10::NumberType::get()",
    "StringType": "c10::StringType::get()",
    "DeviceObjType": "c10::DeviceObjType::get()",
    "ScalarTypeType": "c10::IntType::get()",
    "LayoutType": "c10::IntType::get()",
    "MemoryFormatType": "c10::IntType::get()",
}


def can_generate(op: Any, values: Sequence[Any]) -> bool:
    """Whether `FallbackCalls` generates a call, rather than torch's codegen.

    Args:
        op: the operator; calls of methods of torchbind objects have none with a schema.
        values: its arguments, as `fallback_arguments.complete` returns them.
    """
    pairs = zip(values, op._schema.arguments, strict=True)
    return arguments.returns_tensors(op) and all(
        arguments.is_boxable(value, argument.real_type) for value, argument in pairs
    )


def export(kernel: Any, values: Sequence[Any], stock: Callable[[Any], Any]) -> CompleteArguments:
    """Return a call's arguments, after adding a call by the executor to the extern kernel nodes.

    Args:
        kernel: the FallbackKernel.
        values: its arguments, for which `can_generate` is true.
        stock: torch's `export_extern_kernel_node`.
    """
    op = kernel.op_overload
    result = CompleteArguments(values)
    result.by_executor = _uses_executor(op, values)
    if result.by_executor:
        serialized = [_serializable(value, kernel) for value in values]
        pairs = list(zip(serialized, op._schema.arguments, strict=True))
        args = [value for value, argument in pairs if not argument.kwarg_only]
        kwargs = {argument.name: value for value, argument in pairs if argument.kwarg_only}
        unflatten = kernel.unflatten_args
        kernel.unflatten_args = lambda *_: (args, kwargs)
        try:
            stock(kernel)
        finally:
            kernel.unflatten_args = unflatten
    return result


def _uses_executor(op: Any, values: Sequence[Any]) -> bool:
    """Whether a package passes a call to torch's proxy executor."""
    from torch._inductor.virtualized import V

    pairs = zip(values, op._schema.arguments, strict=True)
    return bool(V.graph.aot_mode) and all(
        arguments.executor_takes(value, argument.real_type, V.graph.device_type)
        for value, argument in pairs
    )


def _serializable(value: Any, kernel: Any) -> Any:
    """Return a value of the same kind for the JSON.

    The executor takes tensors and integers from the code; of the JSON it reads that they are such.
    """
    if isinstance(value, list):
        return [_serializable(item, kernel) for item in value]
    if isinstance(value, arguments.ScalarTensor):
        return kernel.inputs[0]
    if arguments.is_number(value) and not arguments.is_constant(value):
        return 0
    return value


@contextlib.contextmanager
def name_operator(op: Any) -> Iterator[None]:
    """Replace an error of torch's codegen by one that names the operator.

    Raises:
        exc.UnsupportedOperatorError: torch cannot generate a call of the operator.
    """
    import torch

    try:
        yield
    except (AssertionError, AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
        if not isinstance(op, torch._ops.OpOverload) or isinstance(error, exc.InductorExtError):
            raise
        why = f"{type(error).__name__}: {error}".rstrip(": .\n")
        raise exc.UnsupportedOperatorError(
            operator=op.name(), schema=str(op._schema), why=why
        ) from error


class FallbackCalls:
    """Mixin for torch's C++ wrapper codegen classes, placed before them in the MRO."""

    def generate_fallback_kernel_with_runtime_lookup(
        self: Any,
        buf_name: str,
        python_kernel_name: str,
        get_args: Any,
        op_overload: Any,
        raw_args: Sequence[Any],
        outputs: Any,
    ) -> None:
        """Generate a call of an operator by name; see torch's method.

        Args:
            raw_args: the result of `FallbackKernel.export_extern_kernel_node`, a
                `CompleteArguments` if this mixin generates the call.
        """
        if not isinstance(raw_args, CompleteArguments):
            with name_operator(op_overload):
                super().generate_fallback_kernel_with_runtime_lookup(  # type: ignore[misc]
                    buf_name, python_kernel_name, get_args, op_overload, raw_args, outputs
                )
            return
        results = list(_flatten(outputs))
        for result in results:
            if not _is_mutation(result):
                name = result.get_name()
                self.writeline(f"AtenTensorHandle {name}_handle;  // output buffer")
                self.writeline(
                    "AOTI_TORCH_ERROR_CODE_CHECK("
                    f"aoti_torch_new_uninitialized_tensor(&{name}_handle));"
                )
                self.writeline(f"RAIIAtenTensorHandle {name}({name}_handle);")
        call = _Call(self, op_overload, raw_args)
        if raw_args.by_executor:
            call.write_executor_call(results)
        else:
            call.write_dispatcher_call(outputs)


class CompleteArguments(list[Any]):
    """The values of all arguments of an operator, in the order of its schema."""

    by_executor = False
    """Whether the proxy executor is called."""


def _is_mutation(output: Any) -> bool:
    from torch._inductor import ir

    return isinstance(output, ir.MutationOutput)


def _flatten(outputs: Any) -> Iterator[Any]:
    """Yield the buffers among the results of a call."""
    if isinstance(outputs, (list, tuple)):
        for output in outputs:
            yield from _flatten(output)
    elif hasattr(outputs, "get_name"):
        yield outputs


class _Call:
    """Writes one call."""

    def __init__(self, wrapper: Any, op: Any, values: CompleteArguments) -> None:
        self.wrapper = wrapper
        self.op = op
        self.pairs = [
            (value, argument.real_type)
            for value, argument in zip(values, op._schema.arguments, strict=True)
        ]
        self.names = [argument.name for argument in op._schema.arguments]
        self.lines: list[str] = []

    # --- torch's proxy executor -------------------------------------------------------------------

    def write_executor_call(self, results: Sequence[Any]) -> None:
        """Write a call of the last of the extern kernel nodes."""
        from torch._inductor.virtualized import V

        tensors: list[str] = []
        integers: list[str] = []
        for value, type_ in self.pairs:
            self._collect(value, type_, tensors, integers)
        tensors += [_result_name(result) for result in results]
        # A hook of torch's wrapper classes from torch 2.13 on.
        convert = getattr(self.wrapper, "codegen_runtime_lookup_tensor_call_args", list)
        pointers = [
            self.wrapper._generate_temporary_array_pointer(type_, items, force_mutable=True)
            for type_, items in (
                ("int64_t", integers),
                ("AtenTensorHandle", convert(tensors)),
            )
        ]
        number = len(V.extern_kernel_nodes) - 1
        passed = f"{len(integers)}, {pointers[0]}, {len(tensors)}, {pointers[1]}"
        if self.wrapper.reports_operators:
            self.wrapper.writeline(
                f"inductor_ext::call_operator(proxy_executor, {number}, {passed}, {self._text()});"
            )
        else:
            self.wrapper.writeline(
                "AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_proxy_executor_call_function("
                f"proxy_executor, {number}, {passed}));"
            )

    def _collect(self, value: Any, type_: Any, tensors: list[str], integers: list[str]) -> None:
        """Append the C++ expressions of what the executor takes when it is called."""
        name = arguments.kind(type_)
        if value is None:
            return
        if name == "OptionalType":
            self._collect(value, arguments.element(type_), tensors, integers)
        elif name == "ListType":
            for item in value:
                self._collect(item, arguments.element(type_), tensors, integers)
        elif name == "TensorType":
            tensors.append(self._tensor(value))
        elif arguments.is_number(value) and arguments.number_class(value) is int:
            integers.append(self._number(value))

    # --- the dispatcher ---------------------------------------------------------------------------

    def write_dispatcher_call(self, outputs: Any) -> None:
        """Write a call with boxed values."""
        self._include("ATen/core/dispatch/Dispatcher.h")
        schema = self.op._schema
        name, overload = quote(schema.name), quote(schema.overload_name)
        boxed = [self._box(value, type_) for value, type_ in self.pairs]
        self.lines += [
            "std::vector<c10::IValue> stack;",
            f"stack.reserve({max(len(boxed), len(schema.returns))});",
            *(f"stack.emplace_back({value});" for value in boxed),
        ]
        if self.wrapper.reports_operators:
            self._include("boxed_call.h")
            self.lines += [
                f"static const char* const call = {self._text()};",
                f"static const auto op = inductor_ext::find_operator({name}, {overload}, call);",
                "inductor_ext::call_boxed(op, stack, call);",
            ]
        else:
            found = f"c10::Dispatcher::singleton().findSchemaOrThrow({name}, {overload})"
            self.lines += [f"static const auto op = {found};", "op.callBoxed(&stack);"]
        self._take_results(outputs)
        self.wrapper.writelines(["{", *(f"    {line}" for line in self.lines), "}"])

    def _include(self, header: str) -> None:
        included = self.wrapper.__dict__.setdefault("headers_of_calls", set())
        if header not in included:
            included.add(header)
            quoted = f"<{header}>" if "/" in header else f'"{header}"'
            self.wrapper.header.writeline(f"#include {quoted}")

    def _take_results(self, outputs: Any) -> None:
        returns = self.op._schema.returns
        is_list = len(returns) == 1 and arguments.kind(returns[0].real_type) == "ListType"
        results = [outputs] if is_list else outputs
        if not isinstance(results, (list, tuple)):
            results = [results]
        for index, (_, result) in enumerate(zip(returns, results, strict=False)):
            value = f"stack[{index}]"
            if isinstance(result, (list, tuple)):
                for item, buffer in enumerate(result):
                    self._assign(buffer, f"{value}.toTensorList().get({item})")
            else:
                self._assign(result, f"std::move({value}).toTensor()")

    def _assign(self, buffer: Any, tensor: str) -> None:
        if hasattr(buffer, "get_name") and not _is_mutation(buffer):
            self.lines.append(f"{_dereference(buffer.get_name())} = {tensor};")

    def _box(self, value: Any, type_: Any) -> str:
        """Return the C++ expression of a value's c10::IValue."""
        name = arguments.kind(type_)
        if value is None:
            return "c10::IValue()"
        if name == "OptionalType":
            return self._box(value, arguments.element(type_))
        if name == "ListType":
            return self._box_list(value, arguments.element(type_))
        if name == "TensorType":
            return f"c10::IValue({_dereference(self._tensor(value))}{self._cast(value)})"
        if name == "StringType":
            size = len(value.encode())
            return f"c10::IValue(std::string({quote(value)}, {size}))"
        if name == "DeviceObjType":
            return self._box_device(value)
        if arguments.is_number(value):
            return self._box_number(value, name)
        return f"c10::IValue(static_cast<int64_t>({self._enumeration(value)}))"

    def _box_list(self, values: Sequence[Any], type_: Any) -> str:
        items = [self._box(value, type_) for value in values]
        variable = f"list_{len(self.lines)}"
        self.lines.append(f"c10::impl::GenericList {variable}({_type(type_)});")
        self.lines += [f"{variable}.emplace_back({item});" for item in items]
        return f"c10::IValue(std::move({variable}))"

    def _box_device(self, device: Any) -> str:
        import torch

        device = torch.device(device)
        type_, index = self.wrapper.codegen_device(device).split(", ")
        index = "-1" if device.index is None else index
        return f"c10::IValue(c10::Device(static_cast<c10::DeviceType>({type_}), {index}))"

    def _box_number(self, value: Any, name: str) -> str:
        class_ = arguments.number_class(value)
        if "Float" in name and class_ is int:
            class_ = float
        type_ = {
            bool: "bool",
            int: "int64_t",
            float: "double",
            complex: "c10::complex<double>",
        }[class_]
        return f"c10::IValue(static_cast<{type_}>({self._number(value)}))"

    def _enumeration(self, value: Any) -> str:
        import torch

        generate = {
            torch.dtype: self.wrapper.codegen_dtype,
            torch.layout: self.wrapper.codegen_layout,
            torch.memory_format: self.wrapper.codegen_memory_format,
        }[type(value)]
        return str(generate(value))

    # --- expressions ------------------------------------------------------------------------------

    def _tensor(self, value: Any) -> str:
        if not isinstance(value, arguments.ScalarTensor):
            return str(value.codegen_reference())
        type_ = arguments.SCALAR_TENSORS.get(value.dtype_name, "float")
        name = f"scalar_to_tensor_{next(self.wrapper.scalar_to_tensor_id)}"
        number = self._number(value.value)
        if value.dtype.is_complex and not isinstance(value.value, complex):
            number = f"static_cast<double>({number})"
        created = f"scalar_to_tensor_handle(static_cast<{type_}>({number}))"
        self.wrapper.writeline(f"RAIIAtenTensorHandle {name} = {created};")
        return name

    def _cast(self, value: Any) -> str:
        """Return the call that gives a boxed tensor its dtype, if no C function creates it so."""
        if not isinstance(value, arguments.ScalarTensor) or value.has_function:
            return ""
        return f".to(static_cast<c10::ScalarType>({self._enumeration(value.dtype)}))"

    def _number(self, value: Any) -> str:
        from torch._inductor.codegen.cpp_utils import cexpr

        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, int):
            return "std::numeric_limits<int64_t>::min()" if value == -(2**63) else f"{value}L"
        if isinstance(value, float):
            return str(self.wrapper.generate_float_value(value))
        if isinstance(value, complex):
            parts = (self.wrapper.generate_float_value(p) for p in (value.real, value.imag))
            return f"c10::complex<double>({', '.join(parts)})"
        return str(cexpr(arguments.expression_of(value)))

    def _text(self) -> str:
        """Return the C++ literal that describes the call, for errors.

        In place of a tensor it has the byte 1, and the input that the tensor is a view of.
        """
        described = [
            f"{name}={self._describe(value, type_)}"
            for name, (value, type_) in zip(self.names, self.pairs, strict=True)
        ]
        return quote(f"{self.op.name()}({', '.join(described)})")

    def _describe(self, value: Any, type_: Any) -> str:
        name = arguments.kind(type_)
        if value is None:
            return "None"
        if name == "OptionalType":
            return self._describe(value, arguments.element(type_))
        if name == "ListType":
            items = [self._describe(item, arguments.element(type_)) for item in value]
            return f"[{', '.join(items)}]"
        if name == "TensorType":
            is_scalar = isinstance(value, arguments.ScalarTensor)
            return describe_tensor(
                None if is_scalar else self.wrapper.name_input(str(value.get_name()))
            )
        if arguments.is_number(value):
            constant = arguments.is_constant(value)
            return repr(value) if constant else str(arguments.expression_of(value))
        return repr(value)


def _result_name(result: Any) -> str:
    return str(result.get_mutation_names()[0] if _is_mutation(result) else result.get_name())


def _dereference(handle: str) -> str:
    """Return the at::Tensor of a handle."""
    return f"*reinterpret_cast<at::Tensor*>(static_cast<AtenTensorHandle>({handle}))"


def _type(type_: Any) -> str:
    """Return the C++ expression of a c10::TypePtr."""
    name = arguments.kind(type_)
    if name == "OptionalType":
        return f"c10::OptionalType::create({_type(arguments.element(type_))})"
    if name == "ListType":
        return f"c10::ListType::create({_type(arguments.element(type_))})"
    return _TYPES[name]
