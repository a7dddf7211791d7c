"""Damaged and forged packages against the loader, from the command line or from a test.

A case takes an intact package and changes it: bits flipped, bytes cut out, put in or moved, the end
missing, entries renamed (out of the folder, onto each other, into links), their contents exchanged,
the manifest altered with outdated checksums, or with all checksums corrected. Each is then loaded
and called. The allowed outcomes are

- an error of `inductor_ext.exc`, or
- the results of the intact package, for one of its targets if it has several (`--targets`);

The intact package is signed. With a required signature, one with another manifest must be refused.
`inductor-ext verify` must refuse every package that was changed without correcting its checksums,
and `inspect` must say that it does not run here if it cannot be loaded;

never another error, other results, or the end of the process, and never a file that is left in the
folder for temporary files or written outside of it. Shared libraries and weights are changed as
well, but never with correct checksums: that would be another model.

    python -m test.fuzz.aot_packages [--targets] [--package FILE] [--cases N] [--seed S] [--jobs N]

A case depends only on seed and number; `--only NUMBER` runs one again in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import inductor_ext
from inductor_ext import exc
from inductor_ext.cpp_wrapper.package import manifest, signing, zip_format, zip_reader
from inductor_ext.reports import package_report
from test.fuzz.aot_package_mutations import EVIL_NAME, SANDBOX_DEPTH, Case, mutate
from test.support.altered_packages import contents, manifest_of, seal

__all__ = ["TARGETS", "Net", "expected", "inputs", "make_package", "run_cases"]


TARGETS = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
"""Of a package with several targets."""


class Net(torch.nn.Module):
    """Nested inputs, a non-tensor constant, weights too large to be inlined."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 16)
        self.register_buffer("scale", torch.rand(16))

    def forward(
        self, batch: dict[str, torch.Tensor], times: int, flag: bool = True
    ) -> dict[str, Any]:
        y = torch.relu(self.linear(batch["x"])) * self.scale
        return {"y": y * times if flag else y, "sums": [y.sum(-1), batch["x"] + 1]}


def inputs() -> tuple[Any, ...]:
    """Arguments for `Net`, equal each time."""
    return ({"x": torch.linspace(-1, 1, 24).reshape(3, 8)}, 3)


def make_package(path: str | os.PathLike[str], targets: Sequence[str] | None = None) -> None:
    """Compile a `Net` into a package of the extension, and sign it.

    Args:
        path: of the package.
        targets: CPU targets. Default: None, compiled for this machine.
    """
    torch.manual_seed(0)
    program = torch.export.export(Net().eval(), inputs())
    inductor_ext.aoti_compile_and_package(program, package_path=path, cpu_targets=targets)
    private, _ = key_pair()
    signing.sign(path, private)


def key_pair() -> tuple[bytes, bytes]:
    """A private key, always the same, and its public key."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key, pem = Ed25519PrivateKey.from_private_bytes(bytes(32)), serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    kind = serialization.PublicFormat.SubjectPublicKeyInfo
    return private, key.public_key().public_bytes(pem, kind)


def signed_part(path: str | os.PathLike[str]) -> list[bytes]:
    """The manifest and the entry with its signatures, without those that cannot be read."""
    parts = []
    with zip_reader.open_package(path) as package:
        for name in (manifest.PATH, zip_format.SIGNATURES):
            with contextlib.suppress(exc.BadPackageError):
                parts.append(package.read(name))
    return parts


def expected(path: str | os.PathLike[str]) -> list[torch.Tensor]:
    """The results of an intact package."""
    return [tensor.clone() for tensor in flat(inductor_ext.load(path)(*inputs()))]


def expected_by_target(path: str) -> list[list[torch.Tensor]]:
    """The results of an intact package for each of its targets that run on this machine."""
    package = pathlib.Path(path).read_bytes()
    results = [expected(path)]
    for index in range(-1, len(manifest_of(package)["models"]["model"].get("variants", ()))):
        content = manifest_of(package)
        model = content["models"]["model"]
        variants = model.pop("variants", [])
        if index >= 0:
            model.update(variants[index])
        with tempfile.TemporaryDirectory() as folder:
            alone = pathlib.Path(folder, "net.pt2")
            alone.write_bytes(seal(contents(package), content))
            with contextlib.suppress(exc.IncompatibleArtifactError):
                results.append(expected(alone))
    return results


def flat(results: dict[str, Any]) -> list[torch.Tensor]:
    return [results["y"], *results["sums"]]


def is_verified(path: pathlib.Path) -> bool:
    """Whether `inductor-ext verify` accepts a package."""
    try:
        with zip_reader.open_package(path) as package:
            manifest.verify(package)
    except exc.InductorExtError:
        return False
    return True


def is_shown_to_run(path: pathlib.Path) -> bool:
    """Whether `inductor-ext inspect` says that the model runs here."""
    try:
        return package_report.read(str(path)).misfits.get("model", "none") is None
    except exc.InductorExtError:
        return False


def is_trusted(path: pathlib.Path) -> bool:
    """Whether a package can be loaded with the required signature."""
    try:
        inductor_ext.load(path, require_signature=key_pair()[1])
    except exc.InductorExtError:
        return False
    return True


def attempt(
    case: Case,
    sandbox: pathlib.Path,
    references: Sequence[Sequence[torch.Tensor]],
    signed: list[bytes],
) -> str:
    """The outcome of loading and calling a package: "refused", "right", or the error.

    Args:
        case: the package.
        sandbox: an empty folder; the folder for temporary files is within it.
        references: the results of the intact package, one list per target.
        signed: its manifest and its signatures.
    """
    path = sandbox / "case.pt2"
    path.write_bytes(case.data)
    try:
        results = flat(inductor_ext.load(path)(*inputs()))
        is_right = any(all(map(torch.equal, results, reference)) for reference in references)
        outcome = "right" if is_right else "wrong numbers"
    except exc.InductorExtError as error:
        outcome = f"refused: {type(error).__name__}"
    except Exception as error:
        outcome = f"unexpected {type(error).__name__}: {error}"
    # What cannot be loaded without a signature cannot be loaded with one either.
    if outcome == "right":
        found = signed_part(path)
        if is_trusted(path) and found[0] != signed[0]:
            outcome += ", and trusted with another manifest"
        elif not is_trusted(path) and found == signed:
            outcome += ", but not trusted"
    if not case.is_consistent:
        if is_verified(path):
            outcome += ", but verify calls the package intact"
        if outcome != "right" and is_shown_to_run(path):
            outcome += ", but inspect says that it runs here"
    path.unlink()
    left = [str(path.relative_to(sandbox)) for path in sandbox.rglob("*") if not path.is_dir()]
    left += [path.name for path in pathlib.Path(tempfile.gettempdir()).iterdir()]
    left += [item for item in (f"/tmp/{EVIL_NAME}", f"/{EVIL_NAME}") if os.path.exists(item)]
    for item in pathlib.Path(tempfile.gettempdir()).iterdir():
        shutil.rmtree(item, ignore_errors=True)
    return f"{outcome}, and files left behind: {left}" if left else outcome


def _child(package_path: str, seed: int, sandbox: str) -> None:
    """Run the cases whose numbers are read from standard input; print a line of JSON for each."""
    torch.set_num_threads(1)
    package = pathlib.Path(package_path).read_bytes()
    references, signed = expected_by_target(package_path), signed_part(package_path)
    for line in sys.stdin:
        case = mutate(package, seed, int(line))
        outcome = attempt(case, pathlib.Path(sandbox), references, signed)
        print(json.dumps([int(line), case.kind, outcome]), flush=True)


def run_cases(package: str, seed: int, numbers: Sequence[int]) -> Iterator[tuple[int, str, str]]:
    """Run cases in other processes, one at a time; one that dies is reported and replaced.

    Yields:
        Number, kind and outcome of each case.
    """
    left = list(numbers)
    while left:
        with tempfile.TemporaryDirectory(prefix="artifact_fuzz-") as sandbox:
            temporary = pathlib.Path(sandbox, *"abcd"[:SANDBOX_DEPTH], "tmp")
            temporary.mkdir(parents=True)
            run = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "test.fuzz.aot_packages",
                    "--child",
                    sandbox,
                    package,
                    str(seed),
                ],
                input="\n".join(map(str, left)) + "\n",
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, "TMPDIR": str(temporary)},
                cwd=pathlib.Path(__file__).parents[2],
            )
        done = [json.loads(line) for line in run.stdout.splitlines()]
        yield from ((number, kind, outcome) for number, kind, outcome in done)
        left = left[len(done) :]
        if left:
            last = run.stderr.strip().splitlines()[-1:] or [""]
            yield left.pop(0), "", f"the process ended with {run.returncode}: {last[0]}"


def is_good(outcome: str) -> bool:
    return outcome == "right" or bool(re.fullmatch(r"refused: \w+", outcome))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m test.fuzz.aot_packages", description=__doc__)
    parser.add_argument("--package", help="an intact package of the model of this module")
    parser.add_argument(
        "--targets", action="store_true", help="compile the package for several CPU targets"
    )
    parser.add_argument("--cases", type=int, default=1000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="run this case here")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 if a case fails."""
    import concurrent.futures

    options = _parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        package = options.package or os.path.join(folder, "net.pt2")
        if options.package is None:
            make_package(package, TARGETS if options.targets else None)
        if options.only is not None:
            _child_case(package, options.seed, options.only)
            return 0
        numbers = range(options.cases)
        batches = [numbers[at :: options.jobs] for at in range(options.jobs)]
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            results = pool.map(lambda batch: list(run_cases(package, options.seed, batch)), batches)
            outcomes = [result for batch in results for result in batch]
    bad = [result for result in outcomes if not is_good(result[2])]
    for (kind, outcome), count in sorted(Counter((k, o) for _, k, o in outcomes).items()):
        if is_good(outcome):
            print(f"{count:6}  {kind:11} {outcome}")
    for number, kind, outcome in bad:
        print(f"case {number} ({kind}): {outcome}")
    print(f"{len(outcomes)} packages with seed {options.seed}: {len(bad)} failures")
    return 1 if bad else 0


def _child_case(package: str, seed: int, number: int) -> None:
    case = mutate(pathlib.Path(package).read_bytes(), seed, number)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "case.pt2")
        pathlib.Path(path).write_bytes(case.data)
        print(case.kind)
        print(inductor_ext.load(path)(*inputs()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _, _, sandbox_path, given_package, given_seed = sys.argv
        _child(given_package, int(given_seed), sandbox_path)
        sys.exit(0)
    sys.exit(main())
