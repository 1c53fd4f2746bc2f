"""--prompt-dtype: who takes it, where bf16 is the default, and that a token of a prompt is computed the same however
its prompt is cut and whoever is beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import helper

from llmc.artifacts.bundle.kernel_sets import KERNEL_SETS
from llmc.compiler.targets import open_target
from llmc.compiler.targets.base import shaping
from llmc.compiler.targets.onnxruntime import to_onnx
from llmc.compiler.targets.onnxruntime.emitter import DECODING, OWN
from llmc.compiler.targets.onnxruntime.target import OnnxRuntimeTarget
from llmc.compiler.targets.onnxruntime.to_onnx import hand_on_words
from llmc.errors import LlmcError
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.base import Executor
from llmc.runtime.step import ragged
from tests.compiler import tiny
from tests.compiler.targets.onnxruntime.kernels.host import own_set
from tests.compiler.targets.onnxruntime.kernels.test_build import compile_with
from tests.compiler.targets.onnxruntime.test_kv_cache_dtype import configured


def test_bf16_is_the_default_where_every_set_of_kernels_has_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnnxRuntimeTarget, "isa", lambda self: KERNEL_SETS[3].isa)
    plain = configured()
    assert configured(prompt_dtype="int8") == configured(prompt_dtype="auto") == plain
    assert "prompt_dtype" not in plain.extensions, "a manifest and a key would name it"
    requested, target = configured(prompt_dtype="bf16"), open_target("onnxruntime")
    assert shaping(target.description, requested) == {**shaping(target.description, plain), "prompt_dtype": "bf16"}
    tiled = {"quantize": "int8", "cpu": "sapphirerapids", "verify": "none"}
    assert configured(**tiled) == configured(**tiled, prompt_dtype="bf16")
    assert "prompt_dtype" not in configured(**tiled, prompt_dtype="int8").extensions
    assert "prompt_dtype" not in configured(**tiled | {"cpu": "sapphirerapids,zen4"}).extensions
    monkeypatch.setattr(OnnxRuntimeTarget, "isa", lambda self: KERNEL_SETS[0].isa)
    assert configured().get("prompt_dtype") == "bf16"
    assert configured(kernels="onnxruntime").get("prompt_dtype") is None


@pytest.mark.parametrize(
    ("device", "options", "why"),
    [
        ("onnxruntime", {"kernels": "onnxruntime"}, "--prompt-dtype bf16 is for llmc's kernels: quantise"),
        ("onnxruntime", {"quantize": "none"}, "--prompt-dtype bf16 is for llmc's kernels: quantise"),
        ("onnxruntime", {"specialise": True}, "--prompt-dtype bf16 is for llmc's kernels: quantise"),
        ("onnxruntime", {"prompt_dtype": "f16"}, "unknown prompt dtype 'f16'; known: auto, bf16, int8"),
        ("openvino", {}, "--prompt-dtype is for .*onnxruntime.*; leave it out for openvino"),
    ],
)
def test_who_cannot_says_who_can(device: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(LlmcError, match=why):
        configured(device, **{"prompt_dtype": "bf16"} | options)


@pytest.fixture(scope="module", params=["int8", "int4"])
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    own_set()
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny.write_model(folder / "model", "llama")
    built = opened(model, folder, request.param)
    yield built
    built.close()


PROMPT = list(range(1, 24))


def opened(model: Path, folder: Path, quantize: str) -> Executor:
    folder.mkdir(exist_ok=True)
    _, path = compile_with(model, folder, quantize=quantize, prompt_dtype="bf16", verify="none")
    return open_executor(Bundle.open(path), 4, threads=2)


def answer(executor: Executor, cuts: list[int]) -> NDArray[np.float32]:
    """Logits after PROMPT in slot 0, in pieces, and after two tokens more."""
    logits, past = np.zeros(0, np.float32), 0
    for end in [*cuts, len(PROMPT)]:
        logits = executor.run(ragged("prompt", [0], [PROMPT[past:end]], [past]))[0].copy()
        past = end
    more = [executor.run(ragged("decode", [0], [[t]], [past + i]))[0].copy() for i, t in enumerate((5, 9))]
    return np.stack([logits, *more])


def test_a_prompt_in_pieces_beside_others_has_the_bits_that_it_has_whole(executor: Executor) -> None:
    whole = answer(executor, [])
    for cuts in ([1], [7, 8], [16, 22]):
        assert answer(executor, cuts).tobytes() == whole.tobytes(), cuts
    executor.run(ragged("prompt", [1], [[3, 4, 5]], [0]))
    mixed = executor.run(ragged("prompt", [1, 0], [[6], PROMPT], [3, 0], decode_rows=1)).copy()
    assert mixed[1].tobytes() == whole[0].tobytes()
    executor.run(ragged("prompt", [1], [[3, 4, 5]], [0]))
    assert executor.run(ragged("decode", [1], [[6]], [3]))[0].tobytes() == mixed[0].tobytes()


def test_drafted_tokens_are_computed_as_decode_computes_them(executor: Executor) -> None:
    whole = answer(executor, [])
    executor.run(ragged("prompt", [0], [PROMPT], [0]))
    drafted = executor.run_each(ragged("decode", [0], [[5, 9]], [len(PROMPT)]))
    assert drafted[:2].tobytes() == whole[1:].tobytes()


def test_prompts_are_computed_otherwise_than_decode(executor: Executor) -> None:
    whole = answer(executor, [])
    executor.run(ragged("prompt", [0], [PROMPT[:-1]], [0]))
    decoded = executor.run(ragged("decode", [0], [PROMPT[-1:]], [len(PROMPT) - 1]))
    assert decoded[0].tobytes() != whole[0].tobytes()


def norm(out: str) -> Any:
    return helper.make_node("AddNorm", ["x", "", "weight"], [out], domain=OWN)


def matmul(x: str, out: str, *, rows: int = 64, gated: int = 0, of_prompts: bool = True) -> Any:
    inputs = [x, "panels", "", DECODING] if of_prompts else [x, "panels"]
    return helper.make_node("Linear", inputs, [out, f"{out}_scratch"], domain=OWN, rows=rows, gated=gated)


def test_norms_and_gates_hand_on_what_matmuls_alone_read() -> None:
    nodes = [norm("a"), matmul("a", "b", gated=1), matmul("b", "c"), norm("d"), matmul("d", "e"), matmul("d", "f")]
    hand_on_words(nodes, ["c"])
    assert list(nodes[0].input) == ["x", "", "weight", DECODING]
    assert list(nodes[0].output) == ["a", "", "a_words"]
    assert list(nodes[1].output) == ["b", "b_scratch", "b_words"]
    assert [node.input[4] for node in nodes if len(node.input) > 4] == ["a_words", "b_words", "d_words", "d_words"]
    assert len(nodes[2].output) == 2, "what is no gate gives floats"


@pytest.mark.parametrize(
    "others",
    [
        [helper.make_node("Add", ["a", "one"], ["z"])],
        [helper.make_node("Adapted", ["base", "a"], ["z"], domain=OWN)],
        [matmul("x", "y"), helper.make_node("Linear", ["x", "a", "", DECODING], ["z"], domain=OWN, rows=64, gated=0)],
        [matmul("a", "z", of_prompts=False)],
    ],
)
def test_what_others_read_stays_as_it_is(others: list[Any]) -> None:
    nodes = [norm("a"), matmul("a", "b", rows=96, gated=1), matmul("b", "c"), *others]
    hand_on_words(nodes, [])
    assert all(len(node.output) < 3 for node in nodes), "a gate of 48 numbers fills no words, either"


def test_what_a_graph_gives_or_nobody_reads_stays_as_it_is() -> None:
    nodes = [norm("a"), matmul("a", "b"), norm("d")]
    hand_on_words(nodes, ["a"])
    assert all(len(node.output) < 3 for node in nodes)


def test_what_is_handed_on_in_bfloat16_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_set()
    model = tiny.write_model(tmp_path / "model", "llama")
    handed: list[str] = []

    def watched(nodes: list[Any], outputs: Any) -> None:
        hand_on_words(nodes, outputs)
        handed.extend(node.op_type for node in nodes if len(node.output) == 3 and node.domain == OWN)

    monkeypatch.setattr(to_onnx, "hand_on_words", watched)
    built = opened(model, tmp_path / "with", "int8")
    assert {"AddNorm", "Linear"} <= set(handed)
    monkeypatch.setattr(to_onnx, "hand_on_words", lambda nodes, outputs: None)
    plain = opened(model, tmp_path / "without", "int8")
    for cuts in ([], [7, 8]):
        assert answer(built, cuts).tobytes() == answer(plain, cuts).tobytes()
