"""Lengths that OpenVINO GenAI admits on an NPU, whose static graphs it compiles for this CPU, and llmc's rules."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmc.compiler.checkpoint import demo_path
from llmc.errors import InputError
from llmc.integrations import bucket_rules
from llmc.integrations.base import Export, Lists, Setup
from llmc.integrations.settings import Value, complete
from tests.oracles.conftest import releases

pytestmark = pytest.mark.oracle
NPU = bucket_rules("openvino-genai")
CASES = 60


def setup(prompt: int, total: int, **own: Value) -> Setup:
    limits = NPU.limits({"max_model_len": total, "max_prompt_len": prompt})
    return Setup(limits, complete(NPU.settings, own))


def ran(root: Path, configurations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What pipelines with these configurations admit, each as tests/oracles/openvino_npu.py prints it."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("openvino_npu.py")), str(demo_path())],
        input=json.dumps(configurations), capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(root), "OPENVINO_LOG_LEVEL": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def admitted(lists: Lists) -> dict[str, Any]:
    """What llmc says that the lists admit."""
    return {"prompt": lists["prompt"][0][0], "totals": [lists["cache"][0][0]]}


@pytest.mark.parametrize("root", releases("openvino-genai"), ids=lambda path: path.name)
def test_it_admits_what_its_configuration_and_its_own_lengths_say(root: Path) -> None:
    random_ = random.Random(root.name)
    configurations: list[dict[str, Any]] = [{}]
    expected: list[dict[str, Any]] = [admitted(NPU.default(setup(1, 8192)))]
    for _ in range(CASES):
        hint, chunk = random_.choice(["DYNAMIC", "STATIC"]), random_.choice([32, 64, 96, 128, 256, 1000, 1024])
        prompt, response = random_.choice([random_.randint(1, 400), 64, 256]), random_.randint(1, 200)
        own = setup(1, 8192, prefill_hint=hint, prefill_chunk_size=chunk)
        stated = {"MAX_PROMPT_LEN": prompt, "MIN_RESPONSE_LEN": response, "PREFILL_HINT": hint}
        configurations.append({**stated, "NPUW_LLM_PREFILL_CHUNK_SIZE": chunk})
        try:
            lists = NPU.accept(own, NPU.read(Export(files={"c.json": json.dumps(configurations[-1])}), own)).lists
        except InputError as error:
            assert "not a power of two" in str(error)
            expected.append({"error": "not power of 2"})
        else:
            expected.append(admitted(lists))
    for found, wanted, configuration in zip(ran(root, configurations), expected, configurations, strict=True):
        if "error" in wanted:
            assert wanted["error"] in found.get("error", ""), configuration
        else:
            assert found == wanted, configuration
    assert 0 < sum("error" in one for one in expected) < CASES / 2


@pytest.mark.parametrize("root", releases("openvino-genai"), ids=lambda path: path.name)
def test_it_takes_what_is_written(root: Path) -> None:
    random_ = random.Random(root.name)
    written, expected = [], []
    for _ in range(CASES // 4):
        prompt = random_.randint(1, 600)
        built = setup(prompt, prompt + random_.randint(1, 200), prefill_chunk_size=random_.choice([64, 256, 1024]))
        lists = NPU.propose(built, {}, {"prompt": 1, "cache": 1})
        written.append(json.loads(NPU.export(built, lists).files["config.json"]))
        expected.append(admitted(lists))
    assert ran(root, written) == expected
