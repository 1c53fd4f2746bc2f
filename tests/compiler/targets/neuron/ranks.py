"""A tiny model over two ranks, each a device of this CPU: `python -m … FOLDER [MORE=…]` prints what a compile says.

It is run in a process of its own, since a process has as many devices as it began with.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from llmc.artifacts.store.store import Store
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors.neuron.files import NeuronFile
from tests.compiler import tiny


def main(folder: Path) -> None:
    model = tiny.write_model(folder / "model", "llama")
    asked = CompileOptions.of("neuron:trn2", tensor_parallel=2, verify="sample")
    result = compile_bundle(str(model), folder / "bundle", tiny.kinds_plan(), asked, Store(folder / "store"), str)
    bundle = Bundle.open(folder / "bundle")
    file = NeuronFile.parse(bundle.files.read(bundle.manifest.executables[0].blob), "a step")
    found = {
        "verification": result.verification, "split": result.analysis["tensor_parallel"]["cache"],
        "operators": sorted(file.module.operators), "cache": [file.header.inputs[4].shape, file.module.inputs[4][1]],
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
