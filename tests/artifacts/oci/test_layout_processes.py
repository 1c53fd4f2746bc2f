"""Layouts that several write at once, or that one dies over."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from llmc.artifacts.bundle.stored import read_bundle
from llmc.artifacts.oci import pull_bundle, push_image
from llmc.artifacts.store.locks import exclusive
from llmc.artifacts.store.store import Store
from tests.artifacts.helpers import child, files_below, finish
from tests.artifacts.oci.helpers import KILLED, WEIGHTS, Anyone, make_bundle, pulled
from tests.timing import PATIENCE_S, until


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    return tmp_path / "images"


def test_a_push_that_is_killed_leaves_a_sound_layout_and_is_built_good(
    store: Store, layout: Path, tmp_path: Path
) -> None:
    push_image(store, make_bundle(store, weights=b"small"), f"oci-layout:{layout}:v1")
    entry = make_bundle(store)
    killed = child(KILLED, "push", store.root, f"oci-layout:{layout}:v2", 500_000, entry.key.hex)
    assert killed.wait(PATIENCE_S) == -signal.SIGKILL
    killed.communicate()
    pulled(tmp_path, f"oci-layout:{layout}:v1")
    left = list(layout.glob(".*.new"))
    assert left
    old = time.time() - 3600
    os.utime(left[0], (old, old))
    push_image(store, entry, f"oci-layout:{layout}:v2")
    assert not list(layout.glob(".*.new"))
    pulled(tmp_path, f"oci-layout:{layout}:v2", "second")


def test_a_pull_that_is_killed_keeps_what_came(store: Store, layout: Path, tmp_path: Path) -> None:
    big = {name: WEIGHTS + name.encode() * 1000 for name in ("first", "second")}
    entry = make_bundle(store, **big)
    push_image(store, entry, f"oci-layout:{layout}:v1")
    killed = child(KILLED, "pull", tmp_path / "other", f"oci-layout:{layout}:v1", 1_500_000)
    assert killed.wait(PATIENCE_S) == -signal.SIGKILL
    killed.communicate()
    other = Store(tmp_path / "other")
    assert other.entries() == []
    found, report = pull_bundle(other, f"oci-layout:{layout}:v1", trust=Anyone())
    assert report.skipped_bytes > len(WEIGHTS) and report.bytes > len(WEIGHTS)
    assert read_bundle(other, found) == read_bundle(store, entry)


def test_many_who_push_at_once_lose_no_tag(store: Store, layout: Path, tmp_path: Path) -> None:
    script = """
        import sys
        from llmc.artifacts.oci import push_image
        from llmc.artifacts.store.store import Store
        from tests.artifacts.oci.helpers import make_bundle

        store = Store(sys.argv[1])
        for number in range(5):
            entry = make_bundle(store, decode=f"{sys.argv[3]} {number}".encode())
            push_image(store, entry, f"oci-layout:{sys.argv[2]}:v{sys.argv[3]}.{number}")
    """
    children = [child(script, store.root, layout, number) for number in range(3)]
    for process in children:
        finish(process)
    tags = [f"v{number}.{part}" for number in range(3) for part in range(5)]
    index = json.loads((layout / "index.json").read_bytes())["manifests"]
    assert sorted(item["annotations"]["org.opencontainers.image.ref.name"] for item in index) == tags
    for tag in tags[::7]:
        pulled(tmp_path, f"oci-layout:{layout}:{tag}")


def test_the_index_is_not_written_while_another_holds_its_lock(store: Store, layout: Path) -> None:
    push_image(store, make_bundle(store), f"oci-layout:{layout}:v1")
    entry = make_bundle(store, decode=b"another graph")
    before = len(files_below(layout / "blobs"))
    pushing = threading.Thread(target=push_image, args=(store, entry, f"oci-layout:{layout}:v2"))
    with exclusive(layout / ".index.lock") as held:
        assert held
        pushing.start()
        until(lambda: len(files_below(layout / "blobs")) >= before + 4)
        time.sleep(0.1)  # what would be written by now if it did not wait for the lock
        text = (layout / "index.json").read_text()
        assert "v2" not in text
        (layout / "index.json").write_text(text.replace('"v1"', '"v0"'))
    pushing.join()
    text = (layout / "index.json").read_text()
    assert '"v0"' in text and '"v2"' in text
