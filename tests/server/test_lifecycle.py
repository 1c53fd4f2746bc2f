"""From the bound socket to a warm engine: what each phase answers, what warming runs, and how loading fails."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llmc.buckets.capture.order import warm_up_order
from llmc.errors import ArtifactError, InputError
from llmc.server import lifecycle, serve
from llmc.server.events import Listening, Ready, Stopped
from llmc.server.loading import Countdown, how_of
from llmc.server.state import Progress, ServerConfig
from llmc.testing.toy import write_toy
from tests.server.live import Gate, Live, toy_bundle
from tests.timing import PATIENCE_S, until
from tests.toy import Toy


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One executable for every shape."""
    return toy_bundle(tmp_path_factory.mktemp("exact"), specialise=False)


@pytest.fixture(scope="module")
def static_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One executable a bucket."""
    return toy_bundle(tmp_path_factory.mktemp("static"), specialise=True)


class Door:
    """Opens `bundle` once it is let."""

    def __init__(self, bundle: Path) -> None:
        self._bundle = bundle
        self.let = threading.Event()

    def __call__(self, on_progress: Callable[[Progress], None]) -> Path:
        on_progress(Progress("compile", 3, 8, 2.25))
        while not self.let.wait(0.01):
            on_progress(Progress("compile", 3, 8, 2.25))
        return self._bundle


# While it loads


def test_the_process_settles_once_when_everything_is_read(bundle: Path) -> None:
    phases: list[str] = []
    live = Live(bundle, loaded=lambda: phases.append(live.server.state.phase))
    with live:
        live.ready()
        until(lambda: bool(phases))
        assert live.complete().status == 200
    assert phases == ["ready"]


def test_a_server_has_one_heap_before_it_has_threads(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def server(*args: object, loaded: Callable[[], None], **options: object) -> None:
        done.append(loaded.__name__)
        raise InputError("enough")

    monkeypatch.setattr(serve, "share_heap", lambda: done.append("share_heap"))
    monkeypatch.setattr(serve, "Server", server)
    with pytest.raises(InputError, match="enough"):
        serve.serve(ServerConfig(port=0), lambda on_progress: bundle)
    assert done == ["share_heap", "settle"]


def test_the_socket_answers_from_the_first_moment(bundle: Path) -> None:
    door = Door(bundle)
    with Live(door) as live:
        assert live.get("/health").json == {"status": "ok", "phase": "loading"}
        refused = live.get("/ready")
        assert refused.status == 503
        assert refused.json == {
            "status": "loading", "phase": "loading", "stage": "compile", "done": 3, "total": 8, "eta_s": 2.2,
        }  # fmt: skip
        assert refused.headers["retry-after"] == "3"
        door.let.set()
        live.ready()
        assert live.get("/ready").json == {"status": "ready", "phase": "ready"}
        assert live.get("/health").json == {"status": "ok", "phase": "ready"}


def test_requests_that_come_while_it_loads_are_reported_to_come_again(bundle: Path) -> None:
    door = Door(bundle)
    with Live(door) as live:
        refused = live.complete()
        assert refused.status == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json["error"]["type"] == "server_error"
        door.let.set()
        live.ready()
        assert live.complete().status == 200


def test_health_and_ready_answer_head_and_need_no_key(bundle: Path) -> None:
    with Live(bundle, api_keys=("secret",)) as live:
        live.ready()
        for path in ("/health", "/ready"):
            assert live.get(path).status == 200
            assert (live.ask("HEAD", path).status, live.ask("HEAD", path).text) == (200, "")
        assert live.get("/v1/health_check").status == 401
        assert live.ask("GET", "/v1/health_check", Authorization="Bearer secret").json == {
            "Service Title": "llmc serve",
            "Service Description": "OpenAI-compatible text generation over precompiled graphs",
        }


# Warming


def test_every_bucket_has_run_once_the_largest_first_before_it_is_ready(
    static_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    with Live(static_bundle) as live:
        event = live.wait(Ready)
        ran = [(s.phase, s.batch, s.query, s.context) for s in gate.steps]
        assert live.server.state.served is not None
        buckets = live.server.state.served.bundle.plan.buckets
        assert ran == [(b.phase, b.batch, b.query, b.context) for b in warm_up_order(buckets)]
        assert ran[0][1] * ran[0][2] == max(batch * query for _, batch, query, _ in ran)
        assert (event.warmed, event.compilations, event.device) == (len(buckets), 0, "fake")


def test_where_any_shape_runs_a_prompt_and_a_decode_step_warm_it(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with Live(bundle) as live:
        assert live.wait(Ready).warmed == 2
        assert [(s.phase, s.batch, s.query) for s in gate.steps] == [("prompt", 1, 16), ("decode", 1, 1)]


def test_ready_counts_the_buckets_that_are_warm_and_says_how_long_the_rest_takes(
    static_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    gate.hold()
    with Live(static_bundle) as live:
        gate.let(5)
        gate.wait(6)
        at = live.get("/ready").json
        assert (at["stage"], at["done"], at["total"]) == ("warm up", 5, 11)
        assert at["eta_s"] >= 0
        gate.let()
        live.ready()


def test_opening_alone_runs_two_buckets_and_opens_the_rest(
    static_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    gate = Gate(monkeypatch)
    monkeypatch.setattr(gate.executor, "open_all", lambda executor: opened.append(len(gate.steps)))
    with Live(static_bundle, warm_up="open") as live:
        assert live.wait(Ready).warmed == 2
        assert [(s.phase, s.batch, s.query, s.context) for s in gate.steps] == [
            ("prompt", 1, 4, 0),
            ("decode", 1, 1, 8),
        ]
        assert opened == [2]


def test_an_unknown_warm_up_lists_the_known() -> None:
    assert how_of("open") == "open"
    with pytest.raises(InputError, match="unknown warm-up 'some'; known: all, aside, open"):
        how_of("some")


def test_what_is_left_is_reported_from_the_time_so_far_and_what_the_parts_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    reported: list[Progress] = []
    countdown = Countdown("warm up", [1, 1, 3, 5], reported.append)
    now[0] = 102.0
    countdown(1)
    now[0] = 103.0
    countdown(2)
    now[0] = 120.0
    countdown(4)
    assert reported == [
        Progress("warm up", 0, 4), Progress("warm up", 1, 4, 18.0), Progress("warm up", 2, 4, 12.0),
        Progress("warm up", 4, 4, 0.0),
    ]  # fmt: skip


def test_the_first_answer_is_that_of_a_fresh_engine(bundle: Path) -> None:
    """Warm-up steps leave nothing behind: neither prefixes nor counts."""
    with Live(bundle) as live:
        live.ready()
        assert live.stats.retained_slots == 0
        assert live.gauge("prompt_tokens_total") == 0
        first, second = live.complete().json, live.complete().json
        assert first["choices"][0]["text"] == second["choices"][0]["text"]
        assert first["usage"]["completion_tokens"] == 4


# Names


def test_the_model_is_served_under_the_name_that_was_requested(bundle: Path) -> None:
    with Live(bundle, served_model_name="my/model") as live:
        assert live.wait(Ready).model == "my/model"
        assert live.get("/v1/models").json["data"][0]["id"] == "my/model"


def test_without_a_name_it_is_the_models_own_without_the_folders_it_was_in(bundle: Path) -> None:
    with Live(bundle) as live:
        assert live.wait(Ready).model == "toy"


# Loading fails


def test_a_bundle_that_cannot_be_opened_ends_the_server_with_its_error(tmp_path: Path) -> None:
    live = Live(tmp_path / "nowhere")
    with live:
        live.join()
    assert isinstance(live.error, ArtifactError)
    assert "not a bundle" in str(live.error)
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", live.port), 1):
        pass


def test_a_graph_that_cannot_run_here_is_found_before_it_is_ready(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    gate.fail(ArtifactError("the graph cannot run"))
    live = Live(bundle)
    with live:
        live.join()
    assert str(live.error) == "the graph cannot run"
    assert not [e for e in live.events if isinstance(e, Ready)]


def test_a_bundle_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    toy = Toy.make(tmp_path)
    write_toy(tmp_path / "plain", tokenizer=False)
    toy.compile(model=tmp_path / "plain")
    live = Live(toy.bundle)
    with live:
        live.join()
    assert isinstance(live.error, ArtifactError)
    assert "no tokenizer in the bundle" in str(live.error)


def test_stop_while_loading_gives_up_at_the_next_bit_of_progress(bundle: Path) -> None:
    door = Door(bundle)
    with Live(door) as live:
        live.server.stop()
        live.join()
        assert live.error is None
        assert [type(e) for e in live.events if not isinstance(e, Progress)] == [Listening, Stopped]
        live.server.loader.join(PATIENCE_S)
        assert not live.server.loader.is_alive()


def test_stopping_waits_for_no_tick_of_uvicorns(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_TICK_S", 600.0)
    with Live(bundle) as live:
        live.ready()
        live.server.stop()
        live.join()
    assert live.error is None


def test_stop_while_a_graph_hangs_in_the_warm_up_does_not_wait_for_it(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    gate.hold()
    with Live(bundle) as live:
        gate.wait(1)
        live.server.stop()
        live.join()
        assert live.server.loader.is_alive()
        gate.let()
        live.server.loader.join(PATIENCE_S)
        assert live.server.state.served is None


def test_what_the_artifact_store_counted_is_in_the_metrics(bundle: Path) -> None:
    with Live(bundle, cache_counters=lambda: {"hits": 5, "misses": 2, "corrupt": 1, "fetched": 3}) as live:
        live.ready()
        counted = [live.gauge(f"artifact_cache_{name}_total") for name in ("hits", "misses", "corrupt")]
    assert counted == [5, 2, 1]
