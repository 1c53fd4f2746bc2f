"""vLLM with NxD Inference on AWS Neuron: prompt lengths of context encoding, contexts of token generation."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping

from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan
from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.step_time import StepTime
from llmc.errors import InputError
from llmc.integrations import arguments, line
from llmc.integrations.base import (
    Accepted,
    BucketRules,
    Demands,
    Export,
    GraphCost,
    GraphDemand,
    GraphFamily,
    Lists,
    Setup,
    Shape,
)
from llmc.integrations.settings import Setting, within
from llmc.integrations.steps import pieces, separate_steps

ENCODING, GENERATION = "context_encoding", "token_generation"
CONFIG = "--override-neuron-config"
SWITCH = "enable_bucketing"
NAMES = {ENCODING: "context_encoding_buckets", GENERATION: "token_generation_buckets"}
LEAST = 128
"""The least bucket that NxD Inference generates; proposed ones are multiples of it."""

_LOGGED = {family: re.compile(rf"""['"]{name}['"]: \[([\d, ]+)\]""") for family, name in NAMES.items()}


class Nxd(BucketRules):
    """The rules of neuronx_distributed_inference/modules/autobucketing.py and models/config.py.

    The neuron_config is the one that vLLM derives from its limits: one prompt per prefill, max_num_seqs sequences per
    decode step, contiguous caches. A prompt takes the least bucket that fits its tokens. A decode step always has
    max_num_seqs rows and takes the least bucket above its largest position, the number of cached tokens. A longer input
    is an error, unless allow_input_truncation cuts it. Releases without the bucket kernels choose on the host, and go
    one bucket up where a length equals one. Speculation, prefix caching, chunked prefill and batch buckets
    (token_generation_batches) have lists of other shapes and are not modelled.
    """

    name = "nxd"
    title = "vLLM with NxD Inference on AWS Neuron"
    source = (
        "neuronx-distributed-inference 11b342a: modules/autobucketing.py, models/config.py; vLLM user guide for NxD "
        "Inference, Neuron SDK 2.23"
    )
    families = (
        GraphFamily(ENCODING, ("tokens",), "tokens"),
        GraphFamily(GENERATION, ("context",), "tokens of context"),
    )
    settings = (
        Setting(SWITCH, bool, True, "Whether it generates more than one graph of each by itself."),
    )  # fmt: skip
    limit_flags = arguments.BLOCK_LIMITS
    cost = GraphCost(
        None, None, "published only for a whole model: about 15 minutes for one of 15 GB (vLLM user guide, SDK 2.23)"
    )

    def limits(self, given: Mapping[str, int]) -> Limits:
        """Return max_num_seqs 256, vLLM's default; prompts are prefilled whole, and a block is a whole sequence."""
        length, seqs = given["max_model_len"], given.get("max_num_seqs", 256)
        tokens = given.get("max_num_batched_tokens", max(length, seqs))
        if tokens < length:
            raise InputError(
                f"nxd: max_num_batched_tokens {tokens} is below max_model_len {length}, but prompts are prefilled "
                "whole; leave it out or raise it"
            )
        return Limits(**{**given, "max_num_seqs": seqs, "max_num_batched_tokens": tokens, "block_size": length})

    def default(self, setup: Setup) -> Lists:
        """Return powers of two from 128 up to where one would be close to max_model_len, and max_model_len."""
        length = setup.limits.max_model_len
        values = [length]
        if setup.own[SWITCH]:
            values += [1 << power for power in range(LEAST.bit_length() - 1, round(math.log2(length)))]
        return {ENCODING: line.shapes(values), GENERATION: line.shapes(values)}

    def accept(self, setup: Setup, lists: Lists) -> Accepted:
        """Accept every list unchanged but sorted. Raises InputError for numbers above max_model_len."""
        length = setup.limits.max_model_len
        for family, name in NAMES.items():
            if not lists[family]:
                raise InputError(f"nxd: {name} is empty; leave it out, or end it with max_model_len {length}")
            if lists[family][-1][0] > length:
                raise InputError(f"nxd: {name} {lists[family][-1][0]} is above max_model_len {length}; lower it")
        return Accepted({family: lists[family] for family in NAMES})

    def demands(self, setup: Setup, requests: Iterable[TrafficRequest], step_time: StepTime) -> Iterator[GraphDemand]:
        """Yield a prompt's tokens, none cached; and a decode step's longest context including its new token.

        The real work of a decode step is all its tokens of context.
        """
        length = setup.limits.max_model_len
        whole = (request._replace(cached=0) for request in requests)
        for step in separate_steps(whole, setup.limits, step_time):
            if isinstance(step, int):
                yield GraphDemand(ENCODING, (step,), 1, step)
                continue
            for piece in pieces(step.longest + 1, step.steps, length):
                real = piece.total(step.total + step.batch, step.batch)
                yield GraphDemand(GENERATION, (piece.context,), piece.steps, real)

    def work(self, setup: Setup, family: str, shape: Shape) -> int:
        """Return the prompt's tokens, or max_num_seqs times the context."""
        return shape[0] * (setup.limits.max_num_seqs if family == GENERATION else 1)

    def propose(self, setup: Setup, demands: Demands, most: Mapping[str, int]) -> Lists:
        """Propose multiples of 128, and max_model_len."""
        length = setup.limits.max_model_len
        values = [*range(LEAST, length, LEAST), length]
        return {family: line.choose(demands.get(family, {}), values, [length], most[family]) for family in NAMES}

    def from_plan(self, setup: Setup, plan: Plan) -> Lists:
        """Return the queries of prompt buckets, and the contexts of decode buckets plus the new token."""
        length = setup.limits.max_model_len
        queries = {bucket.query for bucket in plan.prompt if bucket.query < length}
        contexts = {bucket.context + 1 for bucket in plan.decode if bucket.context + 1 < length}
        return {ENCODING: line.shapes([*queries, length]), GENERATION: line.shapes([*contexts, length])}

    def export(self, setup: Setup, lists: Lists) -> Export:
        """Export --override-neuron-config, also as a separate file, and the flags as a file for --config."""
        config: dict[str, object] = {SWITCH: True}
        config |= {name: line.values(lists[family]) for family, name in NAMES.items()}
        words = ["--device neuron", *arguments.limit_flags(setup.limits, self.limit_flags)]
        words.append(arguments.json_flag(CONFIG, config))
        variables = {"VLLM_NEURON_FRAMEWORK": "neuronx-distributed-inference"}
        return arguments.vllm_export(words, variables, {"config.json": json.dumps(config, indent=2) + "\n"})

    def read(self, given: Export, setup: Setup) -> Lists:
        """Return the two lists of --override-neuron-config, in any order, sorted as in NxD Inference."""
        found = arguments.stated(given, CONFIG, (SWITCH, *NAMES.values()))
        arguments.agree(found, setup.limits)
        values = {family: arguments.numbers(found, CONFIG, (name,)) for family, name in NAMES.items()}
        switch = within(CONFIG, found[CONFIG], (SWITCH,)) if CONFIG in found else None
        if not isinstance(switch, bool | None):
            raise InputError(f"{CONFIG}.{SWITCH} must be true or false")
        if switch is False:
            if any(values.values()):
                raise InputError(f"{CONFIG}: with {SWITCH} false the lists are not read; set it to true")
            return dict.fromkeys(NAMES, line.shapes([setup.limits.max_model_len]))
        own = self.default(setup)
        lists = {family: own[family] if listed is None else line.shapes(listed) for family, listed in values.items()}
        return self.accept(setup, lists).lists

    def read_log(self, lines: Iterable[str]) -> Lists | None:
        """Return the lists that vLLM prints at start; NxD Inference does not print generated ones."""
        found = line.logged(lines, _LOGGED, NAMES)
        return found if found.keys() == NAMES.keys() else None
