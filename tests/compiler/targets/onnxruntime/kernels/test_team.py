"""The team of threads that jobs are shared out to: by itself."""

from __future__ import annotations

import ctypes
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.compiler.targets.onnxruntime.kernels import build
from llmc.runtime.executors.onnxruntime.session import Team
from tests.compiler.targets.onnxruntime.kernels.host import own_set

PROBE = Path(__file__).parent / "team_probe" / "probe.c"
THREADS = [2, 3, 16]
TASKS = Path("/proc/self/task")


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    source = tmp_path_factory.mktemp("source")
    for path in (build.SOURCE / "team.c", build.SOURCE / "team.h", build.SOURCE / "ort_abi.h", PROBE):
        shutil.copy(path, source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "SOURCE", source)
        return ctypes.CDLL(str(build.build(tmp_path_factory.mktemp("probe"), own_set().name)))


@pytest.fixture
def team(probe: ctypes.CDLL, request: pytest.FixtureRequest) -> Iterator[ctypes.CDLL]:
    assert probe.SetThreads(request.param) == request.param
    yield probe
    probe.SetThreads(0)


def regions(probe: ctypes.CDLL, counts: list[int]) -> tuple[NDArray[np.uint32], int]:
    """How often each job was run, and the regions that the session's threads ran."""
    built, given = np.zeros(max(counts), np.uint32), np.array(counts, np.int64)
    by_session = probe.Regions(
        ctypes.c_void_p(built.ctypes.data), ctypes.c_void_p(given.ctypes.data), ctypes.c_int64(len(counts))
    )
    return built, by_session


def expected(counts: list[int]) -> NDArray[np.uint32]:
    return (np.array(counts)[:, None] > np.arange(max(counts))).sum(0).astype(np.uint32)


def others() -> set[int]:
    """Threads of this process beside the calling one."""
    return {int(task.name) for task in TASKS.iterdir()} - {threading.get_native_id()}


def cpu_ticks(task: int) -> int:
    return sum(map(int, (TASKS / str(task) / "stat").read_text().rpartition(")")[2].split()[11:13]))


@pytest.mark.parametrize("team", THREADS, indirect=True)
def test_every_job_is_run_once(team: ctypes.CDLL) -> None:
    counts = np.random.default_rng(0).integers(1, 40, 3000).tolist()
    built, by_session = regions(team, counts)
    assert by_session == 0
    assert (built == expected(counts)).all()


@pytest.mark.parametrize("team", THREADS, indirect=True)
def test_jobs_beyond_what_a_part_counts_are_run_once(team: ctypes.CDLL) -> None:
    counts = [3_000_000, 2 * 0xFFFF, 2 * 0xFFFF + 1, 16 * 0xFFFF + 1]
    assert (regions(team, counts)[0] == expected(counts)).all()


@pytest.mark.parametrize("team", [3], indirect=True)
def test_those_who_come_at_once_take_turns(team: ctypes.CDLL) -> None:
    counts = [50] * 4000
    with ThreadPoolExecutor(4) as pool:
        built = list(pool.map(lambda _: regions(team, counts), range(8)))
    assert all((one == expected(counts)).all() for one, _ in built)


@pytest.mark.parametrize("team", [3], indirect=True)
def test_a_team_of_another_size_takes_over_while_one_works(team: ctypes.CDLL) -> None:
    counts = [50] * 20000
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(regions, team, counts)
        sizes = [team.SetThreads(size) for size in (2, 5, 1, 0, 4) * 5]
        assert (working.result()[0] == expected(counts)).all()
    assert sizes == [2, 5, 1, 1, 4] * 5


@pytest.mark.parametrize("size", [0, 1])
def test_without_a_team_jobs_run_on_the_session_s_threads(probe: ctypes.CDLL, size: int) -> None:
    before = others()
    probe.SetThreads(size)
    assert regions(probe, [5, 1, 7])[1] == 2
    assert others() == before


@pytest.mark.parametrize("team", [4], indirect=True)
def test_a_forked_child_works_without_its_parent_s_threads_and_forms_its_own_team(team: ctypes.CDLL) -> None:
    child = os.fork()
    if not child:
        counts = [50] * 20
        alone = (regions(team, counts)[0] == expected(counts)).all()
        formed = team.SetThreads(3) == 3 and len(others()) == 2
        os._exit(0 if alone and formed and (regions(team, counts)[0] == expected(counts)).all() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert regions(team, [9, 9])[1] == 0, "the parent's team is as it was"


def test_threads_wait_asleep_take_no_signals_and_end(probe: ctypes.CDLL) -> None:
    before = others()
    probe.SetThreads(4)
    regions(probe, [50] * 1000)
    mine = others() - before
    assert len(mine) == 3
    time.sleep(0.1)
    spent = sum(map(cpu_ticks, mine))
    time.sleep(0.5)
    assert sum(map(cpu_ticks, mine)) == spent
    for task in mine:
        blocked = (TASKS / str(task) / "status").read_text().partition("SigBlk:")[2].split()[0]
        assert int(blocked, 16) >> 14 & 1, "SIGTERM is for the others"
    assert regions(probe, [50])[1] == 0, "they wake"
    probe.SetThreads(0)
    assert others() == before


def test_a_team_has_so_many_threads_at_most(probe: ctypes.CDLL) -> None:
    assert probe.SetThreads(1000) == 256
    assert (regions(probe, [300] * 20)[0] == expected([300] * 20)).all()
    assert probe.SetThreads(0) == 1


def test_a_library_of_before_there_were_teams_has_none() -> None:
    before = others()
    team = Team("libc.so.6", 3)
    assert others() == before
    team.close()


def test_a_team_ends_with_its_last_user_and_leaves_no_library_behind(library: Path, tmp_path: Path) -> None:
    before, copy = others(), str(shutil.copy(library, tmp_path))
    first, second = Team(copy, 3), Team(copy, 3)
    assert len(others() - before) == 2
    first.close()
    assert len(others() - before) == 2
    assert copy in Path("/proc/self/maps").read_text()
    second.close()
    assert others() == before
    assert copy not in Path("/proc/self/maps").read_text()


def test_bundles_that_link_to_one_library_are_users_of_one_team(library: Path, tmp_path: Path) -> None:
    """As after a swap: the old bundle's last user must not end the new one's team."""
    before, old, new = others(), tmp_path / "old", tmp_path / "new"
    shutil.copy(library, old)
    new.hardlink_to(old)
    first, second = Team(str(old), 3), Team(str(new), 3)
    first.close()
    assert len(others() - before) == 2
    second.close()
    assert others() == before
