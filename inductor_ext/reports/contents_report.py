"""The contents of a package as one HTML page: what `inspect` prints, with tables.

Nothing of the package is run. The rows are those of `package_report`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Sequence

from inductor_ext.cpp_wrapper.package import manifest, self_test, variants
from inductor_ext.memory.planner.peak_report import human_bytes
from inductor_ext.reports import html_parts, package_report
from inductor_ext.reports.html_parts import render_facts, render_paragraph, render_table
from inductor_ext.reports.text import format_count, write_file

_TENSOR = ("name", "dtype or value", "shape", "strides", "device")


@dataclasses.dataclass(frozen=True)
class ContentsReport:
    """The contents of a package. `str()` is the text that `inductor-ext inspect` prints."""

    package: package_report.Report

    def to_html(self, top: int = 10) -> str:
        """Return the self-contained HTML page.

        Args:
            top: how many of the largest constants of each model to list.
        """
        package = self.package
        sections: list[tuple[str, str, Iterable[str]]] = []
        if package.content is None:
            for number, (name, values) in enumerate(package.metadata.items()):
                facts = [render_facts((key, value) for key, value in values.items() if value)]
                sections.append((f"model{number}", f"Model {name}", facts))
        else:
            for number, (name, model) in enumerate(package.content.models.items()):
                parts = _render_model(model, package.misfits[name], top)
                sections.append((f"model{number}", f"Model {name}", parts))
        sections.append(("files", "Files", [_render_files(package)]))
        title = f"Contents of {package.path}"
        body = html_parts.render_landmarks(title, render_facts(_describe(package)), sections)
        return html_parts.render_document(title, body)

    def to_json(self) -> str:
        """Return the contents as one JSON object."""
        return json.dumps(self.package.as_json(), indent=1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file atomically.

        Raises:
            exc.BadReportFileError: the file cannot be written.
        """
        write_file(path, self.to_html())

    def __str__(self) -> str:
        return package_report.text(self.package)


def read_contents(path: str) -> ContentsReport:
    """Read a package.

    Raises:
        exc.BadPackageError, exc.IncompatibleArtifactError: the package cannot be read.
    """
    return ContentsReport(package_report.read(path))


def _describe(package: package_report.Report) -> Iterator[tuple[str, str]]:
    yield "size", human_bytes(package.bytes)
    content = package.content
    if content is None:
        yield "compiled by", "Inductor (default): there is no manifest"
        return
    yield "format", f"{content.format}"
    yield "compiled by", package_report.format_versions(content)
    yield "compiled for", " ".join(content.platform.values()) or "any platform"
    if package.signers:
        yield "signed by", f"key {', '.join(package.signers)} (not checked)"
    for key, value in content.provenance.items():
        yield key, package_report.format_value(value)


def _render_model(model: manifest.Model, misfit: str | None, top: int) -> Iterator[str]:
    facts = [("device", str(model.device)), ("runs here", "yes")]
    if misfit is not None:
        facts[1] = ("runs here", f"no: {misfit}")
    if model.library is None:
        facts.append(("library", "none: the package contains its sources"))
    if not model.variants:
        if model.cpu_features:
            facts.append(("CPU needs", package_report.format_features(model.cpu_features)))
        if model.cuda_architectures:
            facts.append(("compiled for", ", ".join(model.cuda_architectures)))
    if model.memory:
        facts.append(("memory", package_report.format_memory(model.memory)))
    if model.self_test:
        results = format_count(self_test.count_results(model.self_test), "result")
        facts.append(("self test", results))
    if model.options:
        options = ", ".join(f"{key}={value!r}" for key, value in model.options.items())
        facts.append(("options", options))
    yield render_facts(facts)
    if model.variants:
        targets = [package_report.format_target(target) for target in variants.candidates(model)]
        yield render_table("Targets.", ("target", "needs", "kernels"), targets, row_head=0)
    yield from _render_signature(model)
    yield from _render_constants(model, top)
    if model.kernels:
        yield render_table(
            "Kernels.",
            ("kernel", "device", "operators"),
            [(k.name, k.device, ", ".join(k.operators)) for k in model.kernels],
            row_head=0,
        )
    else:
        yield render_paragraph("The manifest lists no kernels.")


def _render_signature(model: manifest.Model) -> Iterator[str]:
    signature = model.signature
    inputs = list(package_report.format_inputs(signature.get("inputs", ())))
    outputs = list(package_report.format_outputs(signature.get("outputs", ())))
    for caption, rows in (("Inputs.", inputs), ("Outputs.", outputs)):
        if rows:
            yield render_table(caption, _TENSOR, _fill_rows(rows), row_head=0)
        else:
            yield render_paragraph(f"There are no {caption[:-1].lower()}.")
    conditions = list(package_report.format_conditions(signature))
    if conditions:
        yield render_paragraph(f"Conditions: {'; '.join(conditions)}.")


def _fill_rows(rows: Iterable[Sequence[str]]) -> list[Sequence[str]]:
    """Return rows with a cell for each column."""
    return [(*row, *[""] * (len(_TENSOR) - len(row))) for row in rows]


def _render_constants(model: manifest.Model, top: int) -> Iterator[str]:
    if not model.constants:
        yield render_paragraph("There are no constants.")
        return
    yield render_table(
        f"Constants: {package_report.summarize_constants(model)}. The largest ones.",
        ("name", "dtype", "shape", "size", "SHA-256"),
        list(package_report.format_constants(model, top)),
        (3,),
        row_head=0,
    )


def _render_files(package: package_report.Report) -> str:
    digests = package.content.digests() if package.content is not None else {}
    return render_table(
        f"{format_count(len(package.entries), 'file')} in the package.",
        ("file", "size", "SHA-256", "storage"),
        [
            (
                entry.name,
                human_bytes(entry.size),
                digests.get(entry.name, "")[:12],
                "stored" if entry.stored else "compressed",
            )
            for entry in package.entries
        ],
        (1,),
        row_head=0,
    )
