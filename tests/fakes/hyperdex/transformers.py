"""The runtime: models, tokenizers, streamers."""

import json
from pathlib import Path

import numpy as np
from hyperdex import GPUS, LPUS, at, requested
from hyperdex.model import Llama, choose, unpack


class AutoModelForCausalLM:
    @classmethod
    def from_pretrained(cls, model_id, device_map):
        print("[ INFO ] : loading", model_id, device_map)
        at("from_pretrained")
        folder, lpus, gpus = Path(model_id), device_map["lpu"], device_map.get("gpu", 0)
        if lpus > LPUS or gpus > GPUS:
            raise RuntimeError(f"{device_map} asked for, {LPUS} LPUs and {GPUS} GPUs found")
        if gpus and not list((folder / "ckpt").glob("*.safetensors")):
            raise RuntimeError("the GPU needs safetensors; compile again with low_memory_usage=False")
        program = json.loads((folder / "inst" / f"decode_{lpus}fpga.bin").read_text())
        parts = (folder / "param" / f"param_{lpus}_{i}.bin" for i in range(32 * lpus))
        blob = b"".join(part.read_bytes() for part in parts)
        config = json.loads((folder / "ckpt" / "hyperdex_config.json").read_text())
        return LpuModel(config, unpack(blob), program["max_length"])


class LpuModel:
    def __init__(self, config, tensors, max_length):
        self.config, self.tensors, self.max_length = config, tensors, max_length

    def generate_yield(
        self, input_ids, max_new_tokens, do_sample=False, top_p=0.7, top_k=1, temperature=1.0, repetition_penalty=1.2,
        stop=None, streamer=None, seed=None,
    ):  # fmt: skip
        assert isinstance(streamer, TextStreamer) and not streamer.use_print
        if input_ids and not isinstance(input_ids[0], int):
            raise ValueError("expected sequence of length 1: one batch at a time")
        if len(input_ids) + max_new_tokens > self.max_length:
            raise ValueError(f"{len(input_ids)} + {max_new_tokens} tokens exceed max_length {self.max_length}")
        at("generate")
        ends = self.config["eos_token_id"] if stop is None else stop
        ends = ends if isinstance(ends, list) else [ends]
        model, random, seen = Llama(self.config, self.tensors), np.random.default_rng(seed), list(input_ids)
        for token in input_ids:
            logits = model.logits(token)
        for built in range(max_new_tokens):
            at(str(built))
            logits = -logits if requested("wrong:tokens") else logits
            token = choose(logits, seen, do_sample, top_p, top_k, temperature, repetition_penalty, random)
            seen.append(token)
            yield [token]
            if token in ends:
                return
            logits = model.logits(token)


class AutoTokenizer:
    @classmethod
    def from_pretrained(cls, model_id):
        assert (Path(model_id) / "ckpt" / "tokenizer.json").is_file()
        return cls()


class TextStreamer:
    def __init__(self, tokenizer, use_print=True, use_sse=False, skip_special_tokens=False):
        self.use_print = use_print
