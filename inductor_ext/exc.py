"""Errors of inductor_ext: one class a kind, each with what is wrong and how to mend it.

A class states its message as a `template` and its `remedy`, both filled by `str.format` from the
keyword fields it is raised with, so that the wording of an error stands in one place and tests can
look at `error.fields` instead of parsing text. Every error is raised before any side effect.
"""

from __future__ import annotations

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
    "BadModelNameError",
    "BadOptionError",
    "BadPackageError",
    "BadPackagePathError",
    "BadProblemFileError",
    "BadReportFileError",
    "BadSignatureError",
    "BadTuningFileError",
    "BadWeightsFileError",
    "ConstantMismatchError",
    "ForeignConstantError",
    "IncompatibleArtifactError",
    "InductorExtError",
    "InputMismatchError",
    "KernelBuildError",
    "KernelLaunchError",
    "MemoryBudgetError",
    "MissingKernelError",
    "MissingToolchainError",
    "ModelNotFoundError",
    "NoModelError",
    "NotAnExportedProgramError",
    "NotReportableError",
    "NothingCompiledError",
    "NothingMeasuredError",
    "OrderError",
    "PlanError",
    "PlanNotFoundError",
    "SharedWeightsFileError",
    "TuningFaultError",
    "UncheckableInputError",
    "UnknownModeError",
    "UnknownNodeError",
    "UnknownOptionError",
    "UnknownVariableError",
    "UnsupportedArtifactError",
    "UnsupportedCompileModeError",
    "UnsupportedLevelError",
    "UnsupportedTorchError",
]


class InductorExtError(RuntimeError):
    """Base of all errors that inductor_ext raises on purpose."""

    template: ClassVar[str]
    remedy: ClassVar[str]

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        text = f"{self.template.format(**fields)} {self.remedy.format(**fields)}"
        super().__init__(text.strip())

    def __reduce__(self) -> tuple[Any, ...]:
        # RuntimeError's own __reduce__ would hand the message to __init__ as a positional argument;
        # errors cross process borders when Inductor compiles in a subprocess.
        return _rebuild, (type(self), self.fields)


def _rebuild(cls: type[InductorExtError], fields: dict[str, Any]) -> InductorExtError:
    return cls(**fields)


class UnsupportedTorchError(InductorExtError):
    """The installed torch lies outside the range that inductor_ext is written and tested for."""

    template = "inductor_ext supports torch {lowest} to {highest}, and this is torch {found}."
    remedy = (
        "Install a torch within that range, or set {variable}=1 to try this one at your own "
        "risk.{check}"
    )


class HookError(InductorExtError):
    """Something that the extension replaces or relies on in torch is missing or different."""

    template = "inductor_ext cannot compile with torch {torch}: hook {hook}: {why}."
    remedy = (
        "Install a supported torch; `inductor-ext doctor` lists every hook that does not fit this "
        "one. INDUCTOR_EXT_ENABLED=0 compiles with Inductor (default)."
    )


class SharedWeightsFileError(InductorExtError):
    """One file for the weights of several models."""

    template = "The weights of {models} cannot all be written to {path!r}."
    remedy = "Compile the models one by one, or leave the weights in the package."


class BadWeightsFileError(InductorExtError):
    """An `aot_weights_file` that cannot be written."""

    template = "The weights cannot be written to {path!r}: {why}."
    remedy = "Give aot_weights_file a path in an existing writable folder."


class ForeignConstantError(InductorExtError):
    """A constant on a device that nothing of the graph runs on."""

    template = (
        "Constant {name!r} is on {found}, and nothing in the graph runs there but on {device}."
    )
    remedy = "Move it to the CPU, or use it in the model."


class UnsupportedLevelError(InductorExtError):
    """An `aot_isa` that this machine cannot compile for."""

    template = "This machine cannot compile for {level}: it lacks {lacking}."
    remedy = 'Choose a lower level, or leave the setting aot_isa at "auto".'


class UnknownOptionError(InductorExtError):
    """An option name that neither Inductor nor inductor_ext knows."""

    template = "Unknown option {name!r} (value {value!r}).{nearest}"
    remedy = "inductor_ext.list_options() lists the {count} names that are allowed."


class BadOptionError(InductorExtError):
    """An option whose value has the wrong type."""

    template = "Option {name!r} has the value {value!r} of type {found}; allowed is {allowed}."
    remedy = "Its default is {default!r}."


class BadArgumentError(BadOptionError):
    """An argument of a function or a command that is of no use."""

    template = "{name} is {given}."
    remedy = "Give {allowed}."


class UnknownModeError(InductorExtError):
    """A `mode=` that torch.compile does not have."""

    template = "Unknown mode {mode!r}; allowed are {allowed}.{nearest}"
    remedy = "inductor_ext.list_mode_options() says what each mode sets."


class BadEnvironmentError(InductorExtError):
    """An INDUCTOR_EXT_* environment variable whose value cannot be read."""

    template = "Environment variable {variable}={value!r} cannot be read as {allowed}."
    remedy = "Unset it, or give it such a value before Python starts."


class UnknownVariableError(BadEnvironmentError):
    """An INDUCTOR_EXT_* environment variable that is no setting's."""

    template = "Environment variable {variable}={value!r} is no setting's.{nearest}"
    remedy = "Unset it, or name a setting by it: docs/settings.md lists their variables."


class MissingToolchainError(InductorExtError):
    """A compiler or package that the compile at hand cannot do without."""

    template = "{part} is missing: {why}."
    remedy = "To mend it: {install}."


class BadModelNameError(InductorExtError):
    """A model's name that cannot be a folder in a package."""

    template = "A model in a package cannot be named {name!r}."
    remedy = "Use letters, digits, underscores, hyphens and dots, and begin with a letter."


class NotAnExportedProgramError(InductorExtError):
    """AOT compilation was given something else than a program made by torch.export."""

    template = "aoti_compile_and_package needs a torch.export.ExportedProgram, not {found}."
    remedy = "Make one with torch.export.export(model, args, kwargs)."


class BadPackagePathError(InductorExtError):
    """A package path that cannot be written."""

    template = "The package cannot be written to {path!r}: {why}."
    remedy = "Give a path that ends in .pt2 in an existing writable folder, or a writable buffer."


class BadPackageError(InductorExtError):
    """A package that cannot be read, is damaged, or has names that lead out of it."""

    template = "The package {path} is damaged or unsafe: {why}."
    remedy = "Nothing of it has been loaded. Copy it again from where it came, or compile it again."


class IncompatibleArtifactError(InductorExtError):
    """A package that is in order, and cannot run on this machine or with this torch."""

    template = "The package {path} does not fit here: {why}."
    remedy = "{mend}."


class ModelNotFoundError(InductorExtError):
    """A model name that a package does not have."""

    template = "The package {path} has no model {name!r}; it has {models}."
    remedy = "Give one of them as model_name."


class NoModelError(ModelNotFoundError):
    """A file in the format of a package in which nothing is compiled."""

    template = "There is no compiled model in {path}."
    remedy = (
        "If torch.export.save has written it, compile what torch.export.load makes of it, "
        "by inductor_ext.aoti_compile_and_package."
    )


class SourcesOnlyError(InductorExtError):
    """A model that a package holds as sources, without a library that could be loaded."""

    template = "The package {path} holds sources of the model {name!r} and no library."
    remedy = (
        "Unpack it and build the library, with data/aotinductor/{name} below its root folder as "
        "SOURCES: cmake -S SOURCES -B build -DCMAKE_PREFIX_PATH=$(python -c 'import torch; "
        "print(torch.utils.cmake_prefix_path)') && cmake --build build. To load a package, compile "
        "the model without aot_inductor.package_cpp_only."
    )


class BadExpressionError(InductorExtError):
    """A size, stride or constraint of a signature that is no integer expression."""

    template = "{text!r} is no expression of a signature: {why}."
    remedy = "Such expressions are whole numbers and symbols under Python's integer operators."


class BadSignatureError(InductorExtError):
    """JSON that is no signature of an artifact."""

    template = "{where} is {found}; allowed is {allowed}."
    remedy = "Take the signature from the manifest of an artifact that inductor_ext has written."


class UncheckableInputError(InductorExtError):
    """An input for which an artifact could not tell right from wrong."""

    template = "Calls cannot be checked for {name!r}: {why}."
    remedy = (
        "Export the model so that each symbol is the size of some dimension or an argument, or "
        "compile without checks (setting aot_check_inputs=False)."
    )


class ArtifactLoadError(InductorExtError):
    """A model whose library or weights the system or the library itself refuses to load."""

    template = "Model {name!r} of the package {path} cannot be loaded: {why}."
    remedy = "{mend}"


class ArtifactRunError(InductorExtError):
    """A call of an artifact that failed while it ran."""

    template = "{why}."
    remedy = ""


class InputMismatchError(ArtifactRunError):
    """A call of an artifact with other inputs than it was compiled for."""

    template = "{why}."
    remedy = ""


class UnknownNodeError(InductorExtError):
    """An artifact whose inputs or outputs have a class that this process does not know."""

    template = "The package {path} takes or returns a class that is not registered here: {why}."
    remedy = (
        "Register it as before the export, with torch.export.register_dataclass or "
        "torch.utils._pytree.register_pytree_node, before loading the package."
    )


class ConstantMismatchError(InductorExtError):
    """Tensors that cannot become an artifact's constants."""

    template = "The constants of the model cannot be updated: {why}."
    remedy = "{mend}"


class UnsupportedArtifactError(InductorExtError):
    """Something that was asked of a package of stock's and that only ours can do."""

    template = "{what} is not possible with the package {path}: {why}."
    remedy = "Compile it with inductor_ext.aoti_compile_and_package."


class UnsupportedCompileModeError(InductorExtError):
    """A TORCHINDUCTOR_FX_COMPILE_MODE that this compile cannot work with."""

    template = "inductor_ext cannot compile with TORCHINDUCTOR_FX_COMPILE_MODE={mode}: {why}."
    remedy = "{mend}."


class BadIntervalError(InductorExtError):
    """A storage that the memory planner cannot plan, since no plan of it could be right."""

    template = "Buffer {name}: its {field} is {value}; allowed is {allowed}."
    remedy = "Correct the buffer's lifetime, size or alignment."


class BadGemmError(InductorExtError):
    """A GEMM problem, a configuration or a device that cannot be, or JSON that is none."""

    template = "A GEMM's {record} has {field} {value!r}; allowed is {allowed}."
    remedy = "Correct the {record}; if it was read from a file, delete the entry and tune again."


class TuningFaultError(InductorExtError):
    """A kernel that was tried has broken the device for this process."""

    template = "While {problem} was tuned, candidate {candidate} broke the device: {why}."
    remedy = (
        "Start the process again with TORCHINDUCTOR_AUTOTUNE_IN_SUBPROC=1, with which such a "
        "candidate breaks a process of its own and is dropped; and report it."
    )


class KernelBuildError(InductorExtError):
    """A kernel that nvcc does not build."""

    template = "nvcc cannot build the kernel {kernel}: {why}."
    remedy = "Other kernels are chosen instead. Deny it by name, or report it."


class MissingKernelError(InductorExtError):
    """A kernel that compiled code calls, and that is not on this machine."""

    template = "Compiled code calls the kernel {kernel}, which is not in {folder}: {why}."
    remedy = (
        "Install what is missing, for the kernel to be built; or copy {folder} from the machine "
        "that compiled the code; or remove the code from Inductor's cache, to compile it anew."
    )


class KernelLaunchError(InductorExtError):
    """A kernel that does not start."""

    template = "The kernel {kernel} cannot be launched: {why}."
    remedy = "Deny it by name, for another one to be chosen, and report it."


class PlanError(InductorExtError):
    """A memory plan that would let buffers overwrite each other or leave their arena."""

    template = "The memory plan is wrong: {why}."
    remedy = "It must not be used; if inductor_ext made it, report the problem and the plan."


class OrderError(InductorExtError):
    """An order of kernels that would run one before what it needs, twice or not at all."""

    template = "The order of kernels is wrong: {why}."
    remedy = "It must not be used; if inductor_ext made it, report the problem and the order."


class BadProblemFileError(InductorExtError):
    """A file of a planning problem that cannot be read, or a plan's that cannot be written."""

    template = "{file}{where}: {why}."
    remedy = "{mend}."


class BadTuningFileError(InductorExtError):
    """A file of tuning results that cannot be read, or that cannot be written."""

    template = "{file}{where}: {why}."
    remedy = "{mend}."


class ArenaBoundsError(InductorExtError):
    """A buffer of generated code that does not lie within its arena: a planning bug."""

    template = (
        "A buffer of size {size} and stride {stride} at element {offset} ends at element {end} of "
        "an arena of {numel}."
    )
    remedy = (
        "This is a bug of inductor_ext, found by the setting memory_debug. "
        'memory_arenas="never" avoids arenas.'
    )


class MemoryBudgetError(InductorExtError):
    """A planned memory peak above the setting `memory_budget`."""

    template = (
        "The planned memory peak of {graph} on {device} is {peak}, above the budget of {budget}."
    )
    remedy = (
        "Raise memory_budget, or need less: a smaller batch or sequence, a dtype of lower "
        "precision, or, for training, activation checkpointing (torch.utils.checkpoint).\n{table}"
    )


class NotReportableError(InductorExtError):
    """A memory report was asked for something that has no memory plan."""

    template = "There is no memory report of {found}: {why}."
    remedy = "Give what torch.compile returned, or a torch.export.ExportedProgram."


class NothingCompiledError(InductorExtError):
    """A memory report was asked for a callable for which nothing has been compiled."""

    template = "Nothing has been compiled for {name} by inductor_ext in this process."
    remedy = (
        'Compile it with backend="inductor_ext" and call it once first; for the plan of a '
        "backward, call backward as well."
    )


class PlanNotFoundError(InductorExtError):
    """A graph came from a cache, and nobody has left its memory plan beside it."""

    template = "A graph of {name} came from a cache (key {key}) that does not hold its memory plan."
    remedy = (
        "Run once with TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 in the environment, so that the graph "
        "is planned again."
    )


class NothingMeasuredError(InductorExtError):
    """A call whose memory was to be compared with plans ran none of the planned graphs."""

    template = "The measured call ran none of the graphs in the report on {title}."
    remedy = (
        "Call what the report was made of, with inputs it has been called with before, and make "
        "the report after that."
    )


class BadReportFileError(InductorExtError):
    """A file that holds no memory plan that can be read, or a report's that cannot be written."""

    template = "{file}{where}: {why}."
    remedy = "{mend}"
