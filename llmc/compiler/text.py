"""Tokenizer and chat template of a checkpoint, as files of a bundle; large vocabularies also get an index.

runtime/text/vocabulary.py has the format of the index, which works only for byte-level BPE, whose decoder joins bytes
and whose tokens are substrings of words. It does not work where a word is altered before its lookup (prefixes and
suffixes of subwords, dropout) or where bytes stand in for tokens. It does not work where added tokens swallow spaces or
match normalised text either. Tokenizer and index must encode a sample of texts identically.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc.compiler.code import code_digest
from llmc.compiler.stages import Stages
from llmc.errors import ArtifactError, CheckpointError, InputError, NoTokenizerError, OverloadedError
from llmc.runtime.text.chat_format import CHAT_FORMAT, ChatFormat
from llmc.runtime.text.confined_chat import ConfinedTemplate
from llmc.runtime.text.confined_encoding import require_sound
from llmc.runtime.text.tokenizer import Tokenizer
from llmc.runtime.text.vocabulary import BASE, MAGIC, VOCABULARY, Vocabulary

if TYPE_CHECKING:
    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.workspace import Workspace

SMALLEST = 256 << 10
"""Bytes of a tokenizer.json from which on an index loads faster."""
SAMPLE = (
    "The capital of France is Paris; isn't it? It's 1,234.5 km away (or 767 miles).",
    "Grüße aus Köln — ça va?  Ünïcödé, naïve café; Ελληνικά, Русский, العربية, हिन्दी, ไทย.",
    "日本語のテキスト、中文文本，한국어 텍스트 😀👩‍👩‍👧‍👦 e\u0301 \u2028 \u00a0.",
    "def f(x):\n\treturn {k: v**2 for k, v in x.items() if not v}  # comment\r\n\n\n        pass\n",
    " leading and trailing   spaces   ",
    "",
    "a",
    "<|im_start|>user\nhi<|im_end|>\n",
    "antidisestablishmentarianism" * 3,
)
_MODULUS = 1 << 64


def build_index(data: bytes, smallest: int = SMALLEST) -> bytes | None:
    """Build the index of a tokenizer.json; None where it has no use, or would be wrong."""
    if len(data) < smallest:
        return None
    try:
        skeleton = json.loads(data)
        model = skeleton["model"]
        if not _is_plain(skeleton, model):
            return None
        vocabulary: dict[str, int] = dict(model["vocab"])
        merges = [tuple(m.split(" ") if isinstance(m, str) else m) for m in model["merges"]]
        vocabulary |= {token["content"]: token["id"] for token in skeleton["added_tokens"]}
        index = _written(skeleton, vocabulary, merges)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # an unknown form of tokenizer.json
    return index if index is not None and _encodes_alike(data, index) else None


def _is_plain(whole: dict[str, Any], model: dict[str, Any]) -> bool:
    altering = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    swallowing = ("lstrip", "rstrip", "single_word")
    added = whole["added_tokens"]
    return (
        model["type"] == "BPE"
        and not any(model.get(name) for name in altering)
        and (whole["decoder"] or {}).get("type") == "ByteLevel"
        and whole["pre_tokenizer"] is not None
        and not any(token.get(name) for token in added for name in swallowing)
        and not (whole["normalizer"] is not None and any(token.get("normalized") for token in added))
    )


def _written(skeleton: dict[str, Any], vocabulary: dict[str, int], merges: list[tuple[str, ...]]) -> bytes | None:
    names = {index: token.encode() for token, index in vocabulary.items()}
    if len(names) < len(vocabulary) or any(not name or b"\0" in name for name in names.values()):
        return None
    hashes = {_hash(name): index for index, name in names.items()}
    if len(hashes) < len(names):
        return None
    built = sorted(
        (vocabulary[left + right], rank, vocabulary[left], vocabulary[right])
        for rank, (left, right) in enumerate(merges)
    )
    pieces = [names.get(index, b"") for index in range(max(names) + 1)]
    text = b"".join(pieces)
    head = json.dumps(
        {
            "skeleton": {**skeleton, "model": {**skeleton["model"], "vocab": {}, "merges": []}},
            "tokens": len(hashes), "merges": len(built), "ids": len(pieces), "bytes": len(text),
            "lengths": sorted({len(name) for name in names.values()}),
        },
        ensure_ascii=False, sort_keys=True,
    ).encode()  # fmt: skip
    start = MAGIC + len(head).to_bytes(4, "little") + head
    ordered = sorted(hashes)
    arrays = [
        np.array(ordered, "<u8"),
        np.array([hashes[h] for h in ordered], "<u4"),
        np.cumsum([0, *map(len, pieces)]).astype("<u4"),
        *np.array(built, "<u4").reshape(-1, 4).T,
    ]
    return b"".join([start, b"\0" * (-len(start) % 8), *(array.tobytes() for array in arrays), text])


def _hash(name: bytes) -> int:
    total, power = 0, 1
    for byte in name:
        total += (byte + 1) * power
        power = power * BASE % _MODULUS
    return total % _MODULUS


def _encodes_alike(data: bytes, index: bytes) -> bool:
    whole, vocabulary = Tokenizer(data), Vocabulary(index)
    for text in SAMPLE:
        cut = vocabulary.cut(text)
        if cut is None:
            continue
        part = Tokenizer(cut.encode())
        if any(part.encode(text, special) != whole.encode(text, special) for special in (True, False)):
            return False
    return True


def text_files(stages: Stages) -> dict[str, str]:
    """Digest of each file by name; the bundle of a checkpoint without a tokenizer takes token ids.

    Raises CheckpointError for a tokenizer that is damaged, or that runtime/text/bounds.py refuses.
    """

    def build(workspace: Workspace) -> Mapping[str, Blob]:
        built = {}
        try:
            tokenizer = stages.checkpoint.tokenizer_json()
        except NoTokenizerError as e:
            workspace.meta["no_tokenizer"] = str(e)
        else:
            try:
                require_sound(tokenizer)
            except ArtifactError as error:
                raise CheckpointError(f"{stages.checkpoint.path}: {error}") from error
            built["tokenizer.json"] = workspace.put_bytes(tokenizer)
            index = build_index(tokenizer)
            if index is not None:
                built[VOCABULARY] = workspace.put_bytes(index)
        template = stages.checkpoint.chat_template()
        if template:
            built["chat_template.jinja"] = workspace.put_bytes(template.encode())
            form = _chat_format(template, stages.checkpoint.special_tokens())
            if form is not None:
                built[CHAT_FORMAT] = workspace.put_bytes(json.dumps(form.to_dict(), ensure_ascii=False).encode())
        return built

    components = {**stages.reading(tokenizer=True), "code": code_digest(text_files, type(stages.checkpoint))}
    return {name: blob.digest for name, blob in stages.run("tokenizer", components, build).outputs.items()}


def _chat_format(template: str, special_tokens: Mapping[str, str]) -> ChatFormat | None:
    """What the template takes and its model writes; None for a template that cannot be tried, which serving reports."""
    confined = ConfinedTemplate(template, special_tokens)
    try:
        return confined.form
    except (InputError, OverloadedError):
        return None
    finally:
        confined.close()
