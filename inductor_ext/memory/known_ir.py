"""Tables of Inductor's IR classes that the memory planner and the kernel order understand.

Every Inductor release adds kinds of wrapper lines, operations and scheduler nodes, and other
packages may subclass them. The memory plan is valid only if it understands every line that may
allocate, free or keep memory. A kernel order is valid only if every effect of a node is known. So
each class has an entry here that says how it is handled and why that is correct. If a class has no
entry, the whole graph gets Inductor's plan and Inductor's order, with one warning that names the
class. A subclass of a known class needs its own entry, because it may override what the entry
relies on.

Entries are by name, because no torch version has all of the classes. A name applies only to classes
of torch and of this package. `test_known_ir` compares the tables with the installed torch; for
torch 2.15 only the wrapper lines were compared, with its sources.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import Any

from inductor_ext import _compat, events


class LineUse(enum.Enum):
    """How the memory planner handles a line."""

    READ = "read"
    """`memory.wrapper_reader` reads it."""
    PASS = "pass"
    """It neither allocates, frees nor keeps memory."""
    REFUSE = "refuse"
    """It cannot be planned: the graph gets Inductor's plan."""
    REFUSE_IN_CPP = "refuse in C++"
    """REFUSE in C++, PASS in Python."""


@dataclasses.dataclass(frozen=True)
class Line:
    """Entry of a line class."""

    use: LineUse
    why: str


@dataclasses.dataclass(frozen=True)
class Operation:
    """Entry of an IR operation class."""

    why: str
    may_keep_inputs: bool = False
    """Whether it may keep or return its inputs in ways that its schema does not declare. Its inputs
    and outputs get their own memory."""
    depends_on_order: bool = False
    """Whether it depends on what has run before it, beyond what it reads."""


def _read(why: str) -> Line:
    return Line(LineUse.READ, why)


def _pass(why: str) -> Line:
    return Line(LineUse.PASS, why)


def _refuse(why: str) -> Line:
    return Line(LineUse.REFUSE, why)


_ABSTRACT = "an abstract class, which has no instances"
_DEVICE = "it frees nothing: names outlive a Python `with`; a C++ guard spans the function"
_CHECK = "checks a size, stride or divisor, and stops the call if it is wrong"
_INDUCTOR_POOL = "Inductor's own memory planner has run already"
_NEVER_READ = "the extension has planned the code already"

LINES: Mapping[str, Line] = {
    # Buffers.
    "AllocateLine": _read("a storage begins"),
    "FreeIfNotReusedLine": _read("a variable ends"),
    "FreeLine": _read("an input, or a buffer that is never reused, ends"),
    "ReuseLine": _read("a buffer reuses the storage of another one"),
    "ReinterpretLine": _read("a buffer is a view of another"),
    "NullLine": _pass("writes nothing: it replaces an unneeded line"),
    "AllocFromPoolLine": _refuse(_INDUCTOR_POOL),
    "DeallocFromPoolLine": _refuse(_INDUCTOR_POOL),
    # Kernels.
    "KernelCallLine": _pass("a generated kernel; its operands and workspaces have AllocateLines"),
    "KernelDefinitionLine": _pass("text of a kernel, outside the function"),
    "ExternKernelAllocLine": _read("a kernel that allocates its outputs; it may need scratch"),
    "ExternKernelOutLine": _read("a kernel that writes into a buffer; it may need scratch"),
    "ExternKernelMultiOutLine": _read(
        "a kernel that writes into several buffers; its scratch is unknown"
    ),
    "IndexPutFallbackLine": _read("an operator; its scratch is unknown"),
    "ScatterFallbackLine": _read("an operator; its scratch is unknown"),
    "MultiOutputLine": _read("a variable for one of the outputs that a kernel allocated"),
    "DualWrapperCodeLine": _refuse("its text may allocate"),
    # Scopes and contexts.
    "EnterSubgraphLine": _read("an inlined subgraph begins"),
    "ExitSubgraphLine": _read("an inlined subgraph ends"),
    "EnterDeviceContextManagerLine": _pass(_DEVICE),
    "ExitDeviceContextManagerLine": _pass(_DEVICE),
    "EnterDeviceContextManagerWithStreamInfoLine": _pass(_DEVICE),
    "ExitDeviceContextManagerWithStreamInfoLine": _pass(_DEVICE),
    "EnterCudaStreamContextLine": _read("the allocations that follow belong to a stream"),
    "ExitCudaStreamContextLine": _read("the stream context ends"),
    "EnterCudaMemPoolContextLine": _read("the allocations that follow belong to a pool"),
    "ExitCudaMemPoolContextLine": _read("the pool context ends"),
    "EnterKernelProfileScopeLine": Line(
        LineUse.REFUSE_IN_CPP,
        "a C++ block of the profiler, at whose end an arena declared inside would be freed",
    ),
    "ExitKernelProfileScopeLine": Line(
        LineUse.REFUSE_IN_CPP, "the end of a C++ block of the profiler"
    ),
    # Control flow of the FX wrapper, where there are no arenas. The called subgraphs are not read.
    "ConditionalLine": _read("a call of subgraphs; their memory use is unknown"),
    "SwitchLine": _read("a call of subgraphs; their memory use is unknown"),
    # Sizes.
    "DynamicScalarLine": _pass("defines a size from a tensor"),
    "SymbolicCallArgLine": _pass("defines a size from sizes"),
    "UnbackedSymbolDefsLine": _pass("defines sizes from outputs"),
    "AssertSizeStrideLine": _pass(_CHECK),
    "GroupedAssertSizeStrideLine": _pass(_CHECK),
    "AssertAlignmentLine": _pass(_CHECK),
    "AssertDivByZeroLine": _pass(_CHECK),
    # Text.
    "CommentLine": _pass("a comment"),
    "str": _read("text; it may call an operator or a generated function, or name a buffer"),
    "LineContext": _pass("a mark for a traceback; it writes at most a comment"),
    "DeferredLine": _read("text that is dropped with its buffer; it may name a buffer"),
    "DelayReplaceLine": _read("text with a name that is filled in later; it may name a buffer"),
    "_LazyTritonCompileKickoffLine": _pass("starts the compile of a Triton kernel"),
    # Base classes.
    "WrapperLine": _refuse(_ABSTRACT),
    "MemoryPlanningLine": _refuse(_ABSTRACT),
    "PoolMemoryPlanningLine": _refuse(_ABSTRACT),
    "DeferredLineBase": _refuse(_ABSTRACT),
}
"""Lines of torch 2.11 to 2.14, and those that 2.15 adds, by class name."""

OWN_LINES: Mapping[str, Line] = {
    "OutVariantLine": _read("an operator that may need scratch; its outputs have AllocateLines"),
    "MatchStridesLine": _pass(
        "copies the result of an operator whose strides are not as predicted"
    ),
    "_Line": _refuse(_ABSTRACT),
    "ArenaLine": _refuse(_NEVER_READ),
    "MemberLine": _refuse(_NEVER_READ),
    "MemberEndLine": _refuse(_NEVER_READ),
    "ArenaEndLine": _refuse(_NEVER_READ),
}
"""Lines of this package."""

_BASE = Operation("a base class; an instance of its own is one generic call")
_GENERATED = Operation("a generated kernel: it accesses only what it reads and writes")
_LIBRARY = Operation(
    "an operator of ATen or oneDNN: its schema declares what it accesses and returns"
)
_SCALAR = Operation("defines or checks a size on the host; it makes no memory")
_VIEW = Operation("a view; get_inputs_that_alias_output names what it shares memory with")
_NOTHING = Operation("no code")
_STORAGE = Operation(
    "it changes the storage of a tensor, not the elements",
    may_keep_inputs=True,
    depends_on_order=True,
)
_DESCRIPTOR = Operation("a TMA descriptor holds the address of its tensor", may_keep_inputs=True)
_SUBGRAPHS = Operation(
    "calls subgraphs, which may return their inputs and have effects",
    may_keep_inputs=True,
    depends_on_order=True,
)
_RANDOM = Operation("uses the state of the random number generator", depends_on_order=True)
_COLLECTIVE = Operation("it runs asynchronously until its wait", may_keep_inputs=True)

OPERATIONS: Mapping[str, Operation] = {
    "ComputedBuffer": _GENERATED,
    "TemplateBuffer": _GENERATED,
    "TritonTemplateBuffer": _GENERATED,
    "MultiTemplateBuffer": _GENERATED,
    "CppTemplateBuffer": _GENERATED,
    "CUTLASSTemplateBuffer": _GENERATED,
    "CuteDSLTemplateBuffer": _GENERATED,
    "NVUniversalGemmBuffer": _GENERATED,
    "ROCmTemplateBuffer": _GENERATED,
    "_DistributedAutotuneBuffer": _GENERATED,
    "SubgraphBuffer": Operation(
        "a choice of autotuning that is a graph: its operators are written into this one"
    ),
    "UserDefinedTritonKernel": Operation(
        "a Triton kernel of the user; what it changes is found by analysis of its code"
    ),
    "MetalFlexAttentionNode": Operation("a generated kernel of a device that has no arenas"),
    "NopKernel": _NOTHING,
    "ConcatKernel": Operation("no code: its inputs are written in place"),
    "OrderingBarrier": Operation("no code: it makes readers of a buffer wait, as mutations do"),
    "Operation": _BASE,
    "OperationBuffer": _BASE,
    "InputsKernel": _BASE,
    "ExternKernel": _BASE,
    "ExternKernelOut": _LIBRARY,
    "ExternKernelAlloc": _LIBRARY,
    "FallbackKernel": _LIBRARY,
    "ExternKernelMultiOut": _LIBRARY,
    "MultiOutput": Operation("one output of a kernel"),
    "OpaqueMultiOutput": Operation("one output of a kernel; it is not a tensor"),
    "AllocatingMultiOutput": Operation("one output of a kernel, which the wrapper allocates"),
    "MutatingFirstArgExternKernel": _LIBRARY,
    "InplaceBernoulliFallback": _RANDOM,
    "InplaceCopyFallback": _LIBRARY,
    "IndexPutFallback": _LIBRARY,
    "ScatterFallback": _LIBRARY,
    "DeviceCopy": _LIBRARY,
    "RandomSeeds": _RANDOM,
    "ComplexView": _VIEW,
    "DynamicScalar": _SCALAR,
    "DynamicSelectStorageOffset": _SCALAR,
    "DynamicSliceSize": _SCALAR,
    "AssertScalar": _SCALAR,
    "MemoryCheckKernel": Operation("checks what is allocated (test_configs), and nothing else"),
    "Conditional": _SUBGRAPHS,
    "Switch": _SUBGRAPHS,
    "WhileLoop": _SUBGRAPHS,
    "InvokeSubgraph": _SUBGRAPHS,
    "EffectfulKernel": Operation(
        "an operator with effects that only its token orders",
        may_keep_inputs=True,
        depends_on_order=True,
    ),
    "_CollectiveKernel": _COLLECTIVE,
    "_WaitKernel": _COLLECTIVE,
    "_AllReduceKernel": _COLLECTIVE,
    "_AllReduce_Kernel": _COLLECTIVE,
    "TMADescriptor": _DESCRIPTOR,
    "TMADescriptorExperimental": _DESCRIPTOR,
    "TMADescriptorStable": _DESCRIPTOR,
    "ResizeStorageBytes": _STORAGE,
    "SetSourceTensorKernel": _STORAGE,
    "ShallowCopyDataKernel": _STORAGE,
    "ConvolutionUnary": _LIBRARY,
    "ConvolutionBinary": _LIBRARY,
    "ConvolutionBinaryInplace": _LIBRARY,
    "ConvolutionTransposeUnary": _LIBRARY,
    "LinearUnary": _LIBRARY,
    "LinearBinary": _LIBRARY,
    "MKLPackedLinear": _LIBRARY,
    "MkldnnRnnLayer": _LIBRARY,
    "QConvPointWisePT2E": _LIBRARY,
    "QConvPointWiseBinaryPT2E": _LIBRARY,
    "QLinearPointwisePT2E": _LIBRARY,
    "QLinearPointwiseBinaryPT2E": _LIBRARY,
    "WeightInt4PackMatmul": _LIBRARY,
}
"""Operations of torch 2.11 to 2.14, by class name."""

OWN_OPERATIONS: Mapping[str, Operation] = {
    "CutlassCall": Operation("a kernel; it names what it changes in `mutation_outputs`"),
    "OutVariantKernel": Operation("an ATen operator that writes into buffers"),
    "DirectOutVariantKernel": Operation("the same, for one buffer that it is itself"),
    "OutVariantOutput": Operation("such a buffer"),
}
"""Operations of this package."""

SCHEDULER_NODES: Mapping[str, str] = {
    "BaseSchedulerNode": "a base class",
    "SchedulerNode": "one loop nest; its dependencies are all that it touches",
    "FusedSchedulerNode": "several of them in one kernel; get_nodes gives them",
    "OuterLoopFusedSchedulerNode": "the same for C++, with a loop in common",
    "FusedMixOrderReductions": "the same, with reductions in two directions",
    "FusedNestedReductions": "the same, with a reduction inside another",
    "ForeachKernelSchedulerNode": "several kernels side by side; get_nodes gives them",
    "ExternKernelSchedulerNode": "one operation of `OPERATIONS`",
    "FusedExternTritonKernelSchedulerNode": "a user's Triton kernel with what is fused to it",
    "GroupedSchedulerNode": "nodes that stay together; get_nodes gives them",
    "NopKernelSchedulerNode": "no code",
}
"""Scheduler nodes of torch 2.11 to 2.14, by class name."""


def _entry(cls: type[Any], torch_entries: Mapping[str, Any], own_entries: Mapping[str, Any]) -> Any:
    """Return the entry of a class; None if it has none."""
    if cls is str:
        return torch_entries.get("str")
    package = cls.__module__.split(".")[0]
    if package == "torch":
        return torch_entries.get(cls.__name__)
    if package == "inductor_ext":
        return own_entries.get(cls.__name__)
    return None


def find_unplannable_line(lines: Iterable[Any], *, cpp: bool) -> tuple[type[Any], str] | None:
    """Return the class of the first line that cannot be planned, and the reason.

    Args:
        lines: lines of a wrapper.
        cpp: whether they are C++.

    Returns:
        None if all can be planned. The reason is empty for a class without an entry.
    """
    for cls in dict.fromkeys(type(line) for line in lines):
        entry: Line | None = _entry(cls, LINES, OWN_LINES)
        if entry is None:
            return cls, ""
        if entry.use is LineUse.REFUSE or (cpp and entry.use is LineUse.REFUSE_IN_CPP):
            return cls, entry.why
    return None


def find_unplannable_operation(operations: Iterable[Any]) -> type[Any] | None:
    """Return the class of the first IR operation without an entry; None if all have one."""
    for cls in dict.fromkeys(type(operation) for operation in operations):
        if _entry(cls, OPERATIONS, OWN_OPERATIONS) is None:
            return cls
    return None


def find_unknown_scheduler_node(nodes: Iterable[Any]) -> type[Any] | None:
    """Return the class of the first scheduler node, or operation in one, without an entry."""
    for node in nodes:
        for value in {id(part): part for part in (node, *node.get_nodes())}.values():
            if _entry(type(value), SCHEDULER_NODES, {}) is None:
                return type(value)
            # A fused node has no operation itself.
            if value.node is not None and find_unplannable_operation([value.node]) is not None:
                return type(value.node)
    return None


def may_keep_memory(operation: Any) -> bool:
    """Whether an IR operation may keep or return its inputs without declaring it."""
    entry: Operation | None = _entry(type(operation), OPERATIONS, OWN_OPERATIONS)
    return entry is None or entry.may_keep_inputs


def has_order_dependence(operation: Any) -> bool:
    """Whether an IR operation depends on what has run before it, beyond what it reads."""
    entry: Operation | None = _entry(type(operation), OPERATIONS, OWN_OPERATIONS)
    return entry is None or entry.depends_on_order


_TORCH_NAMESPACES = frozenset(
    {"aten", "prims", "rngprims", "inductor", "quantized", "_quantized", "mkl", "mkldnn", "onednn"}
)
"""Namespaces of operators that run on the current stream and keep nothing but what their schemas
declare."""


def is_custom(operation: Any) -> bool:
    """Whether an IR operation calls an operator that is not one of torch's own libraries.

    It may read its operands on a stream of its own and protect them by `record_stream`, or keep
    references to them. Both protect a storage, and not a part of one.
    """
    overload = getattr(operation, "op_overload", None)
    return overload is not None and getattr(overload, "namespace", "") not in _TORCH_NAMESPACES


_STREAM_SWITCHES = ("streams::fork", "streams::join")


def find_stream_operator(operations: Iterable[Any], *, switch: bool) -> str:
    """Return the name of the first of torch's operators on streams and events; empty if none.

    Args:
        operations: IR operations.
        switch: whether to look only for those that change the current stream, so that what follows
            allocates and runs on a stream that Inductor's scheduler does not know.
    """
    for operation in operations:
        overload = getattr(operation, "op_overload", None)
        if getattr(overload, "namespace", "") == "streams":
            name = str(overload.name()).split(".")[0]  # type: ignore[union-attr]
            if name in _STREAM_SWITCHES or not switch:
                return name
    return ""


def warn_unknown(cls: type[Any], feature: str) -> str:
    """Warn once about a class without an entry.

    Args:
        cls: the class.
        feature: what falls back to Inductor's default because of it, such as "memory plan".

    Returns:
        The reason, for records.
    """
    name = f"{cls.__module__}.{cls.__qualname__}"
    why = f"inductor_ext does not know the class {name}"
    events.warn_once(
        f"unknown class:{name}:{feature}",
        f"the {feature} of a graph falls back to Inductor (default): {why} (torch "
        f"{_compat.torch_version()}). Results are not affected. Please report this message to the "
        "maintainers of inductor_ext.",
    )
    return why
