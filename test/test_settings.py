"""Settings and options: declared once, checked when they are set, and documented."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import typing
from collections.abc import Callable
from typing import Any, Literal, Optional

import pytest
import torch
import torch._inductor
import torch._inductor.config as inductor_config
import write_settings_docs

import inductor_ext
from inductor_ext import config, exc, options, settings
from inductor_ext.settings.type_checks import describe_type, describe_values, has_type

ROOT = pathlib.Path(__file__).parent.parent


def test_docs_hold_the_current_table() -> None:
    """`scripts/write_settings_docs.py` brings the page up to date."""
    assert (ROOT / "docs" / "user" / "settings.md").read_text() == write_settings_docs.render_page()


def test_every_setting_is_declared_in_full() -> None:
    for name in settings.names():
        field = settings.Settings.__dataclass_fields__[name]
        assert len(field.metadata["meaning"]) > 40, name
        assert has_type(field.default, settings.types_of()[name]), name
        assert settings.environment_variable(name) == f"INDUCTOR_EXT_{name.upper()}"


def test_config_module_declares_every_setting_for_type_checkers() -> None:
    source = (ROOT / "inductor_ext" / "config.py").read_text()
    declared = dict(re.findall(r"^    (\w+): ([\w|., \[\]\"-]+)$", source, flags=re.M))
    for name, kind in declared.items():
        declared[name] = kind.replace("_typing.", "").replace('"', "'")
    annotations = settings.types_of()
    assert declared == {name: describe_type(annotations[name]) for name in annotations}


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (4096, 4096),
        ("4096", 4096),
        (1.5e9, 1_500_000_000),
        ("1.5 GB", 1_500_000_000),
        ("2GiB", 2 << 30),
        (" 3 KB ", 3000),
        ("0.5 MiB", 1 << 19),
        ("1TB", 10**12),
        (1e16, 10**16),
    ],
)
def test_sizes(value: float | str, size: int) -> None:
    assert settings.parse_bytes(value) == size
    with config.patch(memory_budget=value):
        assert config.snapshot().memory_budget == value


@pytest.mark.parametrize("value", [0, 0.5, 1.5, -1, "", "GB", "1 gigabyte", "1gb", "1e9", "0 B"])
def test_sizes_that_are_refused(value: float | str) -> None:
    with pytest.raises(exc.BadOptionError, match="a positive number of bytes"):
        settings.check("memory_budget", value)


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (bool, "True or False"),
        (int | str | None, "an integer, a string or None"),
        (float | None, "a number or None"),
        (Literal["a", "b", 1], "'a', 'b' or 1"),
        (Literal["a"] | None, "'a' or None"),
        (list[str], "list[str]"),
    ],
)
def test_values_in_words(annotation: Any, words: str) -> None:
    assert describe_values(annotation) == words


def test_setting_names_do_not_hide_those_of_inductor() -> None:
    assert not set(settings.names()) & set(torch._inductor.list_options())


def test_config_is_a_torch_config_module() -> None:
    assert config.get_config_copy() == vars(settings.Settings())
    with config.patch(fallback_to_eager=False), config.patch({"event_log": "x"}):
        assert config.fallback_to_eager is False
        assert config.snapshot() == settings.Settings(fallback_to_eager=False, event_log="x")
    with config.patch("enabled", False):
        assert not config.enabled
    assert config.snapshot() == settings.Settings()


def test_config_patch_is_a_reusable_decorator() -> None:
    @config.patch(enabled=False)
    def value() -> bool:
        return config.enabled

    assert (value(), config.enabled, value()) == (False, True, False)


def test_config_can_be_assigned() -> None:
    config.fallback_to_eager = False
    try:
        assert config.snapshot().fallback_to_eager is False
    finally:
        config.fallback_to_eager = True


@pytest.mark.parametrize(
    "change",
    [
        lambda: setattr(config, "enabled", 1),
        lambda: config.patch(enabled="yes"),
        lambda: config.patch("enabled", None),
        lambda: config.snapshot({"enabled": 0}),
    ],
)
def test_ill_typed_values_are_rejected_when_set(change: Callable[[], Any]) -> None:
    with pytest.raises(exc.BadOptionError) as caught:
        change()
    assert caught.value.fields["name"] == "enabled"
    assert caught.value.fields["allowed"] == "True or False"
    assert config.enabled is True


@pytest.mark.parametrize(
    "change",
    [
        lambda: setattr(config, "enable", True),
        lambda: config.patch(enable=True),
        lambda: config.snapshot({"enable": True}),
    ],
)
def test_unknown_settings_suggest_the_nearest_name(change: Callable[[], Any]) -> None:
    with pytest.raises(exc.UnknownOptionError, match="Did you mean 'enabled'"):
        change()


class TestEnvironment:
    @pytest.mark.parametrize("text", ["1", "true", "YES", "on"])
    def test_true(self, text: str) -> None:
        assert settings.from_environment({"INDUCTOR_EXT_ENABLED": text}) == {"enabled": True}

    @pytest.mark.parametrize("text", ["0", "False", "no", "OFF"])
    def test_false(self, text: str) -> None:
        assert settings.from_environment({"INDUCTOR_EXT_ENABLED": text}) == {"enabled": False}

    def test_optional_text(self) -> None:
        assert settings.from_environment({"INDUCTOR_EXT_EVENT_LOG": "a"}) == {"event_log": "a"}
        assert settings.from_environment({"INDUCTOR_EXT_EVENT_LOG": ""}) == {"event_log": None}

    def test_other_variables_are_ignored(self) -> None:
        assert settings.from_environment({"INDUCTOR": "1", "TORCH_LOGS": "x"}) == {}

    def test_unreadable_value(self) -> None:
        with pytest.raises(exc.BadEnvironmentError, match=r"expected 1 \(or true"):
            settings.from_environment({"INDUCTOR_EXT_ENABLED": "maybe"})

    @pytest.mark.parametrize("text", ["9" * 400, "0.5", "1gb"])
    def test_an_invalid_number_of_bytes(self, text: str) -> None:
        with pytest.raises(exc.BadEnvironmentError, match="a positive number of bytes"):
            settings.from_environment({"INDUCTOR_EXT_MEMORY_BUDGET": text})

    def test_unknown_variable(self) -> None:
        with pytest.raises(exc.BadEnvironmentError, match="Did you mean 'INDUCTOR_EXT_ENABLED'"):
            settings.from_environment({"INDUCTOR_EXT_ENABLE": "1"})

    def test_unknown_variable_that_shares_only_the_prefix(self) -> None:
        with pytest.raises(exc.UnknownVariableError) as caught:
            settings.from_environment({"INDUCTOR_EXT_FOO": "1"})
        assert str(caught.value).startswith("Unknown environment variable INDUCTOR_EXT_FOO='1'")
        assert "Did you mean" not in str(caught.value)

    def test_a_process_reads_it(self) -> None:
        code = "from inductor_ext import config; print(config.snapshot().non_default())"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"PATH": "", "INDUCTOR_EXT_FALLBACK_TO_EAGER": "0"},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.stdout.strip() == "{'fallback_to_eager': False}", done.stderr


def test_cache_key_covers_what_can_change_code_and_nothing_else() -> None:
    default = settings.Settings()
    assert settings.Settings(event_log="x").cache_key() == default.cache_key()
    keys = {default.cache_key()}
    for name in ("enabled", "fallback_to_eager", "allow_unsupported_torch"):
        flipped = {name: not getattr(default, name)}
        keys.add(settings.Settings(**flipped).cache_key())
    assert len(keys) == 4


class TestAccepts:
    CASES: typing.ClassVar[list[tuple[Any, list[Any], list[Any]]]] = [
        (bool, [True], [1, "x", None]),
        (int, [3, True], [3.0, "3"]),
        (float, [3.0, 3], [True, "3"]),
        (str, ["x"], [None, 1]),
        (int | None, [3, None], ["3"]),
        (Optional[str], ["x", None], [3]),  # noqa: UP045 - as torch 2.11 writes it
        (Literal["a", "b", 1], ["a", 1], ["c", True, 2]),
        (list[str], [[], ["a"]], [["a", 1], ("a",)]),
        (dict[str, int], [{}, {"a": 1}], [{1: 1}, {"a": "b"}]),
        (tuple[int, ...], [(), (1, 2)], [(1, "2"), [1]]),
        (tuple[int, str], [(1, "2")], [(1,), (1, 2)]),
        (set[int], [{1}], [{"1"}, [1]]),
        (Callable[[int], str], [str, lambda x: x], ["str"]),
        (Optional[Callable[..., Any]], [None, len], [3]),  # noqa: UP045
        (Any, [None, 1, "x"], []),
        ("ForwardReference", [None, 1], []),
        (list, [[1, "a"]], [(1,)]),
    ]

    @pytest.mark.parametrize(
        ("annotation", "good", "bad"), CASES, ids=[str(case[0]) for case in CASES]
    )
    def test_types(self, annotation: Any, good: list[Any], bad: list[Any]) -> None:
        assert [value for value in good if not has_type(value, annotation)] == []
        assert [value for value in bad if has_type(value, annotation)] == []


class TestOptions:
    def test_list_options_has_both_backends(self) -> None:
        assert inductor_ext.list_options() == [*torch._inductor.list_options(), *settings.names()]

    def test_list_mode_options_adds_one_to_those_of_inductor(self) -> None:
        background = {"triton.cudagraphs": True, "tuning": "background"}
        modes = {**torch._inductor.list_mode_options(), "max-autotune-background": background}
        assert inductor_ext.list_mode_options() == modes
        for mode in modes:
            assert inductor_ext.list_mode_options(mode) == modes[mode]
            assert inductor_ext.list_mode_options(mode, dynamic=True) == modes[mode]

    def test_unknown_mode(self) -> None:
        with pytest.raises(exc.UnknownModeError, match=r"reduce-overhead.*Did you mean 'max-auto"):
            inductor_ext.list_mode_options("max-autotun")

    def test_a_mode_that_is_not_a_string(self) -> None:
        with pytest.raises(
            exc.BadArgumentError, match=r"^Invalid mode=3: expected one of 'default', "
        ):
            options.split_options(3, None)  # type: ignore[arg-type]

    @pytest.mark.parametrize("wrong", ["max_autotune", ["max_autotune"]])
    def test_options_that_are_not_a_dictionary(self, wrong: Any) -> None:
        with pytest.raises(
            exc.BadArgumentError, match=r"expected a dictionary of options by name\.$"
        ):
            options.split_options(None, wrong)

    def test_split_sorts_and_normalizes(self) -> None:
        ours, inductors = options.split_options(
            "max-autotune-no-cudagraphs",
            {"enabled": False, "max-autotune": False, "triton.cudagraphs": True},
        )
        assert ours == {"enabled": False}
        assert inductors == {
            "max_autotune": False,
            "coordinate_descent_tuning": True,
            "triton.cudagraphs": True,
        }

    def test_split_accepts_every_current_value_of_inductor(self) -> None:
        current = inductor_config.get_config_copy()
        _, inductors = options.split_options(None, current)
        assert inductors == current

    def test_split_is_at_least_as_lenient_as_inductor(self) -> None:
        """torch.compile(options=...) accepts the same options as for Inductor (default)."""
        samples: list[Any] = [True, 3, 0.5, "x", None, [], ["x"], {}, {"a": 1}, (), len]
        for name in torch._inductor.list_options():
            annotation = inductor_config.get_type(name)
            if typing.get_origin(annotation) is not None:
                continue  # Inductor (default) does not read these at all
            for value in samples:
                try:
                    torch._TorchCompileInductorWrapper(None, {name: value}, None)
                except (RuntimeError, TypeError):
                    continue
                assert options.split_options(None, {name: value})[1] == {name: value}

    def test_whole_numbers_serve_for_float_options(self) -> None:
        floats = [
            name
            for name in torch._inductor.list_options()
            if inductor_config.get_type(name) is float
        ]
        _, inductors = options.split_options(None, {floats[0]: 2})
        assert type(inductors[floats[0]]) is float
        torch._TorchCompileInductorWrapper(None, inductors, None)

    @pytest.mark.parametrize(
        ("name", "value", "allowed"),
        [
            ("max_autotune", "yes", "True or False"),
            ("triton.cudagraphs", 1, "True or False"),
            ("cpp.threads", "4", "an integer"),
            ("fallback_to_eager", None, "True or False"),
            ("event_log", 3, "a string or None"),
            ("aot_isa", "v3", "'auto', 'x86-64-v2', 'x86-64-v3' or 'x86-64-v4'"),
            ("memory_budget", 1.5, "a positive number of bytes, in a string optionally with a"),
            ("memory_budget", "12XB", "unit: B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"),
        ],
    )
    def test_ill_typed(self, name: str, value: Any, allowed: str) -> None:
        with pytest.raises(exc.BadOptionError) as caught:
            options.split_options(None, {name: value})
        text = str(caught.value)
        assert repr(name) in text
        assert repr(value) in text
        assert allowed in text.partition(": expected ")[2]

    @pytest.mark.parametrize(
        ("name", "nearest"),
        [
            ("max_autotun", "max_autotune"),
            ("cudagraphs", "triton.cudagraphs"),
            ("event_lgo", "event_log"),
        ],
    )
    def test_unknown(self, name: str, nearest: str) -> None:
        with pytest.raises(exc.UnknownOptionError) as caught:
            options.split_options(None, {name: 17})
        text = str(caught.value)
        assert repr(name) in text
        assert "17" in text
        assert f"Did you mean {nearest!r}?" in text
        assert "list_options()" in text

    def test_nothing_similar(self) -> None:
        with pytest.raises(exc.UnknownOptionError) as caught:
            options.split_options(None, {"qqqqqqqq": 1})
        assert "Did you mean" not in str(caught.value)

    @pytest.mark.parametrize(
        ("kwargs", "match"),
        [
            ({"options": {"max_autotun": True}}, "Did you mean 'max_autotune'"),
            (
                {"options": {"enabled": "yes"}},
                "Invalid value 'yes' of type str for option 'enabled'",
            ),
            ({"mode": "fast"}, "Unknown mode 'fast': expected one of 'default'"),
        ],
    )
    def test_torch_compile_reports_them(self, kwargs: dict[str, Any], match: str) -> None:
        compiled = torch.compile(torch.sin, backend="inductor_ext", **kwargs)
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=match):
            compiled(torch.ones(2))
