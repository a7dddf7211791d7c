"""Exported programs that torch.export or Inductor handles wrongly, and what is done about them.

`adjust_options` disables optimizations that would give wrong results, `remove_constant_results`
removes results that Inductor rejects, and `warn_of_unwritten_results` warns of operators that
torch.export drops. None of them modifies an exported program.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inductor_ext import events

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def adjust_options(program: ExportedProgram, patches: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with which Inductor compiles a program correctly.

    Args:
        program: the program to compile.
        patches: options of Inductor for the compile.
    """
    adjusted = dict(patches)
    if _has_small_state(program) or _has_small_float8_constant(program):
        # An Inductor pass folds one-element constants, and the lowering inlines short constants
        # into the code. Both are wrong if the program mutates such a tensor, reads it as a scalar
        # (which needs a tensor), or if its dtype has no literals in the generated code.
        adjusted["always_keep_tensor_constants"] = True
        adjusted["joint_graph_constant_folding"] = False
    if _folds_constants(adjusted) and _mutates_buffers(program):
        # Both options treat buffers as constants, including buffers that a call mutates.
        off = {"freezing": False, "aot_inductor.use_runtime_constant_folding": False}
        adjusted.update(off)
        events.warn_once(
            "state is not folded",
            f"{' and '.join(off)} are ignored: the program mutates a buffer, and these options "
            "would reset it to its exported value in every call",
        )
    return adjusted


def _folds_constants(patches: Mapping[str, Any]) -> bool:
    """Whether the options enable constant folding (freezing or runtime constant folding)."""
    from torch._inductor import config

    options = {**config.get_config_copy(), **patches}
    return bool(options["freezing"] or options["aot_inductor.use_runtime_constant_folding"])


def _mutates_buffers(program: ExportedProgram) -> bool:
    """Whether a call mutates a buffer.

    Decomposes the program (a trace), because export reports mutations of decomposed programs only.
    """
    if not program.graph_signature.buffers and not program.constants:
        return False
    # The trace cannot check guards on the base of an example input that is a view.
    unguarded = copy.copy(program)
    unguarded._guards_code = []
    return bool(unguarded.run_decompositions({}).graph_signature.buffers_to_mutate)


def _has_small_state(program: ExportedProgram) -> bool:
    """Whether the program may mutate a buffer that is small enough (up to 8 elements) for Inductor
    to inline as a constant, or reads a scalar from one.
    """
    import torch

    tensors = {**program.state_dict, **program.constants}
    signature = program.graph_signature
    names = {*signature.buffers, *signature.lifted_tensor_constants}
    if not any(tensors[name].numel() <= 8 for name in names if name in tensors):
        return False
    # Before decomposition, export does not report which buffer an in-place operator mutates
    # (through views and subgraphs). Therefore any mutating operator counts.
    aten = torch.ops.aten
    return bool(signature.buffers_to_mutate) or any(
        getattr(getattr(node.target, "_schema", None), "is_mutable", False)
        or node.target in (aten.item.default, aten._local_scalar_dense.default)
        for module in program.graph_module.modules()
        if hasattr(module, "graph")
        for node in module.graph.nodes
    )


def _has_small_float8_constant(program: ExportedProgram) -> bool:
    """Whether a float8 constant is small enough (up to 8 elements) for Inductor to inline.

    Inductor cannot print float8 literals.
    """
    tensors = {**program.state_dict, **program.constants}.values()
    return any(
        value.numel() <= 8 and str(value.dtype).startswith("torch.float8")
        for value in tensors
        if hasattr(value, "numel")
    )


def warn_of_unwritten_results(name: str, program: ExportedProgram) -> None:
    """Warn if a branch or loop body returns a newly allocated tensor that nothing in it writes.

    In such subgraphs, torch.export drops operators that only write into their arguments: launches
    of user-defined Triton kernels.
    """
    for path, module in program.graph_module.named_modules():
        if not path or not hasattr(module, "graph"):
            continue
        for output in module.graph.find_nodes(op="output"):
            for result in output.all_input_nodes:
                fresh = str(result.target).startswith(("aten.empty", "aten.new_empty"))
                if fresh and len(result.users) == 1:
                    events.warn_once(
                        f"unwritten:{name}:{path}",
                        f"in model {name!r}, {path} returns {result.name} uninitialized. If a "
                        "Triton kernel should write it, torch.export has dropped the launch: "
                        "define an operator that launches the kernel with "
                        "torch.library.triton_op, and call that operator",
                    )


def remove_constant_results(module: Any) -> None:
    """Replace constant float, bool and string results of a module by None.

    Inductor rejects them. `inductor_ext.load` restores the values from the signature; torch's own
    loader returns None for them.
    """
    (output,) = module.graph.find_nodes(op="output")
    (results,) = output.args
    others = tuple(None if isinstance(r, (float, bool, str)) else r for r in results)
    if others != tuple(results):
        output.args = (others,)
        module.recompile()
