"""Rebellions' NPUs: the decode batch sizes for which optimum-rbln or vllm-rbln compiles graphs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping

from llmc.buckets.limits import Limits
from llmc.buckets.traffic.events import DecodeRun, TrafficRequest
from llmc.buckets.traffic.schedule import schedule
from llmc.buckets.traffic.step_time import StepTime
from llmc.errors import InputError
from llmc.integrations import arguments, line
from llmc.integrations.base import Accepted, Demands, Export, GraphDemand, Lists, Setup, Shape
from llmc.integrations.settings import SPECULATIVE, Setting, within
from llmc.integrations.steps import DECODE, DecodeBatches

STRATEGY, MANUAL = "--rbln-decode-batch-bucket-strategy", "--rbln-decode-batch-bucket-manual-buckets"
VARIABLES = ("VLLM_RBLN_DECODE_BATCH_BUCKET_STRATEGY", "VLLM_RBLN_DECODE_BATCH_BUCKET_MANUAL_BUCKETS")
LIMITS = {"--max-model-len": "max_model_len", "--max-num-seqs": "max_num_seqs"}
CONFIG = "--additional-config"
KEYS = ("decode_batch_bucket_strategy", "decode_batch_bucket_manual_buckets")
COMPILED = "decoder_batch_sizes"
ALWAYS_DRAFT = ("eagle", "eagle3", "mtp")
"""Methods whose every step verifies drafts (v1/worker/rbln_model_runner.py)."""

_LOGGED = re.compile(r"Decode batch buckets: \[([\d,\s]+)\]")


class OptimumRbln(DecodeBatches):
    """Two ways to the same graphs.

    optimum-rbln compiles a model ahead with decoder_batch_sizes. vllm-rbln's own models compile at start, with
    --rbln-decode-batch-bucket-*. Prompts run one at a time, in chunks of prefill_chunk_size: one graph, independent of
    the lists.
    """

    name = "optimum-rbln"
    title = "optimum-rbln and vllm-rbln on Rebellions NPUs"
    source = (
        "optimum-rbln, commits f30b3768 and 6fd1d924 (models/decoderonly/configuration_decoderonly.py); vllm-rbln, "
        "commits 0a7577e0 and b64e2828 and release 0.12.0 (v1/worker/bucketing, v1/worker/rbln_worker.py)"
    )
    settings = (
        Setting(
            "decode_batch_bucket_strategy", str, "exponential", "How vllm-rbln generates its own list.", STRATEGY,
            VARIABLES[0], choices=("exponential", "exp", "linear", "manual"),
        ),
        Setting(
            "decode_batch_bucket_min", int, 1, "The least batch of its own list.", "--rbln-decode-batch-bucket-min",
            "VLLM_RBLN_DECODE_BATCH_BUCKET_MIN", least=1,
        ),
        Setting(
            "decode_batch_bucket_step", int, 2, "Its divisor (exponential) or difference (linear).",
            "--rbln-decode-batch-bucket-step", "VLLM_RBLN_DECODE_BATCH_BUCKET_STEP", least=1,
        ),
        Setting(
            "decode_batch_bucket_limit", int, 1, "The most batches of its own list.",
            "--rbln-decode-batch-bucket-limit", "VLLM_RBLN_DECODE_BATCH_BUCKET_LIMIT", least=1,
        ),
        Setting("pipeline_parallel_size", int, 1, "Stages that share requests.", "--pipeline-parallel-size", least=1),
        Setting("prefill_chunk_size", int, 128, "Tokens of a prompt's chunk, a multiple of 64.", least=64),
        *SPECULATIVE,
    )  # fmt: skip
    limit_flags = LIMITS
    miss = "error"

    def limits(self, given: Mapping[str, int]) -> Limits:
        """Return max_num_seqs 1, vllm-rbln's default."""
        return Limits(**{"max_num_seqs": 1, **given})

    def default(self, setup: Setup) -> Lists:
        """Return max_num_seqs over the stages, then repeatedly divided (exponential) or reduced (linear) by the step.

        The list ends at the least value; it has only the first value unless decode_batch_bucket_limit is set.
        """
        top, step = self._top(setup), setup.number("decode_batch_bucket_step")
        least, linear = setup.number("decode_batch_bucket_min"), setup.own["decode_batch_bucket_strategy"] == "linear"
        if least > top:
            raise InputError(f"optimum-rbln: decode_batch_bucket_min {least} is above {top}; lower it")
        if step == 1 and not linear:
            raise InputError("optimum-rbln: decode_batch_bucket_step must be above 1 to divide by")
        found = [top]
        while len(found) < setup.number("decode_batch_bucket_limit"):
            following = found[-1] - step if linear else found[-1] // step
            if following < least:
                break
            found.append(following)
        return {DECODE: line.shapes(found)}

    def accept(self, setup: Setup, lists: Lists) -> Accepted:
        """Require that the largest batch is max_num_seqs over the stages: vllm-rbln exits otherwise.

        optimum-rbln also exits where it is larger.
        """
        top, largest = self._top(setup), lists[DECODE][-1][0]
        if setup.number("prefill_chunk_size") % 64:
            raise InputError(
                f"optimum-rbln: prefill_chunk_size {setup.own['prefill_chunk_size']} is not a multiple of 64"
            )
        if largest != top:
            raise InputError(
                f"optimum-rbln: the largest batch {largest} must be {top}, max_num_seqs over pipeline_parallel_size; "
                f"{'add' if largest < top else 'remove those above'} {top}"
            )
        return Accepted({DECODE: lists[DECODE]})

    def demands(self, setup: Setup, requests: Iterable[TrafficRequest], step_time: StepTime) -> Iterator[GraphDemand]:
        """Yield decode steps, which wait while prompts run in separate steps. Stages have equal batches."""
        stages = setup.number("pipeline_parallel_size")
        for event in schedule(requests, setup.limits, step_time=step_time, prompt_batch=1):
            if isinstance(event, DecodeRun):
                fewer, more = divmod(event.batch, stages)
                for size, count in ((fewer + 1, event.steps * more), (fewer, event.steps * (stages - more))):
                    if size and count:
                        yield GraphDemand(DECODE, (size,), count, size * count)

    def graphs(self, setup: Setup, lists: Lists) -> int:
        """Return one for the chunks of prompts, and one for each batch.

        With drafts two for each batch, for steps with and without them, unless the method always drafts. A draft
        model's own graphs are not counted.
        """
        drafts = setup.number("num_speculative_tokens") and setup.own["speculative_method"] not in ALWAYS_DRAFT
        return 1 + len(lists[DECODE]) * (2 if drafts else 1)

    def propose(self, setup: Setup, demands: Demands, most: Mapping[str, int]) -> Lists:
        """Propose any batches, including max_num_seqs over the stages."""
        top = self._top(setup)
        return {DECODE: line.choose(demands.get(DECODE, {}), range(1, top + 1), [top], most[DECODE])}

    def export(self, setup: Setup, lists: Lists) -> Export:
        """Export rbln_config for optimum-rbln's from_pretrained as config.json, and --additional-config of vllm-rbln.

        The variables for older releases of vllm-rbln are also exported.
        """
        limits, sizes = setup.limits, line.values(lists[DECODE])
        config = {
            "batch_size": self._top(setup),
            "max_seq_len": limits.max_model_len,
            "prefill_chunk_size": setup.own["prefill_chunk_size"],
            COMPILED: sizes[::-1],
        }
        stages = setup.number("pipeline_parallel_size")
        words = [
            *arguments.limit_flags(limits, LIMITS),
            *([f"--pipeline-parallel-size {stages}"] if stages > 1 else []),
            *arguments.drafts_flag(setup),
            arguments.json_flag(CONFIG, {KEYS[0]: "manual", KEYS[1]: sizes}),
        ]
        environment = dict(zip(VARIABLES, ("manual", ",".join(map(str, sizes))), strict=True))
        return Export(environment, tuple(words), {"config.json": json.dumps(config, indent=2) + "\n"})

    def read(self, given: Export, setup: Setup) -> Lists:
        """Return decoder_batch_sizes of a file, or the manual list of flags, --additional-config, or variables.

        Without any, the server's own list. Raises InputError where they state different lists, and where a list is
        stated but the strategy is not manual.
        """
        stated: dict[str, tuple[Shape, ...]] = {}
        for name, text in given.files.items():
            config = arguments.load_config(text, name)
            if config.get(COMPILED) is not None:
                stated[name] = line.numbers(config[COMPILED], f"{name}: {COMPILED}")
        flags = arguments.flags(given)
        arguments.agree(flags, setup.limits, LIMITS)
        for source, strategy, manual in ((flags, STRATEGY, MANUAL), (given.environment, *VARIABLES)):
            if source.get(manual):
                if source.get(strategy) != "manual":
                    raise InputError(f"{manual} is only read with {strategy} manual; set it")
                stated[manual] = line.written_numbers(source[manual], manual)
            elif source.get(strategy) == "manual":
                raise InputError(f"{strategy} manual needs {manual}")
        chosen, sizes = (within(CONFIG, flags[CONFIG], (key,)) if CONFIG in flags else None for key in KEYS)
        if sizes is not None:
            if chosen != "manual":
                raise InputError(f"{CONFIG}.{KEYS[1]} is only read with {KEYS[0]} manual; set it")
            stated[CONFIG] = line.numbers(sizes, f"{CONFIG}.{KEYS[1]}")
        if len(set(stated.values())) > 1:
            raise InputError(f"{' and '.join(stated)} state different lists; keep one of them")
        return {DECODE: next(iter(stated.values()))} if stated else self.default(setup)

    def read_log(self, lines: Iterable[str]) -> Lists | None:
        """Return the list that vllm-rbln prints when its runner starts."""
        return line.logged(lines, {DECODE: _LOGGED}, {DECODE: MANUAL}) or None

    def _top(self, setup: Setup) -> int:
        stages, seqs = setup.number("pipeline_parallel_size"), setup.limits.max_num_seqs
        if seqs < stages:
            raise InputError(f"optimum-rbln: max_num_seqs {seqs} is below pipeline_parallel_size {stages}; raise it")
        return seqs // stages
