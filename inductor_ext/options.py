"""What a user passes as `mode=` and `options=` (or `inductor_configs=`): checked, and sorted.

Inductor's own options and ours come in one dictionary. `split` checks every name and type before
anything happens, and returns ours (for the activation) apart from Inductor's (for a config patch).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inductor_ext import exc, settings

__all__ = ["list_mode_options", "list_options", "split"]


def list_options() -> list[str]:
    """Names of all options: Inductor's, then ours."""
    import torch._inductor

    return [*torch._inductor.list_options(), *settings.names()]


def list_mode_options(mode: str | None = None, dynamic: bool | None = None) -> dict[str, Any]:
    """What each mode of `torch.compile` sets; for one mode its options, else all modes by name.

    The modes are Inductor's: the extension's parts follow Inductor's settings, `max_autotune` for
    one, and need none of their own.

    Raises:
        exc.UnknownModeError: torch.compile has no such mode.
        exc.BadArgumentError: it is no string.
    """
    import torch._inductor

    modes: dict[str, Any] = torch._inductor.list_mode_options(None, dynamic)
    if mode is None:
        return modes
    if not isinstance(mode, str):
        raise exc.BadArgumentError(
            name="mode", given=repr(mode), allowed=f"one of {', '.join(map(repr, modes))}"
        )
    if mode not in modes:
        raise exc.UnknownModeError(
            mode=mode, allowed=", ".join(map(repr, modes)), nearest=settings.nearest(mode, modes)
        )
    options: dict[str, Any] = torch._inductor.list_mode_options(mode, dynamic)
    return options


def split(
    mode: str | None, options: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Check options and sort them into (ours, Inductor's).

    An option wins over what its mode sets. As in torch.compile, "-" in a name reads as "_".

    Raises:
        exc.UnknownModeError: torch.compile has no such mode.
        exc.UnknownOptionError: a name that is neither Inductor's nor ours.
        exc.BadOptionError: a value of the wrong type, or options that are no dictionary.
    """
    from torch._inductor import config as inductor_config

    if options is not None and not isinstance(options, Mapping):
        raise exc.BadArgumentError(
            name="options", given=repr(options), allowed="a dictionary of options by name"
        )
    ours: dict[str, Any] = {}
    inductors: dict[str, Any] = dict(list_mode_options(mode)) if mode else {}
    # Copied only where it is needed: this runs for every graph.
    known: dict[str, Any] = inductor_config.get_config_copy() if options else {}
    for given, value in (options or {}).items():
        name = str(given).replace("-", "_")
        if name in settings.types_of():
            settings.check(name, value)
            ours[name] = value
        elif name in known:
            inductors[name] = _checked(name, value, known[name])
        else:
            allowed = [*known, *settings.names()]
            raise exc.UnknownOptionError(
                name=name, value=value, nearest=settings.nearest(name, allowed), count=len(allowed)
            )
    return ours, inductors


def _checked(name: str, value: Any, current: Any) -> Any:
    """An Inductor option's value if it fits, as the type Inductor wants."""
    from torch._inductor import config as inductor_config

    annotation = inductor_config.get_type(name)  # type: ignore[attr-defined]
    if annotation is type(None):
        # Declared as `name = None` without an annotation: the type says nothing.
        return value
    if not settings.accepts(value, annotation):
        raise exc.BadOptionError(
            name=name,
            value=value,
            found=type(value).__name__,
            allowed=settings.describe_type(annotation),
            default=current,
        )
    return float(value) if annotation is float else value
