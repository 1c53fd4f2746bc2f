"""The engines that llmc is compared with, by name and precision, and what each needs installed.

A baseline is asked for as NAME or NAME:VARIANT, as in `openvino-genai` or `onnxruntime-genai:int4`. A variant is a
precision of the same weights, in a form that the baseline's own tools make (see baseline_models.py), or another
way of its to run them. `PINS` are the versions that the figures of docs/performance.md are of; others may do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmc.errors import InputError, UnknownNameError

PINS = {
    "onnxruntime-genai": "0.18.0",
    "onnxruntime": "1.31.1",
    "openvino-genai": "2026.4.1.0",
    "llama-cpp-python": "0.3.36",
    "torch": "2.13.0",
    "transformers": "5.23.0",
}
"""Distribution → version."""

APART = {"optimum-intel": "2.2.0", "nncf": "3.4.0"}
"""What only the cross-check `openvino-genai:int8-optimum` needs, in an environment of its own with openvino-genai:
optimum-intel takes older versions of transformers than the others."""


@dataclass(frozen=True)
class Variant:
    """`form` names the model's form (FORMS of baseline_models.py), `bits` what a weight has nominally, without scales;
    None where that is not one number.

    `options` go to the engine; `distributions` are what running and making it need beside the baseline's own.
    `searched` are options of the engine that the best value is searched for (tuning.py).
    """

    form: str
    bits: int | None
    options: Mapping[str, Any] = field(default_factory=dict)
    distributions: tuple[str, ...] = ()
    searched: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Baseline:
    """An engine: its file in engines/, what is to be installed, and its variants, the default one first."""

    name: str
    engine: str
    distributions: tuple[str, ...]
    variants: Mapping[str, Variant]


@dataclass(frozen=True)
class Requested:
    """A baseline in one of its variants."""

    baseline: Baseline
    variant_name: str

    @property
    def variant(self) -> Variant:
        """What the name stands for."""
        return self.baseline.variants[self.variant_name]

    @property
    def label(self) -> str:
        """As tables name it."""
        return f"{self.baseline.name} {self.variant_name}"

    @property
    def distributions(self) -> tuple[str, ...]:
        """All that has to be installed."""
        return self.baseline.distributions + self.variant.distributions


_BUILDER = ("onnxruntime", "torch", "transformers")
"""What onnxruntime-genai's model builder needs beside it, with onnx and onnx_ir, which have no pin."""

_PAGED = {"attention": "paged"}
_STEPS = {"batched_tokens": (256, 512, 1024, 2048)}
"""Tokens of one step of openvino-genai's scheduler; 256 is its default."""
_GENAI = {"chunk": (0, 512), "dynamic_block_base": (0, 4)}
"""Tokens that onnxruntime-genai computes of a prompt at once, 0 for all; and how finely ONNX Runtime's threads share
work ("session.dynamic_block_base"), 0 for its default."""
_MICRO_BATCHES = {"micro_batch": (256, 512, 1024)}
"""Tokens of one pass over the weights in llama.cpp; 512 is its default."""

BASELINES = {
    baseline.name: baseline
    for baseline in (
        Baseline(
            "onnxruntime-genai",
            "genai",
            ("onnxruntime-genai",),
            {
                "int8": Variant("genai-int8", 8, {}, _BUILDER, _GENAI),
                "int4": Variant("genai-int4", 4, {}, _BUILDER, _GENAI),
            },
        ),
        Baseline(
            "openvino-genai",
            "openvino_pipeline",
            ("openvino-genai",),
            {
                "int8": Variant("openvino-int8", 8, _PAGED, (), _STEPS),
                "int8-sym": Variant("openvino-int8-sym", 8, _PAGED, (), _STEPS),
                "int8-sdpa": Variant("openvino-int8", 8, {"attention": "sdpa"}),
                "q8_0": Variant("openvino-q8_0", 8, _PAGED, ("llama-cpp-python",), _STEPS),
                "int8-optimum": Variant("optimum-int8", 8, _PAGED, ("optimum-intel", "nncf"), _STEPS),
            },
        ),
        Baseline(
            "llama-cpp",
            "llama",
            ("llama-cpp-python",),
            {
                "q8_0": Variant("gguf-q8_0", 8, {}, (), _MICRO_BATCHES),
                "q4_1": Variant("gguf-q4_1", 4, {}, (), _MICRO_BATCHES),
                "q4_0": Variant("gguf-q4_0", 4, {}, (), _MICRO_BATCHES),
                "q4_k_m": Variant("gguf-q4_k_m", None, {}, (), _MICRO_BATCHES),
                "as-is": Variant("gguf-as-is", None, {}, (), _MICRO_BATCHES),
            },
        ),
        Baseline(
            "transformers",
            "eager",
            ("transformers", "torch"),
            {"f32": Variant("huggingface", 32), "bf16": Variant("huggingface", 16, {"dtype": "bfloat16"})},
        ),
    )
}
"""Name → baseline."""


def parse(text: str) -> list[Requested]:
    """Baselines from a comma-separated list; raises InputError for a name that is not known or comes twice."""
    found: list[Requested] = []
    for part in (p.strip() for p in text.split(",")):
        name, _, variant = part.partition(":")
        baseline = BASELINES.get(name)
        if baseline is None:
            raise UnknownNameError("baseline", name, BASELINES)
        if variant and variant not in baseline.variants:
            raise UnknownNameError(f"variant of {name}", variant, baseline.variants)
        requested = Requested(baseline, variant or next(iter(baseline.variants)))
        if requested in found:
            raise InputError(f"{part!r} is named twice in {text!r}")
        found.append(requested)
    return found


def requirement(distribution: str) -> str:
    """As pip takes it."""
    return f"{distribution}=={(PINS | APART)[distribution]}"
