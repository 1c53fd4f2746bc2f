from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmc.artifacts.third_party.base import compare, merge
from llmc.artifacts.third_party.contents import Tree, scan_tree
from llmc.errors import InputError
from llmc.integrations.host import native_cpu, nvidia_gpu
from llmc.integrations.vllm.cache import VllmCache
from tests.artifacts.third_party.helpers import AOT_HASH, HASH, make_vllm, write

CACHE = VllmCache()
KERNELS = f"torch_compile_cache/torch_aot_compile/{AOT_HASH}/inductor_cache/triton/0/ABC"


def tree(root: Path) -> Tree:
    return scan_tree(root, CACHE.leaves_out)


def facts(root: Path) -> dict[str, str]:
    return merge(CACHE.facts(tree(root)))


def test_the_root_is_found_from_the_folder_below_it(tmp_path: Path) -> None:
    make_vllm(tmp_path)
    assert CACHE.root(tmp_path) == CACHE.root(tmp_path / "torch_compile_cache") == tmp_path


def test_compiled_code_alone_belongs_to_it(tmp_path: Path) -> None:
    make_vllm(tmp_path)
    for name in ("x.lock", ".12.34.tmp", "tmp.pid_7_0", "__pycache__/x.pyc"):
        write(tmp_path / "torch_compile_cache" / HASH / name, "x")
    found = tree(tmp_path).files
    assert len(found) == 7 and {path.split("/")[0] for path in found} == {"torch_compile_cache"}


def test_parts_are_the_folders_of_a_hash_in_every_layout(tmp_path: Path) -> None:
    make_vllm(tmp_path)
    write(tmp_path / "torch_aot_compile" / AOT_HASH / "rank_0_0" / "model", "x")  # vLLM 0.13
    expected = {
        f"torch_compile_cache/{HASH}",
        f"torch_compile_cache/torch_aot_compile/{AOT_HASH}",
        f"torch_aot_compile/{AOT_HASH}",
    }
    assert set(CACHE.entries(tree(tmp_path))) == expected
    assert {CACHE.unit(path) for path in tree(tmp_path).files} == expected


def test_what_its_key_is_built_of_becomes_facts(tmp_path: Path) -> None:
    found = facts(make_vllm(tmp_path))
    assert found == {
        "aot_hash": AOT_HASH,
        "code[/opt/vllm/models/llama.py]": "aa",
        "code[<string>]": "",
        "code_hash": "f00d",
        "compiler.0.device.name": "NVIDIA H100 80GB HBM3",
        "compiler.0.version.cuda": "12.9",
        "compiler.1": "torch key",
        "compiler_hash": "beef",
        "config.dtype": "bfloat16",
        "config.num_gpu_blocks": "2100",
        "config.parallel_config.tensor_parallel_size": "2",
        "config_hash": "c0ffee",
        "env.VLLM_MAIN_CUDA_VERSION": "12.9",
        "env.VLLM_TARGET_DEVICE": "cuda",
        "hash": HASH,
        "rank": "rank_0_0 | rank_1_0",
    }


@pytest.mark.parametrize(
    "value", [[], {"env": []}, {"code": {"a": 1}}, {"code": [1, None]}, {"env": None, "x": [[[]]]}]
)
def test_factors_of_any_shape_are_read(tmp_path: Path, value: object) -> None:
    make_vllm(tmp_path)
    for path in tmp_path.rglob("cache_key_factors.json"):
        path.write_text(json.dumps(value))
    facts(tmp_path)


def test_torn_factors_and_empty_artifacts_are_half_written(tmp_path: Path) -> None:
    make_vllm(tmp_path)
    rank = tmp_path / "torch_compile_cache" / HASH / "rank_0_0" / "backbone"
    write(rank / "cache_key_factors.json", '{"env": {')
    write(tmp_path / "torch_compile_cache" / "torch_aot_compile" / AOT_HASH / "rank_0_0" / "model", "")
    assert CACHE.incomplete(tree(tmp_path)) == {
        f"torch_compile_cache/{HASH}": "has a torn cache_key_factors.json",
        f"torch_compile_cache/torch_aot_compile/{AOT_HASH}": "has an empty model",
    }


def test_tritons_absolute_paths_tie_it_to_its_folder(tmp_path: Path) -> None:
    make_vllm(tmp_path)
    write(tmp_path / KERNELS / "k.cubin", "x")
    group = {"child_paths": {"k.cubin": f"/cache/vllm/{KERNELS}/k.cubin"}}
    write(tmp_path / KERNELS / "__grp__k.json", json.dumps(group))
    write(tmp_path / KERNELS / "k.json", json.dumps({"target": {"backend": "cuda", "arch": 90, "warp_size": 32}}))
    found = facts(tmp_path)
    assert found["path"] == "/cache/vllm"
    assert [found[f"target.{name}"] for name in ("backend", "arch", "warp_size")] == ["cuda", "90", "32"]
    here = CACHE.here({}, tmp_path)
    assert {item.name for item in compare(found, CACHE.must_match, {}, here).mismatches} == {"path"}
    here = CACHE.here({}, Path("/cache/vllm"))
    assert not compare(found, CACHE.must_match, {}, here).mismatches


def test_a_key_that_covers_the_root_ties_it_to_its_folder(tmp_path: Path) -> None:
    make_vllm(tmp_path, env={"VLLM_CACHE_ROOT": "/cache/vllm"})
    (wrong,) = compare(facts(tmp_path), CACHE.must_match, {}, CACHE.here({}, tmp_path)).mismatches
    assert wrong.name == "env.VLLM_CACHE_ROOT"


@pytest.mark.parametrize("group", ["[]", "{", '{"child_paths": [1]}', '{"child_paths": {"a": "/elsewhere/x"}}'])
def test_other_groups_say_nothing(tmp_path: Path, group: str) -> None:
    make_vllm(tmp_path)
    write(tmp_path / KERNELS / "__grp__k.json", group)
    assert "path" not in facts(tmp_path)


@pytest.mark.parametrize(("code", "name"), [(62, "x86_64"), (183, "aarch64"), (190, None)])
def test_the_machine_is_read_from_its_libraries(tmp_path: Path, code: int, name: str | None) -> None:
    make_vllm(tmp_path)
    write(tmp_path / "torch_compile_cache" / HASH / "rank_0_0" / "x.so", b"\x7fELF" + bytes(14) + bytes([code, 0]))
    assert facts(tmp_path).get("machine") == name


def test_native_code_ties_a_cache_to_the_features_of_the_cpu(tmp_path: Path) -> None:
    make_vllm(tmp_path / "cache")
    assert CACHE.recorded(tmp_path / "cache") == {}
    write(tmp_path / "cache" / "torch_compile_cache" / HASH / "x.main.so", b"\x7fELF")
    assert CACHE.recorded(tmp_path / "cache") == native_cpu()
    write(tmp_path / "one", "processor: 0\nflags\t\t: fpu sse4_2 avx2 fma avx512f\n\nflags: other\n")
    write(tmp_path / "arm", "Features\t: fp asimd sve\n")
    assert native_cpu(tmp_path / "one") == {"cpu": "avx2 avx512f fma sse4_2"}
    assert native_cpu(tmp_path / "arm") == {"cpu": "asimd sve"}
    assert native_cpu(tmp_path / "none") == {}
    (wrong,) = compare(native_cpu(tmp_path / "one"), CACHE.must_match, {}, {"cpu": "avx2 fma sse4_2"}).mismatches
    assert str(wrong) == "cpu is avx2 avx512f fma sse4_2 in the cache, avx2 fma sse4_2 here"


def test_the_gpu_here_is_read_from_the_driver_and_compared(tmp_path: Path) -> None:
    for gpu in "01":
        write(tmp_path / gpu / "information", "Model: \t\t NVIDIA H200\nIRQ:   \t 1\n")
    here = nvidia_gpu(tmp_path)
    assert here == {"device.name": "NVIDIA H200"}
    (wrong,) = compare({"compiler.0.device.name": "NVIDIA H100"}, CACHE.must_match, {}, here).mismatches
    assert str(wrong) == "compiler.0.device.name is NVIDIA H100 in the cache, NVIDIA H200 here"
    write(tmp_path / "2" / "information", "Model: NVIDIA L4\n")
    assert nvidia_gpu(tmp_path) == {} == nvidia_gpu(tmp_path / "none")


@pytest.mark.parametrize(
    ("environment", "location"),
    [
        ({"VLLM_CACHE_ROOT": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/vllm"), ({"HOME": "/c"}, "/c/.cache/vllm"), ({}, None),
    ],
)  # fmt: skip
def test_where_vllm_looks(environment: dict[str, str], location: str | None) -> None:
    assert CACHE.location(environment) == location


ENGINE = (
    "(EngineCore pid=3139) INFO 11-30 10:48:50 [v1/engine/core.py:133] Initializing a V1 LLM engine ("
    "v0.32.0) with config: model='/models/secret', speculative_config=None, tokenizer='/models/secret"
    "', trust_remote_code=False, dtype=torch.float32, max_seq_len=1024, download_dir=None, tensor_par"
    "allel_size=1, quantization=None, enforce_eager=False, aux_output_config=AuxOutputConfig(enable_r"
    "eturn_routed_experts=False, max_bytes=None), kv_cache_dtype=auto, device_config=cpu, enable_pref"
    "ix_caching=True, enable_chunked_prefill=True, compilation_config={'mode': <CompilationMode.DYNAM"
    "O_TRACE_ONCE: 2>, 'backend': 'inductor', 'compile_ranges_endpoints': [1024], 'inductor_compile_c"
    "onfig': {'dce': True}, 'dynamic_shapes_config': {'type': <DynamicShapesType.BACKED: 'backed'>}, "
    "'static_all_moe_layers': []}, kernel_config=KernelConfig()"
)
"""The line of a real vLLM 0.32.0 on a CPU, shortened, with other paths."""


def test_the_start_up_log_states_the_settings_that_a_cache_holds_as_a_hash() -> None:
    lines = ["starting", "INFO Chunked prefill is enabled with max_num_batched_tokens=2048.", ENGINE,
             "INFO Chunked prefill is enabled with max_num_batched_tokens=1024."]  # fmt: skip
    found = merge(CACHE.logged(lines))
    assert found["version.vllm"] == "0.32.0"
    settings = {name.removeprefix("setting."): value for name, value in found.items() if name.startswith("setting.")}
    assert settings == {
        "dtype": "torch.float32", "max_seq_len": "1024", "tensor_parallel_size": "1", "quantization": "None",
        "enforce_eager": "False", "kv_cache_dtype": "auto", "device_config": "cpu", "enable_prefix_caching": "True",
        "enable_chunked_prefill": "True", "max_num_batched_tokens": "1024",
        "compilation_config.mode": "CompilationMode.DYNAMO_TRACE_ONCE", "compilation_config.backend": "inductor",
        "compilation_config.compile_ranges_endpoints": "[1024]",
        "compilation_config.inductor_compile_config.dce": "true",
        "compilation_config.dynamic_shapes_config.type": "DynamicShapesType.BACKED",
        "compilation_config.static_all_moe_layers": "[]",
    }  # fmt: skip
    assert not any("secret" in value for value in found.values())


@pytest.mark.parametrize("config", ["{'a': ", "{" * 3000, "{'a': f(1)}", "{'a': <x", ""])
def test_a_configuration_that_cannot_be_read_leaves_the_rest(config: str) -> None:
    text = f"Initializing a V1 LLM engine (v0.32.0) with config: dtype=bfloat16, compilation_config={config}"
    assert merge(CACHE.logged([text])) == {"version.vllm": "0.32.0", "setting.dtype": "bfloat16"}


def test_a_log_without_the_engine_is_refused() -> None:
    with pytest.raises(InputError, match='has no line "Initializing a V1 LLM engine"'):
        CACHE.logged(["INFO max_num_batched_tokens=1024"])
