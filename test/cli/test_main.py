"""The command line: help, version, unknown commands, exit codes and errors."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import types
from importlib import metadata

import pytest

from inductor_ext import __version__, exc
from inductor_ext.cli import main
from test.support.doctor_process import CHECKOUT


class TestCommandLine:
    def test_no_argument_prints_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main.main([]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert printed.startswith("usage: inductor-ext")
        for name, summary in main.COMMANDS.items():
            assert f"{name} {summary}" in printed

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main.main(["--version"]) == 0
        assert capsys.readouterr().out == (
            f"inductor_ext {__version__}, torch {metadata.version('torch')}\n"
        )

    @pytest.mark.parametrize("argument", ["--help", "--version"])
    def test_start_is_fast(self, argument: str) -> None:
        program = (
            "import atexit, sys; from inductor_ext.cli.main import main\n"
            "atexit.register(lambda: print('torch' in sys.modules))\n"
            f"main([{argument!r}])"
        )
        printed = subprocess.check_output([sys.executable, "-c", program], text=True, cwd=CHECKOUT)
        assert printed.splitlines()[-1] == "False"

    @pytest.mark.parametrize(
        ("word", "hint"), [("docter", "Did you mean 'doctor'?"), ("zzz", "The commands are:")]
    )
    def test_unknown_command(
        self, capsys: pytest.CaptureFixture[str], word: str, hint: str
    ) -> None:
        with pytest.raises(SystemExit) as stop:
            main.main([word, "--json"])
        assert stop.value.code == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert f"unknown command {word!r}. {hint}" in printed.err

    def test_every_command_has_add_arguments_and_run(self) -> None:
        for name in main.COMMANDS:
            module = importlib.import_module(f"inductor_ext.cli.{name}")
            module.add_arguments(argparse.ArgumentParser())
            assert callable(module.run)

    def test_the_console_script_is_this(self) -> None:
        (script,) = metadata.entry_points(group="console_scripts", name="inductor-ext")
        assert script.load() is main.main


class TestOwnCommand:
    """A command is a line of the table and a module; the command line handles its errors."""

    @pytest.fixture
    def command(self, monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
        module = types.SimpleNamespace(
            add_arguments=lambda parser: parser.add_argument("--count", type=int, default=1),
            run=lambda arguments: arguments.count,
        )
        monkeypatch.setitem(sys.modules, "inductor_ext.cli.own", module)
        monkeypatch.setitem(main.COMMANDS, "own", "do something")
        return module

    @pytest.mark.usefixtures("command")
    def test_arguments_and_exit_code(self) -> None:
        assert main.main(["own", "--count", "7"]) == 7
        assert main.main(["--traceback", "own"]) == 1

    @pytest.mark.usefixtures("command")
    def test_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as stop:
            main.main(["own", "--help"])
        assert stop.value.code == 0
        printed = capsys.readouterr().out
        assert "usage: inductor-ext own" in printed
        assert "--count COUNT" in printed

    def test_an_extension_error_is_one_line(
        self, command: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def run(arguments: argparse.Namespace) -> int:
            raise exc.MissingToolchainError(part="nvcc", why="gone", install="look for it")

        command.run = run
        assert main.main(["own"]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err == "inductor-ext: nvcc is missing: gone. To fix: look for it\n"
        with pytest.raises(exc.MissingToolchainError):
            main.main(["--traceback", "own"])

    def test_a_bug_keeps_its_traceback(self, command: types.SimpleNamespace) -> None:
        def run(arguments: argparse.Namespace) -> int:
            raise ZeroDivisionError

        command.run = run
        with pytest.raises(ZeroDivisionError):
            main.main(["own"])
