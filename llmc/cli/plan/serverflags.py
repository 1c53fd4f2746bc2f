"""The flags of every verb that plans for another server, and what they open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from llmc.cli.flags import Command, takes
from llmc.cli.options import fields_option, option, traffic_format_option
from llmc.cli.output import ReadingProgress, close_bars
from llmc.cli.planning import not_a_file
from llmc.cli.quantities import duration, rate, size
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.integrations.base import BucketRules, GraphCost, Setup
    from llmc.integrations.configuration import Configuration
    from llmc.integrations.observed import ObservedSteps
    from llmc.integrations.settings import Value

LIMITS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "max_prompt_len")


def _known() -> str:
    from llmc.integrations import BUCKETS

    return ", ".join(BUCKETS.names())


@dataclass(frozen=True)
class ServerFlags:
    """The flags as typed; None is a flag that was not given."""

    server: Annotated[
        str | None, option("--server", "NAME", f"Which server, vllm also at a release, as vllm@0.24: {_known()}.")
    ] = None
    max_model_len: Annotated[
        int | None, option("--max-model-len", "N", "Tokens of one sequence, as the server runs.")
    ] = None
    max_num_seqs: Annotated[
        int | None, option("--max-num-seqs", "N", "Sequences in flight. Default: the server's.")
    ] = None
    max_num_batched_tokens: Annotated[
        int | None, option("--max-num-batched-tokens", "N", "Tokens of a step. Default: the server's.")
    ] = None
    block_size: Annotated[
        int | None, option("--block-size", "N", "Tokens of one KV cache block. Default: the server's.")
    ] = None
    max_prompt_len: Annotated[
        int | None,
        option("--max-prompt-len", "N", "Tokens of the longest prompt. Default: what --max-model-len admits."),
    ] = None
    settings: Annotated[
        list[str] | None,
        option("--set", "NAME=VALUE", "A setting of the server's own; --set ? lists them. Again for each."),
    ] = None
    traffic: Annotated[str | None, option("--traffic", "FILE", "Recorded requests, see docs/traffic.md.")] = None
    traffic_format: Annotated[str | None, traffic_format_option()] = None
    fields: Annotated[str | None, fields_option()] = None
    arrival_rate: Annotated[
        str | None,
        option("--arrival-rate", "R", "Requests per second to replay them at, or inf. Default: as recorded."),
    ] = None
    clip: Annotated[
        bool, typer.Option("--clip", help="Clip requests above the limits, in place of leaving them out.")
    ] = False
    graph_seconds: Annotated[
        str | None, option("--graph-seconds", "T", "What one graph takes at start. Default: as published.")
    ] = None
    graph_bytes: Annotated[
        str | None, option("--graph-bytes", "SIZE", "Device memory of one graph. Default: as published.")
    ] = None

    def model(self) -> BucketRules:
        """The server. Raises InputError without one, UnknownNameError, listing the known ones, for another name."""
        from llmc.integrations import bucket_rules, released

        if self.server is None:
            raise InputError(f"name the server with --server NAME: {_known()}")
        return bucket_rules(released(self.server)[0])

    def limits(self) -> dict[str, int]:
        """The limits that were given, by name."""
        return {name: value for name in LIMITS if (value := getattr(self, name)) is not None}

    def own(self, server: BucketRules) -> dict[str, Value]:
        """The server's own settings that were given. Raises InputError for one that it does not have."""
        from llmc.integrations import released

        known = {setting.name: setting for setting in server.settings}
        found = released(self.server or "")[1]
        for text in self.settings or []:
            name, equals, value = text.partition("=")
            name = name.strip("-").replace("-", "_")
            if name not in known or not equals:
                listed = "; ".join(f"{one.name} ({one.spelling}): {one.help}" for one in server.settings) or "none"
                raise InputError(f"--set {text!r} is none of {server.name}'s NAME=VALUE, known: {listed}")
            found[name] = known[name].parse(value)
        return found

    def setup(self, server: BucketRules) -> Setup:
        """The server's setup. Raises InputError without --max-model-len."""
        from llmc.integrations.configuration import setup_for

        return setup_for(server, self.limits(), self.own(server))

    def load(self, server: BucketRules, source: str) -> Configuration:
        """The configuration at `source`. Raises InputError as configuration.load does."""
        from llmc.integrations.configuration import load

        return load(server, source, self.limits(), self.own(server))

    def cost(self, server: BucketRules) -> GraphCost:
        """What a graph takes at start: what was given, else what was published."""
        from dataclasses import replace

        seconds, held = duration("--graph-seconds", self.graph_seconds), size("--graph-bytes", self.graph_bytes)
        return replace(
            server.cost,
            seconds=server.cost.seconds if seconds is None else seconds,
            size=server.cost.size if held is None else held,
        )

    def observe(self, server: BucketRules, setup: Setup, then: str, path: str | None = None) -> ObservedSteps:
        """The steps for the traffic of `path`, else of --traffic, with a bar that says what comes `then`."""
        from llmc.buckets.traffic.formats.fields import parse
        from llmc.buckets.traffic.formats.prometheus.live import is_url
        from llmc.integrations.observed import TrafficSource, observe

        path = path or self.traffic
        if path is None:
            raise InputError("name the recorded requests with --traffic FILE")
        if is_url(path):
            raise InputError(not_a_file(path))
        source = TrafficSource(
            path, rate("--arrival-rate", self.arrival_rate), self.clip, self.traffic_format,
            None if self.fields is None else parse(self.fields), ReadingProgress(f"replay {path}", then),
        )  # fmt: skip
        found = observe(server, setup, source)
        close_bars()
        return found


def takes_server_flags(command: Command) -> Command:
    """`command`, whose parameter `flags` is a ServerFlags, as a command line function with one option for each."""
    return takes(ServerFlags, command)
