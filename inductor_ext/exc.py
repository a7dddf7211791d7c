"""Errors of inductor_ext: one class per kind of error, with a message and a remedy.

A class defines its message as a `template` and a `remedy`. Both are formatted with `str.format`
from the keyword arguments of the constructor. Thus the wording of an error is in one place, and
tests can inspect `error.fields` instead of parsing text. Errors about arguments, options and
environment variables are raised before any side effect.
"""

from __future__ import annotations

import errno
import os
import re
from typing import Any, ClassVar

__all__ = [
    "ArenaBoundsError",
    "ArtifactLoadError",
    "ArtifactRunError",
    "BadArgumentError",
    "BadEnvironmentError",
    "BadExpressionError",
    "BadGemmError",
    "BadIntervalError",
    "BadKeyError",
    "BadModelNameError",
    "BadModelSourceError",
    "BadOptionError",
    "BadPackageError",
    "BadPackagePathError",
    "BadProblemFileError",
    "BadReportFileError",
    "BadSignatureError",
    "BadTuningFileError",
    "BadWeightsFileError",
    "BatchNotDynamicError",
    "ConstantMismatchError",
    "CudaGraphError",
    "ForeignConstantError",
    "HookError",
    "IncompatibleArtifactError",
    "IncompatibleReloadError",
    "InductorExtError",
    "InputMismatchError",
    "KernelBuildError",
    "KernelLaunchError",
    "MemoryBudgetCallError",
    "MemoryBudgetError",
    "MissingDependencyError",
    "MissingKernelError",
    "MissingToolchainError",
    "ModelNotFoundError",
    "NoBatchFitsError",
    "NoExampleError",
    "NoModelError",
    "NoSelfTestError",
    "NotAPackageError",
    "NotAnExportedProgramError",
    "NotMeasurableError",
    "NotReportableError",
    "NothingCompiledError",
    "NothingMeasuredError",
    "OrderError",
    "PackageNotFoundError",
    "PlanError",
    "PlanNotFoundError",
    "SelfTestError",
    "SharedWeightsFileError",
    "SizesNotKnownError",
    "SourcesOnlyError",
    "TargetMismatchError",
    "TuningFaultError",
    "UncheckableInputError",
    "UncopyableModelError",
    "UnknownModeError",
    "UnknownNodeError",
    "UnknownOptionError",
    "UnknownTargetError",
    "UnknownVariableError",
    "UnreadablePackageError",
    "UnrecordableSelfTestError",
    "UnserializableClassError",
    "UnsignablePackageError",
    "UnsupportedArtifactError",
    "UnsupportedCompileModeError",
    "UnsupportedControlFlowError",
    "UnsupportedLevelError",
    "UnsupportedMutationError",
    "UnsupportedOperatorError",
    "UnsupportedTargetError",
    "UnsupportedTorchError",
    "UntrustedPackageError",
]


class InductorExtError(RuntimeError):
    """Base class of all errors that inductor_ext raises deliberately.

    Args:
        fields: values for the placeholders in `template` and `remedy`; kept in `self.fields`.
    """

    template: ClassVar[str]
    remedy: ClassVar[str]

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        text = f"{self.template.format(**fields)} {self.remedy.format(**fields)}"
        super().__init__(text.strip())

    def __reduce__(self) -> tuple[Any, ...]:
        # RuntimeError.__reduce__ would pass the message to __init__ as a positional argument.
        # Errors are pickled when Inductor compiles in a subprocess.
        return _rebuild, (type(self), self.fields)


def _rebuild(cls: type[InductorExtError], fields: dict[str, Any]) -> InductorExtError:
    return cls(**fields)


class UnsupportedTorchError(InductorExtError):
    """An installed torch outside the range of versions that inductor_ext supports."""

    template = "torch {actual} is not supported: inductor_ext supports torch {lowest} to {highest}."
    remedy = (
        "Install a supported version, or set {variable}=1 to use this version at your own risk."
        "{check}"
    )


class HookError(InductorExtError):
    """A torch internal that the extension replaces or relies on, and that is missing or differs."""

    template = "inductor_ext is not compatible with torch {torch}: hook {hook}: {why}."
    remedy = (
        "Install a supported torch version; `inductor-ext doctor` lists all incompatible hooks. "
        "Set INDUCTOR_EXT_ENABLED=0 to compile with Inductor (default)."
    )


class SharedWeightsFileError(InductorExtError):
    """An `aot_weights_file` given for several models; it can hold the weights of one only."""

    template = "Cannot write the weights of several models ({models}) to one file, {path!r}."
    remedy = (
        "Compile the models one at a time, or unset aot_weights_file to keep the weights in the "
        "package."
    )


class BadWeightsFileError(InductorExtError):
    """An `aot_weights_file` that cannot be written."""

    template = "Cannot write the weights to {path!r}: {why}."
    remedy = "Set aot_weights_file to a path in an existing, writable folder."


class ForeignConstantError(InductorExtError):
    """A constant on a device on which no part of the graph runs."""

    template = "Constant {name!r} is on {actual}, but the graph runs only on {device}."
    remedy = "Before the export, move the constant to {device} or to the CPU."


class UnsupportedLevelError(InductorExtError):
    """An `aot_isa` that this machine cannot compile for."""

    template = "Cannot compile for {level} on this machine: it lacks {lacking}."
    remedy = 'Choose a lower level, or set aot_isa="auto".'


class UnknownTargetError(InductorExtError):
    """A target that does not exist, in `targets` or `cpu_targets`."""

    template = "Unknown target {name!r}."
    remedy = "The known targets are {known}."


class UnsupportedTargetError(InductorExtError):
    """A target that a program cannot be compiled for on this machine."""

    template = "Cannot compile for the target {target}: {why}."
    remedy = "{fix}"


class TargetMismatchError(InductorExtError):
    """Compiles of a model for several targets that cannot share one package."""

    template = (
        "The model {name!r} as compiled for {other} does not fit into one package with that for "
        "{target}: {why}."
    )
    remedy = "Compile one package per target, or without the options that cause the difference."


class UnknownOptionError(InductorExtError):
    """An option name that is neither an Inductor option nor a setting of inductor_ext."""

    template = "Unknown option {name!r} (value {value!r}).{nearest}"
    remedy = "inductor_ext.list_options() returns all valid names."


class BadOptionError(InductorExtError):
    """An option or setting with a value of the wrong type or out of range."""

    template = "Invalid value {value!r} of type {actual} for option {name!r}: expected {allowed}."
    remedy = "The default is {default!r}."


class BadArgumentError(BadOptionError):
    """An invalid argument of a function or of a command line."""

    template = "Invalid {name}={actual}: expected {allowed}."
    remedy = ""


class UnknownModeError(InductorExtError):
    """A `mode=` that torch.compile does not have."""

    template = "Unknown mode {mode!r}: expected one of {allowed}.{nearest}"
    remedy = "inductor_ext.list_mode_options() returns the options that each mode sets."


class BadEnvironmentError(InductorExtError):
    """An INDUCTOR_EXT_* environment variable whose text is not a valid value of its setting."""

    template = "Invalid environment variable {variable}={value!r}: expected {allowed}."
    remedy = "Unset it, or set it to a valid value before Python starts."


class UnknownVariableError(BadEnvironmentError):
    """An INDUCTOR_EXT_* environment variable that does not correspond to a setting."""

    template = (
        "Unknown environment variable {variable}={value!r}: there is no such setting.{nearest}"
    )
    remedy = (
        "Unset it, or correct its name. docs/user/settings.md lists the variable of each setting."
    )


class MissingToolchainError(InductorExtError):
    """A missing compiler or Python distribution that the compile requires."""

    template = "{part} is missing: {why}."
    remedy = "To fix: {install}"


class BadModelNameError(InductorExtError):
    """A model name that is not valid as a folder name in a package."""

    template = "Invalid model name {name!r}."
    remedy = "Use only letters, digits, underscores, hyphens and dots, and start with a letter."


class NotAnExportedProgramError(InductorExtError):
    """An input of AOT compilation that is not a `torch.export.ExportedProgram`."""

    template = "aoti_compile_and_package expects a torch.export.ExportedProgram, got {actual}."
    remedy = "Create one with torch.export.export(model, args, kwargs)."


class BadModelSourceError(InductorExtError):
    """A file from which a command cannot take a model."""

    template = "{source} has no model: {why}."
    remedy = (
        "Pass FILE.py:NAME, or to `build` a file written by torch.export.save. `--help` says what "
        "NAME may give."
    )


class BadPackagePathError(InductorExtError):
    """A package path that cannot be written."""

    template = "Cannot write the package to {path!r}: {why}."
    remedy = "Pass a path ending in .pt2 in an existing, writable folder, or a writable buffer."


class BadPackageError(InductorExtError):
    """A package that cannot be read, is damaged, or has entry names that escape its root folder."""

    template = "The package {path} is damaged or unsafe: {why}."
    remedy = (
        "Nothing was loaded from it. Copy the package again from its source, or compile it again."
    )


class NotAPackageError(BadPackageError):
    """A file or folder that is something else than a package."""

    template = "{path} is not a package: {why}."
    remedy = "Pass a .pt2 file that was written by inductor_ext or torch, or an unpacked one."


class UnreadablePackageError(BadPackageError):
    """A package that the operating system does not let this process read."""

    template = "Cannot read the package {path}: {why}."
    remedy = "Check the permissions of the file and its folder."


class UntrustedPackageError(BadPackageError):
    """A package without a valid signature by a trusted key."""

    template = "The package {path} is not trusted: {why}."
    remedy = (
        "Nothing was loaded from it. Sign it with `inductor-ext sign`, or pass the public key of "
        "whoever has signed it."
    )


class UnserializableClassError(InductorExtError, NotImplementedError):
    """An exported program whose arguments or results have a class that a package cannot store."""

    template = "The {what} of the exported program cannot be described in a package: {why}."
    remedy = (
        'Register the class with serialized_type_name="..." (torch.export.register_dataclass, '
        "torch.utils._pytree.register_pytree_node), or use a dict or a tuple instead."
    )


class UnsignablePackageError(BadPackageError):
    """A package to which no signature can be added."""

    template = "Cannot sign {path}: {why}."
    remedy = "Pass a .pt2 file that inductor_ext has written."


class UnrecordableSelfTestError(InductorExtError):
    """A program whose self test cannot be recorded (setting `aot_self_test`)."""

    template = "Cannot record a self test of the model {name!r}: {why}."
    remedy = "Export it with example inputs that it accepts, or compile without aot_self_test."


class NoSelfTestError(InductorExtError):
    """A model without a self test."""

    template = "The model {name!r} in the package {path} has no self test."
    remedy = "Compile it with aot_self_test=True."


class SelfTestError(InductorExtError):
    """A model that computes something else than was recorded when it was compiled."""

    template = "The self test of the model {name!r} in the package {path} failed: {why}."
    remedy = "Do not use the model on this machine; compile it there, and compare."


class BadKeyError(InductorExtError):
    """A key for signatures that cannot be used."""

    template = "Cannot use the key {key}: {why}."
    remedy = (
        "Pass an Ed25519 key in PEM format. `openssl genpkey -algorithm ed25519 -out private.pem` "
        "makes a private key, `openssl pkey -in private.pem -pubout -out public.pem` a public one."
    )


class MissingDependencyError(InductorExtError):
    """An optional Python package that is not installed."""

    template = "{feature} needs the Python package {package}, which is not installed."
    remedy = "Install it with `pip install {package}`."


class PackageNotFoundError(InductorExtError, FileNotFoundError):
    """A path at which there is no file or folder."""

    template = "There is no package at {path}."
    remedy = "Pass the path of a .pt2 file, or of a folder into which one was unpacked."

    def __init__(self, *, path: str) -> None:
        super().__init__(path=path)
        self.errno = errno.ENOENT
        self.strerror = os.strerror(errno.ENOENT)
        self.filename = path

    def __str__(self) -> str:
        # That of OSError shows number and path only.
        return str(self.args[0])


class IncompatibleArtifactError(InductorExtError):
    """A valid package that cannot run on this machine or with this torch."""

    template = "The package {path} cannot run in this environment: {why}."
    remedy = "{fix}."


class ModelNotFoundError(InductorExtError):
    """A model name that does not exist in a package."""

    template = "The package {path} has no model {name!r}; it has {models}."
    remedy = "Pass one of these names as model_name."


class NoModelError(ModelNotFoundError):
    """A .pt2 file without a compiled model, such as one written by `torch.export.save`."""

    template = "The package {path} contains no compiled model."
    remedy = (
        "If the file was written by torch.export.save, load it with torch.export.load and compile "
        "the result with inductor_ext.aoti_compile_and_package."
    )


class SourcesOnlyError(InductorExtError):
    """A model that a package contains as sources only, without a shared library to load."""

    template = "The package {path} contains only the sources of model {name!r}, no shared library."
    remedy = (
        "Extract the package and build the library from SOURCES, the folder "
        "data/aotinductor/{name} below the package's root folder: "
        "cmake -S SOURCES -B build -DCMAKE_PREFIX_PATH=$(python -c 'import torch; "
        "print(torch.utils.cmake_prefix_path)') && cmake --build build. To get a package that can "
        "be loaded, compile the model without aot_inductor.package_cpp_only."
    )


class BadExpressionError(InductorExtError):
    """A size, stride or constraint of a signature that is not a valid integer expression."""

    template = "Invalid expression {text!r} in a signature: {why}."
    remedy = "Expressions consist of integers, symbols and Python's integer operators."


class BadSignatureError(InductorExtError):
    """JSON that is not a valid signature of a compiled model."""

    template = "Invalid signature: {where} is {actual}, expected {allowed}."
    remedy = "Take the signature from the manifest of a package written by inductor_ext."


class UnsupportedOperatorError(InductorExtError):
    """A call of an operator for which no C++ can be generated."""

    template = "Cannot generate C++ for a call of {operator}: {why}. Its schema is {schema}."
    remedy = (
        "Give the operator arguments of the types Tensor, Scalar, int, float, bool, str, Device, "
        "ScalarType, Layout, MemoryFormat, or lists of them, and tensors as results."
    )


class UnsupportedMutationError(InductorExtError):
    """A call of an operator on overwritten memory that cannot be compiled."""

    template = "Cannot compile a call of {operator}: {why}."
    remedy = "{fix}"


class UnsupportedControlFlowError(InductorExtError):
    """A call of a control-flow operator, such as `while_loop`, that Inductor cannot compile."""

    template = "Inductor cannot compile {operators}: {why}."
    remedy = "{fix}"


class UncheckableInputError(InductorExtError):
    """An input that a compiled model could not check when it is called."""

    template = "Cannot generate input checks for {name!r}: {why}."
    remedy = "{fix}"


class ArtifactLoadError(InductorExtError):
    """A model whose shared library or weights cannot be loaded."""

    template = "Cannot load model {name!r} of the package {path}: {why}."
    remedy = "{fix}"


class ArtifactRunError(InductorExtError):
    """A call of a compiled model that failed at run time.

    The message is a sentence for whoever called the model.
    """

    template = "{why}."
    remedy = ""

    @property
    def details(self) -> str:
        """Where it happened in the code: C++ frames, files of the build. May be empty."""
        return str(self.fields.get("details", ""))


class InputMismatchError(ArtifactRunError):
    """A call of a compiled model with inputs that do not match its signature."""


class UnknownNodeError(InductorExtError):
    """A model whose inputs or outputs have a class that is not registered with pytree here."""

    template = (
        "The package {path} has inputs or outputs of a class that is not registered with pytree: "
        "{why}."
    )
    remedy = (
        "Before loading the package, import the module that registers the class, or register it as "
        "for the export, with torch.export.register_dataclass or "
        "torch.utils._pytree.register_pytree_node."
    )


class ConstantMismatchError(InductorExtError):
    """Tensors that cannot replace the constants of a loaded model."""

    template = "Cannot update the constants of the model: {why}."
    remedy = "{fix}"


class IncompatibleReloadError(InductorExtError):
    """A package whose model is called in another way than the model that it was to replace."""

    template = "The package {path} cannot replace the loaded model: {why}."
    remedy = "The loaded model is unchanged. Load the package on its own with inductor_ext.load."


class UncopyableModelError(InductorExtError, TypeError):
    """A loaded model that was to be copied or pickled."""

    template = "{model} cannot be copied or pickled."
    remedy = (
        "Load the package again with inductor_ext.load, which shares the memory of unchanged "
        "weights, and pass it what was updated: "
        "new.update_constants(model.constants())."
    )


class CudaGraphError(InductorExtError):
    """A call of a loaded model that cannot be captured as a CUDA graph."""

    template = "The model cannot be captured as a CUDA graph: {why}."
    remedy = "Load it without cuda_graphs."


class NoExampleError(InductorExtError):
    """A model for which no inputs could be made up for its first call."""

    template = "No sizes of inputs were found that meet the conditions of the model: {conditions}."
    remedy = "Pass inputs: warm_up=[(x, y)]."


class UnsupportedArtifactError(InductorExtError):
    """An operation that is not supported for packages compiled by Inductor (default)."""

    template = "{what} is not supported for the package {path}: {why}."
    remedy = "Compile the model with inductor_ext.aoti_compile_and_package."


class UnsupportedCompileModeError(InductorExtError):
    """A TORCHINDUCTOR_FX_COMPILE_MODE that the extension does not support for this compile."""

    template = "inductor_ext does not support TORCHINDUCTOR_FX_COMPILE_MODE={mode} here: {why}."
    remedy = "{fix}."


class BadIntervalError(InductorExtError):
    """A storage with an invalid live range, size or alignment, for which no valid plan exists."""

    template = "Invalid buffer {name}: {field} is {value}, expected {allowed}."
    remedy = "Correct the buffer's live range, size or alignment."


class BadGemmError(InductorExtError):
    """An invalid GEMM problem, configuration or device description, or invalid JSON of one."""

    template = "Invalid GEMM {record}: {field} is {value!r}, expected {allowed}."
    remedy = "Correct the {record}. If it was read from a file, delete the entry and tune again."


class TuningFaultError(InductorExtError):
    """A candidate kernel that put the device into an error state for this process."""

    template = (
        "Candidate kernel {candidate} left the device in an error state while tuning {problem}: "
        "{why}."
    )
    remedy = (
        "Restart the process with TORCHINDUCTOR_AUTOTUNE_IN_SUBPROC=1, which benchmarks candidates "
        "in a subprocess and skips those that fail in this way. Please report a bug."
    )


class KernelBuildError(InductorExtError):
    """A kernel that nvcc fails to build."""

    template = "nvcc failed to build kernel {kernel}: {why}."
    remedy = "Exclude it with cutlass_op_denylist_regex to use another kernel, or report a bug."


class MissingKernelError(InductorExtError):
    """A kernel that compiled code calls and that is missing on this machine."""

    template = "Compiled code calls kernel {kernel}, which is not in {folder}: {why}."
    remedy = (
        "Install what is missing so that the kernel can be built, copy {folder} from the machine "
        "that compiled the code, or delete the code from Inductor's cache to compile it again."
    )


class KernelLaunchError(InductorExtError):
    """A kernel that fails to launch."""

    template = "Failed to launch kernel {kernel}: {why}."
    remedy = "Exclude it with cutlass_op_denylist_regex to use another kernel, and report a bug."


class PlanError(InductorExtError):
    """A memory plan in which live buffers overlap or exceed their arena."""

    template = "Invalid memory plan: {why}."
    remedy = "Do not use the plan. If inductor_ext created it, report a bug and attach the plan."


class OrderError(InductorExtError):
    """A kernel order that violates a dependency, or runs a kernel twice or not at all."""

    template = "Invalid kernel order: {why}."
    remedy = "Do not use the order. If inductor_ext created it, report a bug and attach the order."


class BadProblemFileError(InductorExtError):
    """A planning problem file that cannot be read, or a plan file that cannot be written."""

    template = "{file}{where}: {why}."
    remedy = "{fix}."


class BadTuningFileError(InductorExtError):
    """A file of tuning results that cannot be read or written."""

    template = "{file}{where}: {why}."
    remedy = "{fix}."


class ArenaBoundsError(InductorExtError):
    """A buffer in generated code that exceeds the bounds of its arena: a planning bug."""

    template = (
        "A buffer of size {size} and stride {stride} at element {offset} ends at element {end} of "
        "an arena of {numel} elements."
    )
    remedy = (
        "This is a bug in inductor_ext, detected by the setting memory_debug; please report it. "
        'Set memory_arenas="never" to compile without arenas.'
    )


class MemoryBudgetError(InductorExtError):
    """A planned memory peak above the setting `memory_budget`.

    An error of a compile has two more fields: `kind`, the kind of the graph, and `excess`, the
    bytes above the budget.
    """

    template = (
        "The planned memory peak of {graph} on {device} is {peak}, above the budget of "
        "{budget}{tried}."
    )
    remedy = (
        "Raise memory_budget, or reduce memory use: a smaller batch or sequence, a lower-precision "
        "dtype or, for training, activation checkpointing (torch.utils.checkpoint).\n{table}"
    )


class MemoryBudgetCallError(MemoryBudgetError):
    """A call of a compiled graph at sizes whose planned peak is above `memory_budget`."""

    template = (
        "The generated function {graph}, called with {sizes}, needs {needed} bytes on {device}, "
        "above the memory_budget of {budget} bytes."
    )
    remedy = "Call it with smaller sizes, or compile it again with a higher memory_budget."

    @classmethod
    def from_message(cls, message: str) -> MemoryBudgetCallError | None:
        """Return the error whose message, or the beginning of it, is in a text of C++ code."""
        parts = re.split(r"\{(\w+)\}", cls.template.rstrip("."))
        pattern = "".join(
            f"(?P<{part}>.+?)" if index % 2 else re.escape(part) for index, part in enumerate(parts)
        )
        match = re.search(pattern, message, re.DOTALL)
        if match is None:
            return None
        fields: dict[str, Any] = match.groupdict()
        return cls(**fields | {name: int(fields[name]) for name in ("needed", "budget")})


class NotReportableError(InductorExtError):
    """A target of a memory report that cannot have a memory plan."""

    template = "Cannot create a memory report for {actual}: {why}."
    remedy = "Pass the result of torch.compile, or a torch.export.ExportedProgram."


class NothingCompiledError(InductorExtError):
    """A target of a memory report for which nothing has been compiled."""

    template = "Nothing has been compiled for {name} by inductor_ext in this process."
    remedy = (
        'Compile it with backend="inductor_ext" and call it first. To get the plan of the '
        "backward, run the backward too."
    )


class PlanNotFoundError(InductorExtError):
    """A graph loaded from a cache that does not contain its memory plan."""

    template = "A graph of {name} was loaded from a cache entry (key {key}) without a memory plan."
    remedy = (
        "Run once with TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 in the environment, so that the graph "
        "is planned again."
    )


class BatchNotDynamicError(InductorExtError):
    """A model whose memory is not known for other batch sizes."""

    template = "The memory of the model at other batch sizes is not known: {why}."
    remedy = (
        "fit_batch needs a model that torch.compile compiles to one graph, for any batch size; "
        "torch.compile(model, fullgraph=True, dynamic=True) shows where it is not."
    )


class NoBatchFitsError(InductorExtError):
    """A budget in which not even a batch of one fits."""

    template = "A batch of 1 needs {needed} on {device}, more than the budget of {budget}."
    remedy = "Raise the budget, or reduce the model or its other dimensions."


class SizesNotKnownError(InductorExtError):
    """Sizes at which the memory of a report's graphs is not known."""

    template = "The memory of {title} at other sizes is not known: {why}."
    remedy = "{fix}"


class NotMeasurableError(InductorExtError):
    """A step whose memory cannot be measured."""

    template = "The {what} cannot be measured: {why}."
    remedy = "{fix}"


class NothingMeasuredError(InductorExtError):
    """A measured call that ran none of the graphs of the memory report."""

    template = "The measured call ran none of the graphs in the report on {title}."
    remedy = (
        "Call the target of the report with inputs that it was called with before, and create the "
        "report after that call."
    )


class BadReportFileError(InductorExtError):
    """A file without a readable memory plan, or a report file that cannot be written."""

    template = "{file}{where}: {why}."
    remedy = "{fix}"

    @classmethod
    def not_writable(cls, file: str, why: str | None) -> BadReportFileError:
        """Return the error for a report file that cannot be written."""
        remedy = "Pass a path in an existing, writable folder."
        return cls(file=file, where="", why=f"cannot be written: {why}", fix=remedy)
