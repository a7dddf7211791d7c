"""The command line: help, version, unknown commands, exit codes and errors."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import types
from importlib import metadata

import pytest
import write_command_docs

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

    @pytest.mark.parametrize("name", main.COMMANDS)
    def test_every_command_has_a_valid_example_and_exit_codes(
        self, name: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        parser, module = main.make_command_parser(name)
        program, command, *arguments = shlex.split(module.EXAMPLE.partition(" > ")[0])
        assert (program, command) == ("inductor-ext", name)
        parser.parse_args(arguments)
        assert 0 in module.EXIT_CODES
        assert callable(module.run)
        # Lines are broken at spaces and hyphens.
        printed = "".join(parser.format_help().split())
        assert f"`{module.EXAMPLE}`".replace(" ", "") in printed
        for code, text in module.EXIT_CODES.items():
            assert f"{code}: {text}".replace(" ", "") in printed

    def test_no_help_imports_torch(self) -> None:
        program = (
            "import sys\n"
            "from inductor_ext.cli import main\n"
            "for name in main.COMMANDS:\n"
            "    main.make_command_parser(name)[0].format_help()\n"
            "    assert 'torch' not in sys.modules, name\n"
        )
        subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, check=True)

    @pytest.mark.parametrize("name", sorted(set(main.COMMANDS) - {"completion"}))
    def test_every_command_prints_json_on_request(self, name: str) -> None:
        parser, _ = main.make_command_parser(name)
        actions = [
            choice
            for action in parser._actions
            if isinstance(action, argparse._SubParsersAction)
            for choice in action.choices.values()
        ]
        for own in actions or [parser]:
            (flag,) = (item for item in own._actions if "--json" in item.option_strings)
            assert flag.nargs == 0, own.prog

    def test_documentation(self) -> None:
        """`scripts/write_command_docs.py` brings the page up to date."""
        page = CHECKOUT / "docs" / "user" / "command_line.md"
        assert page.read_text() == write_command_docs.render_page()

    @pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
    def test_completion(self, shell: str, capsys: pytest.CaptureFixture[str]) -> None:
        pytest.importorskip("shtab")
        assert main.main(["completion", shell]) == 0
        script = capsys.readouterr().out
        assert all(name in script for name in main.COMMANDS)
        assert "max-autotune" in script

    def test_completion_without_shtab(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(sys.modules, "shtab", None)
        assert main.main(["completion", "bash"]) == 2
        assert "pip install shtab" in capsys.readouterr().err

    def test_a_full_disk(self) -> None:
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "inductor_ext", "cache"],
                cwd=CHECKOUT,
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
            )
        assert done.returncode == 2
        assert done.stderr == (
            "inductor-ext: the output cannot be written: No space left on device\n"
        )

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
            EXAMPLE="inductor-ext own",
            EXIT_CODES={0: "done"},
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

    def test_an_interrupt_is_one_line(
        self, command: types.SimpleNamespace, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def run(arguments: argparse.Namespace) -> int:
            raise KeyboardInterrupt

        command.run = run
        assert main.main(["own"]) == 130
        assert capsys.readouterr().err == "inductor-ext: interrupted\n"
        with pytest.raises(KeyboardInterrupt):
            main.main(["--traceback", "own"])

    def test_other_errors_of_the_system_are_bugs(self, command: types.SimpleNamespace) -> None:
        def run(arguments: argparse.Namespace) -> int:
            raise FileNotFoundError

        command.run = run
        with pytest.raises(FileNotFoundError):
            main.main(["own"])

    def test_a_bug_keeps_its_traceback(self, command: types.SimpleNamespace) -> None:
        def run(arguments: argparse.Namespace) -> int:
            raise ZeroDivisionError

        command.run = run
        with pytest.raises(ZeroDivisionError):
            main.main(["own"])
