"""TensorRT-LLM's PyTorch backend: the batch sizes of captured decode graphs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from llmc.buckets.limits import Limits
from llmc.buckets.traffic.chunked_schedule import chunked_steps
from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.step_time import StepTime
from llmc.errors import InputError
from llmc.integrations import arguments, line
from llmc.integrations.base import Accepted, Demands, Dropped, Export, Finder, GraphDemand, Lists, Setup, Shape
from llmc.integrations.settings import Setting
from llmc.integrations.steps import DECODE, DecodeBatches

CONFIG = "cuda_graph_config"
KEY = "--cuda-graph-config"
"""The file's key in the form of `arguments.flags`."""
LIMITS = {
    "--max_seq_len": "max_model_len",
    "--max_batch_size": "max_num_seqs",
    "--max_num_tokens": "max_num_batched_tokens",
}
MOST_BY_DEFAULT = 128
"""The largest batch of its own list."""

_LOGGED = re.compile(r"cuda_graph_batch_sizes=\[([\d,\s]+)\]")


class TensorrtLlm(DecodeBatches):
    """A graph serves steps that only decode; every other step runs eagerly, whatever the list."""

    name = "tensorrt-llm"
    title = "TensorRT-LLM, PyTorch backend"
    source = (
        "TensorRT-LLM 1.1 to 1.3, commits fcd3f316 (llmapi/llm_args.py) and 7b437aaa (_torch/pyexecutor/"
        "cuda_graph_runner.py), _torch/pyexecutor/model_engine.py, _torch/pyexecutor/scheduler"
    )
    settings = (
        Setting("enable_padding", bool, False, "Batches are rounded up.", KEY, path=("enable_padding",)),
        Setting(
            "cuda_graph_max_batch_size", int, None, "The largest batch of its own list.", KEY,
            path=("max_batch_size",), least=1,
        ),
        Setting(
            "max_draft_len", int, 0, "Draft tokens of a step.", "--speculative-config", path=("max_draft_len",), least=0
        ),
        Setting(
            "enable_chunked_prefill", bool, False, "Prompts are cut to what max_num_tokens leaves.",
            "--enable-chunked-prefill",
        ),
    )  # fmt: skip
    limit_flags = LIMITS

    def limits(self, given: Mapping[str, int]) -> Limits:
        """Return max_batch_size 2048 and max_num_tokens 8192, trtllm-serve's defaults, and blocks of 32."""
        block_size = min(32, given["max_model_len"])
        return Limits(**{"max_num_seqs": 2048, "max_num_batched_tokens": 8192, "block_size": block_size, **given})

    def default(self, setup: Setup) -> Lists:
        """Return TensorRT-LLM's own list.

        With padding 1, 2, 4, multiples of 8 to 128 and of 64 from there; without it 1 to 32, 64, 128 and powers of two.
        The list ends with cuda_graph_config.max_batch_size, 128 by default.
        """
        most = setup.own["cuda_graph_max_batch_size"]
        most = most if isinstance(most, int) else MOST_BY_DEFAULT
        if setup.own["enable_padding"]:
            sizes = [1, 2, 4, *range(8, 129, 8), *range(192, most + 1, 64)]
        else:
            sizes = [*range(1, 33), 64, 128, *(2**power for power in range(8, math.ceil(math.log2(most))))]
        return {DECODE: self._captured(setup, sorted({*(size for size in sizes if size <= most), most}))}

    def accept(self, setup: Setup, lists: Lists) -> Accepted:
        """Drop batches that max_batch_size or max_num_tokens exclude; with padding add the largest possible batch
        instead.
        """
        given = line.values(lists[DECODE])
        kept, reach = self._captured(setup, given), self._reach(setup)
        reason = f"above {reach}, the most requests of a decode step"
        dropped = [Dropped(DECODE, (size,), reason) for size in given if size > reach]
        return Accepted.of(lists, {DECODE: kept}, dropped)

    def demands(self, setup: Setup, requests: Iterable[TrafficRequest], step_time: StepTime) -> Iterator[GraphDemand]:
        """Yield steps without prompts. Prompts and decodes share steps of max_num_tokens.

        Without chunked prefill a prompt runs whole.
        """
        whole = not setup.own["enable_chunked_prefill"]
        for steps in chunked_steps(requests, setup.limits, step_time, whole=whole):
            if not steps.chunks:
                batch = len(steps.cached)
                yield GraphDemand(DECODE, (batch,), steps.steps, batch * steps.steps)

    def finder(self, setup: Setup, family: str, shapes: Sequence[Shape]) -> Finder:
        """Return a look-up of the next batch above with padding, and of the same batch without."""
        return super().finder(setup, family, shapes) if setup.own["enable_padding"] else line.Exact(shapes, self.miss)

    def propose(self, setup: Setup, demands: Demands, most: Mapping[str, int]) -> Lists:
        """With padding, propose lists that reach as far as the server's own, so that no step loses its graph.

        Without padding, propose the batches that most steps have; padding serves more steps.
        """
        top = self.default(setup)[DECODE][-1:]
        if not top:
            raise InputError("tensorrt-llm: max_num_tokens leaves no room for one drafted step; raise it")
        found, candidates = demands.get(DECODE, {}), range(1, top[0][0] + 1)
        if setup.own["enable_padding"]:
            return {DECODE: line.choose(found, candidates, top[0], most[DECODE])}
        return {DECODE: line.most_frequent(found, candidates, most[DECODE]) or top}

    def export(self, setup: Setup, lists: Lists) -> Export:
        """Export the file for trtllm-serve's --extra_llm_api_options, and the other flags."""
        own = setup.own
        sizes = ", ".join(str(size) for (size,) in lists[DECODE])
        text = (
            f"enable_chunked_prefill: {_yes(own['enable_chunked_prefill'])}\n"
            f"{CONFIG}:\n  batch_sizes: [{sizes}]\n  enable_padding: {_yes(own['enable_padding'])}\n"
        )
        words = (*arguments.limit_flags(setup.limits, LIMITS), "--extra_llm_api_options config.yaml")
        return Export({}, words, {"config.yaml": text})

    def read(self, given: Export, setup: Setup) -> Lists:
        """Return batch_sizes of cuda_graph_config in a file, or the server's own list; empty where the file has it as
        null.

        Raises InputError where the file and the settings disagree on padding, since the look-up then differs.
        """
        arguments.agree(arguments.flags(given), setup.limits, LIMITS)
        for name, text in given.files.items():
            config = arguments.load_config(text, name)
            if CONFIG in config:
                return {DECODE: self._stated(setup, config[CONFIG], name)}
        return self.default(setup)

    def read_log(self, lines: Iterable[str]) -> Lists | None:
        """Return the list in the PyTorchConfig that releases up to 1.1 print at start; later ones print none."""
        return line.logged(lines, {DECODE: _LOGGED}, {DECODE: "cuda_graph_batch_sizes"}) or None

    def _stated(self, setup: Setup, config: object, source: str) -> tuple[Shape, ...]:
        if config is None:
            return ()
        if not isinstance(config, dict):
            raise InputError(f"{source}: {CONFIG} must be a mapping with batch_sizes, or null")
        padding = config.get("enable_padding", False)
        if padding is not setup.own["enable_padding"]:
            raise InputError(
                f"{source}: {CONFIG}.enable_padding is {_yes(padding)}, but the setting enable_padding is "
                f"{_yes(setup.own['enable_padding'])}; set it to the file's"
            )
        sizes = config.get("batch_sizes")
        if not sizes:
            return self.default(setup)[DECODE]
        found = line.numbers(sizes, f"{source}: {CONFIG}.batch_sizes")
        largest = config.get("max_batch_size", 0)
        if largest not in (0, found[-1][0]):
            raise InputError(
                f"{source}: {CONFIG}.max_batch_size {largest} is not the largest of batch_sizes, {found[-1][0]}; "
                "remove it"
            )
        return found

    def _reach(self, setup: Setup) -> int:
        """The largest batch of a step that only decodes."""
        limits = setup.limits
        return min(limits.max_num_seqs, limits.max_num_batched_tokens // (1 + setup.number("max_draft_len")))

    def _captured(self, setup: Setup, sizes: Sequence[int]) -> tuple[Shape, ...]:
        """Ascending `sizes` up to the reach; with padding the reach itself replaces larger ones."""
        reach = self._reach(setup)
        kept = [size for size in sizes if size <= reach]
        if len(kept) < len(sizes) and setup.own["enable_padding"] and reach:
            kept.append(reach)
        return line.shapes(kept)


def _yes(value: object) -> str:
    return "true" if value is True else "false"
