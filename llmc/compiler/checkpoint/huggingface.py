"""A Hugging Face folder: config.json, safetensors (one file or shards with an index), tokenizer.json."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import canonical_json
from llmc.compiler.architectures import require_supported
from llmc.compiler.architectures.encoders import ENCODERS
from llmc.compiler.architectures.shared.wrappers import text_config, text_tensors
from llmc.compiler.checkpoint.base import (
    CONFIG,
    Checkpoint,
    FloatArray,
    QuantisedBlocks,
    either,
    folder_name,
    require_content,
    unknown_tensor,
    without_path,
)
from llmc.compiler.checkpoint.quantised import (
    STATED,
    QuantisedTensor,
    StoredTensors,
    in_models_order,
    is_read,
    read_quantised,
)
from llmc.compiler.checkpoint.safetensors_file import SafetensorsFile
from llmc.errors import CheckpointError, NoTokenizerError

if TYPE_CHECKING:
    from llmc.compiler.architectures.shared.base import Architecture
    from llmc.compiler.architectures.shared.block_form import BlockForm


ArchitectureReader: TypeAlias = "Callable[[Mapping[str, Any]], Architecture]"
"""Returns a configuration's architecture. Passed in, because readers of weights are in keys and architectures are not.
"""

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOOL_USE = "additional_chat_templates/tool_use.jinja"
_SMALL_FILES = (
    CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "chat_template.json", TOOL_USE,
)  # fmt: skip
_VOCABULARY = re.compile(
    r"tokenizer\.model(\.v\d+)?|tekken\.json|.+\.tiktoken|spiece\.model|sentencepiece.*\.model|vocab\.(json|txt)"
)
"""Tokenizers in other files: SentencePiece, Mistral's, OpenAI's, GPT-2's and BERT's."""
_VALUES = frozenset({*_SMALL_FILES, INDEX} - {"tokenizer.json", "chat_template.jinja", TOOL_USE})
"""Files that are read as JSON values; the excluded ones go into bundles byte by byte."""

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_SAMPLING = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_TORCH_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "consolidated.00.pth")


class HuggingFaceCheckpoint(Checkpoint):
    """A folder. Opening reads config, index and every shard's header, which detects missing and truncated shards."""

    format = "huggingface"

    def __init__(self, path: Path, name: str | None = None, facts: ArchitectureReader | None = None) -> None:
        super().__init__(path, name or folder_name(path))
        self._config = read_config_file(path / CONFIG, facts)
        try:
            files = _weight_files(path)
        except CheckpointError:  # an unsupported model is not worth a download
            if str(self._config["model_type"]).replace("-", "_") not in ENCODERS:
                require_supported(self._config)
            raise
        self._shards = {file: SafetensorsFile(path / file) for file in files}
        self._owner = {name: shard for shard in self._shards.values() for name in shard.tensors}
        self._check_index()
        raw = read_json(path / CONFIG)
        reading = read_quantised(raw, StoredTensors(path, self._owner))
        turned = facts(self._config).turned if facts else frozenset()
        self._quantised, self._unread = in_models_order(reading.tensors, turned), reading.notices
        parts = {part for tensor in self._quantised.values() for part in tensor.parts} | reading.left_out
        text, self.left_out = text_tensors(raw, (self._owner.keys() - parts) | self._quantised.keys())
        held = {name: stored for stored, name in text.items()}
        full = facts(self._config).names.in_full(held) if facts else {name: name for name in held}
        self._stored = {name: held[short] for name, short in full.items()}

    def _check_index(self) -> None:
        """The index decides which shard's tensor counts. Raises CheckpointError for one that its shard lacks."""
        if SINGLE in self._shards:
            return
        for name, file in _weight_map(self.path / INDEX).items():
            if name not in self._shards[file].tensors:
                raise CheckpointError(f"{self.path / file}: lacks tensor {name}, which {INDEX} says it has")
            self._owner[name] = self._shards[file]

    @property
    def config(self) -> dict[str, Any]:
        """config.json with transformers 4's rope fields moved to `rope_parameters`. A quantization_config is left out
        if its method is read, since tensors are dequantized then."""
        return {name: value for name, value in self._config.items() if name != STATED or not is_read(value)}

    def roles(self) -> dict[str, Path]:
        names = [file for file in _SMALL_FILES if (self.path / file).is_file()] + list(self._shards)
        if SINGLE not in self._shards:
            names.append(INDEX)
        return {name: self.path / name for name in names}

    def _value_digest(self, role: str) -> str | None:
        if role not in _VALUES:
            return None
        try:
            return digest_bytes(canonical_json(without_path(read_json(self.path / role))))
        except (CheckpointError, ValueError):  # invalid JSON, or JSON with NaN, counts by its bytes
            return None

    def tensor_names(self) -> list[str]:
        """Names of the causal language model, even if the checkpoint was saved without lm_head under shorter names."""
        return sorted(self._stored)

    def _where(self, name: str) -> str:
        if name not in self._stored:
            raise unknown_tensor(name, self.path, self.tensor_names())
        return self._stored[name]

    def _quantized(self, name: str) -> QuantisedTensor | None:
        return self._quantised.get(self._where(name))

    def shape(self, name: str) -> tuple[int, ...]:
        found, stored = self._quantized(name), self._where(name)
        return self._owner[stored].tensors[stored].shape if found is None else found.shape

    def tensor(self, name: str) -> FloatArray:
        """F64, F32, F16 or BF16 as float32, F32 as a view of the file; quantized tensors by their format's rule."""
        found, stored = self._quantized(name), self._where(name)
        return self._owner[stored].tensor(stored) if found is None else found.values()

    def stored_form(self, name: str) -> BlockForm | None:
        found = self._quantized(name)
        return None if found is None else found.form()

    def unkept(self, name: str) -> str | None:
        found = self._quantized(name)
        return None if found is None else found.unkept()

    def quantised_blocks(self, name: str) -> QuantisedBlocks | None:
        found = self._quantized(name)
        return None if found is None else found.blocks()

    def reordered_form(self, name: str) -> BlockForm | None:
        found = self._quantized(name)
        return None if found is None else found.reordered_form()

    def reordered_blocks(self, name: str) -> QuantisedBlocks | None:
        found = self._quantized(name)
        return None if found is None else found.reordered_blocks()

    def fill(self, name: str, out: FloatArray) -> None:
        stored = self._stored.get(name)
        if stored is None or stored in self._quantised or not self._owner[stored].fills(stored):
            super().fill(name, out)
        else:
            self._owner[stored].fill(stored, out)

    def forget(self) -> None:
        for shard in self._shards.values():
            shard.forget()

    def tokenizer_json(self) -> bytes:
        """The file's bytes. A folder with vocabulary files alone raises CheckpointError, not NoTokenizerError."""
        path = self.path / "tokenizer.json"
        if not path.is_file():
            if others := sorted(file.name for file in self.path.glob("*") if _VOCABULARY.fullmatch(file.name)):
                raise CheckpointError(
                    f"{self.path}: the tokenizer is in {others[0]}, and llmc reads tokenizer.json; write it with "
                    f"`AutoTokenizer.from_pretrained({str(self.path)!r}).save_pretrained({str(self.path)!r})` "
                    "from transformers"
                )
            raise NoTokenizerError(f"{self.path}: no tokenizer.json; fetch it to send text instead of token ids")
        read_json(path)
        return path.read_bytes()

    @cached_property
    def _tokenizer_config(self) -> dict[str, Any]:
        return optional_json(self.path / "tokenizer_config.json")

    def chat_template(self) -> str | None:
        """From chat_template.jinja, else chat_template.json, else tokenizer_config.json. A second template for requests
        with tools ("tool_use", in a list of named templates or in a folder) gives one that chooses between both."""
        template = optional_json(self.path / "chat_template.json").get("chat_template")
        template = template or self._tokenizer_config.get("chat_template")
        named: dict[Any, Any] = {"default": template}
        if isinstance(template, list):  # several named templates: [{"name": "default", "template": …}, …]
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        for name, file in (("default", "chat_template.jinja"), ("tool_use", TOOL_USE)):
            if (self.path / file).is_file():
                named[name] = _template_text(self.path / file)
        default, tool_use = (
            text if isinstance(text, str) else None for text in map(named.get, ("default", "tool_use"))
        )
        return default if tool_use is None else either(tool_use, default)

    def special_tokens(self) -> dict[str, str]:
        declared = {**optional_json(self.path / "special_tokens_map.json"), **self._tokenizer_config}
        found: dict[str, str] = {}
        for role in _SPECIAL:
            token = declared.get(role)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                found[role] = token
        return found

    def generation_config(self) -> dict[str, Any]:
        """generation_config.json over config.json; tokenizer_config.json's end token ends an answer as well. Raises
        CheckpointError for an id that is not an integer."""
        stated = optional_json(self.path / "generation_config.json")
        merged = {**self._config, **{key: value for key, value in stated.items() if value is not None}}
        ids: dict[str, Any] = {
            "bos_token_id": merged.get("bos_token_id"),
            "eos_token_ids": _as_list(merged.get("eos_token_id")),
            "pad_token_id": merged.get("pad_token_id"),
        }
        for value in (ids["bos_token_id"], ids["pad_token_id"], *ids["eos_token_ids"]):
            if value is not None and (type(value) is not int):
                raise CheckpointError(f"{self.path}: a token id in the configs is {value!r}, not an integer")
        if self._tokenizer_end is not None and self._tokenizer_end not in ids["eos_token_ids"]:
            ids["eos_token_ids"].append(self._tokenizer_end)
        return ids | {key: stated[key] for key in _SAMPLING if stated.get(key) is not None}

    @cached_property
    def _tokenizer_end(self) -> int | None:
        """Id of the end token that the tokenizer's files name."""
        text, path = self.special_tokens().get("eos_token"), self.path / "tokenizer.json"
        if text is None or not path.is_file():
            return None
        tokenizer = read_json(path)
        added, model = tokenizer.get("added_tokens"), tokenizer.get("model")
        known = model.get("vocab") if isinstance(model, dict) else None
        ids = {**known} if isinstance(known, dict) else {}
        for token in added if isinstance(added, list) else []:
            if isinstance(token, dict):
                ids[token.get("content")] = token.get("id")
        return found if type(found := ids.get(text)) is int else None

    @property
    def notices(self) -> Sequence[str]:
        stated = optional_json(self.path / "generation_config.json").get("eos_token_id")
        others, last = _as_list(self._config.get("eos_token_id") if stated is None else stated), self._tokenizer_end
        if last is None or last in others or not others:
            return self._unread
        text, listed = self.special_tokens()["eos_token"], ", ".join(map(str, others))
        return (*self._unread, f"end tokens: {listed}, and {last} ({text!r}), which only the tokenizer names")


def _as_list(ids: Any) -> list[Any]:
    return list(ids) if isinstance(ids, list) else [] if ids is None else [ids]


def read_config_file(path: Path, facts: ArchitectureReader | None = None) -> dict[str, Any]:
    """Read a config.json, or the text part's `text_config`, with its rope fields moved to `rope_parameters`
    (transformers 5), and with `facts` in common terms (`Architecture.in_common_terms`). Raises CheckpointError."""
    config = read_json(path)
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(f'{path}: not a model config: it has no "model_type"')
    config = _with_rope_parameters(text_config(config))
    return facts(config).in_common_terms(config) if facts else config


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises CheckpointError if it is missing, unreadable or not an object."""
    try:
        data = path.read_bytes()
        require_content(path, data)
        content = json.loads(data)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: a JSON object was expected, not {type(content).__name__}")
    return content


def optional_json(path: Path) -> dict[str, Any]:
    """`read_json`, or {} if there is no such file."""
    return read_json(path) if path.is_file() else {}


def _with_rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """transformers 4 wrote separate `rope_theta` and `rope_scaling` ({"type" or "rope_type", …})."""
    if config.get("rope_parameters") or "rope_theta" not in config:
        return config
    scaling = config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise CheckpointError(f"config.json: rope_scaling is {scaling!r}, not an object")
    kept = {key: value for key, value in scaling.items() if key != "type"}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    rest = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
    return rest | {"rope_parameters": {**kept, "rope_type": kind, "rope_theta": config["rope_theta"]}}


def _weight_files(path: Path) -> list[str]:
    """Names of the safetensors files. A single file takes precedence, as in transformers."""
    if (path / SINGLE).is_file():
        return [SINGLE]
    if (path / INDEX).is_file():
        files = sorted(set(_weight_map(path / INDEX).values()))
        missing = [file for file in files if not (path / file).is_file()]
        if missing:
            raise CheckpointError(
                f"{path}: {len(missing)} of {len(files)} shards are missing: {', '.join(missing[:4])}; "
                "finish the download"
            )
        return files
    torch = [file for file in _TORCH_FILES if (path / file).exists()]
    advice = (
        f"{torch[0]} holds pickled weights, which llmc does not load: convert them with "
        "`AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)` (safetensors)"
        if torch
        else "download the weights, or plan from the config alone with `--config`"
    )
    raise CheckpointError(f"{path}: no weights (looked for {SINGLE} and {INDEX}); {advice}")


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: damaged: it has no weight_map; fetch it again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise CheckpointError(f"{index}: damaged or hostile: tensor {name} in file {file!r:.100}")
    return weight_map


class ConfigCheckpoint(HuggingFaceCheckpoint):
    """A configuration without weights: a config.json under any name.

    Next to a file called config.json, the tokenizer, chat template and generation_config.json count as in a folder;
    weights do not. `tensor_names` is empty; `shape` and `tensor` raise CheckpointError.
    """

    format = "config"

    def __init__(self, file: Path, name: str | None = None, facts: ArchitectureReader | None = None) -> None:
        together = file.name == CONFIG
        Checkpoint.__init__(self, file.parent if together else file, name or _name(file, together))
        self._file = file
        self._config = read_config_file(file, facts)
        self._shards, self._owner, self._quantised, self._unread = {}, {}, {}, ()
        self._stored = {}

    def roles(self) -> dict[str, Path]:
        beside = {name: path for name, path in super().roles().items() if name != INDEX}
        return {**beside, CONFIG: self._file}

    def _value_digest(self, role: str) -> str | None:
        if role == CONFIG:
            return digest_bytes(canonical_json(without_path(self._config)))
        return super()._value_digest(role)

    def shape(self, name: str) -> tuple[int, ...]:
        self._refuse()

    def tensor(self, name: str) -> FloatArray:
        self._refuse()

    def _quantized(self, name: str) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise CheckpointError(
            f"{self._file} is only a configuration, without weights; pass the folder or .gguf file that has them"
        )


def _name(file: Path, together: bool) -> str:
    return folder_name(file.parent) if together else file.stem


def _template_text(path: Path) -> str:
    try:
        data = path.read_bytes()
        require_content(path, data)
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read as UTF-8 text ({error})") from error


@dataclass(frozen=True)
class Convention:
    """How folders name experts that they store separately; transformers has one tensor [E, …] for all. Names after
    `model.layers.N.`. Source: transformers 5.23, conversion_mapping.py.

    `parts`: an expert's matrices (the name after `experts.N.`) → the merged tensor that holds them, in the order of its
    rows. `renamed`: pattern and replacement for tensors that only have another name.
    """

    parts: Mapping[str, str]
    renamed: tuple[tuple[str, str], ...] = ()


_GATE_UP = {
    "gate_proj.weight": "gate_up_proj", "up_proj.weight": "gate_up_proj", "down_proj.weight": "down_proj",
}  # fmt: skip
_W123 = {"w1.weight": "gate_up_proj", "w3.weight": "gate_up_proj", "w2.weight": "down_proj"}
CONVENTIONS = {
    "gate_up": Convention(_GATE_UP),
    "gate_up-statics": Convention(_GATE_UP, ((r"^mlp\.moe_statics\.", "mlp.gate.moe_statics."),)),
    "w123": Convention(_W123, ((r"^block_sparse_moe\.", "mlp."),)),
    "w123-router": Convention(_W123, ((r"^block_sparse_moe\.", "mlp."), (r"^mlp\.gate\.weight$", "mlp.router.weight"))),
    "up_down": Convention({"up_proj.weight": "up_proj", "down_proj.weight": "down_proj"}),
    "linear": Convention(
        {},
        (
            (r"^block_sparse_moe\.input_linear\.weight$", "block_sparse_moe.experts.gate_up_proj"),
            (r"^block_sparse_moe\.output_linear\.weight$", "block_sparse_moe.experts.down_proj"),
            (r"^block_sparse_moe\.router\.layer\.weight$", "block_sparse_moe.router.weight"),
        ),
    ),
}
_LAYER = re.compile(r"(model\.layers\.\d+\.)(.+)")
_EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(.+)")


class ExpertsCheckpoint(HuggingFaceCheckpoint):
    """A folder whose experts are merged on reading. `count`: config.json keys with the number of experts. Raises
    CheckpointError if the tensors have another number."""

    def __init__(
        self, path: Path, name: str | None, facts: ArchitectureReader | None, convention: str, count: Sequence[str]
    ) -> None:
        super().__init__(path, name, facts)
        self._count = count
        self._sources = self._merged(CONVENTIONS[convention])

    def _merged(self, convention: Convention) -> dict[str, list[list[str]]]:
        """transformers' name of each tensor → for each expert, the stored names of its parts in order."""
        order = list(convention.parts)
        found: dict[str, list[list[str]]] = {}
        experts: dict[str, dict[tuple[int, int], str]] = {}
        for stored in super().tensor_names():
            name = _renamed(stored, convention)
            part = _EXPERT.fullmatch(name)
            if part is None or part[3] not in convention.parts:
                found[name] = [[stored]]
                continue
            merged = f"{part[1]}.{convention.parts[part[3]]}"
            experts.setdefault(merged, {})[int(part[2]), order.index(part[3])] = stored
        for name, parts in experts.items():
            sides = sorted(i for i, part in enumerate(order) if convention.parts[part] == name.rpartition(".")[2])
            held = sorted({expert for expert, _ in parts})
            if set(parts) != {(expert, side) for expert in range(len(held)) for side in sides} or name in found:
                missing = next(
                    (f"{name.rpartition('.')[0]}.{e}.{order[s]}" for e in range(held[-1] + 1) for s in sides
                     if (e, s) not in parts), name,
                )  # fmt: skip
                raise CheckpointError(
                    f"{self.path}: experts are stored separately, and {missing} is missing: fetch it again"
                )
            found[name] = [[parts[expert, side] for side in sides] for expert in held]
        for name, sources in found.items():
            self._require_count(name, sources)
        return found

    def _require_count(self, name: str, parts: list[list[str]]) -> None:
        if not re.search(r"\bexperts\.(?:gate_up|down)_proj$", name):
            return
        stored = len(parts) if _EXPERT.search(parts[0][0]) else super().shape(parts[0][0])[0]
        stated = next((self._config[key] for key in self._count if self._config.get(key) is not None), None)
        if stored != stated:
            raise CheckpointError(
                f"{self.path}: {name} has {stored} experts, but {' or '.join(self._count)} in config.json says "
                f"{stated!r}: the configuration is of another model; fetch both again"
            )

    def tensor_names(self) -> list[str]:
        return sorted(self._sources)

    def _parts(self, name: str) -> list[list[str]]:
        """Stored names of each expert; for a tensor that is not merged, even an unknown one, its own name."""
        return self._sources.get(name, [[name]])

    def stored_form(self, name: str) -> BlockForm | None:
        """For a merged tensor, the form of all its parts if they differ in zero points at most; else None."""
        forms = [super(ExpertsCheckpoint, self).stored_form(part) for parts in self._parts(name) for part in parts]
        held = {form for form in forms if form is not None}
        alike = len({replace(form, offsets="") for form in held}) == 1 and None not in forms
        return max(held, key=lambda form: form.offsets) if alike else None

    def quantised_blocks(self, name: str) -> QuantisedBlocks | None:
        """For a merged tensor, [E · N, K]: experts stacked by rows."""
        if self.stored_form(name) is None:
            return None
        experts = self._parts(name)
        blocks = [super(ExpertsCheckpoint, self).quantised_blocks(part) for parts in experts for part in parts]
        return QuantisedBlocks.stacked([built for built in blocks if built is not None], len(experts))

    def reordered_form(self, name: str) -> BlockForm | None:
        """None for a merged tensor: experts keep the order of their inputs."""
        parts = self._parts(name)
        return None if _is_merged(parts) else super().reordered_form(parts[0][0])

    def reordered_blocks(self, name: str) -> QuantisedBlocks | None:
        parts = self._parts(name)
        return None if _is_merged(parts) else super().reordered_blocks(parts[0][0])

    def unkept(self, name: str) -> str | None:
        """For a merged tensor without blocks, the format of its first part, or a note that the parts differ."""
        first = self._parts(name)[0][0]
        if self.stored_form(name) is not None:
            return None
        return super().unkept(first) or ("experts in different forms" if super().stored_form(first) else None)

    def shape(self, name: str) -> tuple[int, ...]:
        parts = self._parts(name)
        if not _is_merged(parts):
            return super().shape(parts[0][0])
        rows, *rest = super().shape(parts[0][0])
        return (len(parts), rows * len(parts[0]), *rest)

    def tensor(self, name: str) -> FloatArray:
        parts = self._parts(name)
        if not _is_merged(parts):
            return super().tensor(parts[0][0])
        merged: FloatArray = np.empty(self.shape(name), np.float32)
        for expert, sources in enumerate(parts):
            rows = merged[expert].reshape(len(sources), -1, merged.shape[2])
            for side, source in enumerate(sources):
                matrix = super().tensor(source)
                if matrix.shape != rows[side].shape:
                    raise CheckpointError(
                        f"{self.path}: tensor {source} is {list(matrix.shape)}, another expert's "
                        f"{list(rows[side].shape)}: the checkpoint is damaged; fetch it again"
                    )
                rows[side] = matrix
        return merged


def _is_merged(parts: list[list[str]]) -> bool:
    return bool(_EXPERT.search(parts[0][0]))


def _renamed(stored: str, convention: Convention) -> str:
    found = _LAYER.fullmatch(stored)
    if found is None:
        return stored
    name = found[2]
    for pattern, new in convention.renamed:
        name = re.sub(pattern, new, name)
    return found[1] + name
