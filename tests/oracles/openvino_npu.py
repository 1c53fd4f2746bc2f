"""Runs OpenVINO GenAI's pipeline for NPUs on this CPU, and prints what it admits: python openvino_npu.py MODEL.gguf

    echo '[{"MAX_PROMPT_LEN": 100, "MIN_RESPONSE_LEN": 30}]' | python openvino_npu.py MODEL.gguf

For each pipeline configuration on standard input, one line: the longest prompt and the most tokens of prompt and answer
together, or the error that ends the start. NPUW_DEVICES=CPU compiles the NPU's static graphs for a CPU. The model is a
tiny one with random weights; MODEL.gguf gives its tokenizer only.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY, HEADS, HEAD, LAYERS = 49152, 2, 16, 2
ON_CPU = {"NPU_USE_NPUW": "YES", "NPUW_DEVICES": "CPU", "NPUW_ONLINE_PIPELINE": "NONE"}
TOO_LONG = 100_000
ADMITTED = re.compile(r"up to (\d+) tokens")


def decoder(ov: Any, op: Any) -> Any:
    """A stateful decoder with the inputs that optimum-intel gives every model, and without positions."""
    random = np.random.default_rng(1)

    def constant(value: object, kind: type = np.int64) -> Any:
        return op.constant(np.array(value, kind))

    def weights(*shape: int) -> Any:
        return op.constant(random.standard_normal(shape).astype(np.float32) * 0.3)

    inputs = {}
    for name, shape, kind in (
        ("input_ids", [-1, -1], "i64"), ("attention_mask", [-1, -1], "i64"),
        ("position_ids", [-1, -1], "i64"), ("beam_idx", [-1], "i32"),
    ):  # fmt: skip
        inputs[name] = op.parameter(ov.PartialShape(shape), getattr(ov.Type, kind), name=name)
        inputs[name].output(0).set_names({name})
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    zero, one = constant(0), constant(1)
    count, total = (op.gather(op.shape_of(node), one, zero) for node in (ids, mask))
    rows = op.unsqueeze(op.add(op.range(zero, count, one, "i64"), op.subtract(total, count)), one)
    causal = op.less_equal(op.unsqueeze(op.range(zero, total, one, "i64"), zero), rows)
    seen = op.greater(op.unsqueeze(op.unsqueeze(op.convert(mask, "f32"), one), one), constant(0, np.float32))
    visible = op.logical_and(op.unsqueeze(op.unsqueeze(causal, zero), zero), seen)
    bias = op.select(visible, constant(0, np.float32), constant(-65504, np.float32))
    order, hidden = constant([0, 2, 1, 3]), HEADS * HEAD
    embedding = weights(VOCABULARY, hidden)
    state, writes = op.gather(embedding, ids, zero), []
    for layer in range(LAYERS):
        query, *both = (
            op.transpose(op.reshape(op.matmul(state, weights(hidden, hidden), False, False), shape, True), order)
            for shape in [constant([0, 0, HEADS, HEAD])] * 3
        )
        cached = []
        for name, new in zip(("key", "value"), both, strict=True):
            info = import_module("openvino.op.util").VariableInfo()
            info.data_shape, info.data_type = ov.PartialShape([-1, HEADS, -1, HEAD]), ov.Type.f32
            info.variable_id = f"past_key_values.{layer}.{name}present.{layer}.{name}"
            variable = import_module("openvino.op.util").Variable(info)
            batch = op.gather(op.shape_of(ids), constant([0]), zero)
            empty = op.broadcast(constant(0, np.float32), op.concat([batch, constant([HEADS, 0, HEAD])], 0))
            past = op.gather(op.read_value(empty, variable), inputs["beam_idx"], zero)
            cached.append(op.concat([past, new], 2))
            writes.append(op.assign(cached[-1], variable))
        attended = op.transpose(op.scaled_dot_product_attention(query, *cached, bias), order)
        merged = op.reshape(attended, constant([0, 0, hidden]), True)
        state = op.add(state, op.matmul(merged, weights(hidden, hidden), False, False))
    logits = op.matmul(state, embedding, False, True)
    logits.output(0).set_names({"logits"})
    return ov.Model([op.result(logits)], writes, list(inputs.values()), "decoder")


def admitted(ov: Any, genai: Any, folder: Path, configuration: dict[str, Any]) -> dict[str, Any]:
    """What a pipeline with this configuration admits."""
    try:
        pipeline = genai.LLMPipeline(str(folder), "NPU", **ON_CPU, **configuration)
    except RuntimeError as error:
        return {"error": " ".join(str(error).split())}
    options = genai.GenerationConfig()
    options.max_new_tokens, options.ignore_eos = TOO_LONG, True

    def answer(length: int) -> int:
        ids = ov.Tensor(np.full((1, length), 504, np.int64))
        prompt = genai.TokenizedInputs(ids, ov.Tensor(np.ones((1, length), np.int64)))
        return len(pipeline.generate(prompt, options).tokens[0])

    try:
        answer(TOO_LONG)
    except RuntimeError as error:
        found = ADMITTED.search(str(error))
        if found is None:
            raise
        longest = int(found[1])
    return {"prompt": longest, "totals": sorted({length + answer(length) for length in (1, longest)})}


def main(source: str) -> None:
    """Print what each configuration admits."""
    ov, genai = import_module("openvino"), import_module("openvino_genai")
    with tempfile.TemporaryDirectory() as work:
        folder, gguf = Path(work) / "model", Path(work) / "gguf" / "model.gguf"
        folder.mkdir()
        gguf.parent.mkdir()
        gguf.symlink_to(Path(source).absolute())  # the tokenizers are saved beside the file
        genai.LLMPipeline(str(gguf), "CPU", enable_save_ov_model=True, ATTENTION_BACKEND="SDPA")
        for file in gguf.parent.glob("openvino_*token*"):
            shutil.copy(file, folder)
        config = {"model_type": "llama", "num_hidden_layers": LAYERS, "max_position_embeddings": 1 << 20}
        (folder / "config.json").write_text(json.dumps({**config, "vocab_size": VOCABULARY}))
        ov.save_model(decoder(ov, import_module("openvino.opset13")), folder / "openvino_model.xml", False)
        for configuration in json.load(sys.stdin):
            print(json.dumps(admitted(ov, genai, folder, configuration)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
