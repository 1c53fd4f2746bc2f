from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmc.buckets.limits import Limits
from llmc.runtime.bundle import Bundle
from llmc.testing.toy import toy_plan
from tests.adapters import toy_with_adapters
from tests.farm import cluster
from tests.server.live import toy_bundle
from tests.server.served import OWN_WAYS, WAYS, Served, Ways
from tests.server.stub_engine import Api
from tests.toy import Toy

__all__ = ["cluster"]


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """4 sequences of 32 tokens; a byte is a token."""
    built = Toy.make(tmp_path_factory.mktemp("api"))
    built.compile()
    return Bundle.open(built.bundle)


@pytest.fixture(scope="session")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle whose prompts have room for a conversation with tools; a byte is a token."""
    toy = Toy.make(tmp_path_factory.mktemp("roomy"), positions=1024)
    toy.compile(toy_plan([(1, 1024, 0)], [(1, 1024)], Limits(1024, 1)))
    return Bundle.open(toy.bundle)


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What tests over a real server serve; see `toy_bundle`."""
    return toy_bundle(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ways]:
    """The bundle with adapters, served in all ways; once for all tests that a process runs."""
    servers = Ways(toy_with_adapters(tmp_path_factory.mktemp("adapters")), tmp_path_factory)
    yield servers
    servers.close()


@pytest.fixture(params=WAYS)
def served(ways: Ways, request: pytest.FixtureRequest) -> Served:
    """A server of it, in each way."""
    return ways[request.param]


@pytest.fixture(params=OWN_WAYS)
def own(ways: Ways, request: pytest.FixtureRequest) -> Served:
    """A server of it, in each way in which llmc's own HTTP answers."""
    return ways[request.param]


@pytest.fixture
def api(toy: Bundle) -> Api:
    """The application over an engine that answers "Hello"."""
    return Api(toy)


@pytest.fixture
def make_api(toy: Bundle) -> Callable[..., Api]:
    return lambda **options: Api(toy, **options)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("LLMC_CACHE_DIR", str(cache))
    return cache
