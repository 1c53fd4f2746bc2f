"""HAProxy's statistics stay on its host, or a log says that they may not."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from llmc.server.ray_ingress import keep_statistics_local


@pytest.fixture
def haproxy(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> Any:
    """Ray's module, which is as it was afterwards."""
    from ray.serve._private import haproxy

    monkeypatch.setattr(haproxy, "HAPROXY_CONFIG_TEMPLATE", haproxy.HAPROXY_CONFIG_TEMPLATE)
    return haproxy


def test_both_listen_at_loopback(haproxy: Any, caplog: pytest.LogCaptureFixture) -> None:
    keep_statistics_local()
    binds = [line.split() for line in haproxy.HAPROXY_CONFIG_TEMPLATE.splitlines() if line.strip().startswith("bind")]
    own = [words[1] for words in binds if "config.metrics_port" in " ".join(words) or "stats_port" in " ".join(words)]
    assert len(own) == 2
    assert all(address.startswith("127.0.0.1:") for address in own)
    assert not caplog.records


def test_a_template_that_changed_is_told(haproxy: Any, caplog: pytest.LogCaptureFixture) -> None:
    haproxy.HAPROXY_CONFIG_TEMPLATE = "bind [::]:{{ config.metrics_port }}"
    with caplog.at_level(logging.WARNING):
        keep_statistics_local()
    (record,) = caplog.records
    assert "block 9101 and 8404" in record.getMessage()
