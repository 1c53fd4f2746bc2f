"""A bundle and other engines on the same weights, in turn, on this host; docs/performance.md has the rules.

    python benchmarks/compare.py BUNDLE onnxruntime-genai,openvino-genai,llama-cpp \\
        --baseline-python .venv-baselines/bin/python [--plot bench.html] [-o bench.json]

Each engine may have a precision, as in onnxruntime-genai:int4. An interrupt shows what was measured; the exit code is
then 130.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from baselines import compare, page
from baselines.catalogue import parse
from baselines.contenders import checkpoint_of, default_folder, make_ready
from baselines.environment import interpreter, require
from baselines.report_text import text
from baselines.scope import KINDS, Scope

from llmc.artifacts.local.opening import open_store
from llmc.buckets.render.page import check
from llmc.cli.output import EXIT, StepProgress, sigterm_interrupts
from llmc.errors import InputError, LlmcError
from llmc.runtime.bundle import Bundle
from llmc.settings import Settings


def scope_of(args: argparse.Namespace) -> Scope:
    """What is to be measured; raises InputError."""
    if args.scale is not None and (args.traffic is None or not 0 < args.scale < math.inf):
        raise InputError(f"--scale {args.scale:g} must be above 0, and needs --traffic")
    scope = Scope(trace=args.traffic)
    if args.traffic is not None:
        scope = replace(scope, kinds=KINDS)
    if args.scale is not None:
        scope = replace(scope, scale=args.scale)
    if args.only is not None:
        scope = scope.only(args.only)
    if args.quick:
        scope = scope.quick()
    return scope if args.rounds is None else replace(scope, rounds=args.rounds)


def run(args: argparse.Namespace) -> int:
    """Measure, print the tables or the JSON document, and write what was asked for; the exit code."""
    settings = Settings.from_environment()
    requested, scope, python = parse(args.baselines), scope_of(args), interpreter(args.baseline_python)
    if args.plot is not None:
        check(args.plot)
    opened = Bundle.open(args.bundle)
    require(requested, python)
    checkpoint = checkpoint_of(opened, args.model, open_store(None, settings))
    folder = args.baseline_models or default_folder(settings, checkpoint)
    hidden = args.json and not sys.stderr.isatty()
    with StepProgress("make the baselines' models", hidden) as built:
        ready = make_ready(
            {"llmc": opened}, requested, checkpoint, folder, python, lambda form: built(form, 0, len(requested)),
            "quality" in scope.kinds,
        )  # fmt: skip
    with StepProgress("measure", hidden) as progress, sigterm_interrupts():
        found = compare.run(
            ready.contenders, scope, model=ready.model, threads=args.threads or settings.threads,
            vocabulary=ready.vocabulary, logs=folder / "logs", progress=progress, reference=ready.reference,
            texts=ready.texts, weights=ready.weights,
        )  # fmt: skip
    if args.output is not None:
        found.save(args.output)
        print(f"wrote {args.output}", file=sys.stderr)
    if args.plot is not None:
        page.draw(args.plot, [found])
        print(f"wrote {args.plot}", file=sys.stderr)
    print(json.dumps(found.to_dict()) if args.json else text(found))
    return EXIT if found.unfinished else 0


def main(words: Sequence[str] | None = None) -> int:
    """The exit code; errors of llmc are printed as `llmc` prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("baselines", help="comma-separated: onnxruntime-genai, openvino-genai, llama-cpp, transformers")
    parser.add_argument(
        "--baseline-python", type=Path, help="of the environment that has the baselines; default: this one"
    )
    parser.add_argument(
        "--baseline-models", type=Path, help="keep the baselines' forms of the model here; default: the cache"
    )
    parser.add_argument("--model", help="the checkpoint; default: the one that the bundle was compiled from")
    parser.add_argument("--only", help=f"comma-separated, of {', '.join(KINDS)} (with --traffic); default: all")
    parser.add_argument("--rounds", type=int, help="in which engines take turns; default: 5")
    parser.add_argument("--quick", action="store_true", help="few rounds, for a first look")
    parser.add_argument("--traffic", type=Path, help="a trace (.csv, .jsonl): serve requests of its lengths")
    parser.add_argument("--scale", type=float, help="multiply the trace's lengths; default: 0.125")
    parser.add_argument("--threads", type=int, help="default: LLMC_THREADS or the CPUs")
    parser.add_argument("-o", "--output", type=Path, help="write the measurements here")
    parser.add_argument("--plot", type=Path, help="draw the comparison: a .png, or a self-contained .html")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(words)
    try:
        return run(args)
    except LlmcError as error:
        print(f"llmc: error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
