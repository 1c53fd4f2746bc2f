"""Steps of tiny models over several devices beside one device's: `python -m … FILE…`, traced programs of tiny.py's
models, named as these are.

It is run in a process of its own, which is told to make several devices of the host's. Prints JSON: "MODEL PHASE
DEGREE" → largest differences of logits and of the cache's arrays, whether each was written, collectives, and bytes
updated in place.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from llmc.compiler.architectures.shared.caches import cache_of

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD, MLP, VOCAB = 2, 64, 4, 2, 16, 96, 256
CONFIG = {
    "model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "intermediate_size": MLP, "vocab_size": VOCAB,
}  # fmt: skip
PLAIN = "plain"
"""Of CONFIG, over 2, 3 and 4 devices; all others over 2."""
BATCH = {"decode": (3, 1), "prompt": (2, 8)}
CONTEXT, CAPACITY, SLOTS = 16, 32, 4
FLAGS = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"


def config_of(case: str) -> dict[str, Any]:
    """A model's configuration."""
    if case == PLAIN:
        return CONFIG
    from tests.compiler import tiny

    return tiny.config(case)


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
    return {
        f"{file.stem} {key}": report
        for phase in BATCH
        for key, report in _phase(program, config_of(file.stem), weights, phase, file.stem == PLAIN).items()
    }


def _phase(program: Any, config: dict[str, Any], weights: dict[str, Any], phase: str, plain: bool) -> dict[str, Any]:
    import jax
    import numpy as np

    from llmc.compiler.targets.xla.step import FlatCore, step_function

    random = np.random.default_rng(2)
    batch, query = BATCH[phase]
    shape = cache_of(config)
    sizes = [(len(group), *group[0].size(SLOTS, CAPACITY)) for group in shape.groups]
    given = [
        random.integers(0, VOCAB, (batch, query)).astype(np.int32), np.array([3, 7, 5][:batch], np.int32),
        np.array([1, 1, 1] if query == 1 else [5, 8], np.int32),
        np.array([0, 1, -1] if query == 1 else [2, 1], np.int32),
        *(random.normal(size=size).astype(np.float32) for size in sizes), *weights.values(),
    ]  # fmt: skip
    core = FlatCore(program.at(batch, query, CONTEXT), shape.offsets)
    kinds = [group[0].kind for group in shape.groups]
    expected = jax.jit(step_function(core, phase, CONTEXT, kinds=kinds))(*given)
    shapes = {name: w.shape for name, w in weights.items()}
    return {
        f"{phase} {degree}": _report(core, config, shapes, phase, degree, given, expected)
        for degree in ((2, 3, 4) if plain else (2,))
    }


def _report(
    core: Any, config: dict[str, Any], shapes: dict[str, Any], phase: str, degree: int, given: list[Any], expected: Any
) -> dict[str, Any]:
    """Largest differences from what one device made, what is exchanged, and the bytes that are updated in place."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from llmc.compiler.targets.xla.build import collectives
    from llmc.compiler.targets.xla.sharding import AXIS, ShardedCore, cache_dims, weight_shardings
    from llmc.compiler.targets.xla.step import step_function

    groups = cache_of(config).groups
    mesh = Mesh(np.array(jax.devices()[:degree]), (AXIS,))
    split = weight_shardings(shapes, config, degree)
    entries = [cache_dims(group[0], degree) for group in groups]
    whole, *held = (NamedSharding(mesh, PartitionSpec(*dims)) for dims in ((), *entries))
    lies = [whole] * 4 + held + [NamedSharding(mesh, PartitionSpec(*s.dims)) for s in split.values()]
    kinds = [group[0].kind for group in groups]
    step = step_function(ShardedCore(core, config, degree, entries), phase, CONTEXT, kinds=kinds)
    donated = tuple(range(4, 4 + len(groups)))
    jitted = jax.jit(step, donate_argnums=donated, keep_unused=True, out_shardings=(whole, *held))
    inputs = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s) for a, s in zip(given, lies, strict=True)]
    compiled = jitted.lower(*inputs).compile()
    found = compiled(*(jax.device_put(a, s) for a, s in zip(given, lies, strict=True)))
    logits, *kept = (float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(expected, found, strict=True))
    arrays = zip(found[1:], given[4 : 4 + len(groups)], strict=True)
    written = [float(np.abs(np.asarray(after) - before).max()) for after, before in arrays]
    return {
        "logits": logits, "cache": max(kept), "written": min(written),
        "collectives": collectives(compiled.as_text()), "aliased": compiled.memory_analysis().alias_size_in_bytes,
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps({key: report for name in sys.argv[1:] for key, report in reports(Path(name)).items()}))
