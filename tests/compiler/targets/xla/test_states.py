"""Caches that are not keys and values alone: states beside them, held, copied and replaced on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.artifacts.store.store import Store
from llmc.buckets.bucket import Bucket
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.errors import CheckpointError, InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors import open_sized
from llmc.runtime.llm import BundleLLM
from llmc.runtime.step import pad
from tests.compiler import tiny
from tests.models.texts import NEW, PROMPTS, continued
from tests.tiers import full

pytestmark = pytest.mark.usefixtures("unoptimised_xla")

CASE = "qwen3_5_text"
KINDS = ("kv", "state")


class CountCore:
    """Logits are the states that were read; a row's new state is its old one and its first token."""

    weights = ()

    def run(self, given: Any, read: Any, weights: Any) -> Any:
        import jax.numpy as jnp

        from llmc.compiler.targets.xla.step import CoreOutput

        token_ids, state = given["token_ids"], read(1, 0)
        tokens = jnp.broadcast_to(token_ids[:, None, :, None], (len(token_ids), 1, token_ids.shape[1], 2))
        new = state + token_ids[:, :1]
        return CoreOutput(state, (), (tokens[None].astype(jnp.float32), new[None]))


def step(slots: list[int], phase: str, states: list[float]) -> tuple[list[float], list[float]]:
    """The states that the rows read, and what the slots hold afterwards."""
    import jax

    from llmc.compiler.targets.xla.step import step_function

    rows = [np.array(a, np.int32) for a in ([[7], [8]], [1, 1], [1, 1], slots)]
    held = np.zeros((1, 3, 1, 4, 2), np.float32), np.array(states, np.float32).reshape(1, 3, 1)
    function = jax.jit(step_function(CountCore(), phase, 2, kinds=KINDS))
    read, _, kept = (np.asarray(out) for out in function(*rows, *held))
    return read[:, 0].tolist(), kept.ravel().tolist()


def test_live_rows_read_and_replace_the_states_of_their_slots_and_dummy_rows_replace_none() -> None:
    assert step([2, -1], "prompt", [10, 20, 30]) == ([30, 10], [10, 20, 37])
    assert step([0, 1], "decode", [10, 20, 30]) == ([10, 20], [17, 28, 30])
    assert step([0, -1], "decode", [10, 20, 30]) == ([10, 20], [17, 20, 30])


def test_a_state_goes_with_any_prefix_and_is_nan_filled_only_where_no_token_is_left() -> None:
    from llmc.compiler.targets.xla.step import slot_programs
    from llmc.runtime.executors.xla.envelope import Tensor

    shapes = (1, 3, 1, 4, 2), (1, 3, 1)
    tensors = [Tensor("t", shape, "float32", (None,) * len(shape)) for shape in shapes]
    programs = {name: function for name, (function, *_) in slot_programs(tensors, KINDS).items()}
    cache = [np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for shape in shapes]

    tokens, states = programs["slot_copy"](*cache, np.int32(2), np.int32(0), np.int32(1))
    assert states.ravel().tolist() == [2, 1, 2]
    assert np.asarray(tokens)[0, 0, 0, :, 0].tolist() == [16, 2, 4, 6]
    for start, expected in ((1, [0, 1, 2]), (0, [0, 9, 2])):
        _, states = programs["slot_fill"](*cache, np.int32(1), np.int32(start), np.int32(4), np.float32(9))
        assert states.ravel().tolist() == expected
    rows = programs["slot_read"](*cache, np.int32(1))
    written = programs["slot_write"](*cache, np.int32(0), np.int32(4), *rows)
    assert [np.asarray(w)[0, 0].tolist() for w in written] == [c[0, 1].tolist() for c in cache]


@full
def test_a_model_with_states_is_verified_and_continues_texts_as_transformers_does(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", CASE)
    options = CompileOptions("xla", quantize="none", verify="all")
    path = tmp_path / "bundle"
    result = compile_bundle(str(model), path, tiny.kinds_plan(), options, Store(tmp_path / "store"), lambda _: None)
    assert result.verification is not None
    assert result.verification["max_abs"] < 1e-3
    assert result.verification["leak"] < 1e-4
    with BundleLLM(path, threads=1) as llm:
        built = llm.generate(list(PROMPTS), SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True))
    assert [output.outputs[0].token_ids for output in built] == continued(CASE)

    executor = open_sized(Bundle.open(path), slots=3, capacity=48, threads=1)
    executor.run(pad(Bucket("prompt", 3, 16, 0), [0], [[1, 2, 3]], [0]))
    with pytest.raises(InputError, match="holds the states after 3 tokens"):
        executor.copy_prefix(0, 1, 2)
    executor.close()


@pytest.mark.parametrize(("device", "lowering"), [("tpu:v5e-1x1", "torch-xla")])
def test_what_cannot_hold_such_a_cache_refuses_it_before_anything_is_traced(device: str, lowering: str) -> None:
    from llmc.compiler.targets import open_target
    from llmc.compiler.targets.xla.target import XlaTarget

    target = open_target(device)
    assert isinstance(target, XlaTarget)
    with pytest.raises(CheckpointError, match=r"needs keys and values of one size in every layer.*qwen3_5_text"):
        target.cache_shape(tiny.config(CASE), CompileOptions.of(device, lowering=lowering))
