from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from llmc.artifacts.store.layout import Layout
from llmc.artifacts.store.store import Store


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "store")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture(scope="session")
def mounts() -> None:
    """Skips where this host does not let us mount."""
    probe = ["unshare", "-Urm", "sh", "-c", "mount -t tmpfs -o size=64k tmpfs /mnt"]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip(
            "no mounts in a namespace: apt-get install util-linux, and a kernel that lets users make namespaces"
        )
