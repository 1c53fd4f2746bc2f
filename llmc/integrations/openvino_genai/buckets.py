"""OpenVINO GenAI on Intel NPUs: two static graphs, one for the chunks of a prompt and one for generated tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan
from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.step_time import StepTime
from llmc.errors import InputError
from llmc.integrations import arguments
from llmc.integrations.base import (
    Accepted,
    BucketRules,
    Demands,
    Export,
    GraphDemand,
    GraphFamily,
    Lists,
    Setup,
    Shape,
)
from llmc.integrations.settings import Setting

PROMPT, CACHE = "prompt", "cache"
PROMPT_KEY, RESPONSE_KEY = "MAX_PROMPT_LEN", "MIN_RESPONSE_LEN"
HINT_KEY, CHUNK_KEY = "PREFILL_HINT", "NPUW_LLM_PREFILL_CHUNK_SIZE"
ALIGNMENT = 64
"""Both graphs are compiled for multiples of this."""

_LOGGED = re.compile(r"NPUW_LLM_(MAX_PROMPT_LEN|MIN_RESPONSE_LEN): (\d{1,9})\b")


class OpenvinoGenai(BucketRules):
    """One request at a time, with two graphs.

    The prompt graph holds the longest prompt, MAX_PROMPT_LEN. The other graph attends over the whole cache,
    MAX_PROMPT_LEN + MIN_RESPONSE_LEN, at every token. A longer prompt is refused, and an answer that exceeds the cache
    is cut short. The lists hold these two limits, exactly as stated. The graphs are compiled for both lengths rounded
    up to multiples of 64, and the prompt's also to chunks. The variants of NPUW_LLM_GENERATE_PYRAMID and the attention
    hints, all off by default, are not modelled.
    """

    name = "openvino-genai"
    title = "OpenVINO GenAI on NPU"
    source = (
        "openvino-genai 2026.4.1, run on a CPU (tests/oracles); openvino.genai, commits 5fc238e7 "
        "(src/cpp/src/llm/pipeline_stateful.cpp), 14a3a7f7 (src/cpp/src/utils.cpp); "
        "openvino, commit e4a97607 (src/plugins/intel_npu/src/plugin/npuw/llm_compiled_model.cpp)"
    )
    families = (
        GraphFamily(PROMPT, ("tokens",), "tokens"),
        GraphFamily(CACHE, ("tokens",), "cached tokens"),
    )
    settings = (
        Setting("prefill_hint", str, "DYNAMIC", "Whether prompts run in chunks.", choices=("DYNAMIC", "STATIC")),
        Setting("prefill_chunk_size", int, 1024, "Tokens of a chunk, a power of two.", least=1),
    )
    limit_flags: ClassVar[Mapping[str, str]] = {}

    def limits(self, given: Mapping[str, int]) -> Limits:
        """Return limits for one request at a time. Raises InputError for more."""
        limits = Limits(**{"max_num_seqs": 1, **given})
        if limits.max_num_seqs != 1:
            raise InputError(f"openvino-genai: max_num_seqs {limits.max_num_seqs}: an NPU runs one request at a time")
        return limits

    def default(self, setup: Setup) -> Lists:
        """Return MAX_PROMPT_LEN 1024 and MIN_RESPONSE_LEN 128, regardless of the limits."""
        return self._lists(setup, 1024, 128)

    def accept(self, setup: Setup, lists: Lists) -> Accepted:
        """Accept one length of each as stated. Raises InputError for a chunk that the compiler refuses."""
        for family in (PROMPT, CACHE):
            if len(lists[family]) != 1:
                raise InputError(
                    f"openvino-genai: {len(lists[family])} lengths for {family!r}; an NPU has one graph each"
                )
        prompt, total = lists[PROMPT][0][0], lists[CACHE][0][0]
        if total <= prompt:
            raise InputError(
                f"openvino-genai: a cache of {total} tokens has no room after {prompt} tokens of the prompt"
            )
        self._prompt_graph(setup, prompt)
        return Accepted(dict(lists))

    def demands(self, setup: Setup, requests: Iterable[TrafficRequest], step_time: StepTime) -> Iterator[GraphDemand]:
        """Yield the chunks of each whole prompt, since no prefix is kept, and its tokens after the first."""
        chunk = self._chunk(setup)
        for request in requests:
            prompt, later = request.prompt, request.output - 1
            yield GraphDemand(PROMPT, (prompt,), -(-prompt // chunk) if chunk else 1, prompt)
            if later:
                attended = later * prompt + later * (later + 1) // 2
                yield GraphDemand(CACHE, (prompt + request.output,), later, attended)

    def work(self, setup: Setup, family: str, shape: Shape) -> int:
        """Return the tokens of a chunk or of the whole prompt graph; or the tokens that the cache graph attends over.

        Where MAX_PROMPT_LEN is not a multiple of its chunk, the cache graph is up to one chunk larger than stated here.
        """
        if family == CACHE:
            return _up(shape[0], ALIGNMENT)
        chunk = self._chunk(setup)
        return chunk if 0 < chunk < _up(shape[0], ALIGNMENT) else self._prompt_graph(setup, shape[0])

    def propose(self, setup: Setup, demands: Demands, most: Mapping[str, int]) -> Lists:
        """Propose the least lengths for the longest prompt and the longest sequence that the limits admit.

        Without max_prompt_len, the prompt graph is as long as the model's context.
        """
        limits = setup.limits
        prompt = self._prompt_graph(setup, limits.longest_prompt)
        return self._lists(setup, prompt, max(1, limits.max_model_len - prompt))

    def from_plan(self, setup: Setup, plan: Plan) -> Lists:
        """Return the longest prompt of its buckets, and the longest context plus the next token."""
        prompt = max(bucket.context + bucket.query for bucket in plan.prompt)
        total = max(bucket.context for bucket in plan.decode) + 1
        return self._lists(setup, prompt, max(1, total - prompt))

    def export(self, setup: Setup, lists: Lists) -> Export:
        """Export the pipeline's configuration, LLMPipeline(models_path, "NPU", **config), as config.json."""
        prompt, total = lists[PROMPT][0][0], lists[CACHE][0][0]
        config = {
            PROMPT_KEY: prompt,
            RESPONSE_KEY: total - prompt,
            HINT_KEY: setup.own["prefill_hint"],
            CHUNK_KEY: setup.own["prefill_chunk_size"],
        }
        return Export({}, (), {"config.json": json.dumps(config, indent=2) + "\n"})

    def read(self, given: Export, setup: Setup) -> Lists:
        """Return MAX_PROMPT_LEN and MIN_RESPONSE_LEN of a file, with defaults for missing ones.

        Raises InputError where the file and the settings disagree on chunks, since prompts are then padded differently.
        """
        prompt, response = 1024, 128
        for name, text in given.files.items():
            config = arguments.load_config(text, name)
            for key, setting in ((HINT_KEY, "prefill_hint"), (CHUNK_KEY, "prefill_chunk_size")):
                if config.get(key, setup.own[setting]) != setup.own[setting]:
                    raise InputError(
                        f"{name}: {key} is {config[key]}, but the setting {setting} is {setup.own[setting]}; "
                        "set it to the file's"
                    )
            prompt = _length(config.get(PROMPT_KEY, prompt), f"{name}: {PROMPT_KEY}")
            response = _length(config.get(RESPONSE_KEY, response), f"{name}: {RESPONSE_KEY}")
        return {PROMPT: ((prompt,),), CACHE: ((prompt + response,),)}

    def read_log(self, lines: Iterable[str]) -> Lists | None:
        """Return the lengths among the properties that are printed with OPENVINO_LOG_LEVEL above 2.

        Release 2026.4.1 prints none of them.
        """
        found: dict[str, int] = {}
        for text in lines:
            for match in _LOGGED.finditer(text):
                found[match[1]] = int(match[2])
        if len(found) < 2 or not found[PROMPT_KEY]:
            return None
        return {PROMPT: ((found[PROMPT_KEY],),), CACHE: ((found[PROMPT_KEY] + found[RESPONSE_KEY],),)}

    def _chunk(self, setup: Setup) -> int:
        """Tokens of a chunk; 0 where prompts run whole."""
        return setup.number("prefill_chunk_size") if setup.own["prefill_hint"] == "DYNAMIC" else 0

    def _lists(self, setup: Setup, prompt: int, response: int) -> Lists:
        """The least lengths that leave nothing of the compiled graphs unused."""
        prompt = self._prompt_graph(setup, prompt)
        return {PROMPT: ((prompt,),), CACHE: ((prompt + _up(response, ALIGNMENT),),)}

    def _prompt_graph(self, setup: Setup, prompt: int) -> int:
        """Tokens that the prompt graph is compiled for."""
        chunk = self._chunk(setup)
        aligned = _up(prompt, ALIGNMENT)
        if not 0 < chunk < aligned:
            return aligned
        if chunk & (chunk - 1):
            raise InputError(f"openvino-genai: {CHUNK_KEY} {chunk} is not a power of two; choose one")
        return _up(aligned, chunk)


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _length(value: object, spelling: str) -> int:
    if type(value) is not int or value < 1:
        raise InputError(f"{spelling} {value!r} must be a whole number above 0")
    return value
