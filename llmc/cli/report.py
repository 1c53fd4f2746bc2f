"""`llmc report`: describe a bundle in Markdown for a CI job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.cli.options import Command, bundle_argument, flag, store_flag
from llmc.cli.output import echo
from llmc.cli.results import accuracy_line, verified_line
from llmc.cli.verify import certificate_lines
from llmc.errors import ArtifactError
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle

MAX_ROWS = 100
"""Graphs that the report lists; GitHub limits a step summary to 1 MiB."""


@dataclass(frozen=True, kw_only=True)
class ReportCommand(Command):
    """Describe a bundle in Markdown: graphs built and reused, sizes, padding, verification and its certificate.

    \b
    Example:
      llmc report bundle --certificate certificate.json -o report.md
      llmc report bundle --compiled compiled.json --traffic requests.csv >> "$GITHUB_STEP_SUMMARY"
    """

    bundle: str = bundle_argument()
    compiled: Path | None = flag(None, "FILE", "A file of llmc compile --result: graphs built and reused.")
    traffic: Path | None = flag(None, "FILE", "Recorded requests: report the plan's padding on them.")
    certificate: Path | None = flag(None, "FILE", "A certificate of llmc warmup --certify for this bundle.")
    output: Path | None = flag(None, "FILE", "Write the report here instead of printing it.", names="--output -o")
    cache_dir: Path | None = store_flag()

    def run(self) -> None:
        from llmc.artifacts.local.opening import open_store
        from llmc.artifacts.local.references import resolve
        from llmc.files import write_text
        from llmc.runtime.bundle import Bundle

        settings = Settings.from_environment()
        found = Bundle.open(resolve(self.bundle, settings, open_store(self.cache_dir, settings)), settings)
        text = "\n".join(_lines(found, self.compiled, self.traffic, self.certificate)) + "\n"
        if self.output is None:
            echo(text, nl=False, verbatim=True)
        else:
            write_text(self.output, text, "report")


def _lines(bundle: Bundle, compiled: Path | None, traffic: Path | None, certificate: Path | None) -> Iterator[str]:
    from llmc.deploy.quoting import as_markdown

    manifest, verification = bundle.manifest, bundle.manifest.verification
    states = [one.state for one in manifest.executables]
    weights = sum(manifest.blobs[blob] for name, blob in manifest.files.items() if name.startswith("weights"))
    rows = [
        ("bundle", manifest.digest),
        ("graphs", f"{len(states)}: native {states.count('native')}, portable {states.count('portable')}"),
        ("size", f"{manifest.size / 1e6:,.1f} MB, of which weights {weights / 1e6:,.1f} MB"),
    ]
    if compiled is not None:
        rows.insert(2, ("made", _built(compiled)))
    if traffic is not None:
        rows.append(("padding", _padding(bundle, traffic)))
    if verification.get("mode", "none") == "none":
        rows.append(("numbers", f"not verified{': ' + str(verification['why']) if 'why' in verification else ''}"))
    else:
        rows.append(("numbers", f"verified {verified_line(verification, len(states))}"))
        rows += (
            [("accuracy", line.removeprefix("accuracy "))] if (line := accuracy_line(verification)) is not None else []
        )
    rows.append(("certificate", "none" if certificate is None else _certified(bundle, certificate)))
    yield f"### {as_markdown(manifest.model.get('name', 'bundle'))} for {as_markdown(manifest.device)}"
    yield from _table(("", ""), rows)
    shapes = [
        (str(one), one.state, f"{one.buckets}", f"{manifest.blobs[one.blob] / 1e6:,.2f} MB")
        for one in manifest.executables[:MAX_ROWS]
    ]
    yield from _table(("graph", "state", "buckets", "size"), shapes)
    if len(states) > MAX_ROWS:
        yield f"\n{len(states) - MAX_ROWS} graphs more."


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    from llmc.deploy.quoting import as_markdown

    yield ""
    for row in (header, ["---"] * len(header), *([as_markdown(cell) for cell in row] for row in rows)):
        yield f"| {' | '.join(row)} |"


def _built(file: Path) -> str:
    from llmc.files import read_text
    from llmc.json_fields import Fields

    fields = Fields.parse(read_text(file, "outcome"), str(file))
    return f"{fields.integer('built')} built, {fields.integer('reused')} reused, in {fields.number('seconds'):,.1f} s"


def _padding(bundle: Bundle, file: Path) -> str:
    from llmc.buckets.evaluation.replay import replay
    from llmc.buckets.render.text import percent
    from llmc.buckets.traffic.source import Traffic

    found = replay(bundle.plan, Traffic(str(file)))
    phases = {"prompt": found.prompt, "decode": found.decode}
    reported = [f"{name} {percent(one.padding)}" for name, one in phases.items()]
    uncovered = found.prompt.uncovered + found.decode.uncovered
    return f"{', '.join(reported)} on {found.prompt.requests:,} recorded requests; {uncovered} uncovered"


def _certified(bundle: Bundle, file: Path) -> str:
    """The signature is not checked here."""
    from llmc.runtime.certificate.document import read_file

    built, _, signature = read_file(file)
    if built.bundle != bundle.manifest.digest:
        raise ArtifactError(
            f"{file}: the certificate is for bundle {built.bundle}, not {bundle.path}; certify this bundle again"
        )
    signed = "not signed" if signature is None else "signed"
    reported = [line for line in certificate_lines(built) if not line.startswith(" ")]
    return f"{'; '.join(reported)}; {signed}, created {built.created}"
