"""AutoCompiler: the five phases, and the files of each."""

import json
from pathlib import Path

from hyperdex import at, requested
from hyperdex.model import load_safetensors, pack

SUPPORTED = {
    "CohereForCausalLM", "ExaoneForCausalLM", "FalconForCausalLM", "GemmaForCausalLM", "GPT2LMHeadModel",
    "GPTBigCodeForCausalLM", "GPTJForCausalLM", "GPTNeoXForCausalLM", "InternLM2ForCausalLM", "LlamaForCausalLM",
    "MistralForCausalLM", "OPTForCausalLM", "OlmoForCausalLM", "OrionForCausalLM", "PhiForCausalLM", "Phi3ForCausalLM",
    "Qwen2ForCausalLM", "StableLmForCausalLM", "StarCoder2ForCausalLM",
}  # fmt: skip
"""Hyper-Accel/docs, docs/supported_models.md at 1e681ce."""


class AutoCompiler:
    def compile(
        self, model_id="facebook/opt-1.3b", num_device=1, max_length=1, low_memory_usage=False, fast_compile=False,
        token=None,
    ):  # fmt: skip
        folder = Path(model_id)
        checkpoint = folder / "ckpt"
        print("[ INFO ] : ** Phase-0 : Check supported model **")
        config = json.loads((checkpoint / "config.json").read_text())
        if not SUPPORTED & set(config["architectures"]):
            raise RuntimeError(f"{config['architectures']} is not supported by HyperDex")
        at("compile")
        if requested("nothing:compile"):
            return
        print("[ INFO ] : ** Phase-2 : Convert the checkpoint format to HyperDex style **")
        tensors = load_safetensors(checkpoint)
        (checkpoint / "hyperdex_config.json").write_text(json.dumps(config))
        blob = pack(tensors)
        (checkpoint / "hyperdex_model.bin").write_bytes(blob)
        print("[ INFO ] : ** Phase-3 : Generate Optimized Model Mapping **")
        if num_device <= 0 or num_device & (num_device - 1):
            print("[Error] The number of devices should be a power of two. (ex. 1, 2, 4, 8, etc.)")
            raise RuntimeError("The number of devices is not a power of two!")
        for name in ("param", "config", "inst"):
            (folder / name).mkdir()
        parts = 32 * num_device
        size = -(-len(blob) // parts)
        for part in range(parts):
            (folder / "param" / f"param_{num_device}_{part}.bin").write_bytes(blob[part * size : (part + 1) * size])
        for kind in ("ddr", "hbm"):
            (folder / "config" / f"config_{num_device}fpga_{kind}.ini").write_text(f"[{kind}]\nparts={parts}\n")
        print("[ INFO ] : ** Phase-4 : Generate Optimized Model Instruction **")
        for kind in ("context", "decode"):
            program = {"max_length": max_length, "fast": fast_compile}
            (folder / "inst" / f"{kind}_{num_device}fpga.bin").write_text(json.dumps(program))
        (checkpoint / "hyperdex_model.bin").unlink()
        if low_memory_usage:
            for path in checkpoint.glob("*.safetensors"):
                path.unlink()
        print("[ INFO ] : Model compile Complete!")
