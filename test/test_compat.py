"""compat: which torch is accepted, and what is said about others."""

from __future__ import annotations

from pathlib import Path

import pytest

from inductor_ext import _compat, exc

LOWEST, HIGHEST = _compat.SUPPORTED
MAJOR, MINOR = map(int, HIGHEST.split("."))
NEXT = f"{MAJOR}.{MINOR + 1}.0"


@pytest.mark.parametrize(
    "version", [f"{LOWEST}.0+cu130", f"{HIGHEST}.9", f"{HIGHEST}.0a0+git1", _compat.torch_version()]
)
def test_a_supported_torch_is_accepted(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(_compat, "torch_version", lambda: version)
    _compat.check_torch(override=False)


@pytest.mark.parametrize(("version", "newer"), [("2.10.1", False), (NEXT, True), ("3.0.0", True)])
def test_other_torch_is_rejected_unless_allowed(
    monkeypatch: pytest.MonkeyPatch, version: str, newer: bool
) -> None:
    monkeypatch.setattr(_compat, "torch_version", lambda: version)
    with pytest.raises(exc.UnsupportedTorchError) as caught:
        _compat.check_torch(override=False)
    text = str(caught.value)
    assert (
        f"torch {version} is not supported: inductor_ext supports torch {LOWEST} to {HIGHEST}."
        in text
    )
    assert "INDUCTOR_EXT_ALLOW_UNSUPPORTED_TORCH=1" in text
    assert ("`inductor-ext doctor`" in text) == newer
    assert ("docs/upgrading_torch.md" in text) == newer
    assert text.endswith(".")
    _compat.check_torch(override=True)


def test_the_page_that_the_error_names_exists() -> None:
    assert (Path(__file__).parent.parent / "docs" / "upgrading_torch.md").is_file()
