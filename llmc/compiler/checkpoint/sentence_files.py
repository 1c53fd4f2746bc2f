"""Files of sentence-transformers: pooling after the last layer, prompts, and truncation.

It reads modules.json, the config.json (and weights) of each module's folder, config_sentence_transformers.json and
sentence_bert_config.json. Without modules.json, sentence-transformers' own rule holds: the mean of all tokens for an
encoder, the last token for a decoder. Missing files and unsupported modules are refused by name. Source of the rules:
sentence-transformers 6.2.0, base/model.py, base/modules and sentence_transformer/modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from llmc.compiler.architectures.encoders import encoder_architecture
from llmc.compiler.checkpoint.huggingface import optional_json, read_json
from llmc.compiler.checkpoint.safetensors_file import SafetensorsFile
from llmc.errors import CheckpointError
from llmc.runtime.pooling.modules import MODES, Dense, Module, Normalize, Pooling, PoolingDescription, Task

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmc.compiler.checkpoint.base import Checkpoint

MODULES = "modules.json"
_LEGACY = {
    "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean", "pooling_mode_lasttoken": "lasttoken",
}  # fmt: skip
"""Switches of older files, in the order in which their vectors are concatenated."""
_ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": "identity", "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.Sigmoid": "sigmoid", "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu", "torch.nn.Identity": "identity", "torch.nn.Sigmoid": "sigmoid",
}  # fmt: skip
_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    "\n<Document>: ",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
"""Template around a query and a document. Source: the model card of Qwen/Qwen3-Reranker-0.6B."""
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
JUDGES = ("no", "yes")


class Read(NamedTuple):
    """The pooling after a model, and the arrays that it names."""

    description: PoolingDescription
    arrays: dict[str, NDArray[Any]]


def task_of(checkpoint: Checkpoint) -> Task | None:
    """A checkpoint's task according to its files; None: to generate text."""
    path, classes = Path(checkpoint.path), checkpoint.config.get("architectures") or [""]
    if any(str(name).endswith("ForSequenceClassification") for name in classes):
        return "score"
    if (path / MODULES).is_file():
        return "embed"
    try:
        causal = encoder_architecture(checkpoint.config).causal
    except CheckpointError:
        return None
    return None if causal and not str(classes[0]).endswith("Model") else "embed"


def judges(checkpoint: Checkpoint, task: Task) -> bool:
    """Whether a score compares a decoder's "yes" and "no", instead of using a classifier's logit."""
    classes = checkpoint.config.get("architectures") or [""]
    return task == "score" and any(str(name).endswith("ForCausalLM") for name in classes)


def read_description(checkpoint: Checkpoint, task: Task, max_length: int | None = None) -> Read:
    """Read what follows the model of `checkpoint` for `task`. Texts have at most `max_length` tokens, or the
    checkpoint's own limit if that is less. Raises CheckpointError."""
    folder = Path(checkpoint.path)
    length = min(max_length or 1 << 40, _longest(checkpoint, folder))
    bert = optional_json(folder / "sentence_bert_config.json")
    if task == "score":
        return Read(_score(checkpoint, length), {})
    modules, arrays = _modules(checkpoint, folder)
    said = optional_json(folder / "config_sentence_transformers.json")
    prompts = said.get("prompts") or {}
    default = said.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointError(f"{folder}: config_sentence_transformers.json: prompts must map names to texts")
    if default is not None and default not in prompts:
        raise CheckpointError(
            f"{folder}: config_sentence_transformers.json names the default prompt {default!r}, but has "
            f"{', '.join(sorted(prompts)) or 'none'}"
        )
    built = PoolingDescription(
        "embed", length, tuple(modules), prompts, default, lowercase=bool(bert.get("do_lower_case", False))
    )
    return Read(built, arrays)


def _score(checkpoint: Checkpoint, length: int) -> PoolingDescription:
    config = checkpoint.config
    if judges(checkpoint, "score"):
        return PoolingDescription(
            "score", length, strip=False, activation="sigmoid", template=_RERANKER, instruction=_INSTRUCTION
        )
    said = (config.get("sentence_transformers") or {}).get("activation_fn")
    said = said or config.get("sbert_ce_default_activation_function")
    if said is not None and said not in _ACTIVATIONS:
        raise CheckpointError(f"{checkpoint.path}: config.json: activation {said!r} is not one of {_known()}")
    default = "sigmoid" if labels_of(config) == 1 else "identity"
    return PoolingDescription("score", length, strip=False, activation=_ACTIVATIONS.get(str(said), default))


def labels_of(config: Mapping[str, Any]) -> int:
    """Number of outputs of a classifier, by default 2 (transformers' PretrainedConfig)."""
    return len(config.get("id2label") or ()) or int(config.get("num_labels", 2))


def _longest(checkpoint: Checkpoint, folder: Path) -> int:
    reach = encoder_architecture(checkpoint.config).longest(checkpoint.config)
    said = optional_json(folder / "sentence_bert_config.json").get("max_seq_length")
    said = said or optional_json(folder / "tokenizer_config.json").get("model_max_length") or reach
    if not isinstance(said, int | float) or not said >= 1:
        raise CheckpointError(f"{folder}: the longest text is {said!r} tokens, which is not a length")
    return int(min(said, reach))


def _modules(checkpoint: Checkpoint, folder: Path) -> tuple[list[Module], dict[str, NDArray[Any]]]:
    if not (folder / MODULES).is_file():
        return [Pooling(("lasttoken" if encoder_architecture(checkpoint.config).causal else "mean",))], {}
    found: list[Module] = []
    arrays: dict[str, NDArray[Any]] = {}
    width = 0
    for index, (kind, location) in enumerate(_listed(folder)):
        where = folder / location
        if kind == "Transformer":
            if index:
                raise CheckpointError(f"{folder / MODULES}: module {index} is a second transformer")
        elif kind == "Pooling":
            found.append(pooling := _pooling(where, checkpoint))
            width = len(pooling.modes) * int(checkpoint.config.get("hidden_size", checkpoint.config.get("dim", 0)))
        elif kind == "Dense":
            found.append(dense := _dense(where, arrays, len(found)))
            if (given := arrays[dense.weight].shape[1]) != width:
                raise CheckpointError(f"{where}: a dense layer of {given} inputs follows a module with {width} outputs")
            width = arrays[dense.weight].shape[0]
        elif kind == "Normalize":
            found.append(Normalize())
        else:
            raise CheckpointError(
                f"{folder / MODULES}: module {index} is {kind!r}, which llmc does not compute; it computes "
                "Transformer, Pooling, Dense and Normalize"
            )
    if not found or not isinstance(found[0], Pooling) or sum(isinstance(m, Pooling) for m in found) > 1:
        raise CheckpointError(f"{folder / MODULES}: exactly one Pooling has to follow the Transformer")
    return found, arrays


def _listed(folder: Path) -> list[tuple[str, str]]:
    import json

    path = folder / MODULES
    try:
        entries = json.loads(path.read_bytes())
        found = [(str(e["type"]), str(e["path"])) for e in sorted(entries, key=lambda e: int(e["idx"]))]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as a list of modules ({error}); fetch it again") from error
    for kind, location in found:
        if not kind.startswith("sentence_transformers."):
            raise CheckpointError(f"{path}: {kind!r} is custom code, which llmc does not run")
        if Path(location).is_absolute() or ".." in Path(location).parts:
            raise CheckpointError(f"{path}: {location!r} is outside the checkpoint")
        if location and not (folder / location).is_dir() and not kind.endswith(".Normalize"):
            raise CheckpointError(f"{path}: names the folder {location!r}, which is missing; finish the download")
    return [(kind.rsplit(".", 1)[-1], location) for kind, location in found]


def _pooling(where: Path, checkpoint: Checkpoint) -> Pooling:
    said = read_json(where / "config.json")
    mode = said.get("pooling_mode")
    if mode is None:
        unknown = [k for k, on in said.items() if k.startswith("pooling_mode_") and on and k not in _LEGACY]
        modes = [name for key, name in _LEGACY.items() if said.get(key)] or ["mean"]
    else:
        modes = [mode] if isinstance(mode, str) else list(mode)
        unknown = [name for name in modes if name not in MODES]
    if unknown:
        raise CheckpointError(f"{where / 'config.json'}: pooling {unknown[0]!r} is not one of {', '.join(MODES)}")
    width = said.get("embedding_dimension", said.get("word_embedding_dimension"))
    hidden = checkpoint.config.get("hidden_size", checkpoint.config.get("dim"))
    if width is not None and width != hidden:
        raise CheckpointError(
            f"{where / 'config.json'}: pools vectors of {width} numbers; the model's have {hidden} (config.json)"
        )
    return Pooling(tuple(modes), bool(said.get("include_prompt", True)))


def _dense(where: Path, arrays: dict[str, NDArray[Any]], index: int) -> Dense:
    said = read_json(where / "config.json")
    activation = _ACTIVATIONS.get(str(said.get("activation_function", "torch.nn.modules.activation.Tanh")))
    if activation is None or said.get("use_residual"):
        raise CheckpointError(
            f"{where / 'config.json'}: a dense layer with activation {said.get('activation_function')!r}"
            f"{' and a residual' if said.get('use_residual') else ''} is not one llmc computes; it has {_known()}"
        )
    if not (where / "model.safetensors").is_file():
        raise CheckpointError(f"{where}: no model.safetensors with the weights of this dense layer; fetch it again")
    tensors = SafetensorsFile(where / "model.safetensors")
    shape = (said.get("out_features"), said.get("in_features"))
    bias = bool(said.get("bias", True))
    needed = {"linear.weight", *(["linear.bias"] if bias else [])}
    if set(tensors.tensors) != needed or tensors.tensors["linear.weight"].shape != shape:
        raise CheckpointError(f"{where}: its weights are not those of a layer {shape[1]} → {shape[0]} (config.json)")
    for name in needed:
        arrays[f"{index}.{name}"] = tensors.tensor(name)
    return Dense(f"{index}.linear.weight", f"{index}.linear.bias" if bias else None, activation)


def _known() -> str:
    return ", ".join(sorted(set(_ACTIVATIONS.values())))
