"""Connections, and requests of one client, are bounded; what is refused is told so, and room comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmc.server.clients import Clients, client_of
from llmc.server.errors import ApiError
from tests.server.live import Gate, Live
from tests.server.stub_engine import refusal
from tests.server.test_connections import answered
from tests.timing import until


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("10.0.0.1", "10.0.0.1"), ("::ffff:10.0.0.1", "10.0.0.1"), ("2001:db8:1:2:3:4:5:6", "20010db800010002::/64"),
        ("2001:db8:1:2::9", "20010db800010002::/64"), ("fe80::1%eth0", "fe80000000000000::/64"), (None, ""), ("", ""),
    ],
)  # fmt: skip
def test_a_client_is_an_address_or_a_network_of_ipv6(address: str | None, client: str) -> None:
    assert client_of(address) == client


def test_a_bound_of_zero_is_none_and_unix_sockets_are_no_client() -> None:
    clients = Clients(0, 1, 1)
    assert not any(clients.connect(None) for _ in range(5000))
    assert all(clients.begin(None) for _ in range(5000))
    assert clients.connect("10.0.0.1") is None
    refused = clients.connect("10.0.0.1")
    assert refused is not None and refused.status == 429
    assert clients.connect("10.0.0.2") is None
    end = clients.begin("10.0.0.1")
    with pytest.raises(ApiError):
        clients.begin("10.0.0.1")
    end()
    clients.begin("10.0.0.1")


@pytest.mark.parametrize(("bound", "status"), [("max_connections", 503), ("max_connections_per_client", 429)])
def test_connections_beyond_the_bound_are_reported_so_and_closed(bundle: Path, bound: str, status: int) -> None:
    with Live(bundle, **{bound: 2}) as live:
        first, second = live.connect(), live.connect()
        until(lambda: live.server.state.clients.open == 2)
        with live.connect() as third:
            code, error = answered(third)
        assert (code, error["code"]) == (status, "overloaded" if status == 503 else "too_many_requests")
        first.close()
        until(lambda: live.server.state.clients.open == 1)
        assert live.get("/health").status == 200
        second.close()
        until(lambda: live.server.state.clients.open == 0)


def test_requests_of_a_client_beyond_the_bound_are_reported_so(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with Live(bundle, max_requests_per_client=2) as live:
        live.ready()
        gate.hold()
        calls = [live.call(), live.call()]
        assert live.server.state.served is not None
        engine = live.server.state.served.engine
        until(lambda: engine.in_flight == 2)
        answer = live.complete()
        assert (answer.status, answer.json["error"]["code"]) == (429, "too_many_requests")
        assert int(answer.headers["retry-after"]) >= 1
        assert live.get("/health").status == 200
        gate.let()
        assert {c.answer.status for c in calls} == {200}
        until(lambda: live.complete().status == 200)


def test_the_key_is_requested_first(make_api) -> None:
    """Who has no key learns nothing of others' requests."""
    api = make_api(api_keys=("k",), max_requests_per_client=1)
    api.state.clients.begin("127.0.0.1")
    refusal(api.get("/v1/models"), 401)
    refusal(api.get("/v1/models", Authorization="Bearer k"), 429)
