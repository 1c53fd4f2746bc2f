"""--sample-top-k: graphs that return the largest logits and their ids, in every target, and what keeps them honest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from llmc.artifacts.bundle.manifest import read_manifest
from llmc.artifacts.bundle.reader import blob_path
from llmc.artifacts.key import Key
from llmc.artifacts.store.store import Store
from llmc.buckets.bucket import Bucket
from llmc.buckets.limits import Limits
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle, dry_run
from llmc.compiler.pipeline.requested import requested_members
from llmc.compiler.pipeline.resolve import CompileJob
from llmc.compiler.targets.onnxruntime.onnx_model import add_top, bind, load_model
from llmc.errors import ArtifactError, InputError, VerificationError
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.fake.executor import FakeExecutor
from llmc.runtime.executors.onnxruntime.session import open_session
from llmc.runtime.step import exact, pad
from llmc.runtime.top_logits import TopLogits, top_of
from llmc.testing.toy import VOCAB, toy_plan
from tests.devices import use
from tests.tiers import default_cases, full
from tests.toy import Toy

Array = NDArray[np.float32]

SMALL = toy_plan([(2, 8, 0), (1, 8, 8)], [(2, 15)], Limits(16, 2, 16, 8))
TARGETS: dict[str, dict[str, Any]] = {
    "cpu": {"device": "onnxruntime", "quantize": "none", "specialise": True},
    "cpu-exact": {"device": "onnxruntime", "quantize": "int8", "specialise": False},
    "hpu-bf16": {"device": "hpu", "dtype": "bf16"},
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """The bundle of a tiny model for a target and a K, verified in every bucket."""
    folder = tmp_path_factory.mktemp("top")

    def compile_(target: str, k: int) -> Path:
        from tests.compiler import tiny

        path, model = folder / f"{target}-{k}", folder / "model"
        if not model.exists():
            tiny.write_model(model, "qwen2")
        if not path.exists():
            requested = CompileOptions.of(**TARGETS[target], verify="all", sample_top_k=k)
            compile_bundle(str(model), path, SMALL, requested, Store(folder / "store"), lambda _: None)
        return path

    return compile_


# What graphs return


@default_cases(1)
@pytest.mark.parametrize("target", TARGETS)
def test_a_verified_bundle_returns_the_largest_of_its_own_logits(
    compiled: Callable[[str, int], Path], target: str
) -> None:
    path = compiled(target, 7)
    assert read_manifest(path).options["sample_top_k"] == 7
    executor = open_executor(Bundle.open(path), threads=1)
    assert executor.bundle.sample_top_k == 7
    random, ties = np.random.default_rng(0), 0
    for _ in range(12):
        prompts = random.integers(0, 256, (2, 8)).tolist()
        step = pad(Bucket("prompt", 2, 8, 0), [0, 1], prompts, [0, 0])
        top = executor.run_top(exact("prompt", [0, 1], prompts, [0, 0]) if executor.capabilities.exact else step)
        values, ids = top.values[:2].copy(), top.ids[:2].copy()
        logits = executor.logits()[:2]
        wanted = top_of(logits, 7)
        assert (values.dtype, ids.dtype, values.shape) == (np.float32, np.int64, (2, 7))
        np.testing.assert_array_equal(values, wanted.values)
        np.testing.assert_array_equal(ids, wanted.ids)
        ties += int(((logits >= values[:, -1:]).sum(-1) > 7).sum())
    assert bool(ties) == (target == "hpu-bf16"), "only few digits make logits at the border equal by chance"
    executor.close()


def test_the_default_returns_all_logits_only_and_says_so(compiled: Callable[[str, int], Path], toy: Toy) -> None:
    executor = open_executor(Bundle.open(compiled("cpu", 0)), threads=1)
    assert executor.bundle.sample_top_k == 0
    with pytest.raises(InputError, match=r"return all logits only; compile with --sample-top-k K"):
        executor.run_top(pad(Bucket("prompt", 2, 8, 0), [0], [[1]], [0]))
    executor.close()
    path = compiled("cpu", 0)
    model = load_model(blob_path(path, read_manifest(path).executables[0].blob).read_bytes())
    assert add_top(model, 0).SerializeToString(deterministic=True) == model.SerializeToString(deterministic=True)
    toy.compile(verify="none")
    manifest = read_manifest(toy.bundle)
    assert "sample_top_k" not in manifest.options
    assert all(b"top" not in blob_path(toy.bundle, e.blob).read_bytes() for e in manifest.executables)


TIES = {
    "within": [1, 5, 3, 5, 3, 2, 5, 0],
    "at the border": [0, 4, 9, 4, 4, 4, 1, 4],
    "everywhere": [2] * 8,
    "zeros of either sign": [-0.0, 0.0, -0.0, 0.0, -1, -2, 0.0, -0.0],
    "infinities": [-np.inf, 1, np.inf, -np.inf, np.inf, -np.inf, -np.inf, 1],
}


@pytest.mark.parametrize("k", [1, 3, 5, 8])
@pytest.mark.parametrize("what", TIES)
def test_onnx_runtime_puts_the_lower_id_first_and_in_where_logits_are_equal(what: str, k: int) -> None:
    """What the executor relies on; wide rows take another path through its kernel than narrow ones."""
    for repeat in (1, 50, 6000):
        row = np.tile(np.array(TIES[what], np.float32), repeat)
        logits = np.stack([row, row[::-1]])
        values, ids = run_top_alone(logits, k)
        wanted = top_of(logits, k)
        np.testing.assert_array_equal(values, wanted.values)
        np.testing.assert_array_equal(ids, wanted.ids)


def run_top_alone(logits: Array, k: int) -> tuple[Array, NDArray[np.int64]]:
    """The nodes that `add_top` adds, behind a graph that gives back what it is given."""
    shape = ["B", logits.shape[1]]
    given, out = (helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in ("given", "logits"))
    graph = helper.make_graph([helper.make_node("Identity", ["given"], ["logits"])], "g", [given], [out])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    bound = bind(add_top(model, k), {"B": len(logits)})
    assert [o.name for o in bound.graph.output] == ["logits", "top_values", "top_ids"]
    assert [[d.dim_value for d in o.type.tensor_type.shape.dim] for o in bound.graph.output][1:] == [[2, k]] * 2
    values, ids = open_session(bound.SerializeToString()).run(["top_values", "top_ids"], {"given": logits})
    return values, ids


def test_equal_values_are_ordered_by_id() -> None:
    top = top_of(np.array([[3, 1, 3, 2, 3], [0, 0, 0, 0, 0]], np.float32), 2)
    assert top.ids.tolist() == [[0, 2], [0, 1]]
    assert top.values.tolist() == [[3, 3], [0, 0]]


# What is asked for


@pytest.mark.parametrize("k", [-1, 257])
def test_a_number_out_of_range(k: int) -> None:
    with pytest.raises(InputError, match=f"--sample-top-k {k} must be in 1 … 256, or 0 for all logits only"):
        CompileOptions("fake", sample_top_k=k)


def test_more_than_the_vocabulary_is_refused_before_any_work(tmp_path: Path) -> None:
    toy = Toy.make(tmp_path, vocab=20, tokenizer=False)
    message = r"--sample-top-k 21: toy has 20 tokens; request at most as many"
    with pytest.raises(InputError, match=message):
        toy.compile(sample_top_k=21)
    with pytest.raises(InputError, match=message):
        dry_run(CompileJob.of(str(toy.model), toy.plan, CompileOptions("fake", sample_top_k=21)), toy.store)
    assert not toy.bundle.exists() and not toy.events
    toy.compile(sample_top_k=20)
    executor = open_executor(Bundle.open(toy.bundle))
    top = executor.run_top(pad(Bucket("prompt", 1, 4, 0), [0], [[1]], [0]))
    assert sorted(top.ids[0].tolist()) == list(range(20))


def test_every_k_is_an_executable_of_its_own_and_all_else_is_shared(toy: Toy) -> None:
    first = toy.compile()
    assert toy.compile(sample_top_k=3).built == first.built
    assert "weights" not in toy.built_stages and "reference" not in toy.built_stages
    assert toy.compile(sample_top_k=4).built == first.built
    again = toy.compile(sample_top_k=3)
    assert (again.built, again.sample_top_k, toy.built_stages) == (0, 3, set())


def test_a_miss_names_the_option_and_the_default_has_no_such_component(toy: Toy) -> None:
    toy.compile(verify="none")
    known = {e.key.components["shape.context"]: e.key for e in toy.store.entries("executable")}
    found = dry_run(CompileJob.of(str(toy.model), toy.plan, CompileOptions("fake", sample_top_k=64)), toy.store)
    assert all("option.sample_top_k" in e["why"] and "64" in e["why"] for e in found["executables"])
    assert all("option.sample_top_k" not in key.components for key in known.values())
    key = next(iter(known.values()))
    topped = Key(key.kind, {**key.components, "option.sample_top_k": 64})
    assert [d.name for d in key.explain(topped)] == ["option.sample_top_k"]


@pytest.mark.parametrize(
    ("has", "requested", "named"),
    [(0, None, {}), (0, 0, {}), (64, None, {}), (64, 0, {"sample_top_k": 0}), (0, 64, {"sample_top_k": 64})],
)
def test_a_bundle_that_exists_is_compared_by_it(
    toy: Toy, has: int, requested: int | None, named: dict[str, int]
) -> None:
    toy.compile(verify="none", sample_top_k=has)
    arguments = {} if requested is None else {"sample_top_k": requested}
    assert requested_members(read_manifest(toy.bundle), None, arguments, None)["options"] == named


# What keeps it honest


def one_lower(top: TopLogits) -> TopLogits:
    return TopLogits(top.values, np.maximum(top.ids - 1, 0))


def rounded(top: TopLogits) -> TopLogits:
    return replace(top, values=np.float32(np.float16(top.values)))


def turned_round(top: TopLogits) -> TopLogits:
    return TopLogits(top.values[:, ::-1], top.ids[:, ::-1])


@pytest.mark.parametrize("broken", [one_lower, rounded, turned_round])
def test_top_logits_that_are_not_the_largest_fail_verification(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, broken: Callable[[TopLogits], TopLogits]
) -> None:
    class Broken(FakeExecutor):
        def run_top(self, step: Any) -> TopLogits:
            return broken(super().run_top(step))

    use(monkeypatch, executor=Broken)
    with pytest.raises(VerificationError, match=r"the largest logits that \S+.* returns are not the largest of all"):
        toy.compile(sample_top_k=8)
    assert not toy.bundle.exists()


@full
def test_executables_that_return_other_than_the_manifest_says_are_refused(
    compiled: Callable[[str, int], Path], toy: Toy
) -> None:
    toy.compile(verify="none", sample_top_k=8)
    for path, program in ((toy.bundle, "fake device"), (compiled("hpu-bf16", 7), "portable program")):
        bundle = Bundle.open(path)
        options = {k: v for k, v in bundle.manifest.options.items() if k != "sample_top_k"}
        bundle.files.manifest = bundle.manifest.changed(options=options)
        executor = open_executor(bundle, threads=1)
        with pytest.raises(ArtifactError, match=f"{program}.*returns .*compile again"):
            executor.open_all() if path != toy.bundle else executor.warm([("decode", 1, 1, 8)])
        executor.close()


@full
def test_a_portable_program_with_it_is_one_that_torch_opens(compiled: Callable[[str, int], Path]) -> None:
    import torch

    path = compiled("hpu-bf16", 7)
    for executable in read_manifest(path).executables:
        program = torch.export.load(blob_path(path, executable.blob))
        (outputs,) = [n for n in program.graph.nodes if n.op == "output"]
        shapes = [tuple(o.meta["val"].shape) for o in outputs.args[0]]
        assert shapes[:3] == [(executable.batch, VOCAB), (executable.batch, 7), (executable.batch, 7)]
