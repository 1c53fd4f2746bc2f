"""GET /metrics, as Prometheus asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from llmc.server.state import Progress
from llmc.server.telemetry.metrics import labelled, together
from tests.server.pages import Invented
from tests.server.served import Served


def ask(built: Invented, path: str, **headers: str) -> httpx.Response:
    async def requested() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(built.app()), base_url="http://llmc") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(requested())


def value(answer: httpx.Response, name: str, **labels: str) -> float:
    (found,) = [
        sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return found


def test_metrics_are_there_while_loading() -> None:
    built = Invented()
    built.loading(Progress("warm", 1, 2, 3.0))
    answer = ask(built, "/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert value(answer, "llmc:ready") == 0
    assert value(answer, "llmc:generation_tokens_total") == 0


def test_metrics_of_a_server_that_serves() -> None:
    built = Invented()
    built.serve("toy")
    built.load(3)
    answer = ask(built, "/metrics")
    assert value(answer, "llmc:ready", model_name="toy") == 1
    assert value(answer, "llmc:num_requests_running") == 2
    assert value(answer, "llmc:generation_tokens_total") == 21
    assert value(answer, "llmc:bucket_requests_total", phase="decode", bucket="4x1+16") == 18
    assert value(answer, "llmc:padding_tokens_total", phase="prompt") == 21
    built.state.draining = True
    assert value(ask(built, "/metrics"), "llmc:ready") == 0


@pytest.mark.parametrize("accept", ["application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2"])
def test_openmetrics_where_it_is_requested(accept: str) -> None:
    answer = ask(Invented(), "/metrics", accept=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert answer.text.endswith("# EOF\n")


def test_data_of_the_dashboard() -> None:
    built = Invented()
    built.loading(Progress("warm", 3, 8, 12.5))
    loading = ask(built, "/dashboard/data").json()
    assert (loading["phase"], loading["model"], loading["plan"], loading["stats"]) == ("loading", None, None, None)
    assert loading["progress"] == {"stage": "warm", "done": 3, "total": 8, "eta_s": 12.5}
    built.serve("toy")
    built.load(2)
    answer = ask(built, "/dashboard/data")
    assert answer.headers["cache-control"] == "no-store"
    found = answer.json()
    assert (found["phase"], found["model"], found["device"]) == ("ready", "toy", "fake")
    assert found["plan"]["decode"] == [[1, 1, 8], [1, 1, 32], [2, 1, 16], [4, 1, 16], [4, 1, 32]]
    assert found["limits"]["max_num_seqs"] == 4
    assert found["stats"]["kv_cache_usage"] == 0.375
    assert found["series"]["generated_tokens"] == [7, 7]
    assert found["uptime_s"] >= 0


def test_an_engine_that_died_is_not_hidden_and_not_explained() -> None:
    built = Invented()
    built.serve("toy")
    built.engine.error = RuntimeError("/secret/path")
    answer = ask(built, "/dashboard/data")
    assert answer.json()["phase"] == "dead"
    assert "secret" not in answer.text


def test_the_page_may_only_run_its_own_script() -> None:
    built = Invented()
    first, second = ask(built, "/dashboard"), ask(built, "/dashboard")
    policy = first.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'nonce-")
    assert "unsafe" not in policy and "http" not in policy
    nonce = policy.partition("'nonce-")[2].partition("'")[0]
    assert first.text.count(f'nonce="{nonce}"') == 2
    assert nonce not in second.text
    assert "{{" not in first.text
    assert first.headers["x-content-type-options"] == "nosniff"
    assert "frame-ancestors 'none'" in policy


def test_of_several_replicas_each_family_is_reported_once_with_every_replica() -> None:
    built, other = Invented(), Invented()
    for replica, tokens in ((built, 3), (other, 1)):
        replica.serve("toy")
        replica.load(tokens)

    async def of_all() -> Sequence[Metric]:
        reported = {"one": built, "two": other}
        return together(labelled(one.state.metrics.families(ready=True), name) for name, one in reported.items())

    built.state.all_metrics = of_all
    answer = ask(built, "/metrics")
    assert value(answer, "llmc:generation_tokens_total", replica="one") == 21
    assert value(answer, "llmc:generation_tokens_total", replica="two") == 7
    types = [line for line in answer.text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))


def test_a_servers_answers_are_counted_however_it_is_served(served: Served) -> None:
    before = served.total("generation_tokens_total")
    assert served.complete(max_tokens=3, ignore_eos=True).status_code == 200
    assert served.total("generation_tokens_total") == before + 3
    answer = served.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    types = [line for line in answer.text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
