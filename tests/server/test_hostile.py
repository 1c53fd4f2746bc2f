"""The cheap ones of benchmarks/hostile.py: each is refused or answered, and the server answers others after it."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.server.live import Live

ROOT = Path(__file__).parents[2]


def requests() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hostile_requests", ROOT / "benchmarks" / "hostile_requests.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


ATTACKS = requests().ATTACKS
CHEAP = {a.name: a for a in ATTACKS if a.cheap and a.shape == "whole"}


@pytest.fixture(scope="module")
def live(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("LLMC_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        with Live(bundle) as live:
            yield live.ready()


def test_there_are_as_many_as_are_promised_and_no_two_of_a_name() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 67
    assert len(CHEAP) > 50


@pytest.mark.parametrize("name", CHEAP)
def test_it_is_answered_as_the_clients_matter(live: Live, name: str) -> None:
    with live.connect() as connection:
        said = b""
        try:
            connection.sendall(CHEAP[name].make())
            while part := connection.recv(1 << 16):
                said += part
        except (BrokenPipeError, ConnectionResetError):
            pass  # it was refused before all was sent
    statuses = re.findall(rb"HTTP/1\.1 (\d{3})", said)
    assert all(200 <= int(status) < 500 for status in statuses), (statuses, said[-300:])
    assert b"Traceback" not in said
    assert live.get("/health").status == 200


def test_after_all_of_it_nothing_is_left(live: Live) -> None:
    assert live.complete().status == 200
    state = live.server.state
    assert state.served is not None
    assert (state.served.engine.in_flight, state.held_bytes) == (0, 0)
