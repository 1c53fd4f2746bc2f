"""A real S3 server behind a connection that drops, refuses and is killed: every byte arrives, few of them twice."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from llmc.artifacts.digest import Blob
from llmc.artifacts.key import Key
from llmc.artifacts.remotes.base import Remote, RemoteError, blob_name
from llmc.artifacts.remotes.transfer import pull, push
from llmc.artifacts.store.store import Store
from tests.artifacts.helpers import child, files_below, flip
from tests.artifacts.remotes.helpers import CREDENTIALS, FakeTrust, Proxy
from tests.tiers import full
from tests.timing import until

TRUST = FakeTrust()
SIZE = 3_000_000


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc.artifacts.remotes.fsspec_remote.PIECE", 250_000)


@pytest.fixture
def big(store: Store) -> Blob:
    """One blob of three megabytes, in an entry."""
    blob = store.put_bytes(os.urandom(SIZE))
    store.publish(Key("weights", {"a": 1}), {"weights": blob})
    return blob


@full
def test_connections_that_drop_midway_are_taken_up_again(
    s3: Callable[[], Remote], proxy: Proxy, store: Store, other: Store, big: Blob
) -> None:
    proxy.drop_sent_after, proxy.drops = 1_000_000, 2
    assert push(store, store.entries(), s3()).bytes == SIZE
    assert proxy.dropped == 2
    proxy.reset()
    proxy.drop_after, proxy.drops = 200_000, 5
    report = pull(other, s3(), trust=TRUST)
    assert (report.bytes, report.refused, proxy.dropped) == (SIZE, (), 5)
    assert proxy.received < SIZE + 5 * 250_000 + 100_000
    assert other.verify().bad == []
    assert other.has(big)


def test_a_server_that_refuses_is_an_error_after_some_attempts_and_leaves_what_came(
    s3: Callable[[], Remote], proxy: Proxy, store: Store, other: Store, big: Blob
) -> None:
    push(store, store.entries(), s3())

    def until_half(done: int, total: int) -> None:
        if done >= SIZE // 2:
            proxy.refusing = True

    with pytest.raises(RemoteError, match=r"s3://bucket/.*try again"):
        pull(other, s3(), trust=TRUST, progress=until_half)
    (partial,) = [path for path in files_below(other.layout.temporaries) if "partial" in path.name]
    have = partial.stat().st_size
    assert SIZE // 2 <= have < SIZE
    proxy.reset()
    report = pull(other, s3(), trust=TRUST)
    assert report.bytes == SIZE - have
    assert proxy.received < SIZE - have + 100_000
    assert other.verify().bad == []


PULL = """
    import sys
    from fsspec.config import conf
    from llmc.artifacts.remotes import fsspec_remote, open_remote
    from llmc.artifacts.remotes.transfer import pull
    from llmc.artifacts.store.store import Store
    class Trust:
        def require(self, *_, **__): return None
    root, url, endpoint, key, secret = sys.argv[1:]
    conf["s3"] = {"endpoint_url": endpoint, "key": key, "secret": secret}
    fsspec_remote.PIECE, fsspec_remote.AHEAD = 250_000, 1
    print("ready", flush=True)
    print(pull(Store(root), open_remote(url), trust=Trust()).bytes)
"""


def test_kill_9_during_a_pull_costs_only_what_was_on_its_way(
    s3: Callable[[], Remote], proxy: Proxy, store: Store, other: Store, big: Blob, bucket: Path
) -> None:
    push(store, store.entries(), s3())
    proxy.reset()
    proxy.pause = 0.005
    url = f"s3://bucket/{bucket.name}"
    victim = child(PULL, other.root, url, proxy.url, *CREDENTIALS)
    partial = other.layout.temporaries / f"partial-{big.digest[7:]}"
    until(lambda: (partial.exists() and partial.stat().st_size >= SIZE // 3) or victim.poll() is not None)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    have = partial.stat().st_size
    assert have < SIZE
    proxy.reset()
    assert pull(other, s3(), trust=TRUST).bytes == SIZE - have
    assert proxy.received < SIZE - have + 100_000
    assert other.verify().bad == []


def test_damage_on_the_server_is_found_and_nothing_of_it_stays(
    s3: Callable[[], Remote], store: Store, other: Store, big: Blob, bucket: Path
) -> None:
    push(store, store.entries(), s3())
    flip(bucket / blob_name(big.digest))
    report = pull(other, s3(), trust=TRUST)
    assert "is damaged" in report.refused[0].reason
    assert files_below(other.layout.temporaries) == []
    assert not other.has(big)


def test_wrong_credentials_are_not_tried_twice_and_not_shown(
    s3: Callable[[], Remote], proxy: Proxy, store: Store, big: Blob, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.config import conf

    monkeypatch.setitem(conf, "s3", {**conf["s3"], "key": "nobody", "secret": "hush-hush-secret"})
    naps: list[float] = []
    monkeypatch.setattr("tenacity.nap.time.sleep", naps.append)
    with pytest.raises(RemoteError, match="access refused") as caught:
        push(store, store.entries(), s3())
    assert "hush" not in str(caught.value)
    assert naps == []


def test_a_bucket_that_is_not_there_is_named(s3: Callable[[], Remote], store: Store, big: Blob) -> None:
    from llmc.artifacts.remotes.base import address
    from llmc.artifacts.remotes.fsspec_remote import FsspecRemote
    from tests.artifacts.remotes.helpers import BRIEF

    with pytest.raises(RemoteError, match=r"s3://nosuchbucket/x: .*no such bucket"):
        push(store, store.entries(), FsspecRemote(address("s3://nosuchbucket/x"), BRIEF))
