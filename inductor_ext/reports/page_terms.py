"""What the numbers on the HTML page of a memory report mean: the terms and their explanations.

Every column of a table and every number in a headline or a drawing has a term here; a test compares
the page with them.
"""

from __future__ import annotations

from html import escape

PLAN_TERMS = {
    "peak": "The most memory that the generated function takes from the allocator at the same "
    "time, in bytes. It contains intermediate results, outputs and, in a backward, saved "
    "tensors that it frees. It does not contain parameters, buffers and other inputs that the "
    "caller keeps. The number before the arrow is the peak of Inductor's buffer reuse for the "
    "same order of kernels, the number after it is that of the plan that is used. With "
    "several devices, it is the sum of their peaks.",
    "lower bound": "The most memory that is live at the same time if each buffer is freed after "
    "its last use. No plan for the same order of kernels can need less. If the extension "
    "changed the order of kernels, the lower bound of Inductor's order follows in "
    "parentheses.",
    "ratio": "The peak divided by the lower bound. 1.000 is the best possible plan.",
    "arena": "One allocation that contains several buffers at planned offsets.",
    "allocator calls": "The number of allocations in one call of the function, with Inductor's "
    "buffer reuse and with the plan.",
    "step": "A line of the generated code. The steps are numbered from 0 in the order in which "
    "they run.",
    "held": "Memory taken from the allocator at a step: whole arenas, and storages outside of "
    "them.",
    "live": "Memory at a step whose content is still needed. In a table, the steps [first, end) "
    "during which a storage is live.",
    "offset": "The distance of a storage from the start of its arena, in bytes. Storages outside "
    "of arenas are stacked above them where they fit; their real addresses are not known.",
    "bytes": "The size of a storage, as the allocator rounds it. KiB, MiB and GiB are 1024, "
    "1024^2 and 1024^3 bytes.",
    "share": "The bytes as a percentage of the peak.",
    "buffer": "The name of a buffer in the generated code, or of an arena.",
    "kind": "Of a storage: intermediate, output, extern (allocated by the kernel that writes it), "
    "input (freed during the call), subgraph (memory that a called subgraph needs), or unused "
    "(the part of an arena that no member uses). Of a graph: inference, forward, backward or "
    "aot.",
    "operator": "The operators that the kernel computes which writes the buffer.",
    "module": "The module of the model whose result the buffer is.",
    "graph": "The generated function.",
    "device": "The device whose memory it is.",
}

MEASURED_TERMS = {
    "predicted": "The peak according to the plan, above what was allocated when the call began.",
    "measured": "The same according to the allocator, in one run.",
    "deviation": "By how many percent the measured memory is above the predicted memory.",
}

STATE_TERMS = {
    "parameters": "The bytes of the model's parameters. They are not in the plans. Memory that "
    "tensors share counts once, here and in the next columns.",
    "buffers": "The bytes of the model's buffers and constants. They are not in the plans.",
    "gradients": "The bytes of one gradient for each parameter that requires one. The gradients "
    "that a backward computes are outputs in its plan.",
    "gradients now": "The part of them that existed when the report was made.",
    "optimizer state": "The bytes of the tensors in the optimizer's state. It is not known if the "
    "report was made without the optimizer, or if the optimizer had no state, as before its "
    "first step.",
}

STEP_TERMS = {
    "mode": "Whether the step ran compiled graphs (compiled) or none (eager).",
    "level": "The memory in use above what was in use when the step began, in bytes. It is below "
    "0 if the step has freed memory that existed before. Both modes have the same scale of "
    "bytes.",
    "time": "Milliseconds since the step began. The profiler that records the allocations adds to "
    "it.",
    "call": "A call of a compiled graph: the number and the kind of its plan. Brackets in the "
    "drawing mark the calls, and the steps of optimizers.",
    "begins at": "The level when the call begins.",
    "planned peak": "The peak of the graph according to its plan, above the level at which the "
    "call begins; a dashed line in the drawing.",
    "measured peak": "The peak of the call, or of the whole step, according to the allocator, "
    "above the level at its beginning.",
    "at the peak": "What runs when the step reaches its peak.",
}

BATCH_TERMS = {
    "batch": "The size of the first dimension of the inputs. The peak at this size is that of the "
    "compiled code, whose plan was made for the sizes of the first call.",
    "graph with the highest peak": "The generated function that needs most at this size.",
}


def render_terms(terms: dict[str, str], *, is_open: bool = True) -> str:
    """Return the HTML of the list of terms, which can be opened and closed."""
    attribute = ' open="open"' if is_open else ""
    entries = "".join(
        f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>\n" for term, text in terms.items()
    )
    return (
        f"<details{attribute}><summary>What the numbers mean</summary>\n"
        f"<dl>{entries}</dl></details>"
    )
