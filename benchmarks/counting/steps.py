"""llmc alone: a prompt twice, and twice as many decode steps; every token is known before, so none is chosen.

python steps.py BUNDLE TOKENS STEPS

os.getpriority ends an interval that plugin.c counts: opening and a prompt; the prompt again; steps; more steps.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from llmc.runtime.bundle import Bundle
from llmc.runtime.executors import open_executor
from llmc.runtime.step import exact


def main(bundle: str, count: int, steps: int) -> None:
    executor = open_executor(Bundle.open(Path(bundle)), threads=1)
    tokens = [1 + i * 97 for i in range(count + 2 * steps)]  # as baseline.c
    for _ in range(2):
        executor.run(exact("prompt", [0], [tokens[:count]], [0]))
        os.getpriority(os.PRIO_PROCESS, 0)
    for first in (count, count + steps):
        for i in range(first, first + steps):
            logits = executor.run(exact("decode", [0], [[tokens[i]]], [i]))
        os.getpriority(os.PRIO_PROCESS, 0)
    print(int(logits[0].argmax()))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
