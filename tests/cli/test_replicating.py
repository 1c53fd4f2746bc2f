"""`llmc serve --replicas N` on this host: what it refuses."""

from __future__ import annotations

import os
import socket

import pytest

from llmc import cpus
from tests.cli.helpers import Llmc


@pytest.fixture(autouse=True)
def _two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "allowed_cpus", lambda: frozenset({0, 1}))


def test_a_port_that_is_taken(llmc: Llmc) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        said = llmc("serve", "bundle", "--replicas", 2, "--port", other.getsockname()[1]).failed(2)
    assert "is in use; give another one" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--replicas", "0"), "--replicas 0: nothing would serve; give at least 1"),
        (("--replicas", "1-2"), "--replicas 1-2: write it as N; a range MIN-MAX needs --executor ray"),
        (("--replicas", "many"), "--replicas many: write it as N"),
        (
            ("--replicas", "3"),
            "--replicas 3: this process may use 2 CPUs, and a replica takes one at least; ask for at most 2",
        ),
        (("--replicas", "2", "--admin-token", "t"), "--admin-token: a request would reach one replica of several"),
        (("--replicas", "2", "--record-traffic", "t"), "--record-traffic: one server's file, not for --replicas"),
    ],
)
def test_what_cannot_be_is_one_clear_error(llmc: Llmc, flags: tuple[str, ...], message: str) -> None:
    assert message in llmc("serve", "bundle", *flags).failed(2)


def test_a_system_without_fork(llmc: Llmc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    assert "--replicas: this system has no fork" in llmc("serve", "bundle", "--replicas", 2).failed(2)
