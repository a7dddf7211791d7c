"""`inductor-ext options [TEXT]`: shows the settings, with their values in this environment.

With `--all`, Inductor's options are listed, too; only then torch is imported.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from typing import Any

from inductor_ext import exc, settings
from inductor_ext.settings.type_checks import describe_values

EXAMPLE = "inductor-ext options memory"
EXIT_CODES = {
    0: "options are shown",
    2: "no name of an option contains the text, or a setting in the environment is invalid",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "text",
        nargs="?",
        default="",
        metavar="TEXT",
        help="show the options whose names contain this (default: all)",
    )
    parser.add_argument("--all", action="store_true", help="show Inductor's options, too")
    parser.add_argument("--json", action="store_true", help="print a JSON array")


def run(arguments: argparse.Namespace) -> int:
    """Print the options.

    Raises:
        exc.BadArgumentError: no name of an option contains the text.
        exc.BadEnvironmentError: a setting cannot be read.
    """
    options = _list_settings() + (_list_inductor_options() if arguments.all else [])
    text = _simplify(arguments.text)
    shown = [option for option in options if text in _simplify(option["name"])]
    if not shown:
        where = "" if arguments.all else " (--all searches Inductor's options, too)"
        allowed = f"a part of the name of an option{where}"
        raise exc.BadArgumentError(name="TEXT", actual=repr(arguments.text), allowed=allowed)
    print(json.dumps(shown, indent=1, default=repr) if arguments.json else _format(shown))
    return 0


def _simplify(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _list_settings() -> list[dict[str, Any]]:
    values = settings.from_environment()
    annotations = settings.types_of()
    return [
        {
            "name": field.name,
            "value": values.get(field.name, field.default),
            "default": field.default,
            "allowed": describe_values(annotations[field.name]),
            "variable": settings.environment_variable(field.name),
            "meaning": field.metadata["meaning"],
        }
        for field in dataclasses.fields(settings.Settings)
    ]


def _list_inductor_options() -> list[dict[str, Any]]:
    from torch._inductor import config

    values = config.get_config_copy().items()
    return [{"name": name, "value": value} for name, value in values]


def _format(options: list[dict[str, Any]]) -> str:
    lines = []
    for option in options:
        value, default = option["value"], option.get("default", option["value"])
        changed = "" if value == default else f" (default: {default!r})"
        lines.append(f"{option['name']} = {value!r}{changed}")
        if "meaning" in option:
            lines += textwrap.wrap(
                f"{option['meaning']} Values: {option['allowed']}. Variable: {option['variable']}.",
                width=96,
                initial_indent="    ",
                subsequent_indent="    ",
                break_on_hyphens=False,
            )
    return "\n".join(lines)
