"""`llmc serve --replicas N` as processes: one port, connections for all, and none left behind."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from llmc.cpus import shares, usable_cpus
from llmc.runtime.bundle import Bundle
from tests.server.live import toy_bundle
from tests.server.process import Process
from tests.tiers import full
from tests.timing import until

pytestmark = pytest.mark.skipif(usable_cpus() < 2, reason="replicas need a CPU each, and this host gives one")

SLOW = """
    import os, time
    from pathlib import Path
    from tests.devices import always, watching
    slow = Path({slow!r})
    def step_slowly(step):
        if slow.exists():
            slow.with_suffix(f".{{os.getpid()}}").write_text(f"{{len(step.slots):4}}")
            time.sleep(0.25)
    always(executor=watching(step_slowly))
"""
"""While there is that file, a step takes so long that requests of a test meet, and says how many run."""
SECOND_WAITS = """
    import os, time
    from pathlib import Path
    from llmc.cpus import shares
    from tests.devices import always, watching
    second = shares(2)[1]
    def wait(step):
        while os.sched_getaffinity(0) == second and not Path({go!r}).exists():
            time.sleep(0.01)
    always(executor=watching(wait))
"""
DIES = """
    import os, signal
    from tests.devices import always, watching
    always(executor=watching(lambda step: os.kill(os.getpid(), signal.SIGKILL)))
"""
ENGINES_DIE = """
    from tests.devices import always, watching
    steps = []
    def fail(step):
        steps.append(step)
        if step.past_lengths[0] >= 20:
            raise RuntimeError("the device is gone")
    always(executor=watching(fail))
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_bundle(tmp_path_factory.mktemp("toy"), specialise=False)


class Replicas(Process):
    """Two of them."""

    def __init__(self, cache: Path, bundle: Path, *, before: str = SLOW) -> None:
        self.slow = cache / "slow"
        super().__init__(
            cache, bundle, "--replicas", 2, "--port", 0, before=before.format(slow=str(self.slow), go=str(cache / "go"))
        )

    @property
    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.child.pid).children()

    def counts(self, name: str) -> dict[str, float]:
        """A counter's sum for each replica."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self.text("/metrics")):
            for sample in family.samples:
                if sample.name == name:
                    replica = sample.labels["replica"]
                    found[replica] = found.get(replica, 0.0) + sample.value
        return found

    @property
    def running(self) -> list[int]:
        """Sequences of the last slow step of each replica."""
        return [int(file.read_text() or 0) for file in self.slow.parent.glob("slow.*")]

    def text(self, path: str) -> str:
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
            with connection.makefile("rb") as answer:
                return answer.read().decode().partition("\r\n\r\n")[2]

    @contextmanager
    def requested(self, requests: int) -> Iterator[list[Future[tuple[int, Any]]]]:
        """So many requests at once, each on a connection of its own; all run, slowly until `slow` is removed."""
        self.slow.touch()
        with ThreadPoolExecutor(requests) as pool:
            calls = [pool.submit(self.complete, max_tokens=28) for _ in range(requests)]
            until(lambda: sum(self.running) == requests)
            yield calls


@full
def test_a_burst_is_spread_and_a_signal_lets_all_of_it_end(bundle: Path, tmp_path: Path) -> None:
    with Replicas(tmp_path, bundle) as server:
        ready = server.ready()
        assert ready.text("/ready") == '{"status":"ready","phase":"ready"}'
        left = psutil.Process(server.child.pid).children(recursive=True)
        cpus = [set(one.cpu_affinity()) for one in server.processes]
        assert sorted(map(sorted, cpus)) == sorted(map(sorted, shares(2)))
        with server.requested(8) as calls:
            assert server.running == [4, 4]
            server.signal()
            draining = server.wait("draining")
            assert (draining["signal"], draining["running"], draining["waiting"]) == ("SIGTERM", 8, 0)
            server.slow.unlink()
            assert {call.result()[0] for call in calls} == {200}
        assert server.wait("stopped")["cancelled"] == 0
        assert server.ended() == (0, "")
        assert not any(one.is_running() for one in left)


@full
def test_metrics_add_up_and_tell_who_answered(bundle: Path, tmp_path: Path) -> None:
    with Replicas(tmp_path, bundle).ready() as server:
        for _ in range(6):
            assert server.complete()[0] == 200
        assert server.counts("llmc:generation_tokens_total") == {"0": 12.0, "1": 12.0}
        assert server.counts("llmc:request_success_total") == {"0": 3.0, "1": 3.0}
        assert server.text("/metrics").count("# TYPE llmc:generation_tokens_total counter") == 1


def test_a_killed_replica_takes_its_own_requests_alone_and_returns(bundle: Path, tmp_path: Path) -> None:
    with Replicas(tmp_path, bundle).ready() as server:
        before = {one.pid for one in server.processes}
        with server.requested(6) as calls:
            victim = server.processes[0]
            victim.kill()
            lost = server.wait("replicalost")
            assert (lost["reason"], lost["again_s"]) == ("ended by SIGKILL", 0)
            server.slow.unlink()
            assert server.complete()[0] == 200  # by the other one
            ended = [call.exception() for call in calls]
        assert sum(isinstance(error, HTTPException | ConnectionError) for error in ended) == 3
        assert [call.result()[0] for call, error in zip(calls, ended, strict=True) if error is None] == [200] * 3
        assert server.wait("replicaback")["replica"] == lost["replica"]
        now = {one.pid for one in server.processes}
        assert len(now) == 2 and before - now == {victim.pid}
        until(lambda: server.complete()[0] == 200 and min(server.counts("llmc:request_success_total").values()) > 0)


def test_it_is_ready_when_all_are(bundle: Path, tmp_path: Path) -> None:
    with Replicas(tmp_path, bundle, before=SECOND_WAITS) as server:
        server.wait("listening")
        until(lambda: '"done":1,"total":2' in server.text("/ready"))
        assert '"stage":"replicas"' in server.text("/ready")
        assert server.complete()[0] == 200  # the one that is ready takes what comes
        (tmp_path / "go").touch()
        ready = server.wait("ready")
        assert (ready["model"], ready["warmed"]) == ("toy", 2 * 2)
        assert server.ask("GET", "/ready") == (200, {"status": "ready", "phase": "ready"})


@full
def test_a_replica_whose_engine_died_is_replaced(bundle: Path, tmp_path: Path) -> None:
    with Replicas(tmp_path, bundle, before=ENGINES_DIE).ready() as server:
        assert server.complete(prompt="a" * 21)[0] == 503
        assert server.wait("dead")["message"] == "RuntimeError: the device is gone"
        assert server.wait("replicalost")["reason"] == "its engine stopped on an error"
        assert server.wait("replicaback")["replica"] == 0
        assert {server.complete()[0] for _ in range(4)} == {200}


@full
def test_a_hangup_swaps_in_each(bundle: Path, tmp_path: Path) -> None:
    link = tmp_path / "current"
    link.symlink_to(bundle)
    with Replicas(tmp_path, link).ready() as server:
        server.signal(signal.SIGHUP)
        reported = [server.wait("swapped") for _ in range(2)]
        assert {(one["digest"], one["changed"]) for one in reported} == {(Bundle.open(bundle).manifest.digest, False)}
        link.unlink()
        server.signal(signal.SIGHUP)
        assert {server.wait("swaprefused")["code"] for _ in range(2)} == {"broken_bundle"}
        assert {server.complete()[0] for _ in range(4)} == {200}


@full
def test_replicas_end_with_their_supervisor(bundle: Path, tmp_path: Path) -> None:
    with Replicas(tmp_path, bundle).ready() as server:
        left = psutil.Process(server.child.pid).children(recursive=True)
        server.signal(signal.SIGKILL)
        assert server.ended()[0] == -signal.SIGKILL
        psutil.wait_procs(left, 10)
        assert not any(one.is_running() for one in left)
        with socket.create_server(("127.0.0.1", server.port)):
            pass


@full
def test_a_second_signal_does_not_wait(bundle: Path, tmp_path: Path) -> None:
    with Replicas(tmp_path, bundle).ready() as server, server.requested(4) as calls:
        server.signal(signal.SIGINT)
        assert server.wait("draining")["signal"] == "SIGINT"
        server.signal(signal.SIGINT)
        assert {call.result()[0] for call in calls} == {503}
        assert server.wait("stopped")["cancelled"] == 4
        assert server.ended()[0] == 128 + signal.SIGINT


@full
def test_behind_a_unix_socket(bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "llmc.sock"
    with Process(tmp_path, bundle, "--replicas", 2, "--uds", path).ready() as server:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        server.signal()
        assert server.ended() == (0, "")
    assert not path.exists()


# Bad input


def test_a_bundle_that_cannot_be_opened_is_one_line_and_its_code(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with Replicas(tmp_path, tmp_path / "empty") as server:
        server.wait("listening")
        code, said = server.ended()
    assert code == 5
    assert said.startswith("llmc: error: ") and said.count("\n") == 1


@full
def test_one_that_dies_while_it_starts_ends_all_of_them(bundle: Path, tmp_path: Path) -> None:
    with Replicas(tmp_path, bundle, before=DIES) as server:
        server.wait("listening")
        code, said = server.ended()
    assert code == 1
    assert "did not start: ended by SIGKILL" in said and said.count("\n") == 1
