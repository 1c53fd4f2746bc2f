"""Thread settings of ONNX Runtime side by side, on one bundle's executable for every shape.

    python benchmarks/ort_threads.py BUNDLE [--rounds 15] [--threads 2]

The process-wide pool that llmc uses rules out pools of a session's own, so each setting has a process of its own; they
take turns, with a pause in between in which the threads of the one before stop spinning. Ratios to the first setting,
which is llmc's, are medians of per-round ratios.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import numpy as np
import onnxruntime as ort

from llmc.artifacts.bundle.reader import blob_path
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors.onnxruntime.session import open_session

CAPACITY = 512
SETTLE_S = 0.3
SETTINGS: dict[str, dict[str, str] | None] = {
    "shared pool": None,
    "own pool": {},
    "own pool, block base 4": {"session.dynamic_block_base": "4"},
    "own pool, block base 8": {"session.dynamic_block_base": "8"},
    "own pool, pinned": {"session.intra_op_thread_affinities": "2"},
    "own pool, spinning stops": {"session.force_spinning_stop": "1"},
    "own pool, no spinning": {"session.intra_op.allow_spinning": "0"},
    "own pool, spins 20 us": {"session.intra_op.spin_duration_us": "20"},
    "own pool, spins 100 us": {"session.intra_op.spin_duration_us": "100"},
    "own pool, spins 1000 us": {"session.intra_op.spin_duration_us": "1000"},
}
WORKS = {"decode 1": (1, 1), "decode 4": (4, 1), "decode 8": (8, 1), "prompt 128": (1, 128)}


def serve(path: str, entries: dict[str, str] | None, threads: int, pipe: Connection) -> None:
    """Answer each name of WORKS with the milliseconds of a step."""
    if entries is None:
        session = open_session(path, threads)
    else:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = threads
        for name, value in entries.items():
            options.add_session_config_entry(name, value)
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    bound = {name: bind(session, *shape) for name, shape in WORKS.items()}
    while (name := pipe.recv()) is not None:
        took = []
        for _ in range(3 if name.startswith("prompt") else 12):
            start = time.perf_counter()
            session.run_with_iobinding(bound[name][0])
            took.append(time.perf_counter() - start)
        pipe.send(median(took[1:]) * 1e3)


def bind(session: ort.InferenceSession, batch: int, query: int) -> tuple:
    """A step of `batch` rows of `query` tokens over 64 tokens each."""
    shapes = {i.name: i.shape for i in (*session.get_inputs(), *session.get_outputs())}
    arrays = {
        "token_ids": np.ones((batch, query), np.int64), "past_lengths": np.full(batch, 64, np.int64),
        "logit_rows": np.arange(batch) * query, "logits": np.zeros((batch, shapes["logits"][1]), np.float32),
    }  # fmt: skip
    for name, shape in shapes.items():
        if name.startswith("past_") and name != "past_lengths":
            arrays[name] = arrays[name.replace("past", "present")] = np.zeros(
                (batch, shape[1], CAPACITY, shape[3]), np.float32
            )
    binding = session.io_binding()
    for name, array in arrays.items():
        into = binding.bind_output if name == "logits" or name.startswith("present") else binding.bind_input
        into(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    return binding, arrays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    bundle = Bundle.open(Path(args.bundle).absolute())
    path = str(blob_path(bundle.path, bundle.executable("any", None, None, None).blob))
    context = multiprocessing.get_context("spawn")
    pipes = {}
    for name, entries in SETTINGS.items():
        pipes[name], other = context.Pipe()
        context.Process(target=serve, args=(path, entries, args.threads, other), daemon=True).start()
    seen: dict[tuple[str, str], list[float]] = {}
    for turn in range(args.rounds + 1):
        for work in WORKS:
            for name, pipe in pipes.items():
                time.sleep(SETTLE_S)
                pipe.send(work)
                took = pipe.recv()
                if turn:
                    seen.setdefault((name, work), []).append(took)
    first = next(iter(SETTINGS))
    for name, pipe in pipes.items():
        pipe.send(None)
        line = f"{name:26s}"
        for work in WORKS:
            ratio = median(a / b for a, b in zip(seen[name, work], seen[first, work], strict=True))
            line += f" {work} {median(seen[name, work]):8.2f} ms ({ratio:.3f})"
        print(line)


if __name__ == "__main__":
    main()
