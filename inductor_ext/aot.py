"""Ahead-of-time compilation of exported programs into `.pt2` packages.

The front end is stock's, run inside an activation; what is ours is what surrounds it: options are
checked before the compile and not after, a missing compiler is said by name, and the package
appears at its path complete or not at all. The package is loaded by stock's loaders.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

from inductor_ext import activation, cache, config, events, exc, options, toolchain

if TYPE_CHECKING:
    from torch.export import ExportedProgram

__all__ = ["aoti_compile_and_package"]


def aoti_compile_and_package(
    exported_program: ExportedProgram,
    *,
    package_path: str | os.PathLike[str] | IO[bytes] | None = None,
    inductor_configs: Mapping[str, Any] | None = None,
) -> str | IO[bytes]:
    """Compile an exported program and write it as a `.pt2` package.

    Takes what `torch._inductor.aoti_compile_and_package` takes, ours among `inductor_configs`, and
    never changes that mapping.

    Args:
        exported_program: made by `torch.export.export`, with its example inputs.
        package_path: where to write; a path that ends in .pt2, or a writable and seekable buffer.
            None chooses a path in Inductor's cache folder.
        inductor_configs: Inductor's options and ours by name.

    Returns:
        The package's path, or the buffer.

    Raises:
        exc.NotAnExportedProgramError, exc.BadPackagePathError, exc.UnknownOptionError,
        exc.BadOptionError, exc.UnsupportedTorchError, exc.MissingToolchainError: before anything
            is compiled or written.
    """
    import torch._inductor
    from torch.export import ExportedProgram

    if not isinstance(exported_program, ExportedProgram):
        raise exc.NotAnExportedProgramError(found=type(exported_program).__name__)
    _check_path(package_path)
    ours, patches = options.split(None, inductor_configs)
    with activation.activate(**ours):
        settings = config.snapshot(activation.requested())
        if settings.enabled:
            missing = toolchain.missing("aot", _device_types(exported_program))
            if missing is not None:
                missing.require()
        start = time.perf_counter()
        if isinstance(package_path, (str, os.PathLike)):
            with cache.publish(package_path) as temporary:
                torch._inductor.aoti_compile_and_package(
                    exported_program, package_path=temporary, inductor_configs=patches
                )
            result: str | IO[bytes] = os.fspath(package_path)
        else:
            result = torch._inductor.aoti_compile_and_package(
                exported_program, package_path=package_path, inductor_configs=patches
            )
        if settings.enabled and isinstance(result, str):
            record = events.PackageRecord(
                path=result,
                bytes=os.path.getsize(result),
                seconds=round(time.perf_counter() - start, 3),
            )
            events.emit(record, event_log=settings.event_log)
        return result


def _device_types(program: ExportedProgram) -> set[str]:
    return toolchain.device_types(node.meta.get("val") for node in program.graph.nodes)


def _check_path(path: str | os.PathLike[str] | IO[bytes] | None) -> None:
    if path is None:
        return
    if not isinstance(path, (str, os.PathLike)):
        if not (isinstance(path, (io.IOBase, IO)) and path.writable() and path.seekable()):
            raise exc.BadPackagePathError(path=path, why="it is no path and no writable buffer")
        return
    text = os.fspath(path)
    folder = os.path.dirname(os.path.abspath(text))
    if not text.endswith(".pt2"):
        raise exc.BadPackagePathError(path=text, why="its name does not end in .pt2")
    if os.path.isdir(text):
        raise exc.BadPackagePathError(path=text, why="a folder stands there")
    if not os.path.isdir(folder):
        raise exc.BadPackagePathError(path=text, why=f"the folder {folder} does not exist")
    if not os.access(folder, os.W_OK):
        raise exc.BadPackagePathError(path=text, why=f"the folder {folder} is not writable")
