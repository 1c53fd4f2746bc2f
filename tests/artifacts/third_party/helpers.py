"""Small caches as their servers leave them, and what a folder holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmc.artifacts.store.store import Store
from llmc.artifacts.third_party.contents import Contents
from llmc.artifacts.third_party.packing import pack
from llmc.integrations import compile_cache

PICKLE = b"\x80\x04\x95cos\nsystem\n(S'touch /tmp/llmc-was-here'\ntR."
"""What would run a program if it were unpickled."""

HASH, AOT_HASH = "0123456789", "ab" * 32
FACTORS: dict[str, Any] = {
    "env": {"VLLM_TARGET_DEVICE": "cuda", "VLLM_MAIN_CUDA_VERSION": "12.9"},
    "config": {"parallel_config": {"tensor_parallel_size": 2}, "dtype": "bfloat16", "num_gpu_blocks": 2100},
    "config_hash": "c0ffee",
    "compiler": [{"device": {"name": "NVIDIA H100 80GB HBM3"}, "version": {"cuda": "12.9"}}, "torch key"],
    "compiler_hash": "beef",
    "code_hash": "f00d",
    "code": [{"path": "/opt/vllm/models/llama.py", "hash": "aa"}, {"path": "<string>"}],
}
NEURON_KEY = "de" * 16
JAX_KEY = "jit_step-" + "cd" * 32
TRITON_KEY = "XY" * 20
RECIPE = "123456_0a1b2c_syn1.22.0.638"


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def make_vllm(root: Path, **factors: object) -> Path:
    """One hash with two ranks and one of torch_aot_compile, beside what is no compile cache."""
    for rank in ("rank_0_0", "rank_1_0"):
        folder = root / "torch_compile_cache" / HASH / rank / "backbone"
        write(folder / "cache_key_factors.json", json.dumps({**FACTORS, **factors}))
        write(folder / "artifact_compile_range_1_8_subgraph_0", PICKLE + rank.encode())
        write(folder / "vllm_compile_cache.py", "{}")
    write(root / "torch_compile_cache" / "torch_aot_compile" / AOT_HASH / "rank_0_0" / "model", PICKLE)
    write(root / "modelinfos" / "llama.json", "{}")
    return root


def make_neuron(root: Path, key: str = NEURON_KEY) -> Path:
    write(root / key / "graph.hlo", b"hlo")
    write(root / key / f"graph_{key}.neff", b"neff" * 10)
    write(root / key / "command.txt", f"neuronx-cc compile {root}/graph.hlo --framework XLA --target trn2 -O1 --lnc=2")
    write(root / key / "log-neuron-cc.txt", "…\nNeuronX Compiler version 2.27.5334.0+f702b353\n")
    write(root / key / ".artifact_metadata_v0.json", json.dumps({"cache_key": key}))
    write(root / key / ".compilation_complete", "completed:1.5\nneff_size:40\n")
    return root


def make_gaudi(root: Path) -> Path:
    write(root / f"{RECIPE}.recipe", b"recipe" * 100)
    write(root / f"{RECIPE}.metadata", b"metadata")
    return root


def make_jax(root: Path) -> Path:
    write(root / f"{JAX_KEY}-cache", b"\x28\xb5\x2f\xfdexecutable")
    write(root / f"{JAX_KEY}-atime", (7).to_bytes(8, "little"))
    write(root / ".lockfile", b"")
    return root


def make_triton(root: Path) -> Path:
    folder = root / TRITON_KEY
    write(folder / "k.cubin", b"\x7fELFkernel")
    write(folder / "k.json", json.dumps({"target": {"backend": "cuda", "arch": 90, "warp_size": 32}}))
    write(folder / "__grp__k.json", json.dumps({"child_paths": {"k.cubin": f"/cache/triton/{TRITON_KEY}/k.cubin"}}))
    write(folder / "lock", "")
    return root


MAKERS = {"triton": make_triton, "vllm": make_vllm, "vllm-neuron": make_neuron, "gaudi": make_gaudi, "jax": make_jax}


def packed(store: Store, name: str, folder: Path, **facts: str) -> Contents:
    """The cache in a folder, packed; JAX's without its path, so that it can be anywhere."""
    facts = {"path": "", **facts} if name == "jax" else facts
    return pack(store, compile_cache(name), folder, facts=facts).contents


def content(folder: Path) -> dict[str, tuple[bytes, bool]]:
    """Every file below a folder: what is in it, and whether it can be executed."""
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), bool(path.stat().st_mode & 0o100))
        for path in folder.rglob("*")
        if path.is_file()
    }
