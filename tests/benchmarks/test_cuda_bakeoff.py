"""benchmarks/cuda_bakeoff.py where there is no GPU: its arithmetic, its engines, and a whole run of the tiny form."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from baselines.baseline_models import weights_read
from baselines.results import Series
from baselines.worker import Contender

from llmc.buckets.coverage import prove
from llmc.compiler.checkpoint import open_checkpoint
from tests.compiler import tiny  # noqa: F401 - which also keeps torch's trace log out of pytest's hands
from tests.tiers import full

FAKE = str(Path(__file__).parents[1] / "bench" / "fake_engine")
EAGER, COMPILED, COPY = "transformers eager", "transformers reduce-overhead", "memory copy"


@pytest.fixture(scope="module")
def model(of: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    built: Path = of("bakeoff.shapes").SHAPES["tiny"].write(tmp_path_factory.mktemp("tiny") / "model", "cpu")
    return built


def requested(folder: Path, **more: Any) -> Namespace:
    return Namespace(**{
        "device": "cpu", "gpu": "h100", "work": folder, "only": None, "dtype": "bf16", "server_memory": 0.3,
        "rounds": 2, "progress": lambda *_: None, **more,
    })  # fmt: skip


# The arithmetic


def series(**rounds: list[float]) -> Series:
    names = {"copy": COPY, "eager": EAGER, "compiled": COMPILED, "ours": "llmc cuda"}
    return Series("decode step, batch 1", "ms", rounds={names[name]: times for name, times in rounds.items()})


def test_a_share_of_the_roofline_is_the_copys_time_over_the_steps_in_the_same_round(of: Any) -> None:
    report = of("bakeoff.report")
    found = series(copy=[1.0, 2.0, 4.0], ours=[2.0, 2.5, 8.0], eager=[9.0, 9.0, 9.0])
    assert report.share(found, "llmc cuda") == 0.5
    assert report.share(series(ours=[1.0]), "llmc cuda") is None


def test_a_speed_is_over_the_better_of_transformers_two(of: Any) -> None:
    report = of("bakeoff.report")
    found = series(ours=[2.0, 2.0, 4.0], eager=[9.0, 9.0, 9.0], compiled=[3.0, 5.0, 4.0])
    assert report.speed(found, "llmc cuda") == (COMPILED, 1.5)
    assert report.speed(found, COMPILED) == (EAGER, 2.25)
    assert report.speed(series(ours=[2.0]), "llmc cuda") is None


def test_graphs_are_summed_and_compared_with_their_predictions(of: Any) -> None:
    rows = [
        {"bucket": "a", "seconds": 1.0, "bytes": 100, "predicted": 110},
        {"bucket": "b", "seconds": 3.0, "bytes": 200, "predicted": 300},
    ]
    found = of("bakeoff.report").of_graphs(rows)
    assert (found["seconds"], found["seconds_of_all"], found["bytes_of_all"]) == (2.0, 4.0, 300)
    assert found["predicted_over_measured"] == pytest.approx(1.3) and found["within_15%"] == 0.5
    unstated = of("bakeoff.report").of_graphs([{"bucket": "a", "seconds": 1.0, "bytes": None, "predicted": None}])
    assert unstated["bytes"] is unstated["predicted_over_measured"] is None


@pytest.mark.parametrize(
    ("name", "parameters", "looked_up", "norms"),
    [("llama-1b", 1_235_814_400, 0, 33 * 2048), ("llama-8b", 8_030_261_248, 128256 * 4096, 65 * 4096)],
)
def test_a_decode_step_reads_all_parameters_but_what_is_looked_up(
    of: Any, name: str, parameters: int, looked_up: int, norms: int
) -> None:
    """Parameters as the models' pages on the Hugging Face hub have them."""
    shape = of("bakeoff.shapes").SHAPES[name]
    assert shape.matrix_weights == parameters - looked_up - norms
    assert shape.step_bytes(2, 10) == 2 * shape.matrix_weights + 20 * shape.kv_bytes
    assert shape.kv_bytes == {"llama-1b": 32 << 10, "llama-8b": 128 << 10}[name]


def test_the_tiny_shape_is_counted_as_its_checkpoint(of: Any, model: Path) -> None:
    assert of("bakeoff.shapes").SHAPES["tiny"].matrix_weights == weights_read(open_checkpoint(model))


def test_plans_serve_what_is_measured_with_48_decode_graphs(of: Any) -> None:
    points = of("bakeoff.shapes").Points()
    decode, prefill = points.decode_plan(), points.prefill_plan()
    for plan in (decode, prefill):
        prove(plan.limits, plan.buckets)
    assert len(decode.decode) == 48
    assert {1, 8, 64} <= {bucket.batch for bucket in decode.decode}
    assert max(bucket.context for bucket in decode.decode) > points.context + points.steps
    assert {512, 2048} <= {bucket.query for bucket in prefill.prompt}


# The engines


def test_transformers_over_its_static_cache_goes_on_as_without_a_cache(of: Any, model: Path) -> None:
    import torch

    engine = of("bakeoff.engines.torch_model").Engine(str(model), 1, "cpu", False, [2], 32)
    prompts = [[5, 80, 3, 200, 17], [9, 9, 31, 4, 66]]
    for _ in range(2):  # the second time over a cache that was used
        tokens = torch.tensor(prompts)
        ids, at, cache = engine._prompts(prompts)
        for _ in range(4):
            tokens = torch.cat([tokens, engine._model(tokens, use_cache=False).logits[:, -1:].argmax(-1)], 1)
            assert ids.tolist() == tokens[:, -1:].tolist()
            ids, at = engine._step(ids, at, cache), at + 1
    assert len(engine.decode(prompts, 3)["steps"]) == 3


class Server:
    """vllm.LLM and sglang.Engine, as their sources have them (see generating.py): token ids in, token ids out."""

    def __init__(self, options: Mapping[str, Any], short: int = 0) -> None:
        assert options["skip_tokenizer_init"] and options["dtype"] == "bfloat16"
        self.short = short

    def vllm(self, prompts: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        assert params.ignore_eos and not params.detokenize and params.temperature == 0
        ids = range(params.max_tokens - self.short)
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids)]) for _ in (p["prompt_token_ids"] for p in prompts)
        ]

    def sglang(self, input_ids: list[list[int]], sampling_params: Mapping[str, Any]) -> list[dict[str, Any]]:
        assert sampling_params["ignore_eos"] and sampling_params["temperature"] == 0
        return [{"output_ids": range(sampling_params["max_new_tokens"] - self.short)} for _ in input_ids]


def servers(patch: pytest.MonkeyPatch, short: int) -> None:
    modules: dict[str, Any] = {"vllm": ModuleType("vllm"), "sglang": ModuleType("sglang")}
    modules["vllm"].LLM = lambda **o: SimpleNamespace(generate=Server(o, short).vllm)
    modules["vllm"].SamplingParams = SimpleNamespace
    modules["sglang"].Engine = lambda **o: SimpleNamespace(generate=Server(o, short).sglang)
    for name, module in modules.items():
        patch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_a_servers_step_is_what_more_tokens_of_the_same_prompts_take(
    of: Any, monkeypatch: pytest.MonkeyPatch, server: str
) -> None:
    servers(monkeypatch, 0)
    generating = of("bakeoff.engines.generating")
    engine = generating.Engine("model", 1, server, [1, 8], 128, 0.3)
    engine.warm()
    clock = iter([0.0, 1.0, 5.0, 10.0])  # 1 s to the first token, 5 s to the ninth
    monkeypatch.setattr(generating.time, "perf_counter", lambda: next(clock))
    assert engine.decode([[1, 2]] * 8, 8) == {"steps": [0.5]}


def test_a_server_that_ends_early_is_not_measured(of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    servers(monkeypatch, 1)
    engine = of("bakeoff.engines.generating").Engine("model", 1, "vllm", [1], 128, 0.3)
    with pytest.raises(ValueError, match=r"vllm made \[0\] tokens where 1 each were asked for"):
        engine.decode([[1]], 3)


# A run


def contender(name: str, **options: Any) -> Contender:
    return Contender(name, "baseline", FAKE, sys.executable, "model", options, 16)


def test_an_interrupt_keeps_the_rounds_that_were_there(of: Any, tmp_path: Path) -> None:
    bench, asks = of("cuda_bakeoff"), iter(range(100))

    def progress(*_: object) -> None:
        if next(asks) == 3:  # two contenders: the round that warms, and one more
            raise KeyboardInterrupt

    shapes = of("bakeoff.shapes")
    one = bench.Bakeoff(shapes.SHAPES["tiny"], bench.QUICK, requested(tmp_path, progress=progress))
    saved: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        one.timed("prefill", [contender(EAGER, slower=3), contender("llmc xla")], lambda: saved.append("once"))
    (found,) = one.found["series"].values()
    assert found["contenders"]["llmc xla"] | {"rounds": 0} == {
        "median": 16.0, "rounds": 0, "of_roofline": None, "over": EAGER, "speed": 3.0
    }  # fmt: skip
    assert saved == ["once"]


def test_a_host_without_a_gpu_or_without_torch_is_reported(of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="no CUDA GPU; --device cpu"):
        of("cuda_bakeoff").main(["--shape", "tiny"])
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit, match="torch is not installed"):
        of("cuda_bakeoff").main(["--shape", "tiny"])


@full
def test_the_tiny_form_runs_and_names_what_cannot(
    of: Any, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench, gpu = of("cuda_bakeoff"), of("bakeoff.gpu")
    monkeypatch.setattr(gpu, "ON_CPU", {**gpu.ON_CPU, EAGER: ("a_package_that_is_not_there",)})
    monkeypatch.setenv("LLMC_THREADS", "1")  # which compiles in this process
    out = tmp_path / "found.json"
    (tmp_path / "work" / "tiny").mkdir(parents=True)
    (tmp_path / "work" / "tiny" / "model").symlink_to(model)
    flags = ("--device", "cpu", "--shape", "tiny", "--quick", "--rounds", "1", "--work", str(tmp_path / "work"))
    parts = ("--parts", "decode,graphs", "--only", "llmc xla", "--only", COPY, "--only", EAGER)
    bench.main([*flags, *parts, "-o", str(out)])

    found = json.loads(out.read_text())
    shape = found["shapes"]["tiny"]
    (steps,) = shape["series"].values()
    assert set(steps["contenders"]) == {"llmc xla", COPY}, steps["missing"]
    assert 0 < steps["contenders"]["llmc xla"]["of_roofline"] < 1
    assert shape["graphs"]["llmc xla"]["graphs"] == len(bench.QUICK.decode_plan().decode)
    assert shape["missing"] == {EAGER: "not installed: a_package_that_is_not_there"}
    assert found["machine"]["versions"]["jax"] and found["unfinished"] == []
    printed = capsys.readouterr().out
    assert f"not run: {EAGER}: not installed: a_package_that_is_not_there" in printed
    assert "llmc xla: 2 decode graphs" in printed
