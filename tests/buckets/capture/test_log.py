"""Lines and JSON of a capture where prompts have contexts: (batch, query, blocks)."""

from __future__ import annotations

import json

from llmc.buckets.capture.graphs import capture
from llmc.buckets.capture.log import CaptureLog, to_dict
from llmc.buckets.capture.options import CaptureOptions
from llmc.buckets.render.text import size_text
from llmc.integrations.vllm_gaudi.logs import start_lists
from tests.buckets.capture.simulated import MIB, SimulatedDevice, decode, prompt

PLAN = [prompt(1, 128, 300), prompt(2, 128, 0), decode(4, 512)]


def test_lines_of_plans_with_prompt_contexts_are_what_the_gaudi_log_parser_reads():
    lines = CaptureLog.of(PLAN, 128)
    log = [lines.run(bucket, 1, 1, 21 * MIB) for bucket in PLAN]
    assert log[0] == "[Warmup][Prompt][1/1] batch_size:1 query_len:128 num_blocks:3 free_mem:21 MiB"
    assert start_lists(log) == {"prompt": ((1, 128, 3), (2, 128, 0)), "decode": ((4, 1, 16),)}


def test_json_names_every_bucket_in_tokens():
    outcome = capture(
        SimulatedDevice(300, lambda bucket: bucket.tokens), PLAN, 0, CaptureOptions(graph_prompt_ratio=0.5)
    )  # fmt: skip
    found = json.loads(json.dumps(to_dict(outcome)))
    assert found["prompt"] == {
        "share": 150, "used": 128, "buckets": 2, "percent": 50.0,
        "captured": [{"bucket": [1, 128, 300], "bytes": 128, "predicted": 0}],
        "uncaptured": [{"bucket": [2, 128, 0], "why": "does not fit: about 256 B, 168 B left"}],
    }  # fmt: skip
    assert (found["free"], found["budget"], found["used"], found["notes"]) == (300, 300, 132, [])


def test_sizes_have_four_digits_as_the_guides_log():
    shown = [size_text(size) for size in (0, 504 * MIB, -252 * 1024, 7.923 * 1024 * MIB, 1007 * 1024 * MIB, 1 << 50)]
    assert shown == ["0 B", "504 MiB", "-252 KiB", "7.923 GiB", "1007 GiB", "1024 TiB"]
