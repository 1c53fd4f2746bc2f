"""`llmc embed` and `llmc score`: embed texts and score pairs with a bundle that has no KV cache."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import MISSING, dataclass
from pathlib import Path

from llmc.buckets.render.text import counted
from llmc.cli.options import Command, argument, bundle_argument, flag, switch, threads_flag
from llmc.cli.output import echo
from llmc.errors import InputError
from llmc.files import read_text
from llmc.runtime.pooling.tokens import WHOLE

SHOWN = 4
"""Values of a vector that are printed without --json."""


TRUNCATE = ("--truncate", "Truncate texts that are too long. Default: refuse them.")


@dataclass(frozen=True, kw_only=True)
class EmbedCommand(Command):
    """Embed texts: one vector per text, pooled as the checkpoint's sentence-transformers files say. Nothing is
    compiled.

    \b
    Example:
      llmc embed bundle --text "The capital of France is Paris." --text "A river in Europe."
      llmc embed bundle --texts lines.txt -o vectors.npy
      llmc embed bundle --text "where is Paris" --prompt-name query --json
    """

    bundle: str = bundle_argument()
    source: str | None = argument("[-]", "- reads one text a line from standard input.", default=None)
    text: list[str] | None = flag(None, "TEXT", "A text. Repeatable.", names="--text -t")
    texts: Path | None = flag(None, "FILE", "One text a line.")
    prompt_name: str | None = flag(None, "NAME", "Put this prompt of the checkpoint before each text.")
    dimensions: int | None = flag(None, "N", "Keep the first N dimensions and normalise again (Matryoshka models).")
    truncate: bool = switch(*TRUNCATE)
    output: Path | None = flag(
        None, "FILE.npy", "Write the vectors here: float32, [texts, dimensions].", names="--output -o"
    )
    threads: int | None = threads_flag()
    as_json: bool = switch("--json", "Print one JSON object per text.")

    def run(self) -> None:
        import numpy as np

        from llmc.runtime.bundle import Bundle
        from llmc.runtime.pooling.pooler import Pooler

        given = _texts(self.source, self.text, self.texts)
        pooler = Pooler(Bundle.open(self.bundle), self.threads)
        try:
            began = time.perf_counter()
            found = pooler.embed(
                given, prompt_name=self.prompt_name, dimensions=self.dimensions, cut=_cut(self.truncate)
            )
            seconds = time.perf_counter() - began
        finally:
            pooler.close()
        if self.output is not None:
            with self.output.open("wb") as file:
                np.save(file, np.stack([one.values for one in found]))
        for at, one in enumerate(found):
            if self.as_json:
                echo(json.dumps({"index": at, "embedding": one.values.tolist(), "prompt_tokens": one.prompt_tokens}))
            elif self.output is None:
                begins = " ".join(f"{value:.4f}" for value in one.values[:SHOWN])
                echo(f"[{at}] {one.prompt_tokens} tokens, {len(one.values)} numbers: {begins} …")
        _summary(len(found), seconds, pooler)


@dataclass(frozen=True, kw_only=True)
class ScoreCommand(Command):
    """Score documents for a query and print the best first, with a bundle of a reranker. Nothing is compiled.

    \b
    Example:
      llmc score bundle --query "capital of France" --document "Paris is." --document "A river."
      llmc score bundle --query "capital of France" --documents lines.txt --top-n 5 --json
    """

    bundle: str = bundle_argument()
    query: str = flag(MISSING, "TEXT", "The query.")
    document: list[str] | None = flag(None, "TEXT", "A document. Repeatable.", names="--document -d")
    documents: Path | None = flag(None, "FILE", "One document a line.")
    top_n: int | None = flag(None, "N", "Print only the N best.", min=1)
    truncate: bool = switch(*TRUNCATE)
    threads: int | None = threads_flag()
    as_json: bool = switch("--json", "Print one JSON object per document.")

    def run(self) -> None:
        from llmc.runtime.bundle import Bundle
        from llmc.runtime.pooling.pooler import Pooler, paired

        given = _texts(None, self.document, self.documents)
        pooler = Pooler(Bundle.open(self.bundle), self.threads)
        try:
            began = time.perf_counter()
            found = pooler.score(paired(self.query, given), cut=_cut(self.truncate))
            seconds = time.perf_counter() - began
        finally:
            pooler.close()
        ranked = sorted(enumerate(found), key=lambda item: -float(item[1].values[0]))[: self.top_n]
        for at, one in ranked:
            value = float(one.values[0])
            line = {"index": at, "score": value, "document": given[at], "prompt_tokens": one.prompt_tokens}
            echo(json.dumps(line) if self.as_json else f"{value:.4f}  [{at}] {given[at]}")
        _summary(len(found), seconds, pooler)


def _cut(truncate: bool) -> int | None:
    return WHOLE if truncate else None


def _texts(source: str | None, given: list[str] | None, file: Path | None) -> list[str]:
    if source not in (None, "-"):
        raise InputError(f"{source!r}: give texts with --text or --texts, or - for standard input")
    found = list(given or [])
    if file is not None:
        found += read_text(file, "texts").splitlines()
    if source == "-":
        found += sys.stdin.read().splitlines()
    if not found:
        raise InputError("there is no text: give --text, --texts FILE or - (--document, --documents FILE to score)")
    return found


def _summary(count: int, seconds: float, pooler: object) -> None:
    from llmc.cli import output
    from llmc.runtime.pooling.pooler import Pooler

    assert isinstance(pooler, Pooler)
    done = pooler.statistics
    padding = 1 - done.tokens / max(done.padded_tokens, 1)
    if not output.quiet:
        echo(
            f"{counted(count, 'text')} in {seconds:.2f} s; {done.tokens} tokens in {done.steps} batches, "
            f"padding {padding:.1%}",
            err=True,
        )
