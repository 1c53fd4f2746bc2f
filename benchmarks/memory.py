"""Memory of a specialised bundle: PSS of the process with the executables that some work needed, and with all open.

    python benchmarks/memory.py BUNDLE

Two situations: idle after one short answer, and after a batch of four 512-token prompts whose cache is in use.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
from pathlib import Path

from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.llm import BundleLLM


def pss() -> float:
    """Proportional set size in MB."""
    rollup = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(rollup["Pss"].split()[0]) / 1024


def measure(bundle: str, rows: int, tokens: int) -> None:
    llm = BundleLLM(bundle, threads=2)
    llm.executor._executables.open_rest = lambda: None  # only what the work needs
    prompts = [[(7 * i + j) % 40000 + 100 for j in range(tokens)] for i in range(rows)]
    llm.generate(prompts, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    gc.collect()
    few, opened = pss(), llm.executor.memory()["open_executables"]
    llm.executor.open_all()
    gc.collect()
    every, total = pss(), llm.executor.memory()["open_executables"]
    one = few - (every - few) / (total - opened) * (opened - 1)
    print(
        f"{rows} x {tokens} tokens: {opened} executables open {few:.0f} MB, all {total} open {every:.0f} MB; with one "
        f"{one:.0f} MB by the mean of {(every - few) / (total - opened):.2f} MB an executable: ratio {every / one:.2f}"
    )


if __name__ == "__main__":
    for size in ((1, 20), (4, 512), (4, 1000)):
        process = multiprocessing.get_context("spawn").Process(target=measure, args=(sys.argv[1], *size))
        process.start()
        process.join()
