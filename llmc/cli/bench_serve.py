"""`llmc bench serve`: load on a server, ours or any that speaks OpenAI's API, and its latencies and throughput."""

from __future__ import annotations

import json
import math
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from llmc.cli import quantities
from llmc.cli.options import option
from llmc.cli.output import echo
from llmc.errors import InputError


class Endpoint(StrEnum):
    """Which of OpenAI's endpoints."""

    COMPLETIONS = "completions"
    CHAT = "chat"


class Arrivals(StrEnum):
    """How requests are spread in time."""

    POISSON = "poisson"
    UNIFORM = "uniform"


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("serve")(serve)


def serve(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Where the server is, with or without /v1.", show_default=False)
    ],
    *,
    requests: Annotated[int, option("--requests -n", "N", "Requests to send.", min=1)] = 100,
    concurrency: Annotated[
        int | None,
        option("--concurrency", "N", "Closed loop: so many requests at a time. Default: 8, or --rate.", min=1),
    ] = None,
    rate: Annotated[
        str | None, option("--rate", "R", "Open loop: requests per second, inf (all at once), or trace (at its times).")
    ] = None,
    speedup: Annotated[float | None, option("--speedup", "X", "With --rate trace: so many times as fast.")] = None,
    arrivals: Annotated[
        Arrivals | None, typer.Option("--arrivals", help="Of a --rate: random or even gaps. Default: poisson.")
    ] = None,
    burstiness: Annotated[
        float | None, option("--burstiness", "K", "Of random gaps: below 1 burstier. Default: 1, Poisson.")
    ] = None,
    traffic: Annotated[
        Path | None, option("--traffic", "FILE", "A trace (.csv, .jsonl) to take the requests' lengths from.")
    ] = None,
    scale: Annotated[float | None, option("--scale", "F", "Multiply the trace's lengths, as in 0.125.")] = None,
    max_model_len: Annotated[
        int | None, option("--max-model-len", "N", "Cut the trace's requests to so many tokens.", min=2)
    ] = None,
    prompt_len: Annotated[
        str | None, option("--prompt-len", "N|A,B", "Tokens of a prompt, or their range. Default: 128.")
    ] = None,
    output_len: Annotated[
        str | None, option("--output-len", "N|A,B", "Tokens of an answer, or their range. Default: 64.")
    ] = None,
    shared_prefix: Annotated[
        str | None, option("--shared-prefix", "F", "Part of each prompt that all share, as in 50%.")
    ] = None,
    prompt_ids: Annotated[
        bool, typer.Option("--prompt-ids", help="Send prompts as token ids; the server needs /tokenize.")
    ] = False,
    endpoint: Annotated[Endpoint, typer.Option("--endpoint", help="Which endpoint.")] = Endpoint.COMPLETIONS,
    model: Annotated[str | None, option("--model", "NAME", "Default: the first that the server lists.")] = None,
    api_key: Annotated[str | None, option("--api-key", "K", "Sent as a bearer token. Default: LLMC_API_KEY.")] = None,
    temperature: Annotated[float, option("--temperature", "T", "0 is greedy.", min=0.0)] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Ask for answers of exactly the wanted length.")
    ] = True,
    extra_body: Annotated[
        str | None, option("--extra-body", "JSON", "An object, merged into each request's body.")
    ] = None,
    seed: Annotated[int, option("--seed", "S", "Of lengths, prompts and arrivals.")] = 0,
    warmup: Annotated[int, option("--warmup", "N", "Requests sent before, and not counted.", min=0)] = 1,
    timeout: Annotated[str, option("--timeout", "T", "For each request, from its sending to its end.")] = "10m",
    slo: Annotated[
        str | None, option("--slo", "LIMITS", "Count requests within ttft=…,itl=…,tpot=…,e2e=… (ms or s).")
    ] = None,
    output: Annotated[
        Path | None, option("--output -o", "FILE", "Write the report here as JSON, with every request.")
    ] = None,
    plot: Annotated[Path | None, option("--plot", "OUT", "Draw the run: a .png, or a self-contained .html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Put a server under load, and report throughput, latencies and errors.

    Answers are streamed. With --rate, no request waits for another, and latencies count from the time at which a
    request was due, so that a stall counts for all that it held up. Each request has a connection of its own. Prompts
    are random words, of a length that is found by asking the server how it counts them.

    \b
    Example:
      llmc bench serve http://127.0.0.1:8000 --concurrency 8 --prompt-len 64 --output-len 64
      llmc bench serve http://127.0.0.1:8000 --rate 4 --requests 500 --slo ttft=1s,itl=100ms --plot load.html
      llmc bench serve http://127.0.0.1:8000 --traffic azure.csv --scale 0.125 --max-model-len 2048 --rate trace -n 1000
    """
    from llmc.bench.loadtest import plots
    from llmc.bench.loadtest.report_text import text
    from llmc.bench.loadtest.run import LoadTest, run
    from llmc.bench.loadtest.slo import parse
    from llmc.bench.loadtest.workload import Workload
    from llmc.buckets.render.page import check
    from llmc.cli.interrupts import end_incomplete
    from llmc.settings import Settings

    refuse(
        "needs --traffic", traffic is None, {"--scale": scale, "--max-model-len": max_model_len,
        "--rate trace": rate if rate == "trace" else None},
    )  # fmt: skip
    refuse("is the trace's where there is --traffic", traffic is not None,
            {"--prompt-len": prompt_len, "--output-len": output_len})  # fmt: skip
    refuse("excludes --rate", rate is not None, {"--concurrency": concurrency})
    refuse("needs --rate trace", rate != "trace", {"--speedup": speedup})
    paced = rate is not None and rate not in ("trace", "inf")
    refuse("needs --rate with a number", not paced, {"--arrivals": arrivals, "--burstiness": burstiness})
    refuse("needs --arrivals poisson", arrivals == Arrivals.UNIFORM, {"--burstiness": burstiness})
    refuse("needs --endpoint completions", endpoint is Endpoint.CHAT, {"--prompt-ids": prompt_ids or None})
    for flag, value in (("--scale", scale), ("--speedup", speedup), ("--burstiness", burstiness)):
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{flag} {value:g} must be above 0")
    if plot is not None:
        check(plot)
    workload = Workload(
        requests=requests,
        traffic=traffic,
        scale=scale or 1.0,
        max_model_len=max_model_len,
        prompt_len=_lengths("--prompt-len", prompt_len) or (128, 128),
        output_len=_lengths("--output-len", output_len) or (64, 64),
        rate=_rate(rate),
        speedup=speedup or 1.0,
        arrivals=(arrivals or Arrivals.POISSON).value,
        burstiness=burstiness or 1.0,
        concurrency=concurrency or 8,
        seed=seed,
    )
    test = LoadTest(
        url=url,
        workload=workload,
        endpoint=endpoint.value,
        model=model,
        api_key=api_key or Settings.from_environment().api_key,
        temperature=temperature,
        ignore_eos=ignore_eos,
        prompt_ids=prompt_ids,
        shared_prefix=_share(shared_prefix),
        warmup=warmup,
        timeout_s=_timeout(timeout),
        objectives=parse(slo) if slo is not None else {},
        extra=_object(extra_body),
    )
    with _Progress(hidden=as_json and not sys.stderr.isatty()) as progress:
        report = run(test, progress)
    if output is not None:
        from llmc.files import write_text

        write_text(output, json.dumps(report.to_dict(each=True)) + "\n", "report")
        echo(f"wrote {output}", err=True)
    if plot is not None:
        plots.draw(plot, report)
        echo(f"wrote {plot}", err=True)
    echo(json.dumps(report.to_dict()) + "\n" if as_json else text(report), nl=False)
    end_incomplete([f"{report.unfinished} of {requests} requests"] if report.unfinished else [])


class _Progress:
    """A bar on a terminal; elsewhere a line for each tenth of the requests."""

    def __init__(self, hidden: bool) -> None:
        from llmc.cli.output import StepProgress

        self._steps = StepProgress("requests", hidden)
        self._all = sys.stderr.isatty()

    def __enter__(self) -> _Progress:
        self._steps.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._steps.__exit__(*error)

    def __call__(self, words: str, done: int, total: int) -> None:
        if self._all or done * 10 // total != (done - 1) * 10 // total:
            self._steps(words, done, total)


def refuse(why: str, wrong: bool, flags: dict[str, object]) -> None:
    """Raise InputError for a flag that was given where it cannot be."""
    for flag, value in flags.items():
        if wrong and value is not None:
            raise InputError(f"{flag} {why}")


def _rate(text: str | None) -> float | Literal["trace"] | None:
    return "trace" if text == "trace" else quantities.rate("--rate", text)


def _timeout(text: str) -> float:
    found = quantities.duration("--timeout", text)
    if not found:
        raise InputError(f"--timeout {text!r} must be above 0")
    return found


def _share(text: str | None) -> float:
    found = quantities.fraction("--shared-prefix", text) or 0.0
    if found > 1:
        raise InputError(f"--shared-prefix {text} must be at most 100%")
    return found


def _lengths(flag: str, text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    try:
        low, *rest = [int(part) for part in text.split(",")]
        high = rest[0] if rest else low
        good = len(rest) <= 1 and 1 <= low <= high
    except ValueError:
        good = False
    if not good:
        raise InputError(f"{flag} {text!r} is neither a number of tokens nor a range such as 32,128")
    return low, high


def _object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InputError(f"--extra-body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError("--extra-body must be a JSON object")
    return found
