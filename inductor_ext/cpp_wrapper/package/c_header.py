"""Generation of a C header that describes the signature of a model, for C and C++ programs.

The header defines the index of every input and output as a macro; comments give dtype, shape and
device. It is valid C and C++ and includes no other header. Each model's header is in the package at
`extra/inductor_ext/<model>.h`, from where unzip extracts it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from inductor_ext.cpp_wrapper.signature.signature import (
    ConstantInput,
    ConstantOutput,
    Extent,
    Range,
    Signature,
    SymbolInput,
    SymbolOutput,
)


def path(model: str) -> str:
    """Return the entry of a model's header in its package, relative to the root folder."""
    return f"extra/inductor_ext/{model}.h"


def render(model: str, signature: Signature) -> str:
    """Return the text of the header.

    Args:
        model: name of the model.
        signature: its signature.
    """
    prefix = _to_identifier(model)
    guard = f"INDUCTOR_EXT_{prefix}_H"
    lines = [
        f'/* How the compiled model "{model}" is called. */',
        f"#ifndef {guard}",
        f"#define {guard}",
        "",
        f'#define {prefix}_NAME "{model}"',
        "",
        "/* Inputs, in the order in which the artifact takes them. */",
        f"#define {prefix}_NUM_INPUTS {len(signature.tensors)}",
    ]
    used: set[str] = set()
    for index, tensor in enumerate(signature.tensors):
        name = _make_unique(f"{prefix}_INPUT_{_to_identifier(tensor.name)}", used)
        if isinstance(tensor, SymbolInput):
            description = f"{tensor.type} in a tensor of no dimensions on the CPU"
        else:
            shape = _show_shape(tensor.shape)
            description = (
                f"{tensor.dtype} {shape} on {tensor.device}, strides {_show_shape(tensor.stride)}"
            )
        lines.append(
            f"#define {name} {index} /* {_escape_comment(f'{tensor.name}: {description}')} */"
        )
    for constant in signature.inputs:
        if isinstance(constant, ConstantInput):
            text = _escape_comment(f"{constant.name} is {constant.value!r} and not passed.")
            lines.append(f"/* {text} */")
    for symbol, limits in signature.symbols.items():
        lines.append(f"/* {_escape_comment(f'{symbol}: {_show_range(limits)}')} */")
    lines += [f"/* {_escape_comment(text)} */" for text in signature.constraints]
    lines += [
        "",
        "/* Outputs, in the order in which the artifact returns them. */",
        f"#define {prefix}_NUM_OUTPUTS {len(signature.outputs)}",
    ]
    for index, output in enumerate(signature.outputs):
        if isinstance(output, ConstantOutput):
            text = _escape_comment(f"Output {index} is always {output.value!r}.")
            lines.append(f"/* {text} */")
            continue
        label = _to_identifier(output.path) if output.path else str(index)
        name = _make_unique(f"{prefix}_OUTPUT_{label}", used)
        if isinstance(output, SymbolOutput):
            description = f"{output.type} in a tensor of no dimensions"
        else:
            description = f"{output.dtype} {_show_shape(output.shape)} on {output.device}"
        lines.append(f"#define {name} {index} /* {_escape_comment(description)} */")
    return "\n".join([*lines, "", f"#endif /* {guard} */", ""])


def _to_identifier(text: str) -> str:
    return re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_").upper() or "_"


def _make_unique(name: str, used: set[str]) -> str:
    candidate, number = name, 1
    while candidate in used:
        number += 1
        candidate = f"{name}_{number}"
    used.add(candidate)
    return candidate


def _show_shape(extents: Sequence[Extent]) -> str:
    return f"[{', '.join(map(str, extents))}]"


def _show_range(limits: Range) -> str:
    low = "" if limits.min is None else f"from {limits.min}"
    high = "" if limits.max is None else f"to {limits.max}"
    return " ".join(filter(None, (low, high))) or "any number"


def _escape_comment(text: str) -> str:
    """Escape text for use in a C comment."""
    return text.replace("*/", "* /").replace("\\", "/")
