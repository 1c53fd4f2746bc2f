"""A swap to what a tag of a registry names by now, and a registry that fails midway: the old bundle serves on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llmc.api.serving import ServedModel
from llmc.artifacts.bundle.manifest import read_manifest
from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.bundle.stored import add_bundle
from llmc.artifacts.oci import push_image
from llmc.artifacts.oci.registry import RegistryImages
from llmc.artifacts.store.store import Store
from llmc.server.events import Retired, Swapped, SwapRefused
from llmc.testing.toy import toy_plan
from tests.artifacts.oci.server import QUICK, Answer, Handler, Server, half, times
from tests.server.live import Live
from tests.tiers import default_cases
from tests.toy import Toy

ALWAYS = 1000


def cut(handler: Handler) -> bool:
    """The line is cut before the answer."""
    handler.close_connection = True
    return True


def no(handler: Handler) -> bool:
    """Not for you."""
    return handler.reply(403, b'{"errors": [{"code": "DENIED", "message": "closed"}]}')


class Shop:
    """A registry with a tag that moves, and a server that was started with it, and has a store of its own."""

    def __init__(self, folder: Path, toy: Toy) -> None:
        self._folder, self._toy = folder, toy
        self.push(toy.bundle)
        self.registry = Server(folder)
        store = Store(folder / "servers")
        served = ServedModel(self.registry.reference, None, store)
        self.live = Live(served.open, reopen=served.reopen)

    def push(self, bundle: Path) -> None:
        """Let the tag name it."""
        entry = add_bundle(self._toy.store, BundleFiles.open(bundle))
        push_image(self._toy.store, entry, f"oci-layout:{self._folder}:v1")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    toy = Toy.make(tmp_path_factory.mktemp("registry"))
    toy.compile()
    toy.compile(replace(toy_plan(), buckets=toy_plan().buckets[:-1]), bundle=toy.bundle.with_name("two"))
    return toy


@pytest.fixture
def shop(built: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.setattr(RegistryImages.__init__, "__defaults__", (QUICK,))
    monkeypatch.setenv("LLMC_ALLOW_UNSIGNED", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    shop = Shop(tmp_path / "images", built)
    with shop.live as live:
        live.ready()
        yield shop
    shop.registry.shutdown()
    shop.registry.server_close()


def test_a_tag_that_moved_is_swapped_in(shop: Shop, built: Toy) -> None:
    two = built.bundle.with_name("two")
    shop.push(two)
    shop.live.server.reload()
    assert shop.live.wait(Swapped).digest == read_manifest(two).digest
    assert shop.live.wait(Retired).digest == read_manifest(built.bundle).digest
    assert shop.live.complete().status == 200


@default_cases(1)
@pytest.mark.parametrize(("answer", "part", "said"), [
    (half, "GET /v2/x/blobs", "ChunkedEncodingError"),
    (cut, "GET /v2/x/blobs", "registry"),
    (cut, "GET /v2/x/manifests", "registry"),
    (no, "GET /v2/x/blobs", "access denied"),
])  # fmt: skip
def test_a_registry_that_fails_midway_changes_nothing(
    shop: Shop, built: Toy, answer: Answer, part: str, said: str
) -> None:
    """And what is there again is taken at the next signal."""
    live, two = shop.live, built.bundle.with_name("two")
    shop.push(two)
    shop.registry.answers = [times(ALWAYS, answer, part)]
    live.server.reload()
    refused = live.wait(SwapRefused)
    assert refused.code == "unreachable_bundle" and said in refused.message, refused
    assert live.complete().status == 200
    assert live.server.state.served is not None
    assert live.server.state.served.bundle.manifest.digest == read_manifest(built.bundle).digest
    shop.registry.answers = []
    live.server.reload()
    assert live.wait(Swapped).digest == read_manifest(two).digest
