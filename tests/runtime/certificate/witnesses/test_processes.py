"""A process that is started is seen, however it is: by Python, by native code, and by code that waits for its end."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmc.runtime.certificate.witnesses import audit, processes
from llmc.runtime.certificate.witnesses.processes import ENDED, ProcessWitness

linux = pytest.mark.skipif(sys.platform != "linux", reason="native code's processes are found in /proc")
LIBC = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """To be named before `witness`, which then looks when it is asked, and not meanwhile."""
    monkeypatch.setattr(processes, "LOOK_S", 600.0)


@pytest.fixture
def witness() -> Iterator[ProcessWitness]:
    witness = ProcessWitness()
    witness.start()
    assert witness.count() == 0
    yield witness
    witness.stop()


def spawned(path: str, *arguments: str) -> int:
    """posix_spawn(3) as native code calls it: no audit event tells of it."""
    pid = ctypes.c_int()
    argv = (ctypes.c_char_p * (len(arguments) + 2))(path.encode(), *(a.encode() for a in arguments), None)
    assert LIBC.posix_spawn(ctypes.byref(pid), path.encode(), None, None, argv, None) == 0
    return pid.value


def test_nothing_is_seen_where_nothing_starts(witness: ProcessWitness) -> None:
    time.sleep(3 * processes.LOOK_S)
    assert witness.count() == 0


def test_a_subprocess_is_seen_once_by_its_program(witness: ProcessWitness) -> None:
    subprocess.run([sys.executable, "-c", "secret = 1"], check=True)
    with subprocess.Popen(["/bin/sleep", "600"]) as process:
        time.sleep(2 * processes.LOOK_S)
        process.kill()
    assert list(witness.what()) == [f"{Path(sys.executable).name} -c", "sleep"]


def test_every_way_that_python_starts_a_process_is_seen_once(witness: ProcessWitness) -> None:
    os.system("true ptxas")
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
    subprocess.run("true", shell=True, close_fds=False, check=True)  # by os.posix_spawn, which tells of itself
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert list(witness.what()) == ["sh -c true", "true", "sh -c true", "a fork of this process"]


def test_a_process_is_not_taken_for_one_of_its_name_that_started_before(witness: ProcessWitness) -> None:
    subprocess.run(["/bin/true"], check=True)  # by fork and exec
    os.waitpid(os.posix_spawn("/bin/true", ["/bin/true"], {}), 0)
    assert list(witness.what()) == ["true", "true"]


def test_what_a_fork_starts_is_not_told_to_the_locks_that_it_copied(witness: ProcessWitness) -> None:
    assert audit._tells == [witness._tell]
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, b"%d" % len(audit._tells))
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 1) == b"0"
    os.close(read)
    os.close(write)


def test_a_process_that_did_not_start_hides_no_other(seldom: None, witness: ProcessWitness) -> None:
    with pytest.raises(FileNotFoundError):
        os.posix_spawn("/missing/ptxas", ["ptxas"], {})
    assert list(witness.what()) == ["ptxas"]
    LIBC.system(b"true")
    assert list(witness.what()) == ["ptxas", ENDED]


@linux
def test_what_native_code_starts_and_waits_for_is_seen(seldom: None, witness: ProcessWitness) -> None:
    LIBC.system(b"true")
    assert list(witness.what()) == [ENDED]


@linux
def test_what_native_code_starts_is_named_while_it_runs(witness: ProcessWitness) -> None:
    pid = spawned("/bin/sleep", "5")
    try:
        assert list(witness.what()) == ["sleep"]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert list(witness.what()) == ["sleep"], "its end is no second process"


@linux
def test_what_native_code_starts_between_two_looks_is_named_by_the_next(witness: ProcessWitness) -> None:
    LIBC.system(b"sleep 1")
    assert list(witness.what()) == ["sh -c sleep"]


@linux
def test_the_end_of_an_older_child_is_no_process() -> None:
    with subprocess.Popen(["/bin/sleep", "0.05"]):
        witness = ProcessWitness()
        witness.start()
    assert witness.count() == 0
    witness.stop()


def test_it_is_blind_where_the_system_forgets_children(
    witness: ProcessWitness, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert witness.blind() == ""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert "SIGCHLD" in witness.blind()
        assert witness.count() is None
    finally:
        signal.signal(signal.SIGCHLD, before)
    monkeypatch.setattr(processes, "_lists_children", lambda: False)
    assert "does not list" in witness.blind()


def test_once_it_has_stopped_it_hears_nothing(witness: ProcessWitness) -> None:
    other = ProcessWitness()
    other.start()
    other.stop()
    subprocess.run(["true"], check=True)
    assert not other._seen
    assert witness.count() == 1


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["/usr/local/cuda/bin/ptxas", "--gpu-name", "sm_90", "/tmp/x.ptx"], "ptxas"),
        (["neuronx-cc", "compile", "secret"], "neuronx-cc"),
        (["/bin/sh", "-c", "/opt/neuronx-cc compile"], "sh -c neuronx-cc"),
        (["/bin/sh", "-c", "'"], "sh"),
        (["/usr/bin/python3", "-m", "triton.tools.compile", "secret"], "python3 -m triton.tools.compile"),
        (["/usr/bin/python3", "/opt/build.py", "secret"], "python3 build.py"),
        (["python3", "-c", "import secret"], "python3 -c"),
        (["python3", "-I"], "python3"),
        (
            ["python3", "-S", "-c", "import sys; from llmc.runtime.confined.nursery import main; main(3)"],
            "python3 -c llmc.runtime.confined.nursery",
        ),
    ],
)
def test_a_command_is_named_without_its_paths_and_values(words: list[str], name: str) -> None:
    assert audit.command_name(words) == name
