"""`llmc tune` as typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.compiler.targets.fake import FakeTarget
from tests.cli.helpers import Llmc
from tests.compiler.pipeline.test_tune import OnDevice
from tests.toy import Toy


def test_it_reports_how_many_products_were_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llmc: Llmc) -> None:
    toy = Toy.make(tmp_path)
    toy.compile()
    monkeypatch.setattr(FakeTarget, "tuner", lambda self: OnDevice())
    given = (toy.bundle, "--cache-dir", tmp_path / "store", "-o", tmp_path / "found.json")
    assert "11 matmuls tuned on fake-1, 11 of them new; 11 of 11 executables" in llmc("tune", *given).out
    found = llmc("tune", *given, "--json").json
    assert (found["new"], found["results"], found["device"]) == (0, 11, "fake")
    assert "is a bundle for device fake, not cuda:h100" in llmc("tune", *given, "--device", "cuda:h100").failed(2)


def test_an_interrupt_says_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llmc: Llmc) -> None:
    def stop(done: int) -> None:
        raise KeyboardInterrupt

    toy = Toy.make(tmp_path)
    toy.compile()
    monkeypatch.setattr(FakeTarget, "tuner", lambda self: OnDevice(stop=stop))
    ran = llmc("tune", toy.bundle, "--cache-dir", tmp_path / "store")
    assert ran.code == 130
    assert "0 of 11 executables were tuned; their results are kept" in ran.err
