"""A tiny model over two ranks, each a device of this CPU: `python -m … FOLDER` prints what a compile says.

Then the fakes of neuronx-cc and nrtpy finish it, and run it on two cores. It is run in a process of its own, since a
process has as many devices as it began with.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from llmc.artifacts.store.store import Store
from llmc.buckets.bucket import Bucket
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan
from llmc.buckets.provenance import Provenance
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.compiler.pipeline.finish import finish_bundle
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors.neuron.files import NeuronFile
from tests.compiler import tiny
from tests.fakes.neuron.host import with_compiler, with_cores

PLAN = Plan(Limits(32, 1, 32, 8), (Bucket("prompt", 1, 31, 0), Bucket("decode", 1, 1, 32)), Provenance("test"))


def main(folder: Path) -> None:
    model, store = tiny.write_model(folder / "model", "llama"), Store(folder / "store")
    asked = CompileOptions.of("neuron:trn2", tensor_parallel=2, verify="sample")
    result = compile_bundle(str(model), folder / "bundle", PLAN, asked, store, str)
    bundle = Bundle.open(folder / "bundle")
    file = NeuronFile.parse(bundle.files.read(bundle.manifest.executables[0].blob), "a step")
    with pytest.MonkeyPatch.context() as patch:
        with_compiler(patch, folder)
        with_cores(patch, folder)
        finished = finish_bundle(folder / "bundle", store, lambda _: None, jobs=2, verify="sample")
    found = {
        "verification": result.verification, "split": result.analysis["tensor_parallel"]["cache"],
        "operators": sorted(file.module.operators), "cache": [file.header.inputs[4].shape, file.module.inputs[4][1]],
        "on cores": finished.verification,
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
