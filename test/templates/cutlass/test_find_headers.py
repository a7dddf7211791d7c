"""Search for the CUTLASS headers."""

from __future__ import annotations

from pathlib import Path

import pytest

from inductor_ext import exc
from inductor_ext.templates.cutlass import find_headers
from inductor_ext.toolchain import components


class TestHeaders:
    def checkout(self, root: Path, text: str | None = None) -> Path:
        folder = root / "include" / "cutlass"
        folder.mkdir(parents=True)
        (folder / "cutlass.h").touch()
        if text is None:
            numbers = {"MAJOR": 4, "MINOR": 3, "PATCH": 1}
            text = "".join(
                f"#define CUTLASS_{name} {number} \n" for name, number in numbers.items()
            )
        (folder / "version.h").write_text(text)
        return root

    def test_the_package(self) -> None:
        part = components.probe("cutlass")
        if not part.available:
            pytest.skip(f"no CUTLASS: {part.why}")
        result = find_headers.find()
        assert result.version >= find_headers.LOWEST
        assert (result.include / "cutlass" / "gemm" / "device").is_dir()
        # The package's version has an additional number.
        assert (part.version or result.release).startswith(result.release)

    def test_a_checkout(self, tmp_path: Path) -> None:
        result = find_headers.find(self.checkout(tmp_path))
        assert (result.root, result.release) == (tmp_path, "4.3.1")

    def test_inductors_setting(self, tmp_path: Path) -> None:
        import torch._inductor.config as inductor_config

        self.checkout(tmp_path)
        for setting in ("cutlass.cutlass_dir", "cuda.cutlass_dir"):
            with inductor_config.patch({setting: str(tmp_path)}):
                assert find_headers.find().root == tmp_path
            with (
                inductor_config.patch({setting: str(tmp_path / "elsewhere")}),
                pytest.raises(exc.MissingToolchainError, match=f"unset torch.*{setting}"),
            ):
                find_headers.find()

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("#define CUTLASS_MAJOR 4", "states no version"),
            (
                "#define CUTLASS_MAJOR 3\n#define CUTLASS_MINOR 5\n#define CUTLASS_PATCH 1",
                "has CUTLASS 3.5.1, and 4.2.0 is needed",
            ),
        ],
    )
    def test_other_folders_and_old_versions_are_refused(
        self, tmp_path: Path, text: str, why: str
    ) -> None:
        with pytest.raises(exc.MissingToolchainError, match=why) as caught:
            find_headers.find(self.checkout(tmp_path, text))
        assert "pip install nvidia-cutlass==" in str(caught.value)

    def test_a_folder_without_any(self, tmp_path: Path) -> None:
        with pytest.raises(exc.MissingToolchainError, match=r"version\.h cannot be read"):
            find_headers.find(tmp_path)
