"""Replicas over Ray Serve: load, death, a bundle that is swapped, and the end."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmc.errors import InputError
from llmc.runtime.bundle import Bundle
from llmc.server.ray_serve import Fleet, by_load, serve
from llmc.server.state import ServerConfig
from tests.farm import Farm, install
from tests.server.over_ray import OverRay


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    with Farm.running(install(tmp_path_factory.mktemp("farmed"))) as made:
        yield made


def test_a_bundle_is_swapped_under_load_and_a_broken_one_refused(farm: Farm, toy: Bundle, tmp_path: Path) -> None:
    served = tmp_path / "bundle"
    shutil.copytree(toy.path, served)
    with OverRay(farm.address, tmp_path / "cache", served, "--replicas", "2") as server:
        server.ready()
        statuses: list[int] = []
        over = threading.Event()

        def load() -> None:
            while not over.is_set():
                statuses.append(server.complete(max_tokens=4)[0])

        client = threading.Thread(target=load)
        client.start()
        manifest = (served / "manifest.json").read_bytes()
        (served / "manifest.json").write_bytes(b"{}")
        server.signal(signal.SIGHUP)
        told(server, "the bundle is not swapped, and the old one serves on")
        (served / "manifest.json").write_bytes(manifest)
        server.signal(signal.SIGHUP)
        told(server, "the bundle is swapped: generation 1")
        over.set()
        client.join()
        assert statuses and set(statuses) == {200}
        server.signal(signal.SIGTERM)
        assert server.child.wait(60) == 0


def told(server: OverRay, text: str) -> None:
    """Wait until standard error says it."""
    assert server.child.stderr is not None
    deadline = time.monotonic() + 120
    seen = ""
    while text not in seen and time.monotonic() < deadline:
        seen += server.child.stderr.readline()
    assert text in seen, seen


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


def test_replicas_are_one_at_least() -> None:
    for least, most in ((0, 1), (2, 1)):
        with pytest.raises(InputError, match=f"--replicas {least}-{most}: write it as N or MIN-MAX"):
            Fleet(None, least, most)


def test_an_admin_token_is_refused_where_a_request_reaches_one_of_several() -> None:
    config = ServerConfig(port=8000, admin_tokens=("secret",))
    with pytest.raises(InputError, match=r"--admin-token: a request would reach one replica .* send SIGHUP"):
        serve(config, lambda tell: pytest.fail("opened"), Fleet(None, 1, 2))
