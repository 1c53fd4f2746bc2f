"""Trace an embedding or scoring model once, with symbolic batch and length, length masks and no cache.

Program contract:
  inputs   token_ids [B, T] int64; lengths [B] int64 (1 … T live tokens, right padded: padding may hold any id);
           type_ids [B, T] int64 where the model has segments
  outputs  embed: hidden states after the last layer [B, T, H] float32, meaningless at padding;
           score: logits [B, labels]
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils import logging as transformers_logging

from llmc.compiler.architectures.encoders import encoder_architecture
from llmc.compiler.checkpoint.base import coded_names
from llmc.compiler.frontend.in_place import without_writes
from llmc.errors import CheckpointError, CompileError

if TYPE_CHECKING:
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.runtime.pooling.modules import Task

_LEFT_OUT = ("pooler.", "cls.", "lm_head.", "vocab_", "predictions.", "head.", "decoder.", "classifier.")
"""Name prefixes of checkpoint parts that an embedding model does not use; names of enclosing parts may come first."""


class Encode(nn.Module):
    """A model with the program contract above, in float32. `judges`: the ids of "no" and "yes", for a decoder that
    scores by their logits."""

    def __init__(self, checkpoint: Checkpoint, task: Task, judges: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.architecture = encoder_architecture(checkpoint.config)
        self.padding = self.architecture.padding_position(checkpoint.config)
        self.typed = self.architecture.token_types(checkpoint.config)
        self.model = _load(checkpoint, task, judges is not None)
        self.task = task
        self.last = task == "score" and self.architecture.causal
        if judges is not None:
            lm_head = self.model.get_output_embeddings().weight
            difference = (lm_head[judges[1]] - lm_head[judges[0]]).detach().clone()
            self.judge: nn.Module | None = nn.Linear(len(difference), 1, bias=False)
            self.judge.weight = nn.Parameter(difference[None], requires_grad=False)
            self.model = self.model.model
        elif self.last:
            self.judge, self.model = self.model.score, self.model.model
        else:
            self.judge = None

    def forward(self, token_ids: Tensor, lengths: Tensor, type_ids: Tensor | None = None) -> Tensor:
        positions = torch.arange(token_ids.shape[1])[None]
        mask = (positions < lengths[:, None]).long()
        if self.padding is not None:
            counted = (token_ids != self.padding).long() * mask
            positions = counted.cumsum(1) * counted + self.padding
        return self._result(token_ids, lengths, type_ids, attention_mask=mask, position_ids=positions)

    def unpadded(self, token_ids: Tensor, type_ids: Tensor | None = None) -> Tensor:
        """Run texts of one length, [B, T], with transformers' own masks and positions."""
        return self._result(token_ids, torch.full((len(token_ids),), token_ids.shape[1]), type_ids)

    def _result(self, token_ids: Tensor, lengths: Tensor, type_ids: Tensor | None, **inputs: Any) -> Tensor:
        if type_ids is not None:
            inputs["token_type_ids"] = type_ids
        if self.architecture.causal:
            inputs["use_cache"] = False
        out = self.model(input_ids=token_ids, **inputs)
        if self.judge is not None:
            hidden: Tensor = out.last_hidden_state
            return self.judge(hidden[torch.arange(token_ids.shape[0]), lengths - 1])
        found: Tensor = out.logits if self.task == "score" else out.last_hidden_state
        return found

    @property
    def inputs(self) -> tuple[str, ...]:
        return ("token_ids", "lengths", *(["type_ids"] if self.typed else []))


def trace_encoder(model: Encode) -> ExportedProgram:
    """Trace `model` into a program that holds its weights. Raises CompileError."""
    args, dims = _example(model)
    return _exported(model, model, args, dims)


class _Weightless(nn.Module):
    """A model whose parameters and buffers are one more input, {name: tensor}. It is kept out of nn.Module's
    registration, which leaves torch.export nothing to lift."""

    def __init__(self, model: Encode, names: Mapping[str, str]) -> None:
        super().__init__()
        self.__dict__["_model"] = model
        self._names = names

    def forward(self, token_ids: Tensor, lengths: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        return self._run(weights, token_ids, lengths)

    def _run(self, weights: Mapping[str, Tensor], *given: Tensor) -> Tensor:
        named = {self._names[name]: tensor for name, tensor in weights.items()}
        out: Tensor = torch.func.functional_call(self.__dict__["_model"], named, given)
        return out


class _WeightlessTyped(_Weightless):
    def forward(  # type: ignore[override] # the weights are a program's last input
        self, token_ids: Tensor, lengths: Tensor, type_ids: Tensor, weights: Mapping[str, Tensor]
    ) -> Tensor:
        return self._run(weights, token_ids, lengths, type_ids)


@dataclass(frozen=True)
class WeightlessEncoder:
    """A traced program that takes its weights as its last inputs: first `parameters` from the checkpoint, then
    `buffers`, which were computed from the configuration."""

    exported: ExportedProgram
    parameters: dict[str, tuple[int, ...]]
    buffers: dict[str, Tensor]


def trace_weightless_encoder(model: Encode, dtype: torch.dtype = torch.float32) -> WeightlessEncoder:
    """Trace `model` with parameters in `dtype`, into a program without tensors. Raises CompileError."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    names = {name.removeprefix("model."): name for name in tensors}
    parameters = {n: p for n, full in names.items() if isinstance(p := tensors[full], nn.Parameter)}
    buffers = {n: tensors[full] for n, full in names.items() if n not in parameters}
    weights = {n: p.detach().to(dtype) for n, p in parameters.items()} | buffers
    args, dims = _example(model)
    module = (_WeightlessTyped if model.typed else _Weightless)(model, names)
    exported = _exported(model, module, (*args, weights), {**dims, "weights": dict.fromkeys(weights)})
    return WeightlessEncoder(without_writes(exported), {n: tuple(p.shape) for n, p in parameters.items()}, buffers)


def _example(model: Encode) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    dynamic, lengths = Dim.DYNAMIC, torch.tensor([16, 9])
    ids = torch.ones(2, 16, dtype=torch.long)
    both = {0: dynamic, 1: dynamic}
    given = (ids, lengths, torch.zeros_like(ids))[: len(model.inputs)]
    return given, dict(zip(model.inputs, (both, {0: dynamic}, both), strict=False))


def _exported(model: Encode, module: nn.Module, args: tuple[Any, ...], dims: Mapping[str, Any]) -> ExportedProgram:
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return torch.export.export(
                module, args, strict=False, prefer_deferred_runtime_asserts_over_guards=True, dynamic_shapes=dict(dims)
            )
    except Exception as e:
        raise CompileError(f"tracing {type(model.model).__name__} with torch.export failed: {e}") from e


def _load(checkpoint: Checkpoint, task: Task, generative: bool) -> nn.Module:
    """Raises CheckpointError for missing tensors and for unread ones."""
    if coded_names(checkpoint):
        raise CheckpointError(
            f"{checkpoint.path}: its weights are quantized, and --task {task} needs unquantized ones: take the "
            "unquantized checkpoint, and let `llmc compile --quantize` quantize it"
        )
    kind = AutoModel
    if task == "score":
        kind = AutoModelForCausalLM if generative else AutoModelForSequenceClassification
    transformers_logging.set_verbosity_error()
    folder = Path(checkpoint.path)
    if checkpoint.format.endswith(("+lora", "+adapters")):
        raise CheckpointError(
            f"{checkpoint.requested}: only models that generate can use LoRA adapters; merge this one with PEFT "
            "(`merge_and_unload`) and compile the result"
        )
    extra: dict[str, Any] = {"add_pooling_layer": False} if task == "embed" else {}
    try:
        model, info = _from_pretrained(kind, folder, encoder_architecture(checkpoint.config).attention, extra)
    except Exception as e:
        raise CheckpointError(f"{folder}: transformers cannot load it as a model that {task}s: {e}") from e
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{folder}: the weights lack {', '.join(missing[:3])} of {len(missing)} tensors that a model for --task "
            f"{task} has; name the task that the checkpoint was trained for"
        )
    unread = sorted(n for n in info["unexpected_keys"] if not _needless(n, task))
    if unread:
        raise CheckpointError(
            f"{folder}: nothing in architecture {checkpoint.config['model_type']!r} takes the tensors "
            f"{', '.join(unread[:3])}: name the --task that the checkpoint was trained for, or the model is not "
            "supported"
        )
    model.requires_grad_(False)
    return model.eval()


def _from_pretrained(kind: Any, folder: Path, attention: str, extra: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    common = {
        "dtype": torch.float32, "attn_implementation": attention, "output_loading_info": True, "local_files_only": True,
        "trust_remote_code": False,
    }  # fmt: skip
    try:
        found: tuple[Any, dict[str, Any]] = kind.from_pretrained(folder, **common, **extra)
    except TypeError:
        if not extra:
            raise
        found = kind.from_pretrained(folder, **common)  # a model without a pooler rejects the flag
    return found


def _needless(name: str, task: Task) -> bool:
    if name.endswith((".position_ids", ".inv_freq")):
        return True
    return task == "embed" and any(part in f".{name}" for part in (f".{p}" for p in _LEFT_OUT))
