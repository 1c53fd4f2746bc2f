"""The batch sizes that vLLM logs with VLLM_LOG_BATCHSIZE_INTERVAL."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from llmc.buckets.traffic.formats.base import Head, Place, StepFormat
from llmc.buckets.traffic.formats.server_log import process
from llmc.buckets.traffic.step_histogram import StepHistogram, StepKey
from llmc.errors import InputError

LINE = "Batchsize forward time stats (batchsize, count, median_time(ms)): "
ENTRY = re.compile(r"\((\d{1,9}), (\d{1,12}), [0-9.e+-]+\)")
RANK = re.compile(r"_(?:TP|PP|EP|DCP)\d+| rank=\d+")


class VllmBatchSizes(StepFormat):
    """The last line of each process, which counts all its steps since its start; sizes seen only once are not in it.

    Sizes are tokens of a step after padding to a CUDA graph. Ranks of one tensor or pipeline parallel group take the
    same steps, and the first that the log names is counted.
    """

    name = "vllm-batchsizes"
    title = "vLLM batch-size log"
    source = "vLLM 01fb6e2, vllm/forward_context.py; V1 hands it the padded size (v1/worker/gpu_model_runner.py)"

    def recognises(self, head: Head) -> bool:
        """Whether there is such a line."""
        return LINE in head.text

    def steps(self, path: str, lines: Iterator[str]) -> StepHistogram:
        """The steps of all processes together."""
        first: dict[str, str] = {}
        ended: Counter[int] = Counter()
        running: dict[tuple[str, str], Counter[int]] = {}
        place = Place(path)
        for line in place.counted(lines):
            start = line.find(LINE)
            if start < 0:
                continue
            writer = process(line)
            if first.setdefault(RANK.sub("", writer[0]), writer[0]) != writer[0]:
                continue
            found = Counter({int(size): int(count) for size, count in ENTRY.findall(line, start)})
            if not found:
                raise InputError(f"{place}: the line lists no (batchsize, count, time); it is damaged or cut")
            before = running.get(writer, Counter())
            if any(found[size] < count for size, count in before.items()):
                ended.update(before)
            running[writer] = found
        for last in running.values():
            ended.update(last)
        if not ended:
            raise InputError(f"{path}: no line lists batch sizes; start vLLM with VLLM_LOG_BATCHSIZE_INTERVAL=60")
        counts = {StepKey("any", (size,), None): count for size, count in sorted(ended.items())}
        return StepHistogram(("tokens",), counts, padded=True)
