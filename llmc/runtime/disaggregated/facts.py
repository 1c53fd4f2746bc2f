"""Properties that the prefill and decode sides must share, and the comparison of two sides.

Facts travel between processes as JSON, so they hold only strings, numbers, lists and objects of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from llmc.errors import ArtifactError, InputError

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.base import Executor

_CHECKPOINT = "checkpoint/"
_TOKENIZER = "tokenizer.json"
MAX_TENSORS = 1 << 14
_MAX_SIZE = 1 << 31


@dataclass(frozen=True)
class SideFacts:
    """Facts of one side.

    `name`: its bundle, for messages. `checkpoint`: the SHA-256 of each checkpoint file. `shapes`: (heads, head size) of
    each cache tensor. `cache_dtype`: as in Executor; `dtype` and `quantize`: of the compile. `longest_prompt` and
    `max_model_len`: in tokens, 0 if the plan has no limit.
    """

    name: str
    device: str
    checkpoint: dict[str, str]
    tokenizer: str
    vocab_size: int
    shapes: tuple[tuple[int, int], ...]
    cache_dtype: str
    dtype: str
    quantize: str
    max_model_len: int
    longest_prompt: int

    @classmethod
    def of(cls, bundle: Bundle, executor: Executor) -> SideFacts:
        """Read the facts of an open bundle.

        Exports an empty prefix from `executor`, so call it in the thread that runs `executor`.
        """
        manifest, dtype = bundle.manifest, executor.capabilities.cache_dtype
        definition = manifest.provenance.get("buildDefinition")
        found = definition.get("resolvedDependencies") if isinstance(definition, Mapping) else None
        shapes = tuple((int(t.shape[0]), int(t.shape[2])) for t in executor.export_prefix(0, 0))
        return cls(
            str(bundle.path), manifest.device, dict(_checkpoint_files(found)), manifest.files.get(_TOKENIZER, ""),
            bundle.size("vocab_size"), shapes, dtype, str(manifest.options.get("dtype", "")),
            str(manifest.options.get("quantize", "")), bundle.plan.limits.max_model_len,
            bundle.plan.limits.longest_prompt,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: object) -> SideFacts:
        """Parse the facts of another process. Raises InputError for anything but the output of `to_json`."""
        if not isinstance(found, Mapping) or set(found) != {one.name for one in fields(cls)}:
            raise InputError("the prefill side reports facts that this llmc does not know; use one version on both")
        values = dict(found)
        checkpoint, shapes = values["checkpoint"], values["shapes"]
        texts = ("name", "device", "tokenizer", "cache_dtype", "dtype", "quantize")
        sizes = ("vocab_size", "max_model_len", "longest_prompt")
        if not (
            all(isinstance(values[one], str) for one in texts)
            and all(_is_size(values[one]) for one in sizes)
            and isinstance(checkpoint, Mapping)
            and all(isinstance(one, str) for pair in checkpoint.items() for one in pair)
            and isinstance(shapes, list)
            and len(shapes) <= MAX_TENSORS
            and all(isinstance(s, list) and len(s) == 2 and all(map(_is_size, s)) for s in shapes)
        ):
            raise InputError("the prefill side reports invalid facts of its bundle")
        values["checkpoint"] = dict(checkpoint)
        values["shapes"] = tuple((s[0], s[1]) for s in shapes)
        return cls(**values)


def require_fit(prefill: SideFacts, decode: SideFacts) -> list[str]:
    """Raise ArtifactError that names the differences if one side cannot use the other's keys and values.

    Returns descriptions of harmless differences: quantization, dtype, and limits.
    """
    wrong = [*_model(prefill, decode), *_layout(prefill, decode)]
    if wrong:
        raise ArtifactError(
            f"{prefill.name} cannot compute prompts for {decode.name}: {'; '.join(wrong)}. Compile both from one "
            "checkpoint: llmc compile MODEL --prefill-device X --decode-device Y -o FOLDER"
        )
    differences = [
        f"{what} {mine} there, {theirs} here: keys and values come from the prefill side"
        for what, mine, theirs in (
            ("quantization is", prefill.quantize, decode.quantize), ("dtype is", prefill.dtype, decode.dtype),
        ) if mine != theirs
    ]  # fmt: skip
    if prefill.longest_prompt < decode.longest_prompt:
        differences.append(
            f"prompts of more than {prefill.longest_prompt} tokens (up to {decode.longest_prompt}) are computed here: "
            "the prefill side's plan ends there"
        )
    return differences


def _model(prefill: SideFacts, decode: SideFacts) -> Iterator[str]:
    if prefill.checkpoint != decode.checkpoint:
        names = sorted(set(prefill.checkpoint) | set(decode.checkpoint))
        differing = [n for n in names if prefill.checkpoint.get(n) != decode.checkpoint.get(n)]
        yield f"their checkpoints differ (in {', '.join(differing[:3])})"
    if prefill.tokenizer != decode.tokenizer:
        yield "their tokenizers differ"
    if prefill.vocab_size != decode.vocab_size:
        yield f"vocabularies of {prefill.vocab_size} and {decode.vocab_size} tokens"


def _layout(prefill: SideFacts, decode: SideFacts) -> Iterator[str]:
    if len(prefill.shapes) != len(decode.shapes):
        yield f"caches of {len(prefill.shapes)} and {len(decode.shapes)} tensors"
        return
    for at, (mine, theirs) in enumerate(zip(prefill.shapes, decode.shapes, strict=True)):
        if mine != theirs:
            yield (
                f"tensor {at} of the cache has {mine[0]} heads of {mine[1]} numbers there, {theirs[0]} of {theirs[1]} "
                "here"
            )
            return


def _checkpoint_files(dependencies: object) -> Iterator[tuple[str, str]]:
    for one in dependencies if isinstance(dependencies, list) else ():
        name = one.get("name") if isinstance(one, Mapping) else None
        digest = one.get("digest") if isinstance(one, Mapping) else None
        if isinstance(name, str) and name.startswith(_CHECKPOINT) and isinstance(digest, Mapping):
            yield name.removeprefix(_CHECKPOINT), str(digest.get("sha256"))


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_SIZE
