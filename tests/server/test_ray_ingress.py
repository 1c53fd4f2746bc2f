"""HAProxy's statistics stay on its host, or a log says that they may not; what it says itself is JSON."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import pytest

from llmc.server.ray_ingress import configure_haproxy


@pytest.fixture
def haproxy(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> Any:
    """Ray's module, which is as it was afterwards."""
    from ray.serve._private import haproxy

    monkeypatch.setattr(haproxy, "HAPROXY_CONFIG_TEMPLATE", haproxy.HAPROXY_CONFIG_TEMPLATE)
    return haproxy


def test_both_listen_at_loopback(haproxy: Any, caplog: pytest.LogCaptureFixture) -> None:
    configure_haproxy()
    binds = [line.split() for line in haproxy.HAPROXY_CONFIG_TEMPLATE.splitlines() if line.strip().startswith("bind")]
    own = [words[1] for words in binds if "config.metrics_port" in " ".join(words) or "stats_port" in " ".join(words)]
    assert len(own) == 2
    assert all(address.startswith("127.0.0.1:") for address in own)
    assert not caplog.records


def test_what_haproxy_says_itself_is_an_error_object(haproxy: Any) -> None:
    configure_haproxy()
    texts = re.findall(r'status (\d+) content-type application/json string "(.*)"', haproxy.HAPROXY_CONFIG_TEMPLATE)
    said = {int(status): json.loads(text.replace('\\"', '"'))["error"]["code"] for status, text in texts}
    assert said == {404: "unknown_url", 502: "no_replica", 503: "no_replica", 504: "no_replica"}
    assert "errorfile" not in haproxy.HAPROXY_CONFIG_TEMPLATE


def test_a_template_that_changed_is_told(haproxy: Any, caplog: pytest.LogCaptureFixture) -> None:
    haproxy.HAPROXY_CONFIG_TEMPLATE = "bind [::]:{{ config.metrics_port }}"
    with caplog.at_level(logging.WARNING):
        configure_haproxy()
    assert "block 9101 and 8404" in caplog.records[0].getMessage()
