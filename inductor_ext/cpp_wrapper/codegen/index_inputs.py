"""Find the input that an index comes from, if a kernel checks that it is within bounds.

The message of a check names a variable of the kernel (`0 <= tmp4 < 10L`). Its value is traced back
through the kernel's source. If it depends on elements of one pointer only, and every call of the
kernel passes the same input of the model for it, the manifest has the input's name for the message.
Anything that is not known to be arithmetic on these elements ends the search without a result.

A CPU kernel reports the message. The assert of a Triton kernel prints it on stderr, and CUDA
reports only that some assert has failed.

Pure: works on generated text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

_KERNEL = re.compile(r'extern "C"\s+void\s+(\w+)\(([^)]*)\)')
_CHECK = re.compile(r'"(index out of bounds: 0 <= (tmp\d+) < \w+)"')
_DEFINITION = re.compile(r"\bauto (tmp\d+) =")
_POINTER = re.compile(r"in_ptr\d+")
_VARIABLE = re.compile(r"tmp\d+")
_NAME = re.compile(r"\b[A-Za-z_]\w*")
_KNOWN = re.compile(
    r"in_ptr\d+|tmp\d+|tmpbuf|[xk]s?\d+(_inner|_tail)?|auto|static_cast|int64_t|int32_t|int|long|"
    r"decltype|at|vec|Vectorized|VectorizedN|VecMask|loadu|store|data|std|array|float|blendv|"
    r"template|cast|c10|convert|make_unsigned_t|pragma|GCC|unroll|for|return|__at_align__"
)
"""Names in code that computes an index from elements of pointers, constants and loop indices."""
_KNOWN_IN_TRITON = re.compile(
    r"in_ptr\d+|tmp\d+|[xyzr]\d*(_\d+|_index)?|[xyzr]\d*_?mask|ks\d+|tl|load|full|where|broadcast_to|"
    r"to|int\d+|uint\d+|float\d+|[XYZR]\d*_?BLOCK|None|True|False|other|eviction_policy|"
    r"evict_last|evict_first"
)
"""The same of Triton kernels, with masks of loop indices."""
_INTEGER = re.compile(r"\bu?int\d+_t\b")
_TRITON_INTEGER = re.compile(r"'(in_ptr\d+)': '\*[iu]\d+'")
"""A pointer to integers in the signature of a Triton kernel."""
_ARGUMENT = re.compile(r"\((?:const )?\w+\*\)\((\w+)\.data_ptr\(\)\)")


def find_index_inputs(
    kernel_code: str, wrapper_code: str, inputs: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """Return the name of the input for each message that names one, by kernel.

    Args:
        kernel_code: the generated CPU kernels.
        wrapper_code: the generated wrapper, which calls them.
        inputs: names of the model's inputs by variable of the wrapper; without inputs that the
            model writes to.
    """
    kernels = list(_KERNEL.finditer(kernel_code))
    ends = [*(kernel.start() for kernel in kernels), len(kernel_code)][1:]
    results: dict[str, dict[str, str]] = {}
    for kernel, end in zip(kernels, ends, strict=True):
        parameters = kernel[2].split(",")
        arguments = _list_arguments(wrapper_code, kernel[1], len(parameters))
        names = {
            parameter.split()[-1]: inputs[argument]
            for parameter, argument in zip(parameters, arguments, strict=False)
            if argument is not None and argument in inputs and _INTEGER.search(parameter)
        }
        messages = {
            message: names[pointer]
            for message, pointer in _trace_checks(
                kernel_code[kernel.end() : end], _trace_in_cpp
            ).items()
            if pointer in names
        }
        if messages:
            results[kernel[1]] = messages
    return results


def find_index_inputs_of_triton(
    kernels: Mapping[str, str], wrapper_code: str, inputs: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """Return the name of the input for each message that names one, by kernel.

    Args:
        kernels: the generated Triton kernels by name.
        wrapper_code: the generated wrapper, with a function for each kernel, and their calls.
        inputs: as of `find_index_inputs`.
    """
    results: dict[str, dict[str, str]] = {}
    for kernel, source in kernels.items():
        if _CHECK.search(source) is None:
            continue
        arguments = _list_launcher_arguments(wrapper_code, f"call_{kernel}")
        names = {
            pointer: inputs[arguments[pointer]]
            for pointer in _TRITON_INTEGER.findall(source)
            if arguments.get(pointer) in inputs
        }
        messages = {
            message: names[pointer]
            for message, pointer in _trace_checks(source, _trace_in_triton).items()
            if pointer in names
        }
        if messages:
            results[kernel] = messages
    return results


def _trace_checks(body: str, trace: Callable[[str, str], str | None]) -> dict[str, str | None]:
    """Return the pointer that the index of each check comes from; None if it is not known."""
    pointers: dict[str, set[str | None]] = {}
    for check in _CHECK.finditer(body):
        pointers.setdefault(check[1], set()).add(trace(body[: check.start()], check[2]))
    return {
        message: found.pop() if len(found) == 1 else None for message, found in pointers.items()
    }


def _trace_in_cpp(code: str, variable: str) -> str | None:
    def read(name: str) -> str | None:
        definitions = [found for found in _DEFINITION.finditer(code) if found[1] == name]
        return _read_statement(code, definitions[-1].start()) if definitions else None

    return _trace(read, variable, _KNOWN)


def _trace_in_triton(code: str, variable: str) -> str | None:
    def read(name: str) -> str | None:
        statements = re.findall(rf"^ *{name} = (.*)$", code, re.MULTILINE)
        # A name is assigned once, except in the branches of a combo kernel, which are in sequence.
        complete = statements and statements[-1].count("(") == statements[-1].count(")")
        return statements[-1] if complete else None

    return _trace(read, variable, _KNOWN_IN_TRITON)


def _trace(read: Callable[[str], str | None], variable: str, known: re.Pattern[str]) -> str | None:
    """Return the only pointer that the value of a variable depends on; None if not known.

    Args:
        read: returns the statement that defines a variable, None if there is none.
        variable: the name.
        known: the names that a statement may have.
    """
    pointers: set[str] = set()
    pending, done = [variable], set()
    while pending:
        name = pending.pop()
        if name in done:
            continue
        done.add(name)
        statement = read(name)
        if statement is None:
            return None
        names = set(_NAME.findall(statement))
        if not all(map(known.fullmatch, names)):
            return None
        pointers |= set(filter(_POINTER.fullmatch, names))
        inner = {found[1] for found in _DEFINITION.finditer(statement)}
        pending += filter(_VARIABLE.fullmatch, names - inner)
    return pointers.pop() if len(pointers) == 1 else None


def _read_statement(code: str, start: int) -> str:
    depth = 0
    for position in range(start, len(code)):
        depth += (code[position] in "([{") - (code[position] in ")]}")
        if code[position] == ";" and depth == 0:
            return code[start:position]
    return code[start:]


def _list_arguments(wrapper_code: str, kernel: str, count: int) -> list[str | None]:
    """Return the variables that all calls of a kernel pass; None where they differ."""
    calls = [
        [found[1] if (found := _ARGUMENT.fullmatch(text.strip())) else None for text in call]
        for call in _list_calls(wrapper_code, kernel)
    ]
    if not calls or any(len(call) != count for call in calls):
        return []
    return [first if set(rest) <= {first} else None for first, *rest in zip(*calls, strict=True)]


def _list_launcher_arguments(wrapper_code: str, launcher: str) -> dict[str, str]:
    """Return what calls of a function pass, by parameter, without those in which they differ."""
    declared = re.search(rf"\bvoid {launcher}\(([^()]*)\)\s*\{{", wrapper_code)
    calls = list(_list_calls(wrapper_code, launcher))
    if declared is None or not calls:
        return {}
    parameters = [
        parameter.partition("=")[0].split()[-1] for parameter in _split_arguments(declared[1])
    ]
    return {
        parameter: passed[0].strip()
        for parameter, passed in zip(parameters, zip(*calls, strict=False), strict=False)
        if len({text.strip() for text in passed}) == 1
    }


def _list_calls(wrapper_code: str, kernel: str) -> Iterator[Sequence[str]]:
    """Yield the arguments of each call of a kernel; a declaration's parameters are left out."""
    for found in re.finditer(rf"(\bvoid\s+)?\b{kernel}\(", wrapper_code):
        if found[1]:
            continue
        text = _read_statement(wrapper_code, found.end() - 1)
        yield _split_arguments(text[1 : text.rindex(")")])


def _split_arguments(text: str) -> list[str]:
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
