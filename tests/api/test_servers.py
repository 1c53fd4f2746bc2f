"""Plans for other servers from Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.api import servers
from llmc.errors import InputError, UnknownNameError

SAMPLE = Path(__file__).parents[1] / "data" / "azure_conv_sample.csv"


def test_from_traffic_to_a_configuration_and_back(tmp_path: Path) -> None:
    tuned = servers.tune("vllm", SAMPLE, max_model_len=8192, max_num_seqs=64, max_graphs=20)
    assert tuned.chosen.graphs <= 20 < tuned.default.graphs
    assert tuned.plan.facts["requests"] == 1500
    assert servers.evaluate(tuned.plan, SAMPLE) == tuned.chosen
    (tmp_path / "command").write_text("vllm serve m " + " ".join(
        f"{flag} '{value}'" for flag, _, value in (text.partition(" ") for text in servers.export(tuned.plan).arguments)
    ))  # fmt: skip
    assert servers.load("vllm", tmp_path / "command").lists == tuned.plan.lists


def test_what_cannot_be_used_is_named() -> None:
    with pytest.raises(UnknownNameError, match="unknown server 'vlm'"):
        servers.tune("vlm", SAMPLE, max_model_len=8192)
    with pytest.raises(InputError, match="needs max_model_len"):
        servers.tune("vllm", SAMPLE)
    with pytest.raises(UnknownNameError, match="unknown setting of this server 'x'"):
        servers.tune("vllm", SAMPLE, max_model_len=8192, settings={"x": 1})
