"""`llmc serve --executor ray`: what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.server import ray_serve
from tests.cli.helpers import Llmc
from tests.tiers import default_cases


@default_cases(2)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--executor", "cloud"), "unknown executor 'cloud'"),
        (("--executor", "ray", "--uds", "socket"), "--uds: not available with --executor ray"),
        (("--executor", "ray", "--replicas", "many"), "--replicas many: write it as N or MIN-MAX"),
        (("--executor", "ray", "--replicas", "3-2"), "--replicas 3-2"),
        (("--executor", "ray", "--port", "0"), "--port 0"),
        (("--scale-down-after", "1h"), "--scale-down-after: not available with --executor local"),
        (("--executor", "ray", "--scale-up-after", "soon"), "--scale-up-after"),
        (("--executor", "ray", "--address", "127.0.0.1:1"), "no Ray cluster at 127.0.0.1:1"),
    ],
)
def test_what_cannot_be_is_one_clear_error(llmc: Llmc, bundle: Path, flags: tuple[str, ...], message: str) -> None:
    ran = llmc("serve", bundle, *flags)
    assert ran.code in (2, 3) and message in ran.err.replace("\n", " ")


@pytest.mark.parametrize(
    ("model", "code", "message"),
    [
        ("nowhere", 1, "nowhere: no such file or folder; MODEL is"),
        ("empty", 5, "empty"),
        ("store:abcdef", 5, "abcdef"),
        ("file.gguf", 1, "the file is empty"),
    ],
)
def test_what_is_not_there_is_said_before_a_cluster_is_requested(
    llmc: Llmc, here: Path, monkeypatch: pytest.MonkeyPatch, model: str, code: int, message: str
) -> None:
    def connected(*_: object) -> None:
        raise AssertionError("asked a cluster")

    monkeypatch.setattr(ray_serve, "connected", connected)
    (here / "empty").mkdir()
    (here / "file.gguf").touch()
    assert message in llmc("serve", model, "--executor", "ray").failed(code)


def test_a_checkpoint_that_is_there_is_compiled_only_for_a_cluster(llmc: Llmc, toy: Path) -> None:
    said = llmc("serve", toy, "--device", "fake", "--executor", "ray", "--address", "127.0.0.1:1").failed(3)
    assert "no Ray cluster at 127.0.0.1:1" in said and "trace" not in said
