"""The flags of commands that may speculate: vLLM's speculative_config, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from llmc.cli.options import option
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.runtime.engine.speculation import SpeculativeConfig

_PANEL = "Speculation by prompt lookup"

Speculate = Annotated[
    int | None,
    option(
        "--speculate",
        "K",
        "Guess up to K tokens a step from the sequence's own; the text stays the same.",
        rich_help_panel=_PANEL,
    ),
]
LookupMax = Annotated[
    int | None,
    option("--prompt-lookup-max", "N", "Last tokens looked for at most. Default: 4.", rich_help_panel=_PANEL),
]
LookupMin = Annotated[
    int | None,
    option("--prompt-lookup-min", "M", "Last tokens looked for at least. Default: 2.", rich_help_panel=_PANEL),
]
ConfigJson = Annotated[
    str | None,
    option(
        "--speculative-config",
        "JSON",
        'All of it as vLLM takes it: {"method": "ngram", "num_speculative_tokens": K, …}.',
        rich_help_panel=_PANEL,
    ),
]


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
    from llmc.runtime.engine.speculation import SpeculativeConfig

    if config is not None:
        if tokens is not None or given:
            flag = given[0] if tokens is None else "--speculate"
            raise InputError(f"--speculative-config says all of it; leave out {flag}, or put it there")
        return SpeculativeConfig.parse(config)
    return SpeculativeConfig(tokens or 0, lookup_max, lookup_min)
