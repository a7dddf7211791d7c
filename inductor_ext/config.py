"""The settings as a torch ConfigModule: `inductor_ext.config.<name>`, `config.patch(...)`.

Supports the API of torch._inductor.config (`patch` as context manager and decorator,
`get_config_copy`, `save_config_portable`, ...). `settings.Settings` declares names, types, defaults
and meanings; environment variables are read when this module is first imported. Unlike torch's
config modules, setting an unknown name or a value of the wrong type raises
`exc.UnknownOptionError` or `exc.BadOptionError` immediately.

The module must not define other values: torch's `install_config_module` turns each into a setting.
"""

import sys as _sys
import typing as _typing

from torch.utils import _config_module as _torch_config

from inductor_ext import settings as _settings

if _typing.TYPE_CHECKING:
    from torch.utils._config_typing import *  # noqa: F403

    enabled: bool
    fallback_to_eager: bool
    fallback_to_inductor: bool
    allow_unsupported_torch: bool
    gemm_fuse_dequantize: bool
    gemm_fuse_gated: bool
    gemm_fuse_norm: bool
    gemm_fuse_row_maxima: bool
    gemm_fuse_shared_input: bool
    fuse_attention: bool
    decode_attention: bool
    gemm_templates: bool
    gemm_predict: bool
    gemm_rows: str
    persistent_rows: bool
    memory_arenas: _typing.Literal["auto", "always", "never"]
    memory_reorder: bool
    memory_replan: bool
    memory_recompute: bool
    memory_budget: float | str | None
    memory_debug: bool
    aot_check_inputs: bool
    aot_debug_info: bool
    aot_isa: _typing.Literal["auto", "x86-64-v2", "x86-64-v3", "x86-64-v4"]
    aot_self_test: bool
    aot_unit_size: int
    aot_cross_torch: str | None
    aot_weights_file: str | None
    artifact_cache: bool
    artifact_cache_dir: str | None
    artifact_cache_size: float | str
    cutlass_background: bool
    repro_dir: str | None
    progress: bool
    event_log: str | None
    tuning_cache: bool
    tuning_cache_dir: str | None
    tuning_cache_entries: int
    tuning_wait: int
    tuning: _typing.Literal["compile", "background"]
    tuning_budget: int


def snapshot(overrides: "_typing.Mapping[str, object] | None" = None) -> "_settings.Settings":
    """Return the current settings of this thread as a frozen `Settings`, updated by `overrides`.

    Args:
        overrides: values by setting name. Default: None, no override.

    Raises:
        exc.UnknownOptionError: an override is not a setting.
        exc.BadOptionError: an override has the wrong type or an invalid value.
    """
    module = _sys.modules[__name__]
    current = {name: getattr(module, name) for name in _settings.names()}
    return _settings.resolve(current, overrides or {})


def _install() -> None:
    module = _sys.modules[__name__]
    values = {**vars(_settings.Settings()), **_settings.from_environment()}
    for name, annotation in _settings.types_of().items():
        entry: _typing.Any = _torch_config.Config(default=values[name], value_type=annotation)
        setattr(module, name, entry)
    _torch_config.install_config_module(module)
    base: _typing.Any = module.__class__

    class CheckedConfigModule(base):  # type: ignore[misc]
        """torch's ConfigModule with validation of names and values."""

        def __setattr__(self, name: str, value: object) -> None:
            if name not in self._bypass_keys:
                _settings.check(name, value)
            super().__setattr__(name, value)

        def patch(
            self,
            arg1: "str | dict[str, _typing.Any] | None" = None,
            arg2: _typing.Any = None,
            **kwargs: _typing.Any,
        ) -> _typing.Any:
            changes = {arg1: arg2} if isinstance(arg1, str) else {**(arg1 or {}), **kwargs}
            for name, value in changes.items():
                _settings.check(name, value)
            return super().patch(changes)

    # Bypass ConfigModule.__setattr__, which would treat `__class__` as a setting.
    object.__setattr__(module, "__class__", CheckedConfigModule)


_install()
