"""The faults of faults.py, each on any cache: kill −9, failing system calls, damage, crowds.

Victims and judges are forks of one process that has imported everything and opened nothing. A judge is a new process
as far as the cache can tell: it opens the cache itself.
"""

from __future__ import annotations

import os
import pickle
import random
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from faults_caches import CACHES
from faults_rows import SIZES, Row, cut, flip, payload, zeros

TOO_LONG = 30
DENSE = 4096
SAMPLES = 256
KILLS_A_FOLDER = 200
CALLS = "openat mkdir write pwrite64 fsync fdatasync rename close unlink fchmod flock fcntl utimensat ftruncate lseek"
FAILURES = {"write": "ENOSPC", "pwrite64": "ENOSPC", "fsync": "EIO", "fdatasync": "EIO", "rename": "ENOSPC",
            "openat": "ENOSPC", "mkdir": "ENOSPC", "read": "EIO", "pread64": "EIO"}  # fmt: skip


class Bench:
    """One cache in a folder, and the faults that can be done to it."""

    def __init__(self, cache: str, folder: Path, seed: int) -> None:
        self._open, self._left = CACHES[cache]
        self._folder = folder
        self._chance = random.Random(seed)
        self._count = 0

    # Forks

    def fork(self, work: Callable[[], object]) -> int:
        """Start `work` in a fork; its process id."""
        child = os.fork()
        if child == 0:
            signal.alarm(TOO_LONG)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            try:
                work()
            except BaseException:  # noqa: BLE001 - whatever it is, the fork must not go on as if it were the parent
                os._exit(1)
            os._exit(0)
        return child

    def ask(self, work: Callable[[], Any]) -> Any:
        """What `work` returns in a fork; None if the fork died."""
        read, write = os.pipe()

        def answer() -> None:
            os.write(write, pickle.dumps(work()))

        child = self.fork(answer)
        os.close(write)
        with os.fdopen(read, "rb") as stream:
            data = stream.read()
        os.waitpid(child, 0)
        return pickle.loads(data) if data else None

    def _new_root(self) -> Path:
        self._count += 1
        return self._folder / f"root {self._count}"

    # Judging

    def judge(self, root: Path, names: list[int], safe: set[int]) -> tuple[dict[str, int], set[int]]:
        """Look every name up in a new process, put back what is missing, look again in another one.

        `safe` are the names whose `put` had returned and that nothing has damaged since. Returns what to count, and
        the names that are there at the end.
        """
        found = {"wrong": 0, "lost": 0, "wedged": 0, "raised": 0}

        def first() -> dict[str, int]:
            cache = self._open(root)
            for name in names:
                try:
                    data = cache.get(name)
                except Exception:  # noqa: BLE001 - counted
                    data = None
                    found["raised"] += 1
                found["wrong"] += data is not None and data != payload(name)
                found["lost"] += data is None and name in safe
                if data is None:
                    try:
                        cache.put(name, payload(name))
                    except Exception:  # noqa: BLE001 - counted
                        found["raised"] += 1
            return found

        def second() -> set[int]:
            cache, there = self._open(root), set()
            for name in names:
                with suppress(Exception):  # that is a miss too
                    if cache.get(name) is not None:
                        there.add(name)
            return there

        result: dict[str, int] | None = self.ask(first)
        if result is None:
            result = {**found, "raised": 1, "lost": len(safe)}
        there: set[int] = self.ask(second) or set()
        result["wedged"] = len(set(names) - there)
        return result, there

    # kill −9

    def _victim(self, root: Path, names: Iterator[int], said: int) -> Callable[[], None]:
        def work() -> None:
            cache = self._open(root)
            os.write(said, b"\xff\xff\xff\xff")
            for name in names:
                if cache.put(name, payload(name)):
                    os.write(said, name.to_bytes(4, "big"))

        return work

    def _put_seconds(self) -> float:
        root = self._new_root()

        def measure() -> float:
            cache, times = self._open(root), []
            for name in range(30):
                began = time.perf_counter()
                cache.put(name, payload(name))
                times.append(time.perf_counter() - began)
            return median(times)

        return float(self.ask(measure))

    def kills(self, count: int) -> Row:
        """kill −9 after a random time, uniform over that of three `put`s, in the midst of many."""
        row = Row("kill −9 after a random time")
        window = 3 * self._put_seconds()
        root, kept, next_name = self._new_root(), set[int](), 0
        for number in range(count):
            read, write = os.pipe()
            child = self.fork(self._victim(root, iter(range(next_name, next_name + 1000)), write))
            os.close(write)
            os.read(read, 4)
            time.sleep(self._chance.random() * window)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            with os.fdopen(read, "rb") as stream:
                data = stream.read()
            said = {int.from_bytes(data[at : at + 4], "big") for at in range(0, len(data), 4)}
            doubtful = max(said, default=next_name - 1) + 1
            row.injected += 1
            found, there = self.judge(root, [*sorted(said), doubtful], said)
            row.add(found)
            kept |= there
            next_name = doubtful + 1
            if number % KILLS_A_FOLDER == KILLS_A_FOLDER - 1 or number == count - 1:
                row.add(self.judge(root, sorted(kept), kept)[0])
                row.left += self._left(root)
                shutil.rmtree(root)
                root, kept = self._new_root(), set()
        return row

    def traced(self, fault: str, action: Callable[[str], str | None], *, before: bool) -> Row:
        """One `put` for each system call that it makes, and that call is hit (strace, by the count of calls).

        `before`: whether `get` of another key, put before, is traced too.
        """
        row = Row(fault)
        for call in [*CALLS.split(), "read", "pread64"]:
            what = action(call)
            number = 0
            while what is not None:
                number += 1
                root = self._new_root()
                self.ask(lambda root=root: self._open(root).put(0, payload(0)))  # type: ignore[misc]
                hit, raised, said = self._trace(root, call, f"{what}:when={number}", before)
                if hit:
                    row.injected += 1
                    row.raised += raised
                    row.add(self.judge(root, [0, 1, 2], {0} | said)[0])
                    row.left += self._left(root)
                shutil.rmtree(root)
                if not hit:
                    break
        return row

    def _trace(self, root: Path, call: str, inject: str, before: bool) -> tuple[bool, bool, set[int]]:
        """Run a victim under strace: whether the call was hit, whether the cache raised, which `put`s were kept."""
        said_out, said_in = os.pipe()
        go_out, go_in = os.pipe()
        log = root.with_suffix(".strace")

        def work() -> None:
            cache = self._open(root)
            os.write(said_in, b"\xff")
            select.select([go_out], [], [])
            for name in (1, 2):
                if before:
                    cache.get(0)
                if cache.put(name, payload(name)):
                    root.with_suffix(f".{name}").symlink_to("kept")  # a call that no fault is injected into

        child = self.fork(work)
        os.read(said_out, 1)
        tracer = subprocess.Popen(
            ["strace", "-f", "-o", str(log), "-e", f"trace={call}", "-e", f"inject={call}:{inject}", "-p", str(child)],
            stderr=subprocess.PIPE,
        )
        assert tracer.stderr is not None
        while b"attached" not in (line := tracer.stderr.readline()) and line:
            pass
        os.write(go_in, b"g")
        status = os.waitpid(child, 0)[1]
        tracer.communicate()
        for fd in (said_out, said_in, go_out, go_in):
            os.close(fd)
        text = log.read_text()
        hit = os.WIFSIGNALED(status) or "(INJECTED)" in text
        said = {name for name in (1, 2) if root.with_suffix(f".{name}").is_symlink()}
        log.unlink()
        for name in said:
            root.with_suffix(f".{name}").unlink()
        return hit, os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0, said

    # Damage

    def damage(self, fault: str, change: Callable[[bytes, int], bytes], samples: int) -> Row:
        """Each file of a cache of three entries is damaged at each byte, or at `samples` places if it is large."""
        row = Row(fault)
        names = list(range(len(SIZES)))
        pristine = self._new_root()

        def fill() -> None:
            cache = self._open(pristine)
            for name in names:
                cache.put(name, payload(name))
            cache.close()

        self.ask(fill)
        root = self._new_root()
        for file in sorted(path for path in pristine.rglob("*") if path.is_file() and path.stat().st_size):
            data = file.read_bytes()
            dense = len(data) <= DENSE and samples >= SAMPLES
            offsets = (
                range(len(data)) if dense else sorted(self._chance.sample(range(len(data)), min(samples, len(data))))
            )
            for index in offsets:
                changed = change(data, index)
                if changed == data:
                    continue
                shutil.copytree(pristine, root)
                target = root / file.relative_to(pristine)
                target.chmod(0o644)
                target.write_bytes(changed)
                row.injected += 1
                row.add(self.judge(root, names, set())[0])
                shutil.rmtree(root)
        return row

    # Crowds

    def crowd(self, rounds: int, processes: int) -> Row:
        """So many processes look up one key at once, put it on a miss, and look again."""
        row = Row(f"{processes} processes, one key")
        for number in range(rounds):
            root = self._new_root()
            gate_out, gate_in = os.pipe()
            results_out, results_in = os.pipe()

            def work(
                name: int = number,
                root: Path = root,
                gate: int = gate_out,
                closed: int = gate_in,
                out: int = results_in,
            ) -> None:
                os.close(closed)
                cache = self._open(root)
                os.read(gate, 1)
                wrong = raised = 0
                for _ in range(2):
                    try:
                        data = cache.get(name)
                        if data is None:
                            cache.put(name, payload(name))
                        wrong += data is not None and data != payload(name)
                    except Exception:  # noqa: BLE001 - counted
                        raised += 1
                os.write(out, bytes([wrong, raised]))

            children = [self.fork(work) for _ in range(processes)]
            for fd in (gate_out, gate_in, results_in):
                os.close(fd)
            with os.fdopen(results_out, "rb") as stream:
                data = stream.read()
            for child in children:
                os.waitpid(child, 0)
            row.injected += processes
            row.add({"wrong": sum(data[::2]), "raised": sum(data[1::2]) + processes - len(data) // 2})
            row.add(self.judge(root, [number], {number})[0])
            row.left += self._left(root)
            shutil.rmtree(root)
        return row


def all_rows(bench: Bench, kills: int, samples: int, rounds: int, processes: int) -> Iterator[Row]:
    """Every fault."""
    yield bench.kills(kills)
    if shutil.which("strace"):
        yield bench.traced("kill −9 at each system call", lambda call: "signal=SIGKILL", before=False)
        yield bench.traced(
            "EIO or ENOSPC from each system call",
            lambda call: f"error={FAILURES[call]}" if call in FAILURES else None,
            before=True,
        )
    yield bench.damage("a flipped bit", flip, samples)
    yield bench.damage("a file cut off", cut, max(samples // 8, 1))
    yield bench.damage("zeros to the end", zeros, max(samples // 8, 1))
    yield bench.crowd(rounds, processes)
