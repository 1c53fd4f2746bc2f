"""`llmc bench BUNDLE --texts FILE`: texts a second of a bundle that embeds or scores."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.cli.output import echo
from llmc.errors import InputError
from llmc.files import read_text, write_text

if TYPE_CHECKING:
    from llmc.bench.texts import TextBench
    from llmc.runtime.bundle import Bundle

ROUNDS = 5


def run(
    bundle: Bundle, texts: Path | None, query: str | None, truncate: bool, rounds: int | None, threads: int | None,
    output: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure, and print or write the outcome. Raises InputError for what cannot be measured."""
    from llmc.bench.texts import measure
    from llmc.cli.interrupts import end_incomplete, sigterm_interrupts
    from llmc.cli.output import StepProgress
    from llmc.runtime.pooling.tokens import WHOLE

    if texts is None:
        raise InputError(f"{bundle.path}: a bundle to {bundle.task} is timed over texts; give --texts FILE, one a line")
    if (query is None) == (bundle.task == "score"):
        what = "needs --query TEXT, for which all texts are scored" if query is None else "takes no --query"
        raise InputError(f"{bundle.path}: a bundle to {bundle.task} {what}")
    given = [line for line in read_text(texts, "texts").splitlines() if line.strip()]
    if not given:
        raise InputError(f"{texts}: there is no text in it; give one a line")
    hidden = as_json and not sys.stderr.isatty()
    with StepProgress("measure", hidden) as progress, sigterm_interrupts():
        found = measure(
            bundle, given, query=query or "", rounds=rounds or ROUNDS, cut=WHOLE if truncate else None, threads=threads,
            report=progress,
        )  # fmt: skip
    if output is not None:
        write_text(output, json.dumps(found.to_dict(), indent=1) + "\n", "measurements")
        echo(f"wrote {output}", err=True)
    echo(json.dumps(found.to_dict()) if as_json else _text(found))
    end_incomplete(found.unmeasured)


def _text(found: TextBench) -> str:
    from llmc.buckets.render.text import table

    one = found.rounds[-1]
    how = f"{found.rate:,.1f} texts/s"
    if found.partial:
        how += ", interrupted in the first round"
    else:
        how += f" in the median of {len(found.rounds)} rounds, {found.best:,.1f} in the best"
    lines = [
        f"{found.bundle} on {found.device}, {found.threads} threads: {one.texts:,} texts, {one.tokens:,} tokens",
        f"{how}; {found.rate * one.tokens / one.texts:,.0f} tokens/s",
        f"{one.batches:,} batches, {one.padded:,} tokens computed: padding {one.padding:.1%}",
        f"compilations: {found.compilations}",
    ]
    if found.buckets:
        rows = [("batch", "tokens", "batches")]
        rows += [(str(batch), str(tokens), str(steps)) for (batch, tokens), steps in sorted(found.buckets.items())]
        lines += ["", *table(rows, right=range(3))]
    return "\n".join(lines)
