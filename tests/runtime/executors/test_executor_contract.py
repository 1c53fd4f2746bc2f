"""The contract of an executor, held by each: slots keep their tokens, whatever steps, copies and dummy rows come."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.artifacts.bundle.trust import code_among, code_of_entry
from llmc.artifacts.store.store import Store
from llmc.buckets.bucket import Bucket
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.errors import InputError, LlmcError
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.base import Executor
from llmc.runtime.step import exact, pad
from llmc.testing.executors import (
    LONGEST,
    PLAN,
    SLOTS,
    TOP,
    Alone,
    ExecutorContract,
    Open,
    close,
    decode,
    each,
    opener,
    prefill,
)
from llmc.testing.toy import write_toy
from tests.compiler.targets.xla.unoptimised import unoptimised
from tests.manifests import edit_manifest

KINDS = {
    "fake-static": ("fake", True), "fake-exact": ("fake", False), "onnx-static": ("onnxruntime", True),
    "onnx-exact": ("onnxruntime", False), "torch": ("hpu", True), "xla": ("xla", True), "openvino": ("openvino", False),
    "neuron": ("neuron", True),
    "openvino-fixed": ("openvino", True), "openvino-capped": ("openvino", False),
    "openvino-static": ("openvino:NPU", True),
    "fake-ragged": ("fake:ragged", False), "fake-paged": (f"fake:paged={SLOTS * LONGEST}", False),
    "fake-graphs": (f"fake:graphs={1 << 20}", True),
}  # fmt: skip
CASES = {"openvino-capped": "gemma2"}
"""The models of kinds that are about more than Llama's layers: attention over rows of one length."""
ROUNDS = {
    "openvino-static": 50,
    "fake-static": 200,
    "fake-exact": 200,
    "fake-ragged": 100,
    "fake-paged": 100,
    "fake-graphs": 100,
    "onnx-static": 200,
    "onnx-exact": 100,
    "torch": 25,
    "xla": 25,
    "neuron": 25,
    "openvino": 50,
    "openvino-fixed": 50,
    "openvino-capped": 50,
}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A bundle of each kind, compiled when it is first asked for."""
    folder = tmp_path_factory.mktemp("contract")

    def compiled(kind: str) -> Path:
        device, specialise = KINDS[kind]
        path = folder / kind
        if not path.exists():
            if device.startswith("fake"):
                model = write_toy(folder / "toy")
            else:
                from tests.compiler import tiny

                case = CASES.get(kind, "llama")
                model = folder / case if (folder / case).exists() else tiny.write_model(folder / case, case)
            requested = CompileOptions(device, "none", specialise=specialise, verify="none", sample_top_k=TOP)
            with unoptimised() if device in ("xla", "neuron") else nullcontext():
                compile_bundle(str(model), path, PLAN, requested, Store(folder / "store"), lambda _: None)
        return path

    return compiled


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", autouse=True)
def modules_are_compiled_once() -> Iterator[None]:
    """Neuron's programs are compiled for this CPU whenever they are opened."""
    from llmc.runtime.executors.neuron import executor as module

    def compile_once(hlo: bytes, devices: Sequence[Any]) -> Any:
        with unoptimised():
            return built(hlo, tuple(devices))

    before = module.compiled
    built = cache(before)
    module.compiled = compile_once
    yield
    module.compiled = before


@pytest.fixture
def opened(kind: str, bundles: Callable[[str], Path], request: pytest.FixtureRequest) -> Open:
    return opener(bundles(kind), request)


@pytest.fixture
def rounds(kind: str) -> int:
    return ROUNDS[kind]


def test_the_contract_has_at_most_20_members() -> None:
    class Bare(Executor):
        """What every executor has; nothing of it is called."""

    Bare.__abstractmethods__ = frozenset()
    members = {*vars(Executor), *Executor.__annotations__, *vars(Bare(None, 1, 1, 1))}  # type: ignore[abstract, arg-type]
    assert len({name for name in members if not name.startswith("_")}) <= 20


class TestContract(ExecutorContract):
    """Of every kind."""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": (0, 6)}, "slots .0, 6. do not fit a batch of 4 over 6 slots"),
        ({"slots": (0, 0)}, "two rows of one step share a slot"),
        ({"slots": (1, 0)}, "decode runs over the first slots, in order"),
        ({"past_lengths": np.array([17, 0, 0, 0])}, "past lengths .* are not within 0 … 16"),
        ({"new_lengths": np.array([2, 1, 1, 1])}, "new lengths .* are not within 1 … 1"),
    ],
)
@pytest.mark.parametrize("kind", ["fake-static", "onnx-static"])
def test_decode_steps_that_would_write_elsewhere_are_refused(
    opened: Open, change: dict[str, Any], message: str
) -> None:
    executor = opened()
    prefill(executor, 0, [1, 2])
    prefill(executor, 1, [1, 2])
    step = pad(Bucket("decode", 4, 1, 16), [0, 1], [[1], [2]], [2, 2])
    with pytest.raises(InputError, match=message):
        executor.run(replace(step, **change))


@pytest.mark.parametrize("kind", ["onnx-static", "openvino-static"])
def test_decode_of_an_unchanged_set_copies_nothing(opened: Open) -> None:
    executor = opened()
    for slot in range(3):
        prefill(executor, slot, [1, 2, 3])
    decode(executor, [[4]] * 3, [[1, 2, 3]] * 3)
    cache = executor._cache  # type: ignore[attr-defined]
    before, home = cache.decode.array.copy(), cache.home.array.copy()
    decode(executor, [[5]] * 3, [[1, 2, 3, 4]] * 3)
    after = cache.decode.array
    np.testing.assert_array_equal(home, cache.home.array)
    np.testing.assert_array_equal(before[:, :3, :, :4], after[:, :3, :, :4])


@pytest.mark.parametrize("kind", ["onnx-static"])
def test_memory_counts_what_slots_held_at_most_and_the_layouts_that_decode_took(opened: Open, kind: str) -> None:
    executor = open_executor(Bundle.open(opened().bundle.path), slots=SLOTS, threads=1)
    token = 4 * 2 * 2 * 2 * 16  # float32, keys and values, layers, heads, head_dim
    assert executor.memory()["cache"] == 0
    prefill(executor, 0, [1, 2, 3])
    assert executor.memory()["cache"] == token * (3 + 4), "the slot's, and the staging cache of its bucket"
    decode(executor, [[1]], [[1, 2, 3]])
    assert executor.memory()["cache"] == token * (3 + 4 + 4 * 17), "and four rows of context and query"
    executor.copy_prefix(0, 5, 2)
    assert executor.memory()["cache"] == token * (5 + 4 + 4 * 17)
    executor.close()


# Logits after every token


@pytest.mark.parametrize(
    "kind", ["onnx-exact", "fake-ragged", "fake-paged", "openvino", "openvino-fixed", "openvino-capped"]
)
def test_every_live_token_of_several_rows_is_scored_row_by_row(opened: Open) -> None:
    executor, alone = opened(), Alone(opened(1))
    first, more = [[1, 2, 3], [4], [5, 6]], [[7], [8, 9, 10], [11, 12]]
    for tokens, past in ((first, [[], [], []]), (more, first)):
        rows = each(executor, "prompt", [1, 2, 3], tokens, [len(p) for p in past]).copy()
        wanted = [held + new[: n + 1] for held, new in zip(past, tokens, strict=True) for n in range(len(new))]
        assert len(rows) == len(wanted) == 6
        for row, sequence in zip(rows, wanted, strict=True):
            assert close(row, alone(sequence)[0])
        ends = [held + new for held, new in zip(past, tokens, strict=True)]
        for row, sequence in zip(executor.logits(), ends, strict=False):
            assert close(row, alone(sequence)[0])


def test_results_that_are_code_count_as_code(kind: str, bundles: Callable[[str], Path]) -> None:
    store = Store(bundles(kind).parent / "store")
    for entry in store.entries():
        if entry.key.kind != "bundle" and code_among(store.path(blob) for blob in entry.outputs.values()):
            assert code_of_entry(entry.key, {}), entry.key.kind


@pytest.mark.parametrize("name", ["layers", "kv_heads", "head_dim", "vocab_size"])
def test_a_manifest_of_other_sizes_than_the_graphs_is_refused(
    kind: str, bundles: Callable[[str], Path], tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    if kind in ("xla", "neuron") or (kind.startswith("fake") and name == "layers"):
        return  # these go by their executables
    bundle = shutil.copytree(bundles(kind), tmp_path / "bundle")
    edit_manifest(bundle, lambda document: document["model"].update({name: document["model"][name] + 1}))
    with pytest.raises(LlmcError):
        executor = open_executor(Bundle.open(bundle), slots=SLOTS, threads=1)
        request.addfinalizer(executor.close)
        one = pad(Bucket("prompt", 1, 4, 0), [0], [[1, 2, 3]], [0])
        executor.run(exact("prompt", [0], [[1, 2, 3]], [0]) if executor.capabilities.exact else one)
