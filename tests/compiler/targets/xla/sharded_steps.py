"""Steps of a tiny model over 2, 3 and 4 devices beside one device's: `python -m … FILE`, a traced program of CONFIG.

It is run in a process of its own, which is told to make several devices of the host's. Prints JSON: "PHASE DEGREE" →
largest differences of logits and cache, whether anything was written, collectives, and bytes updated in place.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD, MLP, VOCAB = 2, 64, 4, 2, 16, 96, 256
CONFIG = {
    "model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "intermediate_size": MLP, "vocab_size": VOCAB,
}  # fmt: skip
BATCH = {"decode": (3, 1), "prompt": (2, 8)}
CONTEXT, CAPACITY, SLOTS = 16, 32, 4


def reports(file: Path) -> dict[str, Any]:
    """Of every phase and degree."""
    import numpy as np

    from llmc.compiler.program.sized import TracedProgram

    program = TracedProgram.parse(file.read_bytes())
    sizes = {name: [d["as_int"] for d in program.graph["tensor_values"][name]["sizes"]] for name in program.weights}
    random = np.random.default_rng(1)
    weights = {
        name: (random.normal(0, 0.15, sizes[inner]) + ("norm" in name)).astype(np.float32)
        for inner, name in program.weights.items()
    }
    return {key: report for phase in BATCH for key, report in _phase(program, weights, phase).items()}


def _phase(program: Any, weights: dict[str, Any], phase: str) -> dict[str, Any]:
    import jax
    import numpy as np

    from llmc.compiler.targets.xla.step import FlatCore, step_function

    random = np.random.default_rng(2)
    batch, query = BATCH[phase]
    cache = random.normal(size=(2, LAYERS, SLOTS, KV_HEADS, CAPACITY, HEAD)).astype(np.float32)
    given = [
        random.integers(0, VOCAB, (batch, query)).astype(np.int32), np.array([3, 7, 5][:batch], np.int32),
        np.array([1, 1, 1] if query == 1 else [5, 8], np.int32),
        np.array([0, 1, -1] if query == 1 else [2, 1], np.int32),
        *cache, *weights.values(),
    ]  # fmt: skip
    core = FlatCore(program.at(batch, query, CONTEXT))
    expected = jax.jit(step_function(core, phase, CONTEXT))(*given)
    shapes = {name: w.shape for name, w in weights.items()}
    return {f"{phase} {degree}": _report(core, shapes, phase, degree, given, expected) for degree in (2, 3, 4)}


def _report(
    core: Any, shapes: dict[str, Any], phase: str, degree: int, given: list[Any], expected: Any
) -> dict[str, Any]:
    """Largest differences from what one device made, what is exchanged, and the bytes that are updated in place."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from llmc.compiler.targets.xla.collectives import collectives
    from llmc.compiler.targets.xla.sharding import AXIS, ShardedCore, cache_dims, weight_shardings
    from llmc.compiler.targets.xla.step import step_function

    mesh = Mesh(np.array(jax.devices()[:degree]), (AXIS,))
    split = weight_shardings(shapes, CONFIG, degree)
    whole, slots = (NamedSharding(mesh, PartitionSpec(*d)) for d in ((), cache_dims(CONFIG, degree)))
    lies = [whole] * 4 + [slots] * 2 + [NamedSharding(mesh, PartitionSpec(*s.dims)) for s in split.values()]
    step = step_function(ShardedCore(core, CONFIG, degree, [cache_dims(CONFIG, degree)] * 2), phase, CONTEXT)
    jitted = jax.jit(step, donate_argnums=(4, 5), keep_unused=True, out_shardings=(whole, slots, slots))
    inputs = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s) for a, s in zip(given, lies, strict=True)]
    compiled = jitted.lower(*inputs).compile()
    found = compiled(*(jax.device_put(a, s) for a, s in zip(given, lies, strict=True)))
    logits, *kept = (float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(expected, found, strict=True))
    return {
        "logits": logits, "cache": max(kept), "written": float(np.abs(np.asarray(found[1]) - given[4]).max()),
        "collectives": collectives(compiled.as_text()), "aliased": compiled.memory_analysis().alias_size_in_bytes,
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(reports(Path(sys.argv[1]))))
