"""Validation of the arguments `mode=` and `options=` (or `inductor_configs=`).

Users pass Inductor's options and the extension's settings in one dictionary. `split_options`
validates all names and types before the compile starts, and separates the settings (for `activate`)
from Inductor's options (for a config patch). Invalid input raises an error of `exc`; nothing is
ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from inductor_ext import exc, settings
from inductor_ext.settings.type_checks import describe_values, has_type, suggest_name

BACKGROUND = "max-autotune-background"
"""The extension's mode: CUDA graphs, and tuning in the background."""

_BACKGROUND_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {"triton.cudagraphs": True, "tuning": "background"}
)


def list_options() -> list[str]:
    """Return the names of all options: Inductor's, then the extension's settings."""
    import torch._inductor

    return [*torch._inductor.list_options(), *settings.names()]


def list_mode_options(mode: str | None = None, dynamic: bool | None = None) -> dict[str, Any]:
    """Return the options that the modes of `torch.compile` set.

    The modes are Inductor's, whose options the extension's features follow, and
    "max-autotune-background": with CUDA graphs, as with "max-autotune", but matmuls are tuned in
    the background (setting `tuning`).

    Args:
        mode: name of a mode. Default: None, all modes.
        dynamic: passed to `torch._inductor.list_mode_options`. Default: None.

    Returns:
        The options of `mode` by name; if `mode` is None, such a dictionary for each mode name.

    Raises:
        exc.UnknownModeError: torch.compile has no such mode.
        exc.BadArgumentError: `mode` is not a string.
    """
    import torch._inductor

    modes: dict[str, Any] = torch._inductor.list_mode_options(None, dynamic)
    modes[BACKGROUND] = dict(_BACKGROUND_OPTIONS)
    if mode is None:
        return modes
    if not isinstance(mode, str):
        raise exc.BadArgumentError(
            name="mode", actual=repr(mode), allowed=f"one of {', '.join(map(repr, modes))}"
        )
    if mode not in modes:
        raise exc.UnknownModeError(
            mode=mode, allowed=", ".join(map(repr, modes)), nearest=suggest_name(mode, modes)
        )
    options: dict[str, Any] = modes[mode]
    return options


def split_options(
    mode: str | None, options: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Validate options and return them as (settings of the extension, options of Inductor).

    An explicit option takes precedence over the same option set by `mode`. As in torch.compile,
    "-" in an option name is read as "_".

    Raises:
        exc.UnknownModeError: torch.compile has no such mode.
        exc.UnknownOptionError: a name is neither an Inductor option nor a setting.
        exc.BadOptionError: a value has the wrong type, or `options` is not a mapping.
    """
    from torch._inductor import config as inductor_config

    if options is not None and not isinstance(options, Mapping):
        raise exc.BadArgumentError(
            name="options", actual=repr(options), allowed="a dictionary of options by name"
        )
    inductor: dict[str, Any] = dict(list_mode_options(mode)) if mode else {}
    extension = {name: inductor.pop(name) for name in settings.names() if name in inductor}
    # Copy the config only if needed: this function runs for every graph.
    defaults: dict[str, Any] = inductor_config.get_config_copy() if options else {}
    for key, value in (options or {}).items():
        name = str(key).replace("-", "_")
        if name in settings.types_of():
            settings.check(name, value)
            extension[name] = value
        elif name in defaults:
            inductor[name] = _converted(name, value, defaults[name])
        else:
            nearest = suggest_name(name, [*defaults, *settings.names()])
            raise exc.UnknownOptionError(name=name, value=value, nearest=nearest)
    return extension, inductor


def _converted(name: str, value: Any, current: Any) -> Any:
    """Validate the value of an Inductor option and convert it to the type that Inductor expects."""
    from torch._inductor import config as inductor_config

    annotation = inductor_config.get_type(name)  # type: ignore[attr-defined]
    if annotation is type(None):
        # Declared as `name = None` without an annotation: the type is unknown.
        return value
    if not has_type(value, annotation):
        raise exc.BadOptionError(
            name=name,
            value=value,
            actual=type(value).__name__,
            allowed=describe_values(annotation),
            default=current,
        )
    return float(value) if annotation is float else value
