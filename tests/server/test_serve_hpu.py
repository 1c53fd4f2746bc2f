"""`llmc serve` on a Gaudi host, whose accelerator is a fake (tests/fakes/habana_frameworks)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.artifacts.helpers import REPO
from tests.fakes import gaudi
from tests.server.process import Process
from tests.tiers import full


@full
def test_a_server_captures_hpu_graphs_before_it_is_ready_and_compiles_nothing_while_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = gaudi.write_bundle(tmp_path)
    path = [str(REPO), str(gaudi.FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    for name, value in {"PYTHONPATH": os.pathsep.join(path), "PT_HPU_LAZY_MODE": "1"}.items():
        monkeypatch.setenv(name, value)
    with Process(tmp_path / "cache", bundle, "--port", 0, "--graph-reserved-mem", "0.4") as server:
        server.ready()
        status, answer = server.complete(max_tokens=4)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
        with urlopen(f"http://127.0.0.1:{server.port}/metrics") as response:
            metrics = response.read().decode()
    compiled = re.findall(r"^\S*unplanned_compile_total\S* (\S+)$", metrics, re.MULTILINE)
    assert [float(number) for number in compiled] == [0.0]
