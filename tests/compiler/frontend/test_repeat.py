"""A program made from a few traced layers is the program of a whole trace, whatever the model's layers are like."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import sympy
import torch
from torch import nn
from torch.export import ExportedProgram
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from llmc.compiler.frontend import trace
from llmc.compiler.frontend.attention import STATE, attention_name
from llmc.compiler.frontend.repeat import LayerPlan, NotRepeatableError, layer_kinds, layers_of
from llmc.compiler.frontend.traceable import build_traceable
from llmc.compiler.program.import_fx import import_program
from llmc.compiler.program.program import write_graph
from llmc.compiler.program.sized import ASSERTION, SIZE, SIZE_ARITHMETIC
from llmc.compiler.program.to_export import serialise, specialise
from llmc.errors import CompileError
from llmc.runtime.portable_program import PortableProgram, ProgramFields, output_names
from tests.compiler import tiny
from tests.tiers import default_cases, full

WINDOWS = {"use_sliding_window": True, "sliding_window": 8}
FULL, SLIDING = "full_attention", "sliding_attention"
CASES: dict[str, dict[str, Any]] = {
    **{name: tiny.config(name) | {"num_hidden_layers": 4} for name in tiny.REPRESENTATIVES},
    "deep, tied, with biases": tiny.config(tiny.TIED) | {"num_hidden_layers": 5},
    "windows in turn": {
        **tiny.config("qwen3"), **WINDOWS, "num_hidden_layers": 7, "layer_types": [SLIDING, FULL] * 3 + [SLIDING],
    },
    "one window of many": {
        **tiny.config("qwen2"), **WINDOWS, "num_hidden_layers": 6, "layer_types": [FULL] * 4 + [SLIDING, FULL],
    },
}  # fmt: skip
WEIGHTLESS = {"windows in turn": False, "one window of many": True}
"""Cases of dialect two_part, which takes longest, and whether they have a cache."""

TOP = 3
BUCKETS = {(3, 1, 16): "one window of many", (2, 8, 24): "one window of many", (2, 8, 0): "windows in turn"}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many decoder layers ran, of each export since."""
    counts: list[int] = []
    export = trace._export

    def counted(step: Any, *args: Any) -> Any:
        counts.append(0)
        owner = step if isinstance(step, trace.TracedStep) else step.__dict__["_step"]
        for layer in owner.model.model.layers:
            layer.register_forward_pre_hook(lambda *_: counts.append(counts.pop() + 1))
        return export(step, *args)

    monkeypatch.setattr(trace, "_export", counted)
    return counts


def fused(config: dict[str, Any], few: bool) -> ExportedProgram:
    return trace._trace(config, "fused", few)


def files(program: ExportedProgram) -> dict[str, bytes]:
    return write_graph(import_program(program, 64))


@cache
def two_part(case: str, cached: bool, few: bool) -> ProgramFields:
    built = trace._trace_weightless(CASES[case], "two_part", cached, torch.float32, TOP if cached else 0, few)
    return serialise(built.exported)


@default_cases(1)
@pytest.mark.parametrize("case", tiny.REPRESENTATIVES)
def test_the_fused_graph_is_that_of_a_whole_trace_byte_for_byte(case: str, runs: list[int]) -> None:
    built, known = fused(CASES[case], True), fused(CASES[case], False)
    assert runs == [3, 4]
    assert files(built) == files(known)
    assert built.graph_signature.input_specs == known.graph_signature.input_specs
    assert list(built.state_dict) == list(known.state_dict)


@full
@pytest.mark.parametrize(("case", "cached"), WEIGHTLESS.items())
def test_the_weightless_program_is_that_of_a_whole_trace_but_for_names(case: str, cached: bool) -> None:
    assert canonical(two_part(case, cached, True)) == canonical(two_part(case, cached, False))


@full
@pytest.mark.parametrize("sizes", BUCKETS, ids=str)
def test_its_programs_of_a_bucket_compute_the_same_numbers(sizes: tuple[int, int, int]) -> None:
    case, (batch, query, context) = BUCKETS[sizes], sizes
    built, known = (PortableProgram.of(specialise(two_part(case, context > 0, few), *sizes)) for few in (True, False))
    random = torch.Generator().manual_seed(3)
    config = CASES[case]
    model = build_traceable(config, attention_name("two_part"))
    shapes = {n: p.shape for n, p in model.named_parameters()}
    weights = {n: torch.randn(shape, generator=random) * 0.1 for n, shape in shapes.items()} | dict(
        model.named_buffers()
    )
    held = 2 * config["num_hidden_layers"] if context else 0
    kept = [torch.randn(batch, 2, context, 16, generator=random) for _ in range(held)]
    tokens = torch.randint(config["vocab_size"], (batch, query), generator=random)
    lengths = torch.full((batch,), context // 2), torch.full((batch,), query)
    assert built.weights == known.weights
    results = [p.run(tokens, *lengths, *kept, *(weights[n] for n in p.weights)) for p in (built, known)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@default_cases(1)
@pytest.mark.parametrize("layers", [4, 12])
def test_the_number_of_traced_layers_does_not_grow_with_the_model(layers: int, runs: list[int]) -> None:
    trace._trace(tiny.config("llama") | {"num_hidden_layers": layers}, "fused", True)
    assert runs == [3]


def test_a_model_of_few_layers_is_traced_as_it_is(runs: list[int]) -> None:
    built = trace._trace(tiny.config("llama-three-layers"), "fused", True)
    assert runs == [3]
    assert {entry.fqn for entry in built.module_call_graph} >= {"model.model.layers.2.mlp"}


def deep(layers: int = 5, case: str = "llama", **changed: Any) -> Any:
    return build_traceable(tiny.config(case) | {"num_hidden_layers": layers} | changed, attention_name("fused"))


def test_layers_of_one_kind_differ_in_nothing_but_their_index_and_weights() -> None:
    assert layer_kinds(deep()) == (0,) * 5
    assert LayerPlan(layer_kinds(deep()), "model.layers").traced == [0, 1, 2]


CHANGES: dict[str, Callable[[Any], object]] = {
    "an attribute": lambda layer: setattr(layer.self_attn, "scaling", 0.5),
    "an attribute's type": lambda layer: setattr(layer, "hidden_size", 64.0),
    "a new attribute": lambda layer: setattr(layer.mlp, "gated", True),
    "an index of another layer": lambda layer: setattr(layer.self_attn, "layer_idx", 0),
    "a class": lambda layer: setattr(layer, "input_layernorm", nn.RMSNorm(64, device="meta")),
    "a module more": lambda layer: setattr(layer, "dropout", nn.Identity()),
    "a shape": lambda layer: setattr(layer.mlp, "up_proj", nn.Linear(64, 100, False, "meta")),
    "a dtype": lambda layer: layer.input_layernorm.to(torch.bfloat16),
    "a hook": lambda layer: layer.register_forward_hook(lambda *_: None),
    "its mode": lambda layer: layer.mlp.train(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_differs_is_a_kind_of_its_own(change: str) -> None:
    model = deep()
    CHANGES[change](model.model.layers[3])
    assert layer_kinds(model) == (0, 0, 0, 3, 0)


def test_an_entry_of_the_configuration_for_each_layer_reports_kinds_apart() -> None:
    model = deep(6, "qwen2", **WINDOWS, layer_types=[FULL, SLIDING] * 3)
    for layer in model.model.layers:
        layer.self_attn.sliding_window, layer.self_attn.layer_type = None, FULL
    assert layer_kinds(model) == (0, 1, 0, 1, 0, 1)


def test_layers_that_are_traced_are_numbered_as_the_configuration_has_them() -> None:
    model = deep(9, "qwen2", **WINDOWS, layer_types=[FULL] * 4 + [SLIDING] * 5)
    plan = LayerPlan.of(model)
    assert plan is not None
    assert plan.traced == [0, 1, 2, 4, 5, 6]
    assert plan.like == [0, 1, 2, 2, 3, 4, 5, 5, 5]
    assert plan.steady == [(1, 2), (4, 5)]
    plan.apply(model)
    assert model.config.layer_types == [FULL] * 3 + [SLIDING] * 3
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == list(range(6))


UNKNOWN: dict[str, Callable[[Any], object]] = {
    "a buffer": lambda model: model.model.layers[3].register_buffer("table", torch.ones(2)),
    "a tensor": lambda model: setattr(model.model.layers[3], "table", torch.ones(2)),
    "an object": lambda model: setattr(model.model.layers[3], "table", object()),
    "a shared parameter": lambda model: setattr(model.model.layers[3], "mlp", model.model.layers[1].mlp),
    "layers elsewhere": lambda model: setattr(model.model, "layers", nn.ParameterList()),
    "more layers than it says": lambda model: setattr(model.config, "num_hidden_layers", 4),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_a_model_whose_layers_cannot_be_compared_is_traced_whole(what: str) -> None:
    model = deep()
    UNKNOWN[what](model)
    assert LayerPlan.of(model) is None


def by_index(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
    return hidden * (1 + layer.layer_idx)


def by_the_one_before(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
    known = STATE.get().__dict__.setdefault("seen", hidden)
    return hidden + known


@full
@pytest.mark.parametrize("change", [by_index, by_the_one_before])
def test_a_model_without_a_steady_state_is_traced_whole(
    change: Callable[[Any, torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch, runs: list[int]
) -> None:
    forward = LlamaAttention.forward

    def changed(layer: Any, *args: Any, **kwargs: Any) -> Any:
        hidden, *rest = forward(layer, *args, **kwargs)
        return change(layer, hidden), *rest

    monkeypatch.setattr(LlamaAttention, "forward", changed)
    config = tiny.config("llama") | {"num_hidden_layers": 5, "rms_norm_eps": 1.5e-5 if change is by_index else 2e-5}
    built = trace.trace(config, "fused")
    assert runs == [3, 5]
    assert len(built.graph_signature.output_specs) == 1 + 2 * 5


def test_an_error_of_tracing_names_the_architecture(monkeypatch: pytest.MonkeyPatch, runs: list[int]) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise ValueError("no such attention")

    monkeypatch.setattr(LlamaAttention, "forward", failing)
    with pytest.raises(CompileError, match=r"tracing llama with torch\.export failed: no such attention"):
        trace.trace(tiny.config("llama") | {"num_hidden_layers": 6}, "fused")
    assert len(runs) == 2, "the whole model has the last word"


def canonical(program: ProgramFields) -> ProgramFields:
    """All of a program, with tensors named by their place, symbols by what they are, and each guard once."""
    graph = program["graph_module"]["graph"]
    names = [i["as_tensor"]["name"] for i in graph["inputs"]]
    nodes = [n for n in graph["nodes"] if n["target"] not in {*SIZE_ARITHMETIC, SIZE, ASSERTION}]
    built = [name for node in nodes if node["outputs"] for name in output_names(node)[0]]
    index = {name: name for name in names} | {name: f"%{i}" for i, name in enumerate(built)}
    shapes = {name: graph["tensor_values"][name] for name in index}
    symbols = dict(zip("BQ", shapes["token_ids"]["sizes"], strict=True))
    for name in sorted(names):  # the caches of one window have as many places, those of others may have fewer
        if name.startswith("cache_"):
            symbols[f"S_{name}"] = shapes[name]["sizes"][2]
    named: dict[Any, Any] = {}
    for name, size in symbols.items():
        named.setdefault(sympy.sympify(size["as_expr"]["expr_str"]), sympy.Symbol(name))
    sizes = {**graph["sym_int_values"], **graph["sym_bool_values"]}

    @cache
    def written(expression: str) -> str:
        return str(sympy.expand(sympy.sympify(expression).xreplace(named)))

    def said(value: Any) -> Any:
        if isinstance(value, list):
            return [said(v) for v in value]
        if not isinstance(value, dict):
            return value
        if "expr_str" in value:
            return written(value["expr_str"])
        if "as_name" in value:
            return said(sizes[value["as_name"]])
        return {k: index[v] if k == "name" and v in index else said(v) for k, v in value.items() if k != "hint"}

    guards = {str(said(n["inputs"][0]["arg"])) for n in graph["nodes"] if n["target"] == ASSERTION}
    spared = ("nodes", "tensor_values", "sym_int_values", "sym_bool_values")
    rest = said({k: v for k, v in graph.items() if k not in spared})
    module = said({k: v for k, v in program["graph_module"].items() if k != "graph"})
    ranges = {
        str(named[sympy.Symbol(k, positive=True, integer=True)]): v for k, v in program["range_constraints"].items()
    }
    return {
        **program, "graph_module": module, "graph": rest, "guards": guards, "range_constraints": ranges,
        "nodes": [[n["target"], said(n["inputs"]), said(n["outputs"])] for n in nodes],
        "tensors": [[index[name], said(shape)] for name, shape in shapes.items()],
    }  # fmt: skip


def test_the_layers_are_the_one_outermost_list_of_as_many_as_the_model_has() -> None:
    config = AutoConfig.for_model("gpt2", n_layer=4, n_embd=8, n_head=2, vocab_size=8)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert layers_of(model) == "transformer.h"
    model.transformer.more = nn.ModuleList(nn.Identity() for _ in range(4))
    with pytest.raises(NotRepeatableError, match="not one list"):
        layers_of(model)
