"""vLLM's compile cache: torch_compile_cache and torch_aot_compile below VLLM_CACHE_ROOT.

    torch_compile_cache/<10 hex>/rank_<rank>_<dp rank>/[<prefix>/]cache_key_factors.json, …
    torch_compile_cache/torch_aot_compile/<64 hex>/rank_<rank>_<dp rank>/model
    torch_compile_cache/torch_aot_compile/<64 hex>/inductor_cache/…
    torch_aot_compile/<64 hex>/rank_<rank>_<dp rank>/model                    vLLM 0.13 and before

Read in vllm/compilation/backends.py, caching.py and decorators.py of vllm-project/vllm (main of September 2026, which
writes "compiler" and "config" whole, and 00185c66, which writes the latter as a hash) and torch 2.13's
torch/_inductor/codecache.py (CacheBase.get_system). `model` and the artifacts hold pickles, which are never read here.
A cache with Triton kernels (triton/cache.py) is only valid in its original folder, and so is one of a vLLM whose key
covers VLLM_CACHE_ROOT (vllm#47573).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmc.artifacts.third_party.base import Fact, ImageForm, ThirdPartyCache, flatten
from llmc.artifacts.third_party.contents import Tree
from llmc.errors import InputError
from llmc.integrations import kserve
from llmc.integrations.host import LIBRARY, machine, machine_here, native_cpu, nvidia_gpu
from llmc.integrations.triton.cache import kernel_facts

COMPILED, AOT = "torch_compile_cache", "torch_aot_compile"
FACTORS = "cache_key_factors.json"
MODEL, ARTIFACT = "model", "artifact_"
_HASHES = ("code_hash", "compiler_hash", "config_hash")
_RANK = re.compile(r"rank_\d+_\d+")
_TEMPORARY = re.compile(r".*\.(?:lock|tmp)|lock|tmp\.pid_.*|__pycache__")


_ENGINE = re.compile(r"Initializing a V1 LLM engine \(v(\d[\w.+-]*)\) with config: (.*)")
_BATCHED = re.compile(r"\bmax_num_batched_tokens=(\d+)")
_LOGGED = (
    "dtype", "max_seq_len", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "quantization",
    "enforce_eager", "kv_cache_dtype", "device_config", "enable_prefix_caching", "enable_chunked_prefill",
)  # fmt: skip
"""Settings that are one word in vLLM's line on its engine; compilation_config is a dictionary."""
_ENUM = re.compile(r"<([\w.]+): [^<>]*>")


class VllmCache(ThirdPartyCache):
    """vLLM's compiled graphs."""

    name = "vllm"
    looks_like = f"vLLM keeps {COMPILED}/HASH/rank_0_0/… and {COMPILED}/{AOT}/HASH/… in its VLLM_CACHE_ROOT"
    variables = ("VLLM_CACHE_ROOT", "XDG_CACHE_HOME", "HOME")
    packages = ("vllm", "torch", "triton")
    must_match = ("version.*", "compiler*.device.name", "device.name", "machine", "cpu", "path", "env.VLLM_CACHE_ROOT")

    def root(self, folder: Path) -> Path:
        """Return the root; `folder` may be torch_compile_cache itself."""
        if (folder / COMPILED).is_dir():
            return folder
        return folder.parent if folder.resolve().name in {COMPILED, AOT} else folder

    def leaves_out(self, path: str) -> bool:
        """Return True for other folders of VLLM_CACHE_ROOT, which hold no compiled code (modelinfos, dummy_cache)."""
        return (
            path.partition("/")[0] not in {COMPILED, AOT} or _TEMPORARY.fullmatch(path.rpartition("/")[2]) is not None
        )

    def unit(self, path: str) -> str:
        parts = path.split("/")
        depth = 3 if parts[:2] == [COMPILED, AOT] else 2
        return "/".join(parts[:depth])

    def entries(self, tree: Tree) -> Iterable[str]:
        """Return hashes for which a rank has contents."""
        return {self.unit(path) for path in tree.files if any(map(_RANK.fullmatch, path.split("/")[2:-1]))}

    def incomplete(self, tree: Tree) -> Mapping[str, str]:
        """Return factors that are not JSON, and empty models and artifacts."""
        found = {}
        for path, file in tree.files.items():
            name = path.rpartition("/")[2]
            if name == FACTORS and tree.json_object(path) is None:
                found[self.unit(path)] = f"has a torn {FACTORS}"
            elif (name == MODEL or name.startswith(ARTIFACT)) and not file.size:
                found[self.unit(path)] = f"has an empty {name}"
        return found

    def facts(self, tree: Tree) -> Iterable[Fact]:
        """Yield the inputs of vLLM's key, as far as its files record them; hashes, ranks and prefixes."""
        for path in tree.files:
            parts = path.split("/")
            yield Fact("aot_hash" if AOT in parts[:2] else "hash", self.unit(path).rpartition("/")[2])
            yield from (Fact("rank", part) for part in parts[2:-1] if _RANK.fullmatch(part))
            if parts[-1] == FACTORS and (factors := tree.json_object(path)) is not None:
                yield from _factors(factors)
        yield from kernel_facts(tree, "/triton")
        yield from machine(tree)

    def logged(self, lines: Iterable[str]) -> Iterable[Fact]:
        """Return version.vllm, and settings as "setting.NAME", from the line on the engine's configuration.

        Paths and keys of clients are not among them.
        """
        found = dict[str, str]()
        for line in lines:
            if match := _ENGINE.search(line):
                found = {"version.vllm": match[1], **_settings(match[2])}
            elif match := _BATCHED.search(line):
                found["setting.max_num_batched_tokens"] = match[1]
        if "version.vllm" not in found:
            raise InputError('has no line "Initializing a V1 LLM engine", which vLLM logs at start')
        return [Fact(name, value) for name, value in found.items()]

    def recorded(self, folder: Path) -> Mapping[str, str]:
        """Return the features of this CPU where the cache has native code, which is compiled for them."""
        return native_cpu() if any(folder.rglob(f"*{LIBRARY}")) else {}

    def here(self, environment: Mapping[str, str], folder: Path) -> Mapping[str, str]:
        location = str(folder.absolute())
        return {"path": location, "env.VLLM_CACHE_ROOT": location, **machine_here(), **native_cpu(), **nvidia_gpu()}

    def location(self, environment: Mapping[str, str]) -> str | None:
        """Return the folder by the rules of vllm/envs.py."""
        if root := environment.get("VLLM_CACHE_ROOT"):
            return root
        if base := environment.get("XDG_CACHE_HOME"):
            return f"{base}/vllm"
        return f"{home}/.cache/vllm" if (home := environment.get("HOME")) else None

    def image(self, tree: Tree, facts: Mapping[str, str], entries: Collection[str]) -> ImageForm:
        ranks = _ranks(tree)
        formats = {rank["cache_save_format"] for rank in ranks}
        return kserve.image(
            "vllm", tree, entries, kserve.targets(facts), form="unpacked" if formats <= {"unpacked"} else "binary",
            files={"io.vllm.manifest/manifest.json": _manifest(ranks)} if ranks else {},
            framework="vllm", cache_type="torch-compile",
            cache_root_env=f"VLLM_CACHE_ROOT={facts.get('path', f'{kserve.HOME}/vllm')}",
            cache_mount_subpath=min(entries).partition("/")[0],
            cache_hash=",".join(sorted({entry.rpartition("/")[2] for entry in entries})),
        )  # fmt: skip


def _settings(text: str) -> dict[str, str]:
    """Settings of the engine's line, in its own words."""
    found = {f"setting.{name}": match[1] for name in _LOGGED if (match := re.search(rf"\b{name}=([^,(){{}}]*)", text))}
    name = "compilation_config"
    start = text.find(f"{name}={{") + len(name) + 1
    depth = 0
    for end, character in enumerate(text[start:] if start > len(name) else "", start + 1):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if not depth:
            with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
                found |= dict(flatten(f"setting.{name}", ast.literal_eval(_ENUM.sub(r"'\1'", text[start:end]))))
            break
    return found


def _factors(factors: Mapping[str, object]) -> Iterator[Fact]:
    for name, value in factors.items():
        if name == "code" and isinstance(value, list):
            for item in value:
                if isinstance(item, dict) and isinstance(item.get("path"), str):
                    yield Fact(f"code[{item['path']}]", str(item.get("hash", "")))
        else:
            yield from flatten(name, value)


def _ranks(tree: Tree) -> list[dict[str, Any]]:
    """Every folder of a rank (and prefix) with compiled artifacts, in the form of the image's manifest."""
    factors = [_rank(tree, path) for path in tree.files if path.rpartition("/")[2] == FACTORS]
    models = [path for path in tree.files if path.rpartition("/")[2] == MODEL and AOT in path.split("/")[:2]]
    return [*factors, *map(_model, models)]


def _model(path: str) -> dict[str, Any]:
    *_, name, rank, _ = path.split("/")
    return {
        "hash": name, "rank": rank, "prefix": "", "artifact_count": 1, "artifact_names": [MODEL],
        "cache_save_format": "mega-aot",
    }  # fmt: skip


def _rank(tree: Tree, path: str) -> dict[str, Any]:
    folder = path.rpartition("/")[0]
    _, name, rank, *prefix = folder.split("/")
    below = [other.removeprefix(folder + "/") for other in tree.files if other.startswith(f"{folder}/{ARTIFACT}")]
    artifacts = sorted({item.partition("/")[0] for item in below})
    factors = tree.json_object(path) or {}
    env = factors.get("env")
    environment = env if isinstance(env, dict) else {}
    return {
        "hash": name,
        "rank": rank,
        "prefix": "/".join(prefix),
        "artifact_count": len(artifacts),
        "artifact_names": artifacts,
        **{hashed: factors[hashed] for hashed in _HASHES if isinstance(factors.get(hashed), str)},
        "cache_save_format": "unpacked" if any("/" in item for item in below) else "binary",
        "target_device": str(environment.get("VLLM_TARGET_DEVICE", "")),
        "env": environment,
    }


def _manifest(ranks: list[dict[str, Any]]) -> bytes:
    found: dict[str, list[dict[str, Any]]] = {}
    for rank in ranks:
        found.setdefault(rank["hash"], []).append({name: value for name, value in rank.items() if name != "hash"})
    entries = [{"vllmHash": name, "cacheFormat": "binary", "binary": found[name]} for name in sorted(found)]
    return json.dumps({"vllm": entries}, indent=2, sort_keys=True).encode() + b"\n"
