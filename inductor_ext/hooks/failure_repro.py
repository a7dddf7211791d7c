"""Writes a program that repeats a compile which failed by a bug, and names it in the error.

The program has the graph, the settings, the options of Inductor and the versions. It has neither
weights nor inputs: values are random. torch's own tools write it and minimize it
(`torch._dynamo.repro.after_dynamo`); `inductor-ext minify` calls them. Errors that the extension
raises on purpose are no bugs, and Dynamo's own exceptions control its tracing.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from inductor_ext import __version__, _compat, events, exc
from inductor_ext.settings import Settings
from inductor_ext.storage.atomic import atomic_write

FOLDER = "inductor_ext_repros"
"""Name of the folder in Inductor's cache folder, if the setting `repro_dir` names none."""


def report(
    error: Exception,
    model: Any,
    inputs: Sequence[Any],
    patches: Mapping[str, Any] | None,
    settings: Settings,
) -> None:
    """Write the program, and add its path as a note to the error. Never raises an error.

    Args:
        error: what the compile raised.
        model: the graph, of torch.compile; for anything else, nothing is written.
        inputs: its inputs, of which the sizes, strides and dtypes are used.
        patches: options of Inductor that apply to the compile only.
        settings: of the compile.
    """
    if not _is_bug(error):
        return
    try:
        text = _render(error, model, inputs, patches or {}, settings)
        path = _choose_path(text, settings)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            pathlib.Path(temporary).write_text(text, encoding="utf-8")
    except Exception as why:
        events.log.debug("no program that repeats the failed compile: %s", why)
        return
    note = f"inductor_ext: {path} repeats this error; `inductor-ext minify {path}` shortens it."
    if hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(note)
    events.log.warning("%s", note)


def _is_bug(error: BaseException) -> bool:
    return not any(
        isinstance(cause, exc.InductorExtError) or type(cause).__module__ == "torch._dynamo.exc"
        for cause in _list_causes(error)
    )


def _list_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it wraps."""
    pending: list[Any] = [error]
    seen: set[int] = set()
    while pending:
        cause = pending.pop()
        if isinstance(cause, BaseException) and id(cause) not in seen:
            seen.add(id(cause))
            yield cause
            pending += [cause.__cause__, getattr(cause, "inner_exception", None)]


def _choose_path(text: str, settings: Settings) -> pathlib.Path:
    from torch._inductor.runtime.runtime_utils import cache_dir

    folder = settings.repro_dir or os.path.join(cache_dir(), FOLDER)
    name = hashlib.sha256(text.encode()).hexdigest()[:12]
    return pathlib.Path(os.path.abspath(folder), f"repro_{name}.py")


def _render(
    error: Exception,
    model: Any,
    inputs: Sequence[Any],
    patches: Mapping[str, Any],
    settings: Settings,
) -> str:
    """Return the program.

    Raises:
        TypeError: the graph is not one of torch.compile, or an input is not a tensor or an integer.
    """
    import torch
    from torch._dynamo.repro.after_dynamo import generate_dynamo_fx_repro_string
    from torch._inductor import config as inductor_config

    if not isinstance(model, torch.fx.GraphModule):
        raise TypeError(f"the model is a {type(model).__name__}")
    # Without the environment variables and the paths in them.
    program = generate_dynamo_fx_repro_string(model, inputs, "inductor_ext", stable_output=True)
    with inductor_config.patch(dict(patches)):
        options: str = inductor_config.codegen_config()
    summary = str(error).strip().partition("\n")[0]
    changed = settings.non_default(only_of_code=True)
    lines = [
        f"# {type(error).__name__}: {summary}",
        f"# inductor_ext {__version__}, torch {_compat.torch_version()}",
        "# `python FILE` repeats the error, `inductor-ext minify FILE` shortens the program.",
        "import torch._inductor.config",
        *options.splitlines(),
        "import inductor_ext.config",
        *(f"inductor_ext.config.{name} = {value!r}" for name, value in changed.items()),
    ]
    return "\n".join([*lines, program.strip(), ""])
