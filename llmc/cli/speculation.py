"""The flags of commands that may speculate: vLLM's speculative_config, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.runtime.engine.speculation.config import SpeculativeConfig

_PANEL = "Speculation by prompt lookup (off unless asked for)"

Speculate = Annotated[
    int | None,
    typer.Option(
        "--speculate", metavar="K", rich_help_panel=_PANEL,
        help="Guess up to K tokens a step from the sequence's own; the text stays the same.",
    ),
]  # fmt: skip
LookupMax = Annotated[
    int | None,
    typer.Option(
        "--prompt-lookup-max", metavar="N", rich_help_panel=_PANEL, help="Last tokens looked for at most. Default: 4."
    ),
]
LookupMin = Annotated[
    int | None,
    typer.Option(
        "--prompt-lookup-min", metavar="M", rich_help_panel=_PANEL, help="Last tokens looked for at least. Default: 2."
    ),
]
ConfigJson = Annotated[
    str | None,
    typer.Option(
        "--speculative-config", metavar="JSON", rich_help_panel=_PANEL,
        help='All of it as vLLM takes it: {"method": "ngram", "num_speculative_tokens": K, …}.',
    ),
]  # fmt: skip


def asked(
    tokens: int | None, lookup_max: int | None, lookup_min: int | None, config: str | None = None
) -> SpeculativeConfig | None:
    """What the flags ask for; None without any. Raises InputError for flags that do not go together."""
    lengths = {"--prompt-lookup-max": lookup_max, "--prompt-lookup-min": lookup_min}
    given = [flag for flag, value in lengths.items() if value is not None]
    if config is None and tokens is None:
        if given:
            raise InputError(f"{given[0]} says how drafts are looked up; --speculate K asks for them")
        return None
    from llmc.runtime.engine.speculation.config import SpeculativeConfig

    if config is not None:
        if tokens is not None or given:
            flag = given[0] if tokens is None else "--speculate"
            raise InputError(f"--speculative-config says all of it; leave out {flag}, or put it there")
        return SpeculativeConfig.parse(config)
    return SpeculativeConfig(tokens or 0, lookup_max, lookup_min)
