"""What documents name and none of their commands makes: tiny models, bundles, recordings, logs and keys, by name.

A tiny model takes the place of each checkpoint, under its name, so that compiles are of seconds.
"""

from __future__ import annotations

import json
import re
import shutil
import tarfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from llmc.cli.main import main
from llmc.testing.toy import write_toy
from tests.adapters import write_lora
from tests.artifacts.third_party import helpers as foreign
from tests.buckets.traffic.formats import logs
from tests.compiler import tiny
from tests.compiler.checkpoint import writers
from tests.compiler.checkpoint.quantised import packers
from tests.compiler.encoders_tiny import write_encoder
from tests.docs.commands import ROOT
from tests.hyperdex import interpreter
from tests.integrations.test_logs import TABLE

Maker: TypeAlias = Callable[["Kit", Path], object]
"""Makes what a name stands for, at a path."""

LENGTH = 1 << 17
"""Positions of every model: documents plan for up to 16,384."""


class Kit:
    """Makes what is missing; `folder` keeps what takes long, for all documents."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def bring(self, folder: Path, words: Sequence[str], makers: Mapping[str, Maker]) -> None:
        """What words of a call name, where it is not there."""
        for word in words:
            for name in (word, *word.split("=")):
                path = folder / name
                if not path.exists() and (
                    maker := makers.get(path.relative_to(folder).as_posix() if path.is_relative_to(folder) else "")
                ):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    maker(self, path)

    def kept(self, name: str, make: Callable[[Path], object]) -> Path:
        """A file or folder that is made once, and only copied."""
        if not (path := self.folder / name).exists():
            make(path)
        return path

    @staticmethod
    def run(*words: object) -> None:
        """A command that the document does not show."""
        assert main([str(word) for word in words]) == 0, words


def model(_: Kit, path: Path, positions: int = LENGTH) -> None:
    """In codes, as the demo model is; sure enough of its tokens that narrow numbers give the same ones."""
    scales = {"embed_tokens": 0.3, "_proj": 0.05}
    scaled = {
        name: one * next((scale for part, scale in scales.items() if part in name), 1)
        for name, one in writers.weights().items()
    }
    more = {"llama.context_length": positions, "tokenizer.chat_template": tiny.TEMPLATE}
    writers.write_gguf(path, scaled, types={"norm": "F32", "": "Q8_0"}, extra=more)


def config(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**writers.CONFIG, "max_position_embeddings": LENGTH, **fields}))


def folder_model(_: Kit, path: Path) -> None:
    tiny.write_model(path, "llama")


def awq_model(_: Kit, path: Path) -> None:
    packers.write(path, packers.awq_config(32), packers.awq(32))
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(written | {"max_position_embeddings": LENGTH}))


def encoder(_: Kit, path: Path, task: str = "embed", positions: int = 64) -> None:
    write_encoder(path, "bert", task, max_position_embeddings=positions)


def bundle(kit: Kit, path: Path, device: str = "fake", name: str = "bundle") -> None:
    """A toy's, whose sequences have up to 256 tokens. Compiled in the store that documents share, where its model is
    recorded: one of a document's own may be gone when another document uses the bundle."""

    def compiled(into: Path) -> None:
        toy = kit.kept("toy", partial(write_toy, positions=LENGTH))
        limits = ("--max-model-len", 256, "--max-num-seqs", 4)
        kit.run("compile", toy, "--device", device, *limits, "--cache-dir", kit.folder / "cache", "-o", into)

    copied(kit.kept(name, compiled), path)


def encoder_bundle(kit: Kit, path: Path, task: str) -> None:
    def compiled(into: Path) -> None:
        checkpoint = kit.kept(f"{task}-model", partial(encoder, kit, task=task))
        options = ("--device", "openvino", "--dtype", "f32", "--max-num-seqs", 2, "--task", task)
        kit.run("compile", checkpoint, *options, "-o", into)

    copied(kit.kept(f"{task}-bundle", compiled), path)


def copied(kept: Path, path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(kept, path)


def adapter(kit: Kit, path: Path) -> None:
    base = kit.kept("base.gguf", partial(model, kit))
    write_lora(path, base, [f"model.layers.{layer}.self_attn.q_proj" for layer in range(writers.LAYERS)])


def archive(kit: Kit, path: Path) -> None:
    bundle(kit, path.with_suffix(".exported"))
    kit.run("cache", "export", path, path.with_suffix(".exported"))


def torn(kit: Kit, path: Path) -> None:
    """An archive that ends within its largest file."""
    archive(kit, path)
    with tarfile.open(path) as tar:
        largest = max(tar, key=lambda member: member.size)
    path.write_bytes(path.read_bytes()[: largest.offset_data + largest.size // 2])


def evil(_: Kit, path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        link = tarfile.TarInfo("index.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)


def traffic(_: Kit, path: Path) -> None:
    shutil.copy(ROOT / "tests" / "data" / "azure_conv_sample.csv", path)


def short_traffic(_: Kit, path: Path) -> None:
    lines = [
        json.dumps({"time": 1795435205 + at / 4, "prompt_tokens": 5 + at % 30, "output_tokens": 3}) for at in range(600)
    ]
    path.write_text("\n".join(lines) + "\n")


def texts(_: Kit, path: Path) -> None:
    path.write_text("time,prompt_tokens,output_tokens\n" + "".join(f"{at},{5 + at % 30},0\n" for at in range(100)))


def written(text: str) -> Maker:
    return lambda _, path: path.write_text(text)


def key(kit: Kit, path: Path) -> None:
    kit.run("cache", "keygen", path)


def public_key(kit: Kit, path: Path) -> None:
    if not path.with_suffix("").exists():
        key(kit, path.with_suffix(""))


def fleet(kit: Kit, path: Path) -> None:
    """The page's own, with the bundle that it names."""
    (text,) = re.findall(r"```yaml\n# fleet\.yaml\n(.*?)```", (ROOT / "docs" / "planning.md").read_text(), re.DOTALL)
    path.write_text(text)
    kit.bring(path.parent, ["smollm2-demo"], BROUGHT)
    for name in re.findall(r"bundle: (\S+)", text):
        (path.parent / name).parent.mkdir()
        bundle(kit, path.parent / name)


def from_foreign(make: Callable[[Path], Path]) -> Maker:
    return lambda _, path: make(path)


LISTS = "(1, [128, 8192], 0)\n(64, 1, [64, 4096])\n"
"""Of vLLM on Gaudi."""
GAUDI = """\
INFO Generated 2 prompt buckets [bs, query, num_blocks]: [(1, 128, 0), (1, 8192, 0)]
INFO Generated 2 decode buckets [bs, query, num_blocks]: [(32, 1, 128), (32, 1, 4096)]
"""
OF_SERVERS = f"""\
{GAUDI}INFO compilation_config={{'mode': 3, 'cudagraph_capture_sizes': [4, 2, 1], 'x': 1}}
INFO Capture target decode CUDA graph begin. bs=[1, 2, 4, 64]
INFO Capture target prefill CUDA graph begin. num_tokens=[16, 8192]
INFO Prepared token paddings: [16, 64, 8192]
INFO Prepared attn request paddings: [8, 64]
"""
"""What each server says of its lists at its start, all in one log."""
REQUESTED = [
    line for at in range(4) for line in (logs.received(f"r{at}", 20 + at, at), logs.generated(f"r{at}", 4, at + 1))
]
REQUESTS_LOG = "\n".join(REQUESTED) + "\n"
ACCESS_LOG = "".join(
    json.dumps({"time_iso8601": f"2026-11-22T12:00:{at:02}Z", "upstream": {"in": 9 + at, "out": 4}}) + "\n"
    for at in range(9)
)

BROUGHT: Mapping[str, Maker] = {
    **dict.fromkeys(("MODEL", "model", "smollm2-demo", "SmolLM2-Q4_K_M.gguf", "smollm2.gguf"), model),
    **dict.fromkeys(("bge-small-en-v1.5", "bge-small-shape"), partial(encoder, positions=512)),
    "tiny-bert": encoder,
    **dict.fromkeys(("bundle", "copied", "current", "decode-bundle", "m", "prefill-bundle", "smollm2-cpu"), bundle),
    **dict.fromkeys(("smollm2-i8", "smollm2-f32", "u/rootfs"), bundle),
    **dict.fromkeys(("F", "G", "requests.csv", "traffic.csv", "yesterday.csv"), traffic),
    **dict.fromkeys(("replica-0.jsonl", "replica-1.jsonl", "traffic.jsonl"), short_traffic),
    **dict.fromkeys(("lines.txt", "my.txt", "some.txt"), written("A river.\nThe capital of France is Paris.\n" * 60)),
    **dict.fromkeys(("ADAPTER", "my-adapter", "sql-adapter", "french-adapter"), adapter),
    "SmolLM2-AWQ": awq_model,
    "tiny-llama": folder_model,
    "toy": lambda _, path: write_toy(path, positions=LENGTH),
    "toy-finetuned": lambda _, path: write_toy(path, positions=LENGTH, seed=1),
    "judge-bundle": partial(encoder_bundle, task="score"),
    "config.json": lambda _, path: config(path, num_attention_heads=8, num_key_value_heads=8),
    "smollm2/config.json": lambda _, path: config(path),
    "smollm2-cpu.tar": archive,
    "torn.tar": torn,
    "evil.tar": evil,
    "tests/data/azure_conv_sample.csv": traffic,
    "texts.csv": texts,
    "prompts.jsonl": written('{"prompt": "a"}\n{"prompt": "bc"}\n'),
    "buckets.txt": written(LISTS),
    "server.log": written(OF_SERVERS),
    "steps.log": written(TABLE),
    "access.log": written(ACCESS_LOG),
    "metrics.prom": written(logs.scrape([3, 2, 1], [4, 1, 0])),
    "release": key,
    "release.pub": public_key,
    "fleet.yaml": fleet,
    ".cache/vllm": from_foreign(foreign.make_vllm),
    ".cache/vllm/neuron/compile_cache": from_foreign(foreign.make_neuron),
    "mnt/recipes": from_foreign(foreign.make_gaudi),
    "cache/jax": from_foreign(foreign.make_jax),
    ".hdex-env/bin/python": lambda _, path: shutil.copy(interpreter(path.parent), path),
}
