"""One engine of benchmarks/encoders.py, in a process of its own; the baselines' run in .venv-baselines, without
llmc."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def prepare(folder: Path) -> None:
    """The model and the tokenizer in OpenVINO's form, float32, for its pipeline."""
    import openvino as ov
    import torch
    from openvino_tokenizers import convert_tokenizer
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(folder / "model", add_pooling_layer=False).eval()
    ids = torch.ones(2, 8, dtype=torch.long)
    given = {"input_ids": ids, "attention_mask": ids, "token_type_ids": torch.zeros_like(ids)}
    converted = ov.convert_model(model, example_input=given)
    for value in converted.inputs:
        value.get_node().set_partial_shape(ov.PartialShape([-1, -1]))
    converted.validate_nodes_and_infer_types()
    ov.save_model(converted, folder / "model" / "openvino_model.xml", compress_to_fp16=False)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    ov.save_model(convert_tokenizer(tokenizer), folder / "model" / "openvino_tokenizer.xml")


def llmc_engine(how: str, folder: Path, threads: int) -> Callable[[list[str]], tuple[Any, dict[str, Any]]]:
    """A bundle, called once with everything."""
    import numpy as np

    from llmc.runtime.bundle import Bundle
    from llmc.runtime.pooling.pooler import Pooler, Statistics
    from llmc.runtime.pooling.tokens import WHOLE

    pooler = Pooler(Bundle.open(folder), threads)

    def run(texts: list[str]) -> tuple[Any, dict[str, Any]]:
        pooler.statistics = Statistics()
        found = pooler.embed(texts, cut=WHOLE)
        lengths = [one.prompt_tokens for one in found]
        return np.stack([one.values for one in found]), {
            "padded_tokens": pooler.statistics.padded_tokens,
            "lengths": lengths,
        }

    return run


def sentence_transformers_engine(how: str, folder: Path, threads: int) -> Callable[[list[str]], tuple[Any, Any]]:
    """Its own `encode`, which sorts by length itself."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    dtype, batch = how.split("-")
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    return lambda texts: (model.encode(texts, batch_size=int(batch), show_progress_bar=False), {})


def openvino_engine(how: str, folder: Path, threads: int) -> Callable[[list[str]], tuple[Any, Any]]:
    """Its pipeline, called with batches: in order, or sorted by length by its caller."""
    import numpy as np
    import openvino_genai as genai

    config = genai.TextEmbeddingPipeline.Config()
    config.normalize = True
    config.pooling_type = genai.TextEmbeddingPipeline.PoolingType.MEAN
    precision, size, *ordered = how.split("-")
    batch = int(size)
    pipe = genai.TextEmbeddingPipeline(
        str(folder), "CPU", config, INFERENCE_PRECISION_HINT=precision, INFERENCE_NUM_THREADS=threads
    )

    def run(texts: list[str]) -> tuple[Any, Any]:
        order = sorted(range(len(texts)), key=lambda i: len(texts[i])) if ordered else range(len(texts))
        found: list[Any] = []
        for at in range(0, len(texts), batch):
            found += pipe.embed_documents([texts[i] for i in list(order)[at : at + batch]])
        vectors = np.empty((len(texts), len(found[0])), np.float32)
        vectors[list(order)] = found
        return vectors, {}

    return run


def main() -> None:
    """Open, run once, say so; then a pass for each line."""
    import numpy as np

    kind, how, index, *rest = sys.argv[1:]
    if kind == "prepare":
        prepare(Path(index))
        return
    texts: list[str] = json.loads(Path(rest[0]).read_text())
    make = {
        "llmc": llmc_engine, "sentence-transformers": sentence_transformers_engine, "openvino-genai": openvino_engine,
    }[kind]  # fmt: skip
    run = make(how, Path(index), int(rest[1]))
    vectors, _ = run(texts)
    np.save(rest[2], np.asarray(vectors, np.float32))
    print("{}", flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        _, counted = run(texts)
        print(json.dumps({"seconds": time.perf_counter() - began, **counted}), flush=True)


if __name__ == "__main__":
    main()
