"""A tiny model over two ranks, each a device of this CPU: `python -m … FOLDER` prints what came of it.

The fakes of neuronx-cc and nrtpy finish it, and run it on two cores. It is run in a process of its own, since a process
has as many devices as it began with.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from llmc.artifacts.store.store import Store
from llmc.buckets.bucket import Bucket
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan, Provenance
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.compiler.pipeline.on_target import compile_on_target
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.neuron.files import NeuronFile
from llmc.runtime.step import pad
from tests.compiler import tiny
from tests.fakes.neuron.host import with_compiler, with_cores

PLAN = Plan(Limits(32, 1, 32, 8), (Bucket("prompt", 1, 31, 0), Bucket("decode", 1, 1, 32)), Provenance("test"))


TOKENS = [5, 80, 3, 200, 17, 9, 9, 31, 4]


def difference(path: Path) -> float:
    """The largest one between logits after TOKENS, and after one more, and the reference's."""
    with closing(open_executor(Bundle.open(path), threads=1)) as executor:
        *prompt, last = TOKENS
        first = executor.run(pad(PLAN.prompt[0], [0], [prompt], [0]))[0].copy()
        then = executor.run(pad(PLAN.decode[0], [0], [[last]], [len(prompt)]))[0]
        return float(np.abs(np.stack([first, then]) - tiny.logits("llama", TOKENS)[-2:]).max())


def main(folder: Path) -> None:
    path = folder / "bundle"
    model, store = tiny.write_model(folder / "model", "llama"), Store(folder / "store")
    requested = CompileOptions.of("neuron:trn2", tensor_parallel=2, verify="none", sample_top_k=4)
    result = compile_bundle(str(model), path, PLAN, requested, store, lambda _: None)
    bundle = Bundle.open(path)
    file = NeuronFile.parse(bundle.files.read(bundle.manifest.executables[0].blob), "a step")
    found = {
        "split": result.analysis["tensor_parallel"]["cache"], "operators": sorted(file.module.operators),
        "cache": [file.header.inputs[4].shape, file.module.inputs[4][1]], "on this CPU": difference(path),
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        with_compiler(patch, folder)
        with_cores(patch, folder)
        compile_on_target(path, store, lambda _: None, jobs=2, verify="none")
        print(json.dumps({**found, "on cores": difference(path)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
