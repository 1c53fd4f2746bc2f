"""Where the commands of a document, or of a section of one ("docs/page.md#section"), run, where that is not what
stand_ins.py brings to all: the devices, keys and stores that their sentences tell of."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pytest

from llmc.artifacts.store.store import Store
from llmc.artifacts.third_party.packing import pack
from llmc.integrations import compile_cache
from llmc.runtime.executors.fake import device
from llmc.runtime.executors.inductor import executor as inductor
from llmc.testing.toy import write_toy
from tests.artifacts.third_party import helpers as foreign
from tests.docs.commands import ROOT, Shown
from tests.docs.stand_ins import (
    LENGTH,
    LISTS,
    REQUESTS_LOG,
    Kit,
    Maker,
    bundle,
    encoder_bundle,
    folder_model,
    model,
    public_key,
    written,
)
from tests.fakes import cuda, gaudi

Words: TypeAlias = Mapping[str, str]
Prepare: TypeAlias = Callable[[Kit, Path, pytest.MonkeyPatch], Words | None]
"""What is done in a document's folder before its first command; it may return what stands for words of calls."""


@dataclass(frozen=True)
class Scene:
    """`before` the first command; `brought` in the place of what all documents get; `anew`: before a call that has
    these words, what the document says was made in between; `host` before such a call: the devices there; `rest`: what
    stands for "…" at the end of a call of a command; `brief`: other values of options whose own take minutes."""

    before: Prepare | None = None
    brought: Mapping[str, Maker] = field(default_factory=dict)
    anew: Mapping[str, Mapping[str, Maker]] = field(default_factory=dict)
    host: Mapping[str, Callable[[pytest.MonkeyPatch], object]] = field(default_factory=dict)
    rest: Words = field(default_factory=dict)
    brief: Words = field(default_factory=dict)


def trust(kit: Kit, here: Path, _: pytest.MonkeyPatch) -> None:
    """The key "release" is trusted."""
    public_key(kit, here / "release.pub")
    kit.run("cache", "trust", here / "release.pub", "--name", "us")


def toy(_: Kit, path: Path) -> None:
    write_toy(path, positions=LENGTH)


def trusted(kit: Kit, path: Path) -> None:
    kit.run("cache", "trust", path, "--name", "us")


def own_store(kit: Kit, here: Path, patch: pytest.MonkeyPatch) -> None:
    """One bundle is in the store; what all documents share is in `shared`."""
    (here / "shared").symlink_to(kit.folder / "cache")
    patch.setenv("LLMC_CACHE_DIR", str(here / "store"))
    toy = kit.kept("toy", partial(write_toy, positions=LENGTH))
    kit.run("compile", toy, "--device", "fake", "--max-model-len", 64, "--max-num-seqs", 2, "-o", here / "bundle")


def empty_store(_: Kit, here: Path, patch: pytest.MonkeyPatch) -> None:
    """Nothing in the store is signed."""
    patch.setenv("LLMC_CACHE_DIR", str(here / "store"))


def shared_store(patch: pytest.MonkeyPatch) -> None:
    """What a compile found in the shared store lies there alone."""
    patch.setenv("LLMC_SHARED_CACHE", "shared")


def another(kit: Kit, path: Path) -> None:
    """A bundle; nothing was pushed so far."""
    bundle(kit, path)
    for name in (path.parents[1] / "models").iterdir():
        shutil.rmtree(name)


def token(_: Kit, __: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("LLMC_ADMIN_TOKEN", "tok")


def no_token(patch: pytest.MonkeyPatch) -> None:
    """One is a single server's."""
    patch.delenv("LLMC_ADMIN_TOKEN")


def both(*steps: Prepare) -> Prepare:
    def prepare(kit: Kit, here: Path, patch: pytest.MonkeyPatch) -> Words:
        return {word: to for step in steps for word, to in (step(kit, here, patch) or {}).items()}

    return prepare


def neuron_cache(kit: Kit, here: Path, _: pytest.MonkeyPatch, name: str = "KEY") -> Words:
    """What a job on another host packed, an entry of the store; `name` is how the document writes its key."""
    built = pack(Store(kit.folder / "cache"), compile_cache("vllm-neuron"), foreign.make_neuron(here / "of-the-job"))
    return {name: built.entry.key.digest}


def unsigned_images(kit: Kit, here: Path, _: pytest.MonkeyPatch) -> None:
    bundle(kit, here / "unsigned")
    kit.run("cache", "push", f"oci-layout:{here / 'images'}:i8", here / "unsigned")


def vllm_cache(_: Kit, path: Path, dtype: str = "bfloat16", blocks: int = 2100) -> None:
    config = {"model": "Qwen/Qwen3-8B", "dtype": dtype, "cache_config": {"num_gpu_blocks": blocks}}
    compiler = {"system": {"device": {"name": "NVIDIA H100 80GB HBM3"}, "version": {"cuda": "12.9"}}}
    foreign.make_vllm(path, config={**config, "parallel_config": {"tensor_parallel_size": 2}}, compiler=compiler)


def gone(_: Kit, path: Path) -> None:
    """What was there is of another command, or another server's."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def outcome(kit: Kit, path: Path) -> None:
    """Of a compile, of which all is in the store."""
    toy = write_toy(path.with_name("made-of"))
    limits = ("--device", "fake", "--max-model-len", 32, "--max-num-seqs", 2)
    kit.run("compile", toy, *limits, "-o", path.with_name("made"), "--result", path)


def measured(kit: Kit, path: Path) -> None:
    bundle(kit, path.with_suffix(""))
    kit.run("bench", path.with_suffix(""), "-o", path)


def configuration(kit: Kit, path: Path) -> None:
    """A folder for vLLM on Gaudi."""
    lists = path.with_name("buckets.txt")
    lists.write_text(LISTS)
    limits = ("--max-model-len", 8192, "--max-num-seqs", 64, "--max-num-batched-tokens", 8192)
    kit.run("plan", "export", lists, "--server", "vllm-gaudi", *limits, "-o", path)


def signed(kit: Kit, path: Path, name: str = "release") -> None:
    bundle(kit, path)
    public_key(kit, path.with_name(f"{name}.pub"))
    kit.run("cache", "sign", path, "--key", path.with_name(name))


def demo_folder(_: Kit, here: Path, __: pytest.MonkeyPatch) -> None:
    """As scripts/demo.sh makes it."""
    (here / "demo").mkdir()


def prefill_hosts(_: Kit, here: Path, patch: pytest.MonkeyPatch) -> None:
    (here / "run").mkdir()
    patch.setenv("KEY", "a-key-of-more-than-thirty-two-bytes")


def gaudi_host(patch: pytest.MonkeyPatch, lazy: bool = False) -> None:
    gaudi.install(patch, lazy=lazy, FAKE_HPU_MEMORY=str(16 << 20))


def gpu_host(patch: pytest.MonkeyPatch) -> None:
    """The fake device's own."""
    patch.setattr(device, "here", device.FakeGpu())


def cuda_host(patch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled, which takes seconds."""
    patch.setattr(inductor, "whole_graph", lambda run: run)
    cuda.install(patch, memory=64 << 20)


def of_device(device: str) -> Maker:
    """A bundle of two layers of llama with fixed buckets."""

    def make(kit: Kit, path: Path) -> None:
        built = kit.kept(f"for-{device}", lambda into: gaudi.write_bundle(into, device)) / "bundle"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(built, path)

    return make


def plan(kit: Kit, path: Path) -> None:
    kit.run("plan", "--max-model-len", 2048, "--max-num-seqs", 8, "-o", path)


SMALL = {"--max-model-len": "128", "--max-num-seqs": "2"}
ONE_BUCKET = {**dict.fromkeys(("--prompt-batch", "--decode-batch"), "1,1,1"), "--max-num-seqs": "1"}
ONE_BUCKET |= dict.fromkeys(("--prompt-seq", "--decode-seq"), "128,128,128")
ONE_BUCKET |= {"--max-model-len": "128", "--max-prompt-len": "127"}
"""Of each phase: what takes seconds a bucket."""
ragged = partial(bundle, device="fake:ragged", name="ragged")
capturing = partial(bundle, device="fake:graphs=20000000", name="capturing")
portable = partial(bundle, device="fake:portable", name="portable")
embedding = partial(encoder_bundle, task="embed")

SCENES: Mapping[str, Scene] = {
    "README.md": Scene(anew={"cache push": {"bundle": bundle}}),
    "docs/commands.md": Scene(
        both(token, trust, partial(neuron_cache, name="3fa9c2")),
        rest={
            "deploy": "--image registry.example.com/llmc:0.1.0 --bundle-image oci://registry.example.com/models/m:1",
            "plan": "--gb-per-s 3 --model MODEL --prompt-len 64 --output-len 8",
        },
        brought={
            "MODEL": partial(model, positions=4096),
            "other.json": plan,
            "server.log": written(REQUESTS_LOG),
            "done.json": outcome,
            "x.json": measured,
            "y.json": measured,
        },
        anew={
            "--compiled": {"bundle": bundle},
            "--graph-reserved-mem": {"bundle": capturing},
            "--certify": {"bundle": bundle},
            "--texts": {"bundle": embedding},
            "cache push": {"bundle": bundle},
            "keygen": {"release": gone, "release.pub": gone},
        },
        host={"--replicas": no_token},
    ),
    "docs/cuda.md#from-ci-to-a-gpu-host": Scene(empty_store, brief=ONE_BUCKET),
    "docs/cuda.md#cuda-graphs-of-inductor-bundles": Scene(
        brought={"bundle": of_device("inductor")}, host={"warmup": cuda_host}
    ),
    "docs/cuda.md": Scene(brief=ONE_BUCKET, anew={"serve": {"bundle": bundle}}),
    "docs/quickstart.md#the-demo": Scene(demo_folder),
    "docs/deploying.md": Scene(brought={"configuration": configuration}),
    "docs/encoders.md": Scene(brief={"--max-num-seqs": "2", "--max-model-len": "64"}),
    "docs/accelerators.md#on-target-compilation": Scene(
        brought={"MODEL": folder_model},
        anew={"--resume": {"bundle": portable}, "warmup": {"bundle": portable}},
        host={"--resume": gpu_host, "warmup": gpu_host},
    ),
    "docs/servers.md#third-party-compile-caches": Scene(
        trust, brought={".cache/vllm": vllm_cache, "other": partial(vllm_cache, dtype="float16", blocks=1900)}
    ),
    "docs/accelerators.md": Scene(
        brief=SMALL,
        anew={"--no-compile": {"bundle": of_device("hpu")}},
        host={"--no-compile": partial(gaudi_host, lazy=True)},
    ),
    "docs/disaggregated.md": Scene(prefill_hosts),
    "docs/cuda.md#aotinductor": Scene(brief=SMALL),
    "docs/planning.md#the-closed-loop": Scene(token),
    "docs/accelerators.md#lpus-hyperaccel": Scene(
        host={"smollm2.gguf": lambda patch: patch.delenv("LLMC_HYPERDEX_PYTHON")}
    ),
    "docs/accelerators.md#aws-trainium-and-inferentia": Scene(neuron_cache, brief={**ONE_BUCKET, "--max-tokens": "4"}),
    "docs/sharing.md#archives-bundles-as-one-file": Scene(empty_store),
    "docs/sharing.md#bundles-in-container-registries": Scene(
        both(empty_store, trust, unsigned_images), brought={"m": signed}
    ),
    "docs/serving.md": Scene(brought={"plan.json": plan}),
    "docs/servers.md": Scene(brought={"plan.json": plan}, anew={"plan tune": {"configuration": gone}}),
    "docs/sharing.md#signatures-and-provenance": Scene(
        anew={"--prompt hello": {"bundle": partial(signed, name="another")}}
    ),
    "docs/sharing.md": Scene(
        own_store,
        brought={"smollm2-demo": toy, "smollm2-cpu": another},
        rest={"compile": "--device fake --max-model-len 32 --max-num-seqs 2 -o made"},
        anew={
            "--kind bundle -o bundle": {"bundle": gone, "store": gone},
            "-o ./copy": {"../trusted": gone, "store": gone},
            "-o ./served": {"release.pub": trusted, "store": gone},
        },
        host={"./model": shared_store, "cache verify": shared_store},
    ),
    "docs/serving.md#prompt-lookup-speculation": Scene(brought={"bundle": ragged}),
    "docs/planning.md#traffic": Scene(brought={"server.log": written(REQUESTS_LOG)}),
    "docs/xla.md#tpus": Scene(brief=ONE_BUCKET),
    "docs/xla.md": Scene(
        brief={
            **{"--max-model-len": "256", "--max-prompt-len": "128", "--max-num-seqs": "1"},
            "--executable": "decode batch=1 context=256",
        }
    ),
}


def unit_of(one: Shown) -> str:
    """What a line is rehearsed with: its section if that has a scene, else its document."""
    page = one.document.relative_to(ROOT).as_posix() if one.document.is_relative_to(ROOT) else one.document.name
    return name if (name := f"{page}#{one.section}") in SCENES else page
