"""The cheap ones of benchmarks/hostile.py: each is refused or answered, and the server answers others after it."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.server.served import KEYS, Served
from tests.tiers import default_cases

ROOT = Path(__file__).parents[2]


def requests() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hostile_requests", ROOT / "benchmarks" / "hostile_requests.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


ATTACKS = requests().ATTACKS
AUTHORISED = b" HTTP/1.1\r\nauthorization: Bearer %b\r\n" % KEYS[0].encode()
CHEAP = {a.name: a for a in ATTACKS if a.cheap and a.shape == "whole"}


def test_there_are_as_many_as_are_promised_and_no_two_of_a_name() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 67
    assert len(CHEAP) > 50


@default_cases(25)
@pytest.mark.parametrize("name", CHEAP)
def test_it_is_answered_as_the_clients_matter(served: Served, name: str) -> None:
    said = served.say(CHEAP[name].make().replace(b" HTTP/1.1\r\n", AUTHORISED))
    statuses = re.findall(rb"HTTP/1\.1 ([2-9]\d\d)", said)
    assert all(200 <= int(status) < 500 for status in statuses), (statuses, said[-300:])
    assert b"Traceback" not in said
    assert served.get("/health").status_code == 200


def test_after_all_of_it_nothing_is_left(served: Served) -> None:
    assert served.complete().status_code == 200
    assert served.total("num_requests_running") + served.total("num_requests_waiting") == 0
