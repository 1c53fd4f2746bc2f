"""`llmc embed` and `llmc score`: vectors of texts, and scores of pairs, from a bundle without a cache."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from llmc.cli.options import BundleArgument, ThreadsFlag, option
from llmc.cli.output import echo
from llmc.errors import InputError
from llmc.files import read_text
from llmc.runtime.pooling.tokens import WHOLE

SHOWN = 4
"""Numbers of a vector that are printed without --json."""


TruncateFlag = Annotated[
    bool, typer.Option("--truncate", help="Cut texts that are too long for the model; else they are refused.")
]


def register(app: typer.Typer) -> None:
    """Add both commands to `app`."""
    app.command("embed")(embed)
    app.command("score")(score)


def embed(
    bundle: BundleArgument,
    source: Annotated[
        str | None, typer.Argument(metavar="[-]", help="- reads texts from standard input.", show_default=False)
    ] = None,
    *,
    text: Annotated[list[str] | None, option("--text -t", "TEXT", "A text; may be repeated.")] = None,
    texts: Annotated[Path | None, option("--texts", "FILE", "One text a line.")] = None,
    prompt_name: Annotated[
        str | None, option("--prompt-name", "NAME", "The checkpoint's prompt that goes before each text.")
    ] = None,
    dimensions: Annotated[
        int | None, option("--dimensions", "N", "The first N numbers, of length 1 again (Matryoshka models).")
    ] = None,
    truncate: TruncateFlag = False,
    output: Annotated[Path | None, option("--output -o", "FILE.npy", "Write the vectors: float32, [N, D].")] = None,
    threads: ThreadsFlag = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a text.")] = False,
) -> None:
    """Vectors of texts, pooled as the checkpoint's sentence-transformers files say. Compiles nothing.

    \b
    Example:
      llmc embed bundle --text "The capital of France is Paris." --text "A river in Europe."
      llmc embed bundle --texts lines.txt -o vectors.npy
      llmc embed bundle --text "where is Paris" --prompt-name query --json
    """
    import numpy as np

    from llmc.runtime.bundle import Bundle
    from llmc.runtime.pooling.pooler import Pooler

    given = _texts(source, text, texts)
    pooler = Pooler(Bundle.open(bundle), threads)
    try:
        began = time.perf_counter()
        found = pooler.embed(given, prompt_name=prompt_name, dimensions=dimensions, cut=_cut(truncate))
        seconds = time.perf_counter() - began
    finally:
        pooler.close()
    if output is not None:
        with output.open("wb") as file:
            np.save(file, np.stack([one.values for one in found]))
    for at, one in enumerate(found):
        if as_json:
            echo(json.dumps({"index": at, "embedding": one.values.tolist(), "prompt_tokens": one.prompt_tokens}))
        elif output is None:
            begins = " ".join(f"{value:.4f}" for value in one.values[:SHOWN])
            echo(f"[{at}] {one.prompt_tokens} tokens, {len(one.values)} numbers: {begins} …")
    _summary(len(found), seconds, pooler)


def score(
    bundle: BundleArgument,
    query: Annotated[str, option("--query", "TEXT", "What documents are to fit.")],
    document: Annotated[list[str] | None, option("--document -d", "TEXT", "A document; may be repeated.")] = None,
    documents: Annotated[Path | None, option("--documents", "FILE", "One document a line.")] = None,
    top_n: Annotated[int | None, option("--top-n", "N", "Only the N best.", min=1)] = None,
    truncate: TruncateFlag = False,
    threads: ThreadsFlag = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a document.")] = False,
) -> None:
    """Documents by how well they fit a query, best first, with a bundle of a reranker. Compiles nothing.

    \b
    Example:
      llmc score bundle --query "capital of France" --document "Paris is." --document "A river."
      llmc score bundle --query "capital of France" --documents lines.txt --top-n 5 --json
    """
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.pooling.pooler import Pooler, paired

    given = _texts(None, document, documents)
    pooler = Pooler(Bundle.open(bundle), threads)
    try:
        began = time.perf_counter()
        found = pooler.score(paired(query, given), cut=_cut(truncate))
        seconds = time.perf_counter() - began
    finally:
        pooler.close()
    ranked = sorted(enumerate(found), key=lambda item: -float(item[1].values[0]))[:top_n]
    for at, one in ranked:
        value = float(one.values[0])
        line = {"index": at, "score": value, "document": given[at], "prompt_tokens": one.prompt_tokens}
        echo(json.dumps(line) if as_json else f"{value:.4f}  [{at}] {given[at]}")
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
    counted = pooler.statistics
    waste = 1 - counted.tokens / max(counted.padded_tokens, 1)
    if not output.quiet:
        echo(
            f"{count} texts in {seconds:.2f} s; {counted.tokens} tokens in {counted.steps} batches, "
            f"padding {waste:.1%}",
            err=True,
        )
