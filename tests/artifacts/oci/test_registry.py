"""Images in a real registry, also through connections that break."""

from __future__ import annotations

import base64
import json
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from llmc.artifacts.bundle.stored import read_bundle
from llmc.artifacts.oci import parse_reference, pull_bundle, push_image
from llmc.artifacts.oci.registry import RegistryImages
from llmc.artifacts.oci.transfer import pull, push
from llmc.artifacts.remotes.base import RemoteError, TransferReport
from llmc.artifacts.remotes.retry import Patience
from llmc.artifacts.store.store import Store
from llmc.errors import ArtifactError
from tests.artifacts.helpers import child
from tests.artifacts.oci.conftest import free_port
from tests.artifacts.oci.helpers import KILLED, WEIGHTS, Anyone, blob_file, make_bundle, pulled
from tests.artifacts.remotes.helpers import Proxy
from tests.timing import PATIENCE_S

pytestmark = pytest.mark.full

QUICK = Patience(attempts=4, seconds=20, first=0.01, longest=0.05)
BIG = WEIGHTS * 3


@pytest.fixture
def name(registry_port: int, request: pytest.FixtureRequest) -> str:
    """A repository of this test's own."""
    part = "".join(letter if letter.isalnum() else "-" for letter in request.node.name.lower()).strip("-")
    return f"oci://127.0.0.1:{registry_port}/tests/{part.replace('--', '-')}"


@pytest.fixture
def proxy(registry_port: int) -> Iterator[Proxy]:
    proxy = Proxy(registry_port)
    yield proxy
    proxy.close()


def quick_push(store: Store, key: str, reference: str) -> TransferReport:
    location = parse_reference(reference)
    with closing(RegistryImages(location, QUICK)) as images:
        return push(store, store.find(key), images, location, jobs=2, signer=None, progress=None)


def quick_pull(store: Store, reference: str) -> TransferReport:
    location = parse_reference(reference)
    with closing(RegistryImages(location, QUICK)) as images:
        return pull(store, images, location, trust=Anyone(), jobs=2, progress=None)[1]


def through(proxy: Proxy, name: str) -> str:
    return f"oci://127.0.0.1:{proxy.port}/{name.removeprefix('oci://').partition('/')[2]}"


def test_what_is_pushed_is_what_is_pulled(store: Store, name: str, tmp_path: Path) -> None:
    entry = make_bundle(store, signature=b'{"by": "me"}')
    seen: list[tuple[int, int]] = []
    report = push_image(store, entry, f"{name}:v1", progress=lambda *moved: seen.append(moved))
    assert (report.entries, report.skipped_blobs) == (1, 0) and seen[-1] == (report.bytes, report.bytes)
    other = Store(tmp_path / "other")
    found, report = pull_bundle(other, f"{name}:v1", trust=Anyone())
    assert read_bundle(other, found) == read_bundle(store, entry)
    assert report.bytes > len(WEIGHTS)


def test_pushing_twice_moves_nothing(store: Store, name: str) -> None:
    entry = make_bundle(store)
    push_image(store, entry, name)
    again = push_image(store, entry, name)
    assert (again.entries, again.blobs, again.bytes) == (0, 0, 0) and again.skipped_bytes > len(WEIGHTS)


def test_a_bundle_that_shares_weights_moves_only_what_differs(store: Store, name: str, tmp_path: Path) -> None:
    push_image(store, make_bundle(store), f"{name}:v1")
    report = push_image(store, make_bundle(store, decode=b"another graph"), f"{name}:v2")
    assert report.bytes < 20_000 and report.skipped_bytes > len(WEIGHTS)
    other = Store(tmp_path / "other")
    pull_bundle(other, f"{name}:v1", trust=Anyone())
    assert pull_bundle(other, f"{name}:v2", trust=Anyone())[1].bytes < 20_000


def test_the_image_is_the_same_as_in_a_layout(store: Store, name: str, tmp_path: Path) -> None:
    entry = make_bundle(store)
    push_image(store, entry, f"{name}:v1")
    push_image(store, entry, f"oci-layout:{tmp_path / 'images'}:v1")
    digest = json.loads((tmp_path / "images" / "index.json").read_bytes())["manifests"][0]["digest"]
    location = parse_reference(f"{name}@{digest}")
    with closing(RegistryImages(location)) as images:
        assert images.manifest(location) == blob_file(tmp_path / "images", digest).read_bytes()
    pulled(tmp_path, str(location))
    assert push_image(store, entry, str(location)).entries == 0


def test_what_is_not_there_is_said_to_be_missing(store: Store, name: str) -> None:
    push_image(store, make_bundle(store), f"{name}:v1")
    for missing in (f"{name}:v2", f"{name}@sha256:{'0' * 64}", f"{name}/other:v1"):
        with pytest.raises(ArtifactError, match="no such bundle"):
            pull_bundle(store, missing, trust=Anyone())


def test_a_pull_goes_on_where_the_connection_broke(store: Store, name: str, proxy: Proxy, tmp_path: Path) -> None:
    entry = make_bundle(store, weights=BIG)
    push_image(store, entry, f"{name}:v1")
    proxy.drop_after, proxy.drops = len(BIG) // 2, 2
    quick_pull(Store(tmp_path / "other"), through(proxy, f"{name}:v1"))
    assert proxy.dropped > 0
    assert proxy.received < len(BIG) * 1.3
    assert Store(tmp_path / "other").entries()[0].key == entry.key


def test_a_push_is_sent_again_when_the_connection_breaks(store: Store, name: str, proxy: Proxy, tmp_path: Path) -> None:
    entry = make_bundle(store, weights=BIG)
    proxy.drop_sent_after, proxy.drops = len(BIG) // 2, 1
    report = quick_push(store, entry.key.hex, through(proxy, f"{name}:v1"))
    assert proxy.dropped > 0 and report.entries == 1
    pulled(tmp_path, f"{name}:v1")


def test_progress_is_taken_back_for_what_is_sent_again(store: Store, name: str, proxy: Proxy) -> None:
    entry = make_bundle(store, weights=BIG)
    proxy.drop_sent_after, proxy.drops = len(BIG) // 2, 1
    location = parse_reference(through(proxy, f"{name}:v1"))
    seen: list[tuple[int, int]] = []
    with closing(RegistryImages(location, QUICK)) as images:
        push(store, entry, images, location, jobs=1, signer=None, progress=lambda *moved: seen.append(moved))
    assert seen[-1][0] == seen[-1][1] and max(done for done, _ in seen) == seen[-1][1]
    assert any(after < before for (before, _), (after, _) in pairwise(seen))


def test_a_registry_that_never_answers_is_an_error_that_names_it(store: Store, proxy: Proxy, name: str) -> None:
    proxy.refusing = True
    for reference in (through(proxy, f"{name}:v1"), f"oci://127.0.0.1:{free_port()}/x:v1"):
        with pytest.raises(RemoteError, match=r"oci://127\.0\.0\.1:\d+/.*reachable") as caught:
            quick_pull(store, reference)
        assert "\n" not in str(caught.value)


def test_a_pull_that_is_killed_keeps_what_came(store: Store, name: str, tmp_path: Path) -> None:
    push_image(store, make_bundle(store, first=WEIGHTS + b"1" * 1000, second=WEIGHTS + b"2" * 1000), f"{name}:v1")
    killed = child(KILLED, "pull", tmp_path / "other", f"{name}:v1", 1_500_000)
    assert killed.wait(PATIENCE_S) == -signal.SIGKILL
    killed.communicate()
    other = Store(tmp_path / "other")
    assert other.entries() == []
    _, report = pull_bundle(other, f"{name}:v1", trust=Anyone())
    assert report.skipped_bytes > len(WEIGHTS)


def test_a_push_that_is_killed_names_nothing_and_is_built_good(store: Store, name: str, tmp_path: Path) -> None:
    entry = make_bundle(store, weights=BIG)
    killed = child(KILLED, "push", store.root, f"{name}:v1", len(BIG) // 2, entry.key.hex)
    assert killed.wait(PATIENCE_S) == -signal.SIGKILL
    killed.communicate()
    with pytest.raises(ArtifactError, match="no such bundle"):
        pull_bundle(store, f"{name}:v1", trust=Anyone())
    push_image(store, entry, f"{name}:v1")
    pulled(tmp_path, f"{name}:v1")


def test_two_pushes_at_once_both_arrive(store: Store, name: str, tmp_path: Path) -> None:
    entries = [make_bundle(store, decode=f"graph {number}".encode()) for number in range(3)]
    threads = [
        threading.Thread(target=push_image, args=(store, entry, f"{name}:v{number}"))
        for number, entry in enumerate(entries)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, entry in enumerate(entries):
        found, _ = pull_bundle(Store(tmp_path / f"other{number}"), f"{name}:v{number}", trust=Anyone())
        assert found.key == entry.key


@pytest.mark.parametrize("password", [None, "wrong-one", "s3cret-pass"])
def test_the_account_of_docker_login_is_used(
    store: Store, account: int, home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    password: str | None,
) -> None:  # fmt: skip
    secret = base64.b64encode(f"me:{password}".encode()).decode()
    if password is not None:
        (home / ".docker").mkdir()
        auths = {"auths": {f"127.0.0.1:{account}": {"auth": secret}}}
        (home / ".docker" / "config.json").write_text(json.dumps(auths))
    reference = f"oci://127.0.0.1:{account}/private/x:v1"
    caplog.set_level(logging.DEBUG)
    if password == "s3cret-pass":
        push_image(store, make_bundle(store), reference)
        pulled(tmp_path, reference)
    else:
        with pytest.raises(RemoteError, match=f"access denied.*`docker login 127.0.0.1:{account}`") as caught:
            push_image(store, make_bundle(store), reference)
        assert secret not in str(caught.value)
    assert secret not in caplog.text and "s3cret" not in caplog.text and "wrong-one" not in caplog.text


def test_a_broken_docker_configuration_is_an_error_that_names_it(store: Store, name: str, home: Path) -> None:
    (home / ".docker").mkdir()
    for text in ("{", "[]", '{"auths": 5}', '{"auths": {"' + name.split("/")[2] + '": 5}}'):
        (home / ".docker" / "config.json").write_text(text)
        with pytest.raises(RemoteError, match=r"config\.json.*docker login"):
            pull_bundle(store, f"{name}:v1", trust=Anyone())
