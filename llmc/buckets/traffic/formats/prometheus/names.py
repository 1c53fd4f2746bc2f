"""Names of servers' histograms of the prompt and output tokens of a request."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Literal, NamedTuple

Role = Literal["prompt", "output", "cached"]
"""Lengths of prompts or outputs, or the number of prompt tokens from a prefix cache."""

OWN: Mapping[str, Role] = {"llmc:request_prompt_tokens": "prompt", "llmc:request_generation_tokens": "output"}


@cache
def histograms() -> Mapping[str, Role]:
    """Return the names for llmc and its known systems (llmc/integrations/), without their suffixes."""
    found: Mapping[str, Role] = import_module("llmc.integrations").histograms()
    return {**found, **OWN}


@cache
def cached_counters() -> tuple[str, ...]:
    """Return the names of counters of cached prompt tokens; of one system, the best first."""
    found: tuple[str, ...] = import_module("llmc.integrations").cached_counters()
    return found


TOKEN_TYPES: Mapping[str, Mapping[str, Role]] = {
    f"{name}{unit}": {"input": "prompt", "output": "output", "completion": "output"}
    for name in ("gen_ai_client_token_usage", "gen_ai_server_token_usage")
    for unit in ("", "_tokens", "_token")
}
"""OpenTelemetry's gen_ai.client.token.usage (docs/gen-ai/gen-ai-metrics.md): one histogram, split by a label."""

TOKEN_TYPE = "gen_ai_token_type"  # noqa: S105 - the name of a label

BUCKET, SUM, COUNT = "_bucket", "_sum", "_count"

QUERY = '{__name__=~"vllm:request_(prompt|generation)_tokens_(bucket|sum|count)"}'


class Series(NamedTuple):
    """One series of a histogram: its lengths' role, its family, and its part of the histogram. A counter is one too."""

    role: Role
    family: str
    part: str


def series(name: str, labels: Mapping[str, str]) -> Series | None:
    """Return the meaning of the series `name` with `labels`; None for any other series."""
    if name in cached_counters():
        return Series("cached", name, COUNT)
    for part in (BUCKET, SUM, COUNT):
        if name.endswith(part):
            family = name.removesuffix(part)
            role = histograms().get(family)
            if role is None and family in TOKEN_TYPES:
                role = TOKEN_TYPES[family].get(labels.get(TOKEN_TYPE, ""))
            return None if role is None else Series(role, family, part)
    return None


def families() -> list[str]:
    """Return the known histograms, for messages."""
    return [*histograms(), "gen_ai_client_token_usage"]
