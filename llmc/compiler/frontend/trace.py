"""Trace a model once per dialect into a program with symbolic batch, query and cache length.

`trace` leaves weights in the program as parameters, for lowerings that replace them. `trace_weightless` takes them as
inputs, for programs that are kept as they are.

Tracing time grows with the layers. Of identical layers only a few are traced, and repeat.py builds the others from
them.

Program contract, in the order of the traced signature:
  inputs   token_ids [B, Q] int64, past_lengths [B] int64, new_lengths [B] int64 (1 … Q live tokens, right padded),
           cache: the tensors of the model's cache in order (runtime/cache_shape.py), of attention key and value of
           each layer in turn, [B, Hkv, S, D];
           of a model with selectable adapters, between new_lengths and the cache: adapters [B, Q] int64, the adapter
           of each token, 0 for none (the same for all tokens of a row)
  outputs  logits [B, V] of each row's last live token, with `top_k` the largest of them (values [B, K], descending,
           and ids [B, K] int64; the device decides between logits that equal the last one), then the new cache
           tensors, in the order of the inputs. Keys and values:
           `fused`: the updated caches [B, Hkv, S, D]; others: the new tokens only [B, Hkv, Q, D];
           recurrent state: after each row's last live token
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.fx.config
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from llmc.compiler.architectures.shared.caches import cache_of
from llmc.compiler.checkpoint.adapter_layout import ADAPTERS, AdapterLayout, step_inputs
from llmc.compiler.frontend.attention import STATE, Dialect, TraceCache, TraceState, attention_name
from llmc.compiler.frontend.in_place import without_writes
from llmc.compiler.frontend.recurrent import STATES, StateCache, replace_functions
from llmc.compiler.frontend.repeat import LayerPlan, NotRepeatableError, repeat
from llmc.compiler.frontend.skeleton import MASKS, cache_argument
from llmc.compiler.frontend.traceable import as_fake, build_traceable
from llmc.errors import CompileError
from llmc.runtime.cache_shape import CacheShape, CacheTensor

T = TypeVar("T")

_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class StepCache(TraceCache, StateCache):
    """The cache of all layers."""

    def __init__(self, state: TraceState) -> None:
        TraceCache.__init__(self, state)
        StateCache.__init__(self, state)


class TracedStep(nn.Module):
    """One step of a causal language model over a cache, with the program contract above."""

    def __init__(self, model: nn.Module, dialect: Dialect, shape: CacheShape, top_k: int = 0) -> None:
        super().__init__()
        replace_functions(model)
        self.model = model
        self.cache_argument = cache_argument(model)
        self.shape = shape
        self.dialect = dialect
        self.top_k = top_k

    def forward(
        self, token_ids: Tensor, past_lengths: Tensor, new_lengths: Tensor, cache: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        batch, length = token_ids.shape
        positions = past_lengths[:, None] + torch.arange(length)[None]
        state = TraceState(positions, past_lengths, new_lengths, self.shape, cache)

        def last_live_rows(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
            if self.dialect == "fused":
                return (torch.ops.llmc.last_rows(args[0], new_lengths),)
            return (args[0][torch.arange(batch), new_lengths - 1],)

        head: nn.Module = self.model.get_output_embeddings()
        hook = head.register_forward_pre_hook(last_live_rows)
        cache_object = StepCache(state)
        token, states = STATE.set(state), STATES.set(cache_object)
        try:
            given = {self.cache_argument: cache_object}
            out = self.model(input_ids=token_ids, position_ids=positions, use_cache=True, **given)
        finally:
            STATE.reset(token)
            STATES.reset(states)
            hook.remove()
        top = torch.topk(out.logits, self.top_k) if self.top_k else ()
        return out.logits, *top, *state.outputs()


class AdaptedStep(TracedStep):
    """`TracedStep` with selectable adapters."""

    def forward(  # type: ignore[override]
        self, token_ids: Tensor, past_lengths: Tensor, new_lengths: Tensor, adapters: Tensor, cache: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        masks: Any = self.model.adapter_masks
        token = MASKS.set(masks(adapters))
        try:
            return super().forward(token_ids, past_lengths, new_lengths, cache)
        finally:
            MASKS.reset(token)


def trace(config: Mapping[str, Any], dialect: Dialect) -> ExportedProgram:
    """Trace the model of `config` with symbolic B, Q and S; needs no weights. Raises CompileError."""
    return _few_layers_first(lambda few: _trace(config, dialect, few))


def _trace(config: Mapping[str, Any], dialect: Dialect, few: bool) -> ExportedProgram:
    model = build_traceable(config, attention_name(dialect))
    plan = LayerPlan.of(model) if few else None
    shape = cache_of(config)
    traced = shape.only(plan.traced) if plan else shape
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False, allow_non_fake_inputs=True)
    as_fake(model, mode)
    fixed = _fixed(config)
    step = (AdaptedStep if ADAPTERS in fixed else TracedStep)(model, dialect, traced)
    tensors = step.state_dict(keep_vars=True)
    if plan is not None:
        plan.apply(model)
    with mode:
        args = *_fixed_example(fixed), _cache_example(traced, 8)
    exported = _export(step, args, (*fixed.values(), _dims(traced)), config)
    if plan is None:
        return exported
    return repeat(exported, plan, traced, _inputs(fixed, traced), (*(0 for _ in fixed), [0] * len(shape)), tensors)


def _few_layers_first(make: Callable[[bool], T]) -> T:
    """`make(True)` traces a few layers, `make(False)` all, for where the few do not determine the others."""
    with suppress(NotRepeatableError, CompileError):
        return make(True)
    return make(False)


def _fixed(config: Mapping[str, Any]) -> dict[str, dict[int, Any]]:
    """The inputs before the cache, and their symbolic sizes."""
    token, row = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, {0: Dim.DYNAMIC}
    sizes = {"token_ids": token, "past_lengths": row, "new_lengths": row, ADAPTERS: token}
    return {name: sizes[name] for name in step_inputs(config)}


def _fixed_example(fixed: Mapping[str, Sized]) -> list[Tensor]:
    return [torch.ones((2, 4)[: len(sizes)], dtype=torch.long) for sizes in fixed.values()]


def _inputs(fixed: Iterable[str], cache: Sized, weights: Iterable[str] = ()) -> list[str]:
    return [*fixed, *(f"cache.{i}" for i in range(len(cache))), *weights]


def _dims(shape: CacheShape) -> list[dict[int, Any]]:
    d = Dim.DYNAMIC
    return [{0: d, 2: d} if t.kind == "kv" else {0: d} for t in shape]


class WeightlessStep(nn.Module):
    """A `TracedStep` whose parameters and buffers are one more input, {name: tensor}; `held` names the entry of each
    tensor. The step is kept out of nn.Module's registration, which leaves torch.export nothing to lift."""

    def __init__(self, step: TracedStep, held: Mapping[str, str]) -> None:
        super().__init__()
        self.__dict__["_step"] = step
        self._held = held

    def forward(
        self, token_ids: Tensor, past_lengths: Tensor, new_lengths: Tensor, cache: Sequence[Tensor],
        weights: Mapping[str, Tensor],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        return self._call((token_ids, past_lengths, new_lengths, cache), weights)

    def _call(self, given: tuple[Any, ...], weights: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        named = {f"model.{name}": weights[held] for name, held in self._held.items()}
        out: tuple[Tensor, ...] = torch.func.functional_call(self.__dict__["_step"], named, given)
        return out


class AdaptedWeightlessStep(WeightlessStep):
    """`WeightlessStep` of an `AdaptedStep`."""

    def forward(  # type: ignore[override]
        self, token_ids: Tensor, past_lengths: Tensor, new_lengths: Tensor, adapters: Tensor, cache: Sequence[Tensor],
        weights: Mapping[str, Tensor],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        return self._call((token_ids, past_lengths, new_lengths, adapters, cache), weights)


@dataclass(frozen=True)
class WeightlessTrace:
    """A traced program that takes its weights as inputs after the cache: `parameters` from the checkpoint, then
    `buffers`, which were computed from the configuration, by name."""

    exported: ExportedProgram
    parameters: dict[str, tuple[int, ...]]
    buffers: dict[str, Tensor]


def trace_weightless(
    config: Mapping[str, Any], dialect: Dialect, *, cached: bool, dtype: torch.dtype = torch.float32, top_k: int = 0
) -> WeightlessTrace:
    """Trace the model of `config` with symbolic B, Q and, where `cached`, S; parameters and cache are in `dtype`.
    Without `cached` the program has no cache inputs: it is the first step of a sequence. `top_k` adds that many of the
    largest logits to the outputs. Raises CompileError."""
    return _few_layers_first(lambda few: _trace_weightless(config, dialect, cached, dtype, top_k, few))


def _trace_weightless(
    config: Mapping[str, Any], dialect: Dialect, cached: bool, dtype: torch.dtype, top_k: int, few: bool
) -> WeightlessTrace:
    model = build_traceable(config, attention_name(dialect))
    plan = LayerPlan.of(model) if few else None
    shape = cache_of(config)
    traced = shape.only(plan.traced) if plan else shape
    held = _held(model, config)
    parameters, buffers = _shapes(model, held), dict(model.named_buffers())
    if plan is not None:
        plan.apply(model)
    held = _held(model, config)
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False, allow_non_fake_inputs=True)
    fixed = _fixed(config)
    with mode:
        weights = {name: torch.empty(size, dtype=dtype) for name, size in _shapes(model, held).items()}
        weights |= {name: torch.empty(b.shape, dtype=b.dtype) for name, b in buffers.items()}
        args = (*_fixed_example(fixed), _cache_example(traced, 8 if cached else 0, dtype), weights)
    dims = (*fixed.values(), _dims(traced) if cached else [], dict.fromkeys(weights))
    weightless, whole = (AdaptedWeightlessStep, AdaptedStep) if ADAPTERS in fixed else (WeightlessStep, TracedStep)
    step = weightless(whole(model, dialect, traced, top_k), held | dict(zip(buffers, buffers, strict=True)))
    exported = _export(step, args, dims, config)
    if plan is not None:
        cache = len(shape) if cached else 0
        example = (*(0 for _ in fixed), [0] * cache, dict.fromkeys([*parameters, *buffers], 0))
        inputs = _inputs(fixed, traced if cached else (), weights)
        exported = repeat(exported, plan, traced, inputs, example, {})
    return WeightlessTrace(exported, parameters, buffers)


def _held(model: nn.Module, config: Mapping[str, Any]) -> dict[str, str]:
    """Maps each parameter to its own name, or to that of an equal one."""
    layout, names = AdapterLayout.of(config), dict(model.named_parameters())
    return {name: name if layout is None else layout.held_as(name, names) for name in names}


def _shapes(model: nn.Module, held: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters() if held[name] == name}


def _cache_example(shape: CacheShape, capacity: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.empty(t.size(2, capacity), dtype=_dtype(t, dtype)) for t in shape] if capacity else []


def _dtype(tensor: CacheTensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if tensor.dtype is None else _DTYPES[tensor.dtype]


@contextmanager
def _no_stack_traces() -> Iterator[None]:
    """Switch off the Python stack trace that torch records for each operator: an eighth of the time."""
    if not hasattr(torch.fx.config, "do_not_emit_stack_traces"):  # torch 2.11, which the inductor backend also supports
        yield
        return
    before = torch.fx.config.do_not_emit_stack_traces
    torch.fx.config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        torch.fx.config.do_not_emit_stack_traces = before


def _export(step: nn.Module, args: tuple[Any, ...], dims: Any, config: Mapping[str, Any]) -> ExportedProgram:
    try:
        # torch recomputes the symbolic sizes of results that its cache returns, which costs a quarter of the time
        uncached = torch._dynamo.config.patch(fake_tensor_cache_enabled=False)
        with warnings.catch_warnings(), torch.no_grad(), uncached, _no_stack_traces():
            warnings.simplefilter("ignore")
            exported = torch.export.export(
                step, args, strict=False, dynamic_shapes=dims, prefer_deferred_runtime_asserts_over_guards=True
            )
            _drop_dropout(exported.graph_module)
            return without_writes(exported)
    except Exception as e:
        raise CompileError(f"tracing {config.get('model_type')} with torch.export failed: {e}") from e


def _drop_dropout(module: torch.fx.GraphModule) -> None:
    """Take out dropout of models in evaluation mode, which changes no value but counts as random."""
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten.dropout.default and node.args[2] is False:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
