"""Trimming a store that bundles are in: folders go with their entries, and what is open stays."""

from __future__ import annotations

import os
import time
from pathlib import Path

from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.bundle.stored import add_bundle, bundle_key
from llmc.artifacts.gc import collect
from llmc.artifacts.store.layout import Layout
from llmc.artifacts.store.leases import pin
from llmc.artifacts.store.store import Store
from tests.artifacts.gc.collecting import DAY, add, age_blobs, bundle
from tests.artifacts.helpers import files_below, manifest


def test_a_bundle_folder_goes_with_its_entry(layout: Layout, tmp_path: Path) -> None:
    folder = add(layout, tmp_path)
    before = sum(path.stat().st_size for path in files_below(layout.blobs))
    found = collect(layout, max_size=0)
    assert not folder.exists()
    assert (found.entries, found.bundles, found.after) == (1, 1, 0)
    assert found.freed == found.before > before, "the blobs, once, and the rest of the folder"
    assert found.linked == 0


def test_a_folder_whose_entry_has_gone_goes_by_its_own_time(layout: Layout, tmp_path: Path) -> None:
    folder = add(layout, tmp_path)
    layout.entry("bundle", bundle_key(manifest()).hex).unlink()
    age_blobs(layout)
    assert collect(layout, max_age=2 * DAY).bundles == 0
    assert BundleFiles.open(folder).verify() == []
    os.utime(folder, (time.time() - 3 * DAY,) * 2)
    assert collect(layout, max_age=2 * DAY).bundles == 1


def test_a_folder_that_was_built_just_now_is_about_to_be_opened(layout: Layout, tmp_path: Path) -> None:
    folder = add(layout, tmp_path)
    os.utime(folder)
    assert dict(collect(layout, max_size=0).kept) == {"in use": 1}
    assert BundleFiles.open(folder).verify() == []


def test_pinning_a_bundle_keeps_its_folder(layout: Layout, tmp_path: Path) -> None:
    folder = add(layout, tmp_path)
    pin(layout, bundle_key(manifest()))
    collect(layout, max_size=0, max_age=0)
    assert BundleFiles.open(folder).verify() == []


def test_what_a_bundle_elsewhere_links_stays_on_the_disk_and_is_said(layout: Layout, tmp_path: Path) -> None:
    folder = bundle(tmp_path)
    store = Store(layout.root)
    add_bundle(store, BundleFiles.open(folder))
    del store
    linked = manifest().size
    dry = collect(layout, max_size=0, dry_run=True)
    found = collect(layout, max_size=0)
    assert (found.linked, found.after) == (dry.linked, dry.after) == (linked, 0)
    assert found.freed == dry.freed == found.before - linked
    assert BundleFiles.open(folder).verify() == []


OPENER = """
    import sys
    from llmc.artifacts.bundle.reader import BundleFiles
    files = BundleFiles.open(sys.argv[1])
    print("open", flush=True)
    sys.stdin.readline()
    for digest in files.manifest.blobs:
        assert files.path(digest).read_bytes() == files.read(digest)
    print("read")
"""


def test_a_bundle_open_in_another_process_can_be_read_afterwards(layout: Layout, tmp_path: Path) -> None:
    import subprocess
    import sys
    import textwrap

    folder = add(layout, tmp_path)
    command = [sys.executable, "-c", textwrap.dedent(OPENER), str(folder)]
    opener = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert opener.stdout is not None
    opener.stdout.readline()
    os.utime(folder, (0, 0))
    assert dict(collect(layout, max_size=0, max_age=0).kept) == {"in use": 1}
    assert opener.communicate("\n")[0] == "read\n"
    os.utime(folder, (0, 0))
    assert collect(layout, max_size=0).after == 0
