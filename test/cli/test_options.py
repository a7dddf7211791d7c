"""`inductor-ext options`: the settings and Inductor's options."""

from __future__ import annotations

import dataclasses
import json

import pytest

import inductor_ext
from inductor_ext import settings
from inductor_ext.cli import main


def test_the_settings(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INDUCTOR_EXT_MEMORY_BUDGET", "3GB")
    assert main.main(["options", "--json"]) == 0
    shown = {option["name"]: option for option in json.loads(capsys.readouterr().out)}
    assert list(shown) == settings.names()
    assert shown["memory_budget"]["value"] == "3GB"
    for field in dataclasses.fields(settings.Settings):
        assert shown[field.name]["default"] == field.default
        assert shown[field.name]["meaning"] == field.metadata["meaning"]


def test_all_options_are_those_of_list_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["options", "--all", "--json"]) == 0
    shown = [option["name"] for option in json.loads(capsys.readouterr().out)]
    assert sorted(shown) == sorted(inductor_ext.list_options())


def test_a_part_of_a_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INDUCTOR_EXT_MEMORY_ARENAS", "never")
    assert main.main(["options", "Memory-Arenas"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "memory_arenas = 'never' (default: 'auto')"
    assert all(line.startswith("    ") for line in rest)
    assert main.main(["options", "max_autotune_gemm", "--all"]) == 0
    assert "max_autotune_gemm = False\n" in capsys.readouterr().out


def test_no_such_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["options", "max_autotune"]) == 2
    assert capsys.readouterr().err == (
        "inductor-ext: Invalid TEXT='max_autotune': expected a part of the name of an option "
        "(--all searches Inductor's options, too).\n"
    )
