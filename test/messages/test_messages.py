"""The messages of mistakes that users make, reviewed as a whole.

A message names the object, what was given, what is allowed, and what to do. The texts are in
`test/goldens/messages/`; `EXPECTTEST_ACCEPT=1` writes them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from inductor_ext import exc
from inductor_ext.cli import main
from test.messages.provoked import COMMANDS, MISTAKES, Place, prepare
from test.support.goldens import assert_matches_golden, golden_names


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    torch._dynamo.reset()
    return prepare(tmp_path_factory.mktemp("messages"))


def describe(name: str, error: exc.InductorExtError) -> str:
    """Return a name with the class and the message of its error."""
    # A list of live buffers, whose operators differ between releases of torch.
    text, _, _ = str(error).partition("\nLive on ")
    return f"## {name}\n{type(error).__name__}\n{text}\n"


def normalize(text: str, place: Place) -> str:
    """Replace what differs between machines: the folder, and names by digest."""
    return re.sub(r"\bc[a-z2-7]{51}\b", "<digest>", text.replace(str(place.folder), "<folder>"))


@pytest.mark.parametrize("area", MISTAKES)
def test_mistakes(area: str, place: Place) -> None:
    texts = []
    for name, make in MISTAKES[area].items():
        with pytest.raises(Exception) as caught:
            make(place)
        error = getattr(caught.value, "inner_exception", caught.value)
        assert isinstance(error, exc.InductorExtError), (name, error)
        texts.append(describe(name, error))
    assert_matches_golden(normalize("\n".join(texts), place), "messages", area)


def test_commands(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place.folder)
    texts = []
    for name, arguments in COMMANDS.items():
        try:
            code = main.main(list(arguments))
        except SystemExit as ended:
            code = ended.code
        assert code == 2, name
        *_, line = capsys.readouterr().err.splitlines()
        texts.append(f"## {name}\n$ inductor-ext {' '.join(arguments)}\n{line}\n")
    assert_matches_golden(normalize("\n".join(texts), place), "messages", "commands")


def test_there_are_many() -> None:
    assert sum(map(len, MISTAKES.values())) + len(COMMANDS) >= 90
    assert golden_names("messages") == {*MISTAKES, "commands"}


def test_every_message_ends_with_a_sentence() -> None:
    for area in golden_names("messages"):
        text = (Path(__file__).parents[1] / "goldens" / "messages" / f"{area}.expected").read_text()
        for entry in text.split("## ")[1:]:
            message = entry.strip().splitlines()[-1]
            assert re.search(r"[.)]$", message), entry
            assert not re.search(r"Traceback|0x[0-9a-f]{6}", message), entry
