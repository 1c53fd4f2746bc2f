"""Small logs as servers write them, for the tests of formats."""

from __future__ import annotations

import json
from typing import Any

AT = "INFO 11-23 12:58:{:02d} [logger.py:43] "


def received(name: str, prompt: int, second: int, text: str = "Tell me, please: 'why?'") -> str:
    """Older vLLM: one line with the prompt's token ids."""
    return (
        f"{AT.format(second)}Received request {name}: prompt: {text!r}, params: SamplingParams(n=1, temperature=0.7, "
        f"max_tokens=100), prompt_token_ids: {list(range(prompt))}, prompt_embeds shape: None, lora_request: None."
    )


def generated(name: str, output: int | None, second: int, how: str = "", text: str = "Because, you see") -> str:
    """The line of an answer, or of a part of it."""
    ids = None if output is None else list(range(output))
    return (
        f"{AT.format(second)}Generated response {name}{how}: output: {text!r}, output_token_ids: {ids}, "
        "finish_reason: stop"
    )


def span(
    trace: str, name: str, start_s: float, attributes: dict[str, Any], parent: str = "", kind: str = "intValue"
) -> dict[str, Any]:
    """A span of OTLP's JSON."""
    return {
        "traceId": trace,
        "spanId": name,
        "parentSpanId": parent,
        "name": "chat",
        "startTimeUnixNano": str(round(start_s * 1e9)),
        "attributes": [
            {"key": key, "value": {"stringValue": value} if isinstance(value, str) else {kind: str(value)}}
            for key, value in attributes.items()
        ],
    }


def batch(*spans: dict[str, Any]) -> str:
    """A line of the Collector's file exporter."""
    return json.dumps({"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": list(spans)}]}]})


def scrape(
    prompt: list[int], output: list[int], *, labels: str = 'model_name="m"', family: str = "vllm:request"
) -> str:
    """A scrape of two histograms whose buckets end at 10, 100 and +Inf, by what is in each bucket."""
    lines = []
    for name, counts in ((f"{family}_prompt_tokens", prompt), (f"{family}_generation_tokens", output)):
        lines += [f"# HELP {name} Number of tokens.", f"# TYPE {name} histogram"]
        sums = [sum(counts[: index + 1]) for index in range(3)]
        lines += [
            f'{name}_bucket{{{labels},le="{le}"}} {n}.0' for le, n in zip(("10.0", "100.0", "+Inf"), sums, strict=True)
        ]
        lines += [
            f"{name}_count{{{labels}}} {sums[-1]}.0",
            f"{name}_sum{{{labels}}} {5 * counts[0] + 40 * counts[1] + 150 * counts[2]}.0",
        ]
    return "\n".join([*lines, "python_gc_objects_collected_total 7.0", ""])
