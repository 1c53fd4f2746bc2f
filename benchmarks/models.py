"""The models of the suite, the bundles of each, and how they are compared with baselines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from baselines import compare
from baselines.catalogue import parse
from baselines.contenders import make_ready
from baselines.results import Comparison
from baselines.scope import Scope

from llmc.compiler.checkpoint import DEMO, open_checkpoint
from llmc.errors import LlmcError
from llmc.runtime.bundle import Bundle

HERE = Path(__file__).parent
LLMC = str(Path(sys.executable).with_name("llmc"))
GUIDE = [
    "--max-model-len", "2048", "--max-prompt-len", "1024", "--max-num-seqs", "4", "--prompt-batch", "1,32,4",
    "--prompt-seq", "128,128,1024", "--decode-batch", "1,128,4", "--decode-seq", "128,128,2048",
]  # fmt: skip
"""The Gaudi guide's example plan: 24 prompt and 48 decode buckets."""


@dataclass(frozen=True)
class Part:
    """Measurements that share their bundles, which are compiled with `flags`; `changes` are of the scope."""

    name: str
    kinds: tuple[str, ...]
    flags: tuple[str, ...]
    changes: Mapping[str, Any] = field(default_factory=dict)


PARTS = (
    Part("steps", ("quality", "decode", "prefill"), ("--max-model-len", "2304", "--max-num-seqs", "16")),
    Part(
        "long",
        ("prefill",),
        ("--max-model-len", "8192", "--max-num-seqs", "1"),
        {"prompts": (8128,), "tune": False, "rounds": 3},
    ),
    Part("start", ("first-token",), tuple(GUIDE)),
    Part("serving", ("memory", "streams", "trace"), ("--max-model-len", "1024", "--max-num-seqs", "8")),
)


@dataclass(frozen=True)
class Model:
    """`source` is what `llmc compile` takes, None: made by random_llama.py. `bundles`: name → flags of its compile."""

    name: str
    source: str | None
    bundles: dict[str, tuple[str, ...]]
    baselines: str


_BUNDLES = {
    "llmc onnxruntime int8": ("--device", "onnxruntime", "--quantize", "int8"),
    "llmc openvino int8": ("--device", "openvino", "--quantize", "int8"),
    "llmc openvino int8 specialised": (
        "--device",
        "openvino",
        "--quantize",
        "int8",
        "--specialise",
        "--specialise-memory",
        "4G",
    ),
}
_BASELINES = "onnxruntime-genai:int8,openvino-genai:int8,openvino-genai:int8-sdpa,llama-cpp:q8_0"
MODELS = (
    Model(
        "demo",
        DEMO,
        _BUNDLES
        | {
            "llmc onnxruntime keep": ("--device", "onnxruntime", "--quantize", "keep"),
            "llmc openvino keep": ("--device", "openvino", "--quantize", "keep"),
        },
        f"{_BASELINES},llama-cpp:q4_0,llama-cpp:q4_1,llama-cpp:q4_k_m,onnxruntime-genai:int4",
    ),
    Model("random", None, _BUNDLES, _BASELINES),
)


@dataclass(frozen=True)
class Setting:
    """Where the suite works, with what, and whom it tells."""

    work: Path
    baseline_python: str
    threads: int
    scope: Scope
    on_progress: Callable[[str], None]
    progress: Callable[[str, int, int], None]


def run(model: Model, setting: Setting) -> Comparison:
    """All parts of one model as one comparison; a bundle that does not compile is left out, which a note says."""
    source = model.source or _random(setting)
    checkpoint = open_checkpoint(source)
    found: Comparison | None = None
    for part in PARTS:
        kinds = tuple(kind for kind in part.kinds if kind in setting.scope.kinds)
        bundles, notes = _compiled(model, source, part, setting) if kinds else ({}, [])
        if not bundles:
            continue
        scope = replace(setting.scope, kinds=kinds, **part.changes)
        ready = make_ready(
            bundles, parse(model.baselines), checkpoint, setting.work / f"baselines-{model.name}",
            setting.baseline_python, lambda form: setting.on_progress(f"make {form}"), "quality" in scope.kinds,
        )  # fmt: skip
        one = compare.run(
            ready.contenders, scope, model=ready.model, threads=setting.threads, vocabulary=ready.vocabulary,
            logs=setting.work / "logs", progress=setting.progress, reference=ready.reference, texts=ready.texts,
            weights=ready.weights,
        )  # fmt: skip
        one.notes += notes
        if found is None:
            found = one
        else:
            found.series += one.series
            found.notes += [note for note in one.notes if note not in found.notes]
        found.save(setting.work / f"comparison-{model.name}.json")
    if found is None:
        raise LlmcError(f"no bundle of {model.name} could be compiled; see {setting.work}/compile-*.log")
    return found


def _random(setting: Setting) -> str:
    folder = setting.work / "random-llama"
    if not (folder / "model.safetensors").exists():
        setting.on_progress("make a model of random weights")
        subprocess.run([sys.executable, str(HERE / "random_llama.py"), str(folder)], check=True)
    return str(folder)


def _compiled(model: Model, source: str, part: Part, setting: Setting) -> tuple[dict[str, Bundle], list[str]]:
    bundles, notes = {}, []
    for name, flags in model.bundles.items():
        stem = f"{model.name}-{part.name}-{name.replace(' ', '-')}"
        log = setting.work / f"compile-{stem}.log"
        setting.on_progress(f"compile {name} for {part.name}")
        command = [
            LLMC, "compile", source, *flags, *part.flags, "--cache-dir", str(setting.work / "cache"), "-o",
            str(setting.work / stem), "-q",
        ]  # fmt: skip
        with log.open("w") as out:
            code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
        if code:
            said = (log.read_text().strip().splitlines() or ["nothing said"])[-1]
            notes.append(f"{name} could not be compiled for {part.name} (exit {code}): {said}")
            setting.on_progress(notes[-1])
        else:
            bundles[name] = Bundle.open(setting.work / stem)
    return bundles, notes
