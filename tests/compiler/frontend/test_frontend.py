"""An architecture, traced from its configuration alone, computes what transformers computes.

Over a few families; tests/models has all of them.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from llmc.artifacts.store.store import Store
from llmc.compiler.architectures import supported
from llmc.compiler.architectures.shared.architectures import architecture
from llmc.compiler.architectures.shared.caches import cache_of
from llmc.compiler.frontend.attention import attention_name
from llmc.compiler.frontend.trace import TracedStep, WeightlessStep, trace
from llmc.compiler.frontend.traceable import build_traceable
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.compiler.program.fuse import fuse
from llmc.compiler.program.import_fx import import_program
from llmc.compiler.program.to_export import serialise, specialise
from llmc.errors import CheckpointError, CompileError
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.llm import BundleLLM
from llmc.runtime.portable_program import ProgramFields, output_names, weight_names
from tests.compiler import tiny
from tests.compiler.replay import Replay, Run, Tensors, random_texts, symbolic, two_part_run
from tests.tiers import default_cases, full

CASES = [*tiny.REPRESENTATIVES, *tiny.VARIANTS]
CAPACITY = 24

# New tokens of rows 0 … 3 in each step: ragged prompts, chunks over a past, then decoding; 0 is a dummy row.
STEPS = [(6, 4, 1, 0), (5, 0, 3, 0), (1, 1, 1, 0), (1, 1, 1, 0), (1, 0, 1, 2)]
CONTEXT = 16


@cache
def fused(case: str) -> ExportedProgram:
    return trace(tiny.config(case), "fused")


def fused_run(case: str) -> Run:
    """The fused program as it is traced, with the model's weights in the places of its parameters."""
    program = fused(case)
    model = tiny.model(case)
    tensors = dict(model.named_parameters(remove_duplicate=False))
    lifted = {}
    for spec in program.graph_signature.input_specs:
        name = str(spec.target)
        if spec.kind == InputKind.PARAMETER:
            lifted[spec.arg.name] = tensors[name.removeprefix("model.")]
        elif spec.kind != InputKind.USER_INPUT:
            lifted[spec.arg.name] = program.state_dict.get(name, program.constants.get(name))
    order = [n.name for n in program.graph_module.graph.nodes if n.op == "placeholder"]

    def run(token_ids: torch.Tensor, past: torch.Tensor, new: torch.Tensor, kept: Tensors) -> Tensors:
        given = iter([token_ids, past, new, *kept])
        return list(program.graph_module(*(lifted[n] if n in lifted else next(given) for n in order)))

    return run


def replay(case: str, run: Run, *, in_place: bool, rings: bool = True) -> Replay:
    return Replay(case, run, random_texts(case, CAPACITY), capacity=CAPACITY, in_place=in_place, rings=rings)


@default_cases("llama", "mistral", "qwen3")
@pytest.mark.parametrize("case", CASES)
def test_the_fused_program_computes_the_models_logits_in_ragged_padded_steps_over_a_cache_of_nan(case: str) -> None:
    rows = replay(case, fused_run(case), in_place=True)
    for counts in STEPS:
        assert max(rows.step(counts, CAPACITY)) < 1e-4


@full
@pytest.mark.parametrize("case", tiny.VARIANTS)
def test_portable_programs_compute_the_models_logits_in_ragged_padded_steps_over_a_cache_of_nan(case: str) -> None:
    rows = replay(case, two_part_run(case), in_place=False)
    for counts in STEPS:
        assert max(rows.step(counts, CONTEXT)) < 1e-4


@default_cases("llama")
@pytest.mark.parametrize("case", CASES)
def test_a_program_of_one_row_and_one_token_is_right_too(case: str) -> None:
    rows = replay(case, two_part_run(case), in_place=False)
    rows.tokens, rows.kept = rows.tokens[:1], [t[:1] for t in rows.kept]
    for context in (int(case in tiny.VARIANTS), 1, 2, 3):
        assert max(rows.step((1,), context)) < 1e-4


@default_cases(3)
@pytest.mark.parametrize("case", CASES)
def test_the_fused_graph_has_one_operator_for_what_compilers_have_kernels_for(case: str) -> None:
    config = tiny.config(case)
    layers = config["num_hidden_layers"]
    graph = fuse(import_program(fused(case), 128))
    counts = Counter(node.op for node in graph.nodes)
    stated = architecture(config).fused
    assert counts["gqa"] == layers
    assert counts["linear"] == 1 + layers * stated["linear"]
    assert counts["rms_norm"] == 1 + layers * stated["rms_norm"]
    assert counts["skip_rms_norm"] == 2 * layers
    assert counts["split"] == counts["silu"] == layers
    assert counts["embedding"] == 1
    left_over = {"attention", "softmax", "matmul", "rsqrt", "pow", "mean", "cos", "sin", "position_table", "cat", "neg"}
    assert not left_over & set(counts)
    for node in graph.nodes:
        if node.op == "gqa":
            assert node.attrs["window"] == (config.get("sliding_window") or -1)
            assert (node.attrs["heads"], node.attrs["kv_heads"]) == (4, config["num_key_value_heads"])
            assert all(value is not None for value in node.inputs[6:8]), "rotary embedding is part of the operator"


def test_a_tied_head_reads_the_embedding() -> None:
    assert "lm_head.weight" in weight_names(symbolic("llama", True))
    assert "lm_head.weight" not in weight_names(symbolic(tiny.TIED, True))
    assert "model.embed_tokens.weight" in weight_names(symbolic(tiny.TIED, True))


SIZES = [(1, 1, 16), (1, 6, 0)]
ONES = [(case, sizes) for case in tiny.REPRESENTATIVES for sizes in SIZES] + [
    ("llama", s) for s in ((4, 1, 8), (2, 3, 1))
]


@default_cases(2)
@pytest.mark.parametrize(("case", "sizes"), ONES, ids=str)
def test_specialising_gives_the_operators_of_a_fresh_static_trace(case: str, sizes: tuple[int, int, int]) -> None:
    """Tracing with symbols assumes that no size is 1, without saying so in a guard: nothing may depend on it."""
    fresh = specialise(_static_trace(case, *sizes), *sizes)
    mine = specialise(symbolic(case, sizes[2] > 0), *sizes)
    assert _canonical(mine) == _canonical(fresh)


def _static_trace(case: str, batch: int, query: int, context: int) -> ProgramFields:
    model = build_traceable(tiny.config(case), attention_name("two_part"))
    shape = cache_of(tiny.config(case))
    kept = [torch.empty(t.size(batch, context)) for t in shape] if context else []
    lengths = torch.ones(batch, dtype=torch.long)
    weights = {n: torch.empty(p.shape) for n, p in [*model.named_parameters(), *model.named_buffers()]}
    args = (torch.ones(batch, query, dtype=torch.long), lengths, lengths.clone(), kept, weights)
    with torch.no_grad():
        step = WeightlessStep(TracedStep(model, "two_part", shape), {name: name for name in weights})
        return serialise(torch.export.export(step, args, strict=False))


def _canonical(program: ProgramFields) -> list[object]:
    """Operators, arguments and shapes, with every tensor named by its place and a slice's full range left out."""
    graph = program["graph_module"]["graph"]
    names = [i["as_tensor"]["name"] for i in graph["inputs"]]
    names += [name for node in graph["nodes"] for name in output_names(node)[0]]
    index = {name: i for i, name in enumerate(names)}

    def renamed(value: object) -> object:
        if isinstance(value, dict):
            return {k: index[v] if k == "name" and v in index else renamed(v) for k, v in value.items()}
        return [renamed(v) for v in value] if isinstance(value, list) else value

    def arguments(node: ProgramFields) -> list[object]:
        open_ends = {"start": ({"as_none": True}, {"as_int": 0}), "end": ({"as_none": True}, {"as_int": 2**63 - 1})}
        of_slice = open_ends if ".slice." in node["target"] else {}
        return [renamed(i) for i in node["inputs"] if i["arg"] not in of_slice.get(i["name"], ())]

    nodes = [[n["target"], arguments(n)] for n in graph["nodes"]]
    metas = graph["tensor_values"]
    return [*nodes, renamed(graph["outputs"]), *([metas[n]["dtype"], metas[n]["sizes"]] for n in names)]


def test_specialising_at_a_size_that_tracing_excluded_says_so() -> None:
    with pytest.raises(CompileError, match="batch 2, query 4, context 0"):
        specialise(symbolic("llama", True), 2, 4, 0)


@default_cases(1)
@pytest.mark.parametrize("case", tiny.VARIANTS)
def test_the_cpu_target_compiles_a_variant_from_a_checkpoint_on_disk(case: str, tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / case, case)
    options = CompileOptions("cpu", quantize="none", verify="all")
    store = Store(tmp_path / "store")
    result = compile_bundle(str(folder), tmp_path / "bundle", tiny.tiny_plan(), options, store, lambda _: None)
    assert result.verification["top1"] == 1.0
    assert result.verification["greedy_equal"] == result.verification["greedy_sequences"] > 0
    assert result.verification["max_abs"] < 1e-3
    prompts = [[5, 80, 3, 200, 17, 9, 9, 31, 4], list(range(40, 66)), [7]]
    with BundleLLM(tmp_path / "bundle", threads=1) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=10, temperature=0, ignore_eos=True))
        assert [o.outputs[0].token_ids for o in outputs] == [tiny.greedy(case, p, 10) for p in prompts]
        assert llm.compilations == 0


@pytest.mark.parametrize("model_type", ["ctrl", "rwkv", None, 7])
def test_an_architecture_that_is_not_supported_is_refused_by_name(model_type: object) -> None:
    with pytest.raises(CheckpointError, match="is not supported") as refused:
        trace({"model_type": model_type, "vocab_size": 8}, "fused")
    assert repr(model_type) in str(refused.value)
    assert all(name in str(refused.value) for name in supported())


def test_a_configuration_that_makes_no_model_is_a_checkpoint_error() -> None:
    with pytest.raises(CheckpointError, match="llama configuration"):
        trace(tiny.config("llama") | {"hidden_size": "wide"}, "fused")
