"""How many threads a process is worth: by its affinity, and by the quotas of its control groups."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmc import cpus
from llmc.settings import Settings

V1 = "33 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
V2 = "41 31 0:38 {root} /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw\n"
OTHER = "22 31 0:29 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n31 23 0:28 / / rw - ext4 /dev/vda rw\n"


class Host:
    """A file system with the control groups of this process."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self._monkeypatch = monkeypatch
        self.allow(16)

    def allow(self, count: int) -> None:
        self._monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)), raising=False)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def group(self, lines: str, mounts: str) -> None:
        self.write("proc/self/cgroup", lines)
        self.write("proc/self/mountinfo", OTHER + mounts)

    @property
    def quota(self) -> int | None:
        return cpus.quota(self.root)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("max 100000", None), ("200000 100000", 2), ("150000 100000", 2), ("1000 100000", 1), ("1600000 50000", 32),
     ("", None), ("what 100000", None), ("100000", None), ("100000 0", None)],
)  # fmt: skip
def test_version_2(host: Host, given: str, wanted: int | None) -> None:
    host.group("0::/service\n", V2.format(root="/"))
    host.write("sys/fs/cgroup/service/cpu.max", given + "\n")
    assert host.quota == wanted


@pytest.mark.parametrize(
    ("quota", "period", "wanted"),
    [("-1", "100000", None), ("350000", "100000", 4), ("1", "100000", 1), ("100000", "0", None), ("100000", "", None)],
)
def test_version_1(host: Host, quota: str, period: str, wanted: int | None) -> None:
    host.group("4:cpuset:/other\n3:cpu,cpuacct:/docker/abc\n0::/\n", V1.format(root="/"))
    host.write("sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us", quota)
    host.write("sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us", period)
    assert host.quota == wanted


def test_the_least_of_all_groups_above_counts(host: Host) -> None:
    host.group("0::/a/b/c\n", V2.format(root="/"))
    for folder, bound in (("a", "300000 100000"), ("a/b", "max 100000"), ("a/b/c", "800000 100000")):
        host.write(f"sys/fs/cgroup/{folder}/cpu.max", bound)
    assert host.quota == 3
    host.write("sys/fs/cgroup/a/b/cpu.max", "120000 100000")
    assert host.quota == 2


def test_both_versions_at_once(host: Host) -> None:
    host.group("1:cpu:/one\n0::/two\n", V1.format(root="/") + V2.format(root="/"))
    host.write("sys/fs/cgroup/cpu,cpuacct/one/cpu.cfs_quota_us", "500000")
    host.write("sys/fs/cgroup/cpu,cpuacct/one/cpu.cfs_period_us", "100000")
    assert host.quota == 5
    host.write("sys/fs/cgroup/two/cpu.max", "400000 100000")
    assert host.quota == 4


@pytest.mark.parametrize(
    ("path", "root", "folder"),
    [("/docker/abc", "/docker/abc", ""), ("/docker/abc/inner", "/docker/abc", "inner/"), ("/", "/", ""),
     ("/../../docker/abc", "/", ""), ("/elsewhere", "/docker/abc", ""), ("/", "/docker/abc", "")],
)  # fmt: skip
def test_in_a_container(host: Host, path: str, root: str, folder: str) -> None:
    """What is mounted there is a part of the host's groups, or the group has no name in its own namespace."""
    host.group(f"0::{path}\n", V2.format(root=root))
    host.write(f"sys/fs/cgroup/{folder}cpu.max", "700000 100000")
    assert host.quota == 7


def test_without_control_groups(host: Host) -> None:
    assert host.quota is None
    host.group("0::/\n", "nothing - of\nany - \n- use\n")
    assert host.quota is None


@pytest.mark.parametrize(("allowed", "quota", "threads"), [(16, 4, 4), (2, 4, 2), (16, None, 16), (1, 1, 1)])
def test_threads_are_the_least_of_both(
    host: Host, monkeypatch: pytest.MonkeyPatch, allowed: int, quota: int | None, threads: int
) -> None:
    host.allow(allowed)
    monkeypatch.setattr(cpus, "quota", lambda: quota)
    assert cpus.usable_cpus() == Settings.from_environment({}).threads == threads
    assert Settings.from_environment({"LLMC_THREADS": "9"}).threads == 9


def test_where_a_system_has_no_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cpus.usable_cpus() == 1


# Threads that are tied to CPUs


def topology(host: Host, siblings: int, nodes: int) -> None:
    """16 CPUs: `siblings` to a core, and `nodes` NUMA nodes."""
    for n in range(16):
        first = n - n % siblings
        text = f"{first}-{first + siblings - 1}" if siblings > 1 else f"{n}"
        host.write(f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list", text + "\n")
    each = 16 // nodes
    for node in range(nodes):
        host.write(f"sys/devices/system/node/node{node}/cpulist", f"{node * each}-{node * each + each - 1}\n")


@pytest.mark.parametrize(
    ("siblings", "nodes", "allowed", "threads", "may"),
    [(1, 1, 16, 8, True), (1, 1, 16, 16, True), (2, 1, 16, 8, True), (2, 1, 16, 9, False), (2, 1, 16, 16, True),
     (1, 2, 16, 8, False), (1, 2, 16, 16, True), (1, 2, 8, 4, True), (2, 2, 8, 5, False), (2, 2, 8, 8, True)],
)  # fmt: skip
def test_only_where_each_has_a_core_on_one_node_or_all_are_taken(
    host: Host, siblings: int, nodes: int, allowed: int, threads: int, may: bool
) -> None:
    topology(host, siblings, nodes)
    host.allow(allowed)
    assert cpus.may_pin(threads, host.root) == may


def test_not_where_cpus_are_shared_out_by_a_quota(host: Host) -> None:
    host.group("0::/x\n", V2.format(root="/"))
    host.write("sys/fs/cgroup/x/cpu.max", "400000 100000")
    assert not cpus.may_pin(4, host.root)
    host.allow(4)
    assert cpus.may_pin(4, host.root)


def test_where_nothing_is_known_each_cpu_is_a_core(host: Host) -> None:
    assert cpus.may_pin(16, host.root) and cpus.may_pin(3, host.root)


# A real control group


@pytest.fixture
def group() -> Iterator[Path]:
    """A group of half a CPU, and in it one without a bound; skipped where none can be made."""
    for top, name, bound in (("cpu", "cpu.cfs_quota_us", "50000"), ("", "cpu.max", "50000 100000")):
        group = Path("/sys/fs/cgroup", top) / f"llmc-{uuid.uuid4().hex}"
        try:
            group.mkdir()
        except OSError:
            continue
        inner = group / "inner"
        try:
            inner.mkdir()
            (group / name).write_text(bound)
            (inner / "cgroup.procs").touch()
            yield inner
            return
        except OSError:
            continue
        finally:
            if inner.is_dir():
                inner.rmdir()
            group.rmdir()
    pytest.skip("no control group can be made here")


@pytest.mark.full
def test_in_a_real_group(group: Path) -> None:
    code = (
        f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        "from llmc.settings import Settings; print(Settings.from_environment({}).threads)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_nobody_else_counts_cpus() -> None:
    """What counts them goes by quotas as well."""
    root = Path(cpus.__file__).parent
    counting = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if any(word in path.read_text() for word in ("cpu_count", "sched_getaffinity"))
    }
    assert counting == {"cpus.py"}


# CPUs shared out among processes


@pytest.mark.parametrize(("siblings", "nodes"), [(1, 1), (2, 2)])
def test_each_gets_as_many_and_none_is_left(host: Host, siblings: int, nodes: int) -> None:
    topology(host, siblings, nodes)
    for count in (1, 2, 3, 5, 16):
        parts = cpus.shares(count, host.root)
        assert sorted(cpu for part in parts for cpu in part) == list(range(16))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_cores_and_nodes_stay_whole(host: Host) -> None:
    """As servers number them: CPU 8 is the other half of core 0, and even cores are of node 0."""
    for cpu in range(16):
        host.write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 8},{cpu % 8 + 8}\n")
    host.write("sys/devices/system/node/node0/cpulist", "0,2,4,6,8,10,12,14\n")
    host.write("sys/devices/system/node/node1/cpulist", "1,3,5,7,9,11,13,15\n")
    assert cpus.shares(2, host.root) == [frozenset(range(0, 16, 2)), frozenset(range(1, 16, 2))]
    assert cpus.shares(8, host.root)[:2] == [frozenset({0, 8}), frozenset({2, 10})]
