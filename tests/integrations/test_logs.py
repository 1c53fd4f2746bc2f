"""Steps that servers counted themselves, from what they log."""

from __future__ import annotations

import json

import pytest

from llmc.buckets.traffic.formats import create
from llmc.buckets.traffic.formats.base import StepFormat
from llmc.buckets.traffic.step_histogram import StepHistogram, StepKey
from llmc.errors import InputError

TABLE = """\
(EngineCore_DP0 pid=9) INFO 11-23 12:00:10 [cuda_graph.py:117] **CUDAGraph Stats:**
(EngineCore_DP0 pid=9) INFO 11-23 12:00:10 [cuda_graph.py:117] | Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |
(EngineCore_DP0 pid=9) INFO 11-23 12:00:10 [cuda_graph.py:117] |-----------------|---------------|--------------|--------------|-------|
(EngineCore_DP0 pid=9) INFO 11-23 12:00:10 [cuda_graph.py:117] | 42              | 48            | 6            | FULL         | 30    |
(EngineCore_DP0 pid=9) INFO 11-23 12:00:10 [cuda_graph.py:117] | 600             | 600           | 0            | NONE         | 2     |
"""  # noqa: E501 - as vLLM writes it
SIZES = "({process} pid={pid}) INFO 11-23 12:00:{second:02d} [forward_context.py:9] Batchsize forward time stats " \
    "(batchsize, count, median_time(ms)): {found}"  # fmt: skip
GAUDI = """\
INFO 11-23 11:50:00 [hpu_model_runner.py:9] [Warmup][Prompt][1/2] batch_size:1 query_len:2048 num_blocks:0 free_mem:55.43 GiB
INFO 11-23 11:50:01 [hpu_model_runner.py:9] [Warmup][Prompt][2/2] batch_size:1 query_len:128 num_blocks:0 free_mem:55.43 GiB
INFO 11-23 11:50:02 [hpu_model_runner.py:9] [Warmup][Decode][1/1] batch_size:8 query_len:1 num_blocks:512 free_mem:55.43 GiB
WARNING 11-23 12:00:00 [common.py:9] Prompt bucket for (1, 2108, 0) was not prepared. Adding new bucket: (1, 2496, 0)
WARNING 11-23 12:00:01 [common.py:9] Decode bucket for (24, 1, 4026) was not prepared. Adding new bucket: (24, 1, 3721)
WARNING 11-23 12:00:01 [hpu_model_runner.py:9] Configuration: ('decode', 40, 1, 512) was not warmed-up!
"""  # noqa: E501 - as vllm-gaudi writes it


def of(name: str, text: str) -> StepHistogram:
    format_ = create(name)
    assert isinstance(format_, StepFormat)
    return format_.steps("log", iter(text.split("\n")))


def test_tables_of_cuda_graphs_are_added_up():
    found = of("vllm-cudagraphs", "start-up\n" + TABLE + "in between | 1 | 2 |\n" + TABLE)
    assert found.axes == ("tokens",)
    assert found.counts == {StepKey("any", (42,), (48,)): 60, StepKey("any", (600,), (600,)): 4}
    assert found.steps == 64 and found.notes == ("4 of 64 steps ran without a graph",)
    assert found.padding == pytest.approx(60 * 6 / (60 * 42 + 4 * 600))


def test_a_table_that_does_not_add_up_is_damaged():
    with pytest.raises(InputError, match="log: line 4: 42 tokens and 6 paddings are not 84"):
        of("vllm-cudagraphs", TABLE.replace("| 48 ", "| 84 "))


def test_the_last_line_of_a_process_counts_all_its_steps():
    lines = [
        SIZES.format(process="Worker_DP0_TP0", pid=1, second=0, found="[(8, 5, 1.5), (16, 2, 2.0)]"),
        SIZES.format(process="Worker_DP0_TP1", pid=2, second=0, found="[(8, 5, 1.5), (16, 2, 2.0)]"),
        SIZES.format(process="Worker_DP1_TP0", pid=3, second=0, found="[(32, 4, 1.5)]"),
        SIZES.format(process="Worker_DP0_TP0", pid=1, second=9, found="[(8, 9, 1.5), (16, 3, 2.0), (1, 2, 0.1)]"),
    ]
    found = of("vllm-batchsizes", "\n".join(lines))
    assert {key.shape: count for key, count in found.counts.items()} == {(1,): 2, (8,): 9, (16,): 3, (32,): 4}
    assert found.padded and found.padding is None


@pytest.mark.parametrize("process", ["Worker_TP{}", "VllmWorker rank={}", "Worker_PP0_TP{}_EP{}"])
def test_ranks_that_take_the_same_steps_count_once(process):
    lines = [
        SIZES.format(process=process.format(rank, rank), pid=rank, second=rank, found="[(8, 5, 1.5)]").replace(
            ") INFO", ")\x1b[0;0m \x1b[32mINFO\x1b[0m" if rank else ") INFO"
        )
        for rank in range(3)
    ]
    assert of("vllm-batchsizes", "\n".join(lines)).steps == 5


def test_a_process_that_started_again_counts_from_zero():
    lines = [
        SIZES.format(process="EngineCore_DP0", pid=1, second=s, found=f"[(8, {n}, 1.5)]") for s, n in ((0, 9), (5, 2))
    ]
    assert of("vllm-batchsizes", "\n".join(lines)).steps == 11


def test_buckets_that_gaudi_missed_and_warmed_up():
    found = of("vllm-gaudi", GAUDI)
    assert found.counted == "misses" and found.axes == ("batch", "query", "blocks")
    assert found.counts == {
        StepKey("prompt", (1, 2108, 0), (1, 2496, 0)): 1,
        StepKey("decode", (24, 1, 4026), (24, 1, 3721)): 1,
        StepKey("decode", (40, 1, 512), (40, 1, 512)): 1,
    }
    assert found.prepared == {"prompt": ((1, 2048, 0), (1, 128, 0)), "decode": ((8, 1, 512),)}
    assert found.notes == ("1 steps ran in buckets that were in the list and not warmed up",)
    assert of("vllm-gaudi", GAUDI.split("WARNING", 1)[0]).notes == ("no step was without a prepared bucket",)


def test_steps_of_a_tpu():
    def step(real: int, padded: int, requests: int, prefill: int) -> str:
        names = ("total_num_scheduled_tokens", "padded_total_num_scheduled_tokens", "num_reqs", "num_prefill_tokens")
        numbers = (real, padded, requests, prefill)
        return json.dumps({**dict(zip(names, numbers, strict=True)), "num_decode_tokens": real - prefill})

    found = of(
        "tpu-steps", "\n".join([step(5, 16, 5, 0), step(5, 16, 5, 0), step(100, 128, 1, 100), step(20, 32, 3, 18)])
    )
    assert found.counts == {
        StepKey("decode", (5, 5), (16, 5)): 2,
        StepKey("prompt", (100, 1), (128, 1)): 1,
        StepKey("any", (20, 3), (32, 3)): 1,
    }
    assert found.padding == pytest.approx(192 / 130 - 1)
    with pytest.raises(InputError, match="line 1: 5 tokens were padded to 4, which are fewer"):
        of("tpu-steps", step(5, 4, 5, 0))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vllm-cudagraphs", "--cudagraph-metrics"),
        ("vllm-batchsizes", "VLLM_LOG_BATCHSIZE_INTERVAL"),
        ("vllm-gaudi", "no line reports a bucket"),
        ("tpu-steps", "AGGREGATED_STATS_DIR"),
    ],
)
def test_a_log_without_steps_says_how_to_get_them(name, message):
    with pytest.raises(InputError, match=f"log: .*{message}"):
        of(name, "hello\n")


def test_shapes_without_end_are_refused(monkeypatch):
    monkeypatch.setattr("llmc.integrations.vllm_gaudi.logs.MAX_SHAPES", 4)
    with pytest.raises(InputError, match="more than 4 shapes"):
        of("vllm-gaudi", GAUDI)
