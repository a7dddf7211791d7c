"""`inductor-ext build SOURCE --output PACKAGE`: compiles a model into a package.

SOURCE is an exported program (`torch.export.save`), or `FILE.py:NAME`, where NAME is a function
without arguments (or the value itself) in a Python file. It gives an exported program, a mapping
from model names to exported programs, or a tuple `(module, args)` or
`(module, args, dynamic_shapes)` to export.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import zipfile
from collections.abc import Mapping
from typing import TYPE_CHECKING

from inductor_ext import exc
from inductor_ext.cli import model_source
from inductor_ext.cli.argument_types import add_options
from inductor_ext.cpp_wrapper.package import output_path
from inductor_ext.memory.planner.peak_report import human_bytes

if TYPE_CHECKING:
    from torch.export import ExportedProgram

EXAMPLE = "inductor-ext build model.py:make --output model.pt2 --target x86-64-v3"
EXIT_CODES = {0: "the package was written", 2: "there is no such model, or it cannot be compiled"}

_ALLOWED = (
    "an exported program, a mapping from names to exported programs, or a tuple (module, args) or "
    "(module, args, dynamic_shapes)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="an exported program (torch.export.save), or FILE.py:NAME, where NAME is a function "
        f"that returns {_ALLOWED}; default NAME: {model_source.DEFAULT_NAME}",
    )
    parser.add_argument(
        "--output", metavar="PACKAGE", help="the package; by default SOURCE with the suffix .pt2"
    )
    parser.add_argument(
        "--target",
        action="append",
        metavar="NAME",
        default=[],
        help="where it is to run: a CPU level (x86-64-v2, x86-64-v3, x86-64-v4), the architecture "
        "or name of a GPU (sm_90, H100), or ptx; by default on this machine. Several targets (the "
        "option again) give one package, from which the loader chooses",
    )
    add_options(
        parser, "an option of Inductor or a setting of the extension, such as max_autotune=True"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Compile the model, and print the path and size of the package.

    Raises:
        exc.BadModelSourceError: there is no such model.
        exc.InductorExtError: see `inductor_ext.aoti_compile_and_package`.
    """
    from inductor_ext import aot, targets

    path, name = model_source.split(arguments.source)
    output = arguments.output
    if output is None:
        stem = os.path.splitext(path)[0]
        output = f"{stem}.pt2" if path.endswith(".py") else f"{stem}.package.pt2"
    output_path.check_package_path(output)
    program = _load(path, name)
    start = time.perf_counter()
    aot.aoti_compile_and_package(
        program,
        package_path=output,
        inductor_configs=dict(arguments.set),
        targets=[name for name in arguments.target if not targets.is_cpu_target(name)] or None,
        cpu_targets=[name for name in arguments.target if targets.is_cpu_target(name)] or None,
    )
    seconds = time.perf_counter() - start
    size = os.path.getsize(output)
    if arguments.json:
        print(json.dumps({"package": output, "bytes": size, "seconds": round(seconds, 3)}))
    else:
        print(f"{output}: {human_bytes(size)}, compiled in {seconds:.1f} s")
    return 0


def _load(path: str, name: str) -> ExportedProgram | Mapping[str, ExportedProgram]:
    import torch

    model_source.check_file(path)
    if not path.endswith(".py"):
        if not zipfile.is_zipfile(path):
            why = "it was not written by torch.export.save"
            raise exc.BadModelSourceError(source=path, why=why)
        try:
            return torch.export.load(path)
        except Exception as error:
            why = f"torch.export.load cannot read it ({str(error).splitlines()[0]})"
            raise exc.BadModelSourceError(source=path, why=why) from error
    value = model_source.run_file(path, name)
    if isinstance(value, torch.export.ExportedProgram) or (
        isinstance(value, Mapping)
        and value
        and all(isinstance(item, torch.export.ExportedProgram) for item in value.values())
    ):
        return value
    if (
        isinstance(value, tuple)
        and len(value) in (2, 3)
        and isinstance(value[0], torch.nn.Module)
        and isinstance(value[1], tuple)
    ):
        return torch.export.export(value[0], value[1], dynamic_shapes=(*value[2:], None)[0])
    why = f"{name!r} gives a value of type {type(value).__name__} instead of {_ALLOWED}"
    raise exc.BadModelSourceError(source=path, why=why)
