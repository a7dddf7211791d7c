"""Damaged and forged packages against the loader, from the command line or from a test.

A case takes an intact package and changes it: bits flipped, bytes cut out, put in or moved, the end
missing, entries renamed (out of the folder, onto each other, into links), their contents exchanged,
the manifest altered with outdated checksums, or with all checksums corrected. Each is then loaded
and called. The allowed outcomes are

- an error of `inductor_ext.exc`, or
- the results of the intact package;

never another error, other results, or the end of the process, and never a file that is left in the
folder for temporary files or written outside of it. Shared libraries and weights are changed as
well, but never with correct checksums: that would be another model.

    python -m test.fuzz.aot_packages [--package FILE] [--cases N] [--seed S] [--jobs N]

A case depends only on seed and number; `--only NUMBER` runs one again in this process.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import hashlib
import io
import json
import os
import pathlib
import random
import re
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import inductor_ext
from inductor_ext import exc
from inductor_ext.cpp_wrapper.package import manifest, zip_format, zip_reader, zip_writer

__all__ = ["Net", "contents", "expected", "inputs", "make_package", "mutate", "run_cases", "seal"]

_EVIL = "inductor_ext_fuzz_evil"
_DEPTH = 4
"""Folders between the sandbox and the folder for temporary files, so that `../` stays within it."""


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


def make_package(path: str | os.PathLike[str]) -> None:
    """Compile a `Net` into a package of the extension."""
    torch.manual_seed(0)
    program = torch.export.export(Net().eval(), inputs())
    inductor_ext.aoti_compile_and_package(program, package_path=path)


def expected(path: str | os.PathLike[str]) -> list[torch.Tensor]:
    """The results of an intact package."""
    return [tensor.clone() for tensor in flat(inductor_ext.load(path)(*inputs()))]


def flat(results: dict[str, Any]) -> list[torch.Tensor]:
    return [results["y"], *results["sums"]]


def contents(package: bytes) -> dict[str, bytes]:
    """The entries except the manifest and the archive's bookkeeping."""
    with zip_reader.open_package(io.BytesIO(package)) as opened:
        return {
            name: opened.read(name)
            for name in opened.entries
            if name not in (*zip_format.BOOKKEEPING, manifest.PATH)
        }


def manifest_of(package: bytes) -> dict[str, Any]:
    """The manifest as JSON."""
    with zip_reader.open_package(io.BytesIO(package)) as opened:
        content: dict[str, Any] = json.loads(opened.read(manifest.PATH))
    return content


def seal(entries: dict[str, bytes], content: Any, root: str = "net") -> bytes:
    """A package in which every checksum is correct.

    Args:
        entries: contents by name below the root folder.
        content: the manifest as JSON; its list of files is filled in.
        root: the root folder's name.
    """
    content = copy.deepcopy(content)
    if isinstance(content, dict):
        content["files"] = {
            name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in entries.items()
        }
    file = io.BytesIO()
    writer = zip_writer.Writer(file, root)
    for name, data in entries.items():
        writer.add(name, data, aligned=name.endswith(".weights"))
    writer.add(manifest.PATH, json.dumps(content).encode())
    writer.finish()
    return file.getvalue()


# --- mutations -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A changed package."""

    kind: str
    data: bytes


def _flip(package: bytes, rng: random.Random) -> bytes:
    """Flipped bits, mostly in the archive's structure and the manifest."""
    data = bytearray(package)
    with zip_reader.open_package(io.BytesIO(package)) as opened:
        places = [range(entry.offset - 60, entry.offset) for entry in opened.entries.values()]
        listed = opened.entries[manifest.PATH]
    places.append(range(listed.offset, listed.offset + listed.size))
    places.append(range(len(data) - 1500, len(data)))
    for _ in range(rng.choice((1, 1, 1, 2, 8, 64))):
        place = rng.choice([range(len(data)), *places])
        at = max(0, min(len(data) - 1, rng.choice(place)))
        data[at] ^= 1 << rng.randrange(8)
    return bytes(data)


def _overwrite(package: bytes, rng: random.Random) -> bytes:
    data = bytearray(package)
    size = rng.choice((1, 2, 4, 8, 100, 4096))
    at = rng.randrange(len(data) - size)
    if rng.random() < 0.5:
        at = rng.randrange(len(data) - 1500, len(data) - min(size, 1400))
    filling = rng.choice((b"\0", b"\xff", b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"../../"))
    data[at : at + size] = (filling * size)[:size]
    return bytes(data)


def _truncate(package: bytes, rng: random.Random) -> bytes:
    return package[
        : rng.choice((rng.randrange(len(package)), len(package) - rng.randrange(1, 300)))
    ]


def _splice(package: bytes, rng: random.Random) -> bytes:
    """A range removed, inserted, or duplicated."""
    begin, end = sorted(rng.randrange(len(package)) for _ in range(2))
    end = min(end, begin + rng.choice((1, 16, 512, 1 << 16)))
    stretch = package[begin:end]
    at = rng.randrange(len(package))
    return rng.choice(
        (
            package[:begin] + package[end:],
            package[:at] + stretch + package[at:],
            package[:at] + stretch + package[at + len(stretch) :],
            package + stretch,
            stretch + package,
        )
    )


def _numbers(package: bytes, rng: random.Random) -> bytes:
    """A field of the archive's directory or end, set to a critical value."""
    data = bytearray(package)
    central = list(_signatures(package, b"PK\x01\x02"))
    end = package.rindex(b"PK\x05\x06")
    at, fields = rng.choice(
        [
            *((item, ((8, "H"), (10, "H"), (16, "L"), (20, "L"), (24, "L"), (28, "H"), (30, "H"),
                      (32, "H"), (34, "H"), (38, "L"), (42, "L"))) for item in central),
            (end, ((4, "H"), (6, "H"), (8, "H"), (10, "H"), (12, "L"), (16, "L"), (20, "H"))),
        ]
    )  # fmt: skip
    offset, kind = rng.choice(fields)
    top = 0xFFFF if kind == "H" else 0xFFFFFFFF
    (old,) = struct.unpack_from(f"<{kind}", data, at + offset)
    new = rng.choice(
        (0, 1, top, top - 1, top // 2 + 1, old + 1, old - 1, old ^ 8, rng.randrange(top))
    )
    struct.pack_into(f"<{kind}", data, at + offset, new & top)
    return bytes(data)


def _signatures(package: bytes, signature: bytes) -> Iterator[int]:
    at = package.find(signature)
    while at >= 0:
        yield at
        at = package.find(signature, at + 1)


def _evil_names(name: str, others: Sequence[str], rng: random.Random) -> str:
    """Another name, which may lead out of the folder."""
    up = "../" * rng.randrange(1, _DEPTH + 4)
    return rng.choice(
        (
            f"{up}{_EVIL}",
            f"data/aotinductor/model/{up}{_EVIL}.so",
            f"/tmp/{_EVIL}",
            f"data/constants/{up}{_EVIL}",
            f"data\\aotinductor\\{_EVIL}",
            f"C:/{_EVIL}",
            f"data/aotinductor/model/./{_EVIL}.json",
            f"data//{_EVIL}",
            f"data/{_EVIL}/",
            f"{_EVIL}",
            f"data/{_EVIL}\n",
            f"data/{_EVIL}\0.so",
            "",
            ".",
            "..",
            "data/aotinductor/model/",
            "data/aotinductor/other/a.so",
            f"data/aotinductor/model/{'a' * 300}.json",
            "data/aotinductor/model/\udcff.json",
            name.upper(),
            name + ".x",
            name[:-1],
            rng.choice(others),
        )
    )


def _zip(entries: Sequence[tuple[str, bytes, int]], root: str) -> bytes:
    """An archive with arbitrary names; the third field is the file's mode."""
    parts, directory, at = [], [], 0
    for name, data, mode in entries:
        path = f"{root}{name}".encode("utf-8", "surrogateescape")
        crc32 = zlib.crc32(data)
        sizes = struct.pack("<3L2H", crc32, len(data), len(data), len(path), 0)
        local = struct.pack("<4s5H", b"PK\x03\x04", 20, 0, 0, 0, 33) + sizes + path
        parts += [local, data]
        directory.append(
            struct.pack("<4s6H", b"PK\x01\x02", 20 | 3 << 8, 20, 0, 0, 0, 33)
            + sizes
            + struct.pack("<3H2L", 0, 0, 0, mode << 16, at)
            + path
        )
        at += len(local) + len(data)
    central = b"".join(directory)
    count = len(entries)
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count, count, len(central), at, 0)
    return b"".join([*parts, central, end])


def _rename(package: bytes, rng: random.Random) -> bytes:
    """Entries renamed, duplicated, dropped, or as links, in an intact archive."""
    with zip_reader.open_package(io.BytesIO(package)) as opened:
        files = [(name, opened.read(name), stat.S_IFREG | 0o644) for name in opened.entries]
        root = f"{opened.root}/"
    names = [name for name, _, _ in files]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(len(files))
        name, data, mode = files[at]
        what = rng.randrange(6)
        if what == 0 and len(files) > 1:
            del files[at]
        elif what == 1:
            files.insert(rng.randrange(len(files)), (_evil_names(name, names, rng), data, mode))
        elif what == 2:
            target = rng.choice((b"/etc/passwd", f"../../{_EVIL}".encode(), b"data/x"))
            files[at] = (name, target, stat.S_IFLNK | 0o777)
        elif what == 3:
            other = rng.randrange(len(files))
            files[at], files[other] = (
                (name, files[other][1], mode),
                (files[other][0], data, files[other][2]),
            )
        else:
            files[at] = (_evil_names(name, names, rng), data, mode)
    if rng.random() < 0.1:
        root = rng.choice(("", "/", "../", f"../../{_EVIL}/", "a/b/"))
    return _zip(files, root)


_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 2**64, 1e308, 0.5, "", "x", [], {}, [[]], {"a": {}}),
    *("../x", "/etc/passwd", "data/constants/x", "cuda", "sm_90", "avx9999", "float64", "s0"),
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _paths(item, (*path, key))


def _alter(content: Any, rng: random.Random) -> Any:
    """JSON with one or more values changed, exchanged, removed or inserted."""
    content = copy.deepcopy(content)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        if not isinstance(content, (dict, list)):
            break
        paths = [path for path in _paths(content) if path]
        if not paths:
            break
        path = rng.choice(paths)
        inner = content
        for key in path[:-1]:
            inner = inner[key]
        value = inner[path[-1]]
        what = rng.randrange(5)
        if what == 0:
            del inner[path[-1]]
        elif what == 1:
            inner[path[-1]] = rng.choice(_VALUES)
        elif what == 2:
            other = rng.choice(paths)
            source = content
            for key in other:
                source = source[key] if _has(source, key) else None
            inner[path[-1]] = copy.deepcopy(source)
        elif what == 3 and isinstance(value, str):
            inner[path[-1]] = _flip_text(value, rng)
        elif what == 3 and isinstance(value, int):
            inner[path[-1]] = value + rng.choice((-1, 1, 64))
        elif isinstance(inner, list):
            inner.insert(path[-1], copy.deepcopy(value))
        else:
            inner[f"{path[-1]}_"] = value
    return content


def _has(value: Any, key: Any) -> bool:
    if isinstance(value, dict):
        return key in value
    return isinstance(value, list) and isinstance(key, int) and key < len(value)


def _flip_text(text: str, rng: random.Random) -> str:
    if not text:
        return "x"
    at = rng.randrange(len(text))
    return text[:at] + rng.choice('x0"\\/.[]{}\0é') + text[at + rng.randrange(2) :]


def _forge(package: bytes, rng: random.Random) -> bytes:
    """The manifest altered, and all checksums corrected."""
    return seal(contents(package), _alter(manifest_of(package), rng))


def _tamper(package: bytes, rng: random.Random) -> bytes:
    """The manifest altered, in an otherwise intact archive."""
    with zip_reader.open_package(io.BytesIO(package)) as opened:
        files = {name: opened.read(name) for name in opened.entries}
    content = json.loads(files[manifest.PATH])
    files[manifest.PATH] = json.dumps(_alter(content, rng)).encode()
    if rng.random() < 0.2:
        files[manifest.PATH] = _flip_bytes(files[manifest.PATH], rng)
    return _zip([(name, data, stat.S_IFREG | 0o644) for name, data in files.items()], "net/")


def _flip_bytes(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]


def _contents(package: bytes, rng: random.Random) -> bytes:
    """Contents changed; the archive's checksums are correct and the manifest's are not."""
    with zip_reader.open_package(io.BytesIO(package)) as opened:
        files = {name: opened.read(name) for name in opened.entries}
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice([name for name in files if files[name]])
        data = files[name]
        files[name] = rng.choice(
            (_flip_bytes(data, rng), data[: rng.randrange(len(data))], data + b"\0", b"")
        )
    return _zip([(name, data, stat.S_IFREG | 0o644) for name, data in files.items()], "net/")


def _side_files(package: bytes, rng: random.Random) -> bytes:
    """Files other than library and weights changed, and all checksums corrected."""
    files = contents(package)
    names = [name for name in files if not name.endswith((".so", ".weights"))]
    if names:
        name = rng.choice(names)
        files[name] = _flip_bytes(files[name], rng) if files[name] else b"x"
    if rng.random() < 0.3:
        files[f"data/aotinductor/model/{rng.choice(('b.so', 'x.json', 'y.weights'))}"] = b"{}"
    return seal(files, manifest_of(package))


_KINDS: tuple[tuple[int, Callable[[bytes, random.Random], bytes]], ...] = (
    (5, _flip),
    (2, _overwrite),
    (1, _truncate),
    (2, _splice),
    (3, _numbers),
    (4, _rename),
    (3, _forge),
    (2, _tamper),
    (2, _contents),
    (1, _side_files),
)
"""Mutations with their relative frequency."""


def mutate(package: bytes, seed: int, number: int) -> Case:
    """The case with a number: the same for the same package, seed and number."""
    rng = random.Random(f"{seed}:{number}")
    (chosen,) = rng.choices([kind for _, kind in _KINDS], [weight for weight, _ in _KINDS])
    return Case(chosen.__name__.strip("_"), chosen(package, rng))


# --- running ------------------------------------------------------------------------------------


def attempt(data: bytes, sandbox: pathlib.Path, reference: Sequence[torch.Tensor]) -> str:
    """The outcome of loading and calling a package: "refused", "right", or the error.

    Args:
        data: the package.
        sandbox: an empty folder; the folder for temporary files is within it.
        reference: the results of the intact package.
    """
    path = sandbox / "case.pt2"
    path.write_bytes(data)
    try:
        results = flat(inductor_ext.load(path)(*inputs()))
        outcome = "right"
        for actual, tensor in zip(results, reference, strict=True):
            if not torch.equal(actual, tensor):
                outcome = "wrong numbers"
    except exc.InductorExtError as error:
        outcome = f"refused: {type(error).__name__}"
    except Exception as error:
        outcome = f"unexpected {type(error).__name__}: {error}"
    path.unlink()
    left = [str(path.relative_to(sandbox)) for path in sandbox.rglob("*") if not path.is_dir()]
    left += [path.name for path in pathlib.Path(tempfile.gettempdir()).iterdir()]
    left += [item for item in (f"/tmp/{_EVIL}", f"/{_EVIL}") if os.path.exists(item)]
    for item in pathlib.Path(tempfile.gettempdir()).iterdir():
        shutil.rmtree(item, ignore_errors=True)
    return f"{outcome}, and files left behind: {left}" if left else outcome


def _child(package_path: str, seed: int, sandbox: str) -> None:
    """Run the cases whose numbers are read from standard input; print a line of JSON for each."""
    torch.set_num_threads(1)
    package = pathlib.Path(package_path).read_bytes()
    reference = expected(package_path)
    for line in sys.stdin:
        case = mutate(package, seed, int(line))
        outcome = attempt(case.data, pathlib.Path(sandbox), reference)
        print(json.dumps([int(line), case.kind, outcome]), flush=True)


def run_cases(package: str, seed: int, numbers: Sequence[int]) -> Iterator[tuple[int, str, str]]:
    """Run cases in other processes, one at a time; one that dies is reported and replaced.

    Yields:
        Number, kind and outcome of each case.
    """
    left = list(numbers)
    while left:
        with tempfile.TemporaryDirectory(prefix="artifact_fuzz-") as sandbox:
            temporary = pathlib.Path(sandbox, *"abcd"[:_DEPTH], "tmp")
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
            make_package(package)
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
