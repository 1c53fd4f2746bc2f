"""Bundles of models of one shape: the executor's contract, what opening costs and counts, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.artifacts.store.store import Store
from llmc.compiler import targets
from llmc.compiler.architectures.shared.base import WINDOW
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import CompileResult, compile_bundle
from llmc.compiler.targets.openvino.static_target import OpenVinoStaticTarget
from llmc.errors import ArtifactError, InputError
from llmc.runtime.bundle import Bundle
from llmc.runtime.cache_shape import Rewind
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors import open_executor
from llmc.runtime.executors.openvino.static_executor import OpenVinoStaticExecutor
from llmc.runtime.llm import BundleLLM
from llmc.testing.executors import PLAN, SLOTS, TOP, Alone, Life, Open, decode, opener, prefill
from tests.compiler import tiny
from tests.manifests import edit_manifest
from tests.tiers import default_cases, full

DEVICES = ("CPU", "NPU")
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
PROMPTS = [list(range(3, 3 + n)) for n in (9, 1, 14, 4)]
ROUNDS = 40

Compile = Callable[..., CompileResult]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compile]:
    """Compile a tiny model for a device; the same again comes from the store."""
    folder = tmp_path_factory.mktemp("static")
    with pytest.MonkeyPatch.context() as patch:
        cls = OpenVinoStaticTarget
        patch.setitem(targets.TARGETS._own, "openvino-static", f"{cls.__module__}:{cls.__name__}")

        def compile_(device: str, case: str = "llama", **options: Any) -> CompileResult:
            model = folder / case
            if not model.exists():
                tiny.write_model(model, case)
            bundle = folder / f"{case}-{len(list(folder.iterdir()))}"
            chosen = {"quantize": "none", "verify": "none", "sample_top_k": TOP, **options}
            requested = CompileOptions.of(f"openvino-static:{device}", **chosen)
            return compile_bundle(str(model), bundle, PLAN, requested, Store(folder / "store"), lambda _: None)

        yield compile_


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def opened(device: str, compiled: Compile, request: pytest.FixtureRequest) -> Open:
    return opener(compiled(device).bundle, request)


@default_cases(1)
@pytest.mark.parametrize("case", ["llama", "mistral"])
def test_every_bucket_is_exact_in_float32(compiled: Compile, device: str, case: str) -> None:
    result = compiled(device, case, verify="all")
    assert result.verification["mean_kl"] < 1e-9
    assert result.verification["top1"] == 1.0
    assert result.verification["leak"] == 0.0
    assert result.verification["greedy_equal"] == result.verification["greedy_sequences"]


@full
def test_eight_bit_weights_are_close(compiled: Compile) -> None:
    found = compiled("NPU", quantize="int8", verify="all").verification
    assert found["mean_kl"] < 0.02
    assert found["leak"] == 0.0


@default_cases(1)
@pytest.mark.parametrize(("case", "slots"), [("llama", SLOTS), ("llama", PLAN.limits.max_num_seqs), ("mistral", 4)])
def test_every_slot_keeps_its_tokens_through_any_work(
    compiled: Compile, device: str, case: str, slots: int, request: pytest.FixtureRequest
) -> None:
    """Also where all layers have windows, in rings of half as many places as a slot has tokens."""
    opened = opener(compiled(device, case).bundle, request)
    assert opened(1).bundle.cache_shape.rewind == Rewind(rings=((WINDOW, 16),) if case == "mistral" else ())
    alone = Alone(opened(1))
    life = Life(opened(slots), alone, 1)
    for _ in range(ROUNDS):
        life.go_on()
        if life.random.random() < 0.1:
            life.check_slots()
    life.check_slots()
    assert all(life.done.values()), "each kind of work was done"


def test_a_slot_as_long_as_the_context_takes_one_more_token(opened: Open) -> None:
    """The layout that decode reads ends at the context; the token behind it goes to the slot's home."""
    executor, alone = opened(), Alone(opened(1))
    context = min(b.context for b in PLAN.decode)
    tokens = list(range(1, 1 + context))
    prefill(executor, 0, tokens)
    rows = decode(executor, [[7]], [tokens])
    np.testing.assert_allclose(rows[0], alone([*tokens, 7])[0], rtol=1e-4, atol=1e-4)
    for one, other in zip(executor.export_prefix(0, context + 1), alone([*tokens, 7])[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@default_cases(1)
def test_an_engine_serves_from_it_what_another_executor_does(compiled: Compile, device: str) -> None:
    expected = [tiny.greedy("llama", prompt, 6) for prompt in PROMPTS]
    with BundleLLM(compiled(device).bundle, threads=1) as llm:
        llm.executor.open_all()
        got = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY)]
        assert llm.compilations == 0
    assert got == expected


def test_a_portable_model_that_a_step_waits_for_counts_as_compiled_while_serving(compiled: Compile) -> None:
    counts = []
    for device in DEVICES:
        executor = open_executor(Bundle.open(compiled(device).bundle), slots=SLOTS, threads=1)
        prefill(executor, 0, [1, 2])
        counts.append((len(executor.compilations.at_open), executor.compilations.count))
        executor.close()
    assert counts == [(1, 0), (0, 1)], "native: opened; portable: compiled"


def test_a_model_that_opens_after_ready_is_counted(compiled: Compile) -> None:
    with BundleLLM(compiled(DEVICES[0]).bundle, threads=1) as llm:
        llm.executor.open_all()
        llm.executor.compilations.ready()
        llm.generate(PROMPTS, GREEDY)
        assert llm.compilations == llm.core.stats.compilations == 0
        assert llm.compilations_at_open
        llm.executor.close()  # and all its models with it
        llm.generate(PROMPTS[:1], GREEDY)
        assert llm.compilations == llm.core.stats.compilations > 0


def test_models_used_least_recently_are_closed_where_memory_is_short(
    compiled: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmc.runtime.executors.openvino.static_executor._free_memory", lambda: 0)
    executor = open_executor(Bundle.open(compiled("CPU").bundle), slots=SLOTS, threads=1)
    for count in (1, 3, 9):
        prefill(executor, 0, list(range(count)))
        decode(executor, [[1]], [list(range(count))])
        assert executor.memory()["open_executables"] <= 2
    executor.open_all()
    assert executor.memory()["open_executables"] == len({e.blob for e in executor.bundle.manifest.executables})
    executor.close()


def test_portable_bundles_say_what_is_left_to_do_and_are_of_no_instruction_set(compiled: Compile) -> None:
    portable, native = compiled("NPU"), compiled("CPU")
    assert (portable.native, portable.portable) == (0, len(PLAN.buckets))
    assert "NPU's host compiles each model" in portable.remaining
    assert Bundle.open(portable.bundle).manifest.isa in ([], ())
    assert (native.native, native.portable, native.remaining) == (len(PLAN.buckets), 0, "")
    assert Bundle.open(native.bundle).manifest.isa


def test_another_plan_of_the_same_model_builds_nothing_twice(compiled: Compile) -> None:
    first, second = compiled("CPU"), compiled("CPU")
    assert second.built == 0
    files = [Bundle.open(r.bundle).manifest for r in (first, second)]
    assert [e.blob for e in files[0].executables] == [e.blob for e in files[1].executables]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["toolchain"].update(openvino="1999.1"), "compiled with OpenVINO 1999.1, this host has .*install"),
        (lambda m: m.update(isa=["m68k"]), "compiled for another CPU; this host is .*Compile again here"),
    ],
)
def test_a_bundle_of_another_openvino_or_cpu_is_refused(
    compiled: Compile, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    bundle = Path(compiled("CPU").bundle)
    edit_manifest(bundle, change)
    with pytest.raises(ArtifactError, match=message):
        open_executor(Bundle.open(bundle), slots=1, threads=1)


def test_an_executable_of_another_shape_is_refused(compiled: Compile) -> None:
    bundle = Path(compiled("NPU").bundle)

    def swap(document: dict[str, Any]) -> None:
        items = document["executables"]
        decoding = [e for e in items if e["phase"] == "decode"]
        decoding[0]["blob"], decoding[1]["blob"] = decoding[1]["blob"], decoding[0]["blob"]

    edit_manifest(bundle, swap)
    executor = open_executor(Bundle.open(bundle), slots=SLOTS, threads=1)
    with pytest.raises(ArtifactError, match=r"is not a model of that shape: it takes .*compile again"):
        executor.open_all()
    executor.close()


def test_precisions_of_a_paged_cache_are_refused(compiled: Compile) -> None:
    with pytest.raises(InputError, match=r"--kv-cache-dtype u8 is for paged attention on openvino:CPU"):
        compiled("NPU", kv_cache_dtype="u8")


@full
def test_weights_may_share_scales_in_groups_and_activations_are_the_plugins_business(compiled: Compile) -> None:
    rows, groups = (compiled("NPU", quantize="int8", group_size=n, verify="all") for n in (0, 32))
    assert groups.verification["accuracy"]["mean_kl"] < rows.verification["accuracy"]["mean_kl"]
    with pytest.raises(InputError, match=r"--activation-group-size 0 is for paged models on openvino:CPU"):
        compiled("NPU", quantize="int8", activation_group_size=0)


@full
def test_a_bundle_for_a_device_that_is_not_here_says_so_where_a_user_opens_it(
    compiled: Compile, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = compiled("NPU", verify="sample").bundle
    assert not caplog.records, "that verification runs on the CPU is known"
    with BundleLLM(bundle, threads=1) as llm:
        assert llm.generate([[3, 4]], GREEDY)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "compiled for openvino-static:NPU, and this host has no NPU: it is opened on the CPU" in record.message
    caplog.clear()
    with BundleLLM(compiled("CPU").bundle, threads=1):
        assert not caplog.records


@full
def test_it_opens_and_runs_without_torch(compiled: Compile) -> None:
    code = (
        "import sys; from llmc.runtime.bundle import Bundle\n"
        "from llmc.runtime.executors import open_executor; from llmc.runtime.step import pad\n"
        "bundle = Bundle.open(sys.argv[1]); executor = open_executor(bundle, slots=2, threads=1)\n"
        "executor.run(pad(min(bundle.plan.prompt, key=lambda b: b.context), [0], [[1, 2]], [0]))\n"
        "print([m for m in ('torch', 'transformers', 'onnx', 'llmc.compiler') if m in sys.modules])\n"
    )
    for device in DEVICES:
        requested = [sys.executable, "-c", code, str(compiled(device).bundle)]
        assert subprocess.run(requested, check=True, capture_output=True, text=True).stdout == "[]\n"


def test_the_executor_is_known_by_its_name() -> None:
    from llmc.runtime.executors import executor_class

    assert executor_class("openvino-static") is OpenVinoStaticExecutor
