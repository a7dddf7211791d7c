"""A compiled model as sources: one C++ file, and the CMake project that builds it.

With the option `aot_inductor.package_cpp_only` a package contains these instead of a shared
library. `amalgamation` merges the runtime and the model's own translation units into one, which
needs only torch's headers; `cmake` generates the CMakeLists.txt for it. Neither file contains a
path of the machine that wrote it. Pure: does not import torch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

_INCLUDE = re.compile(r'\s*#\s*include\s*"([^"]+)"\s*(//.*)?')

_ONCE = re.compile(r"\s*#\s*pragma\s+once\s*")


def amalgamation(units: Iterable[str], headers: Mapping[str, str]) -> str:
    """Merge several translation units into one.

    Args:
        units: their text, in order.
        headers: text by the name in `#include`. Each header is inlined at its first `#include`, and
            its later ones are removed; includes of other headers are kept.
    """
    inlined: set[str] = set()

    def lines(text: str) -> Iterable[str]:
        for line in text.splitlines():
            include = _INCLUDE.fullmatch(line)
            if include is not None and include[1] in headers:
                if include[1] not in inlined:
                    inlined.add(include[1])
                    yield from lines(headers[include[1]])
            elif _ONCE.fullmatch(line) is None:
                yield line

    return "".join(f"{line}\n" for text in units for line in lines(text))


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A GPU kernel that is embedded in the library."""

    name: str
    """Name in the model's code."""
    ptx: str
    """File name of its PTX."""

    @property
    def fatbin(self) -> str:
        """File name of the fat binary that nvcc builds from it."""
        return f"{self.ptx.removesuffix('.ptx')}.fatbin"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Project:
    """A model's CMake project. All files are in the directory of CMakeLists.txt."""

    name: str
    """Name of the library and of its target."""
    source: str
    standard: str
    """C++ standard: "17", "20"."""
    definitions: Sequence[str]
    """Macro definitions: "NAME", "NAME=value"."""
    compile_options: Sequence[str]
    link_options: Sequence[str]
    libraries: Sequence[str]
    """Libraries besides torch's and CUDA's: "name" for libname.so."""
    exports: str
    """File name of the linker's version script."""
    weights: str | None
    """The weights file; None if there is none, or the weights are provided externally."""
    cuda: bool
    objects: Sequence[str] = ()
    """Object files of compiled GPU kernels."""
    kernels: Sequence[Kernel] = ()
    """GPU kernels to compile."""
    assembly: str | None = None
    """File name of the output of `kernels_assembly` for `kernels`."""
    gencode_options: Sequence[str] = ()
    """Targets of `kernels`, for nvcc's -gencode: "arch=compute_80,code=sm_80"."""


def cmake(project: Project) -> str:
    """Return the text of CMakeLists.txt."""
    target = project.name
    languages = "CXX ASM" if project.kernels else "CXX"
    sources = [project.source, *project.objects, *([project.assembly] if project.kernels else [])]
    blocks = [
        "cmake_minimum_required(VERSION 3.18)",
        f"project({target} LANGUAGES {languages})",
        f"""set(CMAKE_CXX_STANDARD {project.standard})
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)""",
        """# Needs -DCMAKE_PREFIX_PATH=..., for which Python has torch.utils.cmake_prefix_path.
find_package(Torch REQUIRED)""",
        _call("add_library", f"{target} SHARED", map(_here, filter(None, sources))),
        _call("target_compile_definitions", f"{target} PRIVATE", project.definitions),
        _call(
            "target_compile_options",
            f"{target} PRIVATE",
            [f"$<$<COMPILE_LANGUAGE:CXX>:{';'.join(project.compile_options)}>"]
            if project.kernels
            else project.compile_options,
        ),
        _call(
            "target_link_options",
            f"{target} PRIVATE",
            [*project.link_options, f"-Wl,--version-script={_here(project.exports)}"],
        ),
        f"""set_target_properties({target} PROPERTIES
    POSITION_INDEPENDENT_CODE ON
    LINK_DEPENDS "{_here(project.exports)}")""",
        _call(
            "target_link_libraries",
            f"{target} PRIVATE",
            ["${TORCH_LIBRARIES}", *project.libraries],
        ),
    ]
    if project.cuda:
        blocks.append(
            f"""find_package(CUDAToolkit REQUIRED)
target_include_directories({target} PRIVATE ${{CUDAToolkit_INCLUDE_DIRS}})
target_link_libraries({target} PRIVATE CUDA::cuda_driver CUDA::cudart_static)"""
        )
    if project.kernels:
        blocks.append(_fatbins(project))
    if project.weights is not None:
        beside = f"$<TARGET_FILE_PREFIX:{target}>$<TARGET_FILE_BASE_NAME:{target}>.weights"
        blocks.append(
            f"""# The library looks for its weights beside itself.
add_custom_command(TARGET {target} POST_BUILD
    COMMAND ${{CMAKE_COMMAND}} -E copy_if_different
        "{_here(project.weights)}"
        "$<TARGET_FILE_DIR:{target}>/{beside}"
    VERBATIM)"""
        )
    return "\n\n".join(blocks) + "\n"


def _fatbins(project: Project) -> str:
    """Return the CMake commands that build the fat binary of each kernel."""
    gencode = "\n            ".join(f"-gencode={option}" for option in project.gencode_options)
    files = " ".join(kernel.ptx.removesuffix(".ptx") for kernel in project.kernels)
    return f"""foreach(kernel {files})
    add_custom_command(
        OUTPUT ${{kernel}}.fatbin
        COMMAND ${{CUDAToolkit_NVCC_EXECUTABLE}} -fatbin
            "${{CMAKE_CURRENT_SOURCE_DIR}}/${{kernel}}.ptx" -o ${{kernel}}.fatbin
            {gencode}
        DEPENDS "${{CMAKE_CURRENT_SOURCE_DIR}}/${{kernel}}.ptx"
        VERBATIM)
    list(APPEND fatbins "${{CMAKE_CURRENT_BINARY_DIR}}/${{kernel}}.fatbin")
endforeach()
set_source_files_properties("{_here(str(project.assembly))}" PROPERTIES
    COMPILE_OPTIONS "-Wa,-I,${{CMAKE_CURRENT_BINARY_DIR}}"
    OBJECT_DEPENDS "${{fatbins}}")"""


def kernels_assembly(kernels: Iterable[Kernel]) -> str:
    """Return assembly that embeds fat binaries, under the symbols that the model's code uses."""
    lines = ['.section .note.GNU-stack,"",%progbits', ".section .rodata"]
    for kernel in kernels:
        start, end, size = (f"__{kernel.name}_{suffix}" for suffix in ("start", "end", "size"))
        lines += [
            f".global {start}, {end}, {size}",
            ".balign 16",
            f"{start}:",
            f'.incbin "{kernel.fatbin}"',
            f"{end}:",
            f".set {size}, {end} - {start}",
        ]
    return "".join(f"{line}\n" for line in lines)


def _here(name: str) -> str:
    return f"${{CMAKE_CURRENT_SOURCE_DIR}}/{name}"


def _call(command: str, head: str, arguments: Iterable[str]) -> str:
    lines = "".join(f'\n    "{_escape(argument)}"' for argument in arguments)
    return f"{command}({head}{lines})"


def _escape(argument: str) -> str:
    """Escape an argument for CMake's quotes; variable references are kept."""
    return argument.replace("\\", "\\\\").replace('"', '\\"')
