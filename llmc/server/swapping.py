"""Replace the served bundle without losing a request.

opened and checked next to the old one → loaded and warm → probed → new requests run on it → the old one drains → it is
closed

An error before new requests run on it leaves the old bundle serving. Only one swap runs at a time, until the old bundle
is closed. Opening and warming up pause between their parts while requests run.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from llmc.artifacts.bundle.trust import UntrustedError
from llmc.artifacts.remotes.base import RemoteError
from llmc.buckets.render.text import size_text
from llmc.compiler.targets import open_target
from llmc.errors import LlmcError
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.requests import Request
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.host import available_memory
from llmc.server.errors import ApiError, unavailable
from llmc.server.events import OnEvent, Retired, Swapped, SwapRefused
from llmc.server.loading import StoppedLoadingError, as_bundle

if TYPE_CHECKING:
    from llmc.runtime.engine.observer import EngineStats
    from llmc.server.loading import Loaded
    from llmc.server.state import Progress, Served, ServerState


WORK_BYTES = 256 << 20
"""Memory of a second engine in addition to weights and cache: activations, tables, confined children."""
_FILES = ("tokenizer.json", "chat_template.jinja")


def refused(message: str, code: str, status: int = 422) -> ApiError:
    """Return the error for a refused bundle; the served one stays."""
    return ApiError(status, message, code=code)


def check_model(new: Bundle, running: Bundle) -> None:
    """Raise ApiError other_model if `new` is of another model."""
    changed = [name for name, before, after in _identity(running, new) if before != after]
    if changed:
        raise refused(
            f"{new.path}: of another model than the served one: {', '.join(changed)} differ; to accept it, start the "
            "server with --allow-model-change",
            "other_model",
        )


def check_age(new: Bundle, running: Bundle, replaced: Collection[str]) -> None:
    """Raise ApiError older_bundle if `new` is older; `replaced`: digests that this process served before."""
    ours, theirs = running.manifest.llmc, new.manifest.llmc
    why = None
    if _release(theirs) < _release(ours):
        why = f"llmc {theirs} wrote it, and {ours} the running one"
    elif new.manifest.digest in replaced:
        why = "this server served it before, and replaced it"
    if why is not None:
        raise refused(
            f'{new.path}: older than the running bundle: {why}; to go back to it, send {{"allow_older": true}} to POST '
            "/admin/bundle, or start the server with it",
            "older_bundle",
        )


def check_room(new: Bundle) -> None:
    """Raise ApiError no_memory if the host has no room for a second bundle: blobs, cache in host memory, WORK_BYTES.

    An executor checks the memory of its own device when it opens.
    """
    available = available_memory()
    size, cache = new.manifest.size, new.cache_bytes if _in_host(new) else 0
    needed = size + cache + WORK_BYTES
    if available is not None and needed > available:
        raise refused(
            f"{new.path}: no room for two bundles at once: it needs {size_text(needed)} (files {size_text(size)}, "
            f"cache {size_text(cache)}, work {size_text(WORK_BYTES)}), and {size_text(available)} are available; free "
            f"{size_text(needed - available)}, or restart the server with it",
            "no_memory", 507,
        )  # fmt: skip


def _identity(before: Bundle, after: Bundle) -> list[tuple[str, object, object]]:
    pairs = [(name, before.manifest.files.get(name), after.manifest.files.get(name)) for name in _FILES]
    checkpoints = before.manifest.provenance.get("checkpoint"), after.manifest.provenance.get("checkpoint")
    return [("task", before.task, after.task), ("checkpoint", *checkpoints), *pairs]


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))


def _in_host(bundle: Bundle) -> bool:
    try:
        return open_target(bundle.manifest.target, bundle.settings).hosting(bundle.manifest.options).host_memory
    except LlmcError:  # the target's package is missing; its executor may still be installed
        return True


REST = 3.0
"""Seconds of pause for each second of work, while requests run."""
LONGEST_REST_S = 10.0
LOWER = 10
"""Added niceness: leaves the work a tenth of a contended core. At 19 more, a swap under full load took minutes."""
NICEST = 19
"""The system's maximum; higher values are clamped to it."""
_LOOK_S = 0.05


class Pace:
    """Pauses between parts of the work, REST times as long as the last part, while `busy` returns true."""

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy, self._since = busy, time.monotonic()

    def rest(self) -> None:
        """Pause the working thread, LONGEST_REST_S at most."""
        now = time.monotonic()
        until = now + min(LONGEST_REST_S, REST * (now - self._since))
        while self._busy() and (left := until - time.monotonic()) > 0:
            time.sleep(min(_LOOK_S, left))
        self._since = time.monotonic()


@contextmanager
def low_priority() -> Iterator[None]:
    """Raise the niceness of the calling thread by LOWER, so that serving goes first. The thread must end afterwards.

    Threads and child processes that it starts inherit this and live on, so they are reset at the end. Does nothing if
    the system does not allow a reset (RLIMIT_NICE, CAP_SYS_NICE), or if niceness is not per thread.
    """
    if not (sys.platform == "linux" and _may_return()):
        yield
        return
    me = threading.get_native_id()
    usual, before = os.getpriority(os.PRIO_PROCESS, me), _tasks()
    low = min(usual + LOWER, NICEST)
    os.setpriority(os.PRIO_PROCESS, me, low)
    try:
        yield
    finally:
        for task in _tasks() - before:
            with suppress(OSError):  # it has ended
                if (has := os.getpriority(os.PRIO_PROCESS, task)) >= low:
                    os.setpriority(os.PRIO_PROCESS, task, has - (low - usual))


def _tasks() -> set[int]:
    """The threads of this process and of its children."""
    found = list(Path("/proc/self/task").iterdir())
    for task in list(found):
        with suppress(OSError):
            for child in (task / "children").read_text().split():
                found += Path(f"/proc/{child}/task").iterdir()
    return {int(task.name) for task in found}


def _may_return() -> bool:
    """Whether the calling thread may lower its niceness again."""
    me = threading.get_native_id()
    own = os.getpriority(os.PRIO_PROCESS, me)
    try:
        os.setpriority(os.PRIO_PROCESS, me, own + 1)
        os.setpriority(os.PRIO_PROCESS, me, own)
    except OSError:
        return False
    return True


T = TypeVar("T")
Notify = Callable[["Progress"], None]
Reopen = Callable[[str | None, Notify], Path | Bundle]
"""Finds the bundle with a name, or (None) with the name that the server was started with; raises LlmcError."""

PROBE = "1 2 3 4 5 6 7 8"
PROBE_TOKENS = 4
PROBE_S = 60.0
STOP_S = 1.0


class Swapper:
    """Swaps what `state` serves. Everything runs in the event loop except `load`, `reopen` and `settle`.

    `load` opens a bundle as at startup, `begin` sends new requests to it, `settle` returns freed memory to the system.
    """

    def __init__(
        self, state: ServerState, reopen: Reopen, load: Callable[[Bundle, Notify], Loaded],
        begin: Callable[[Loaded], None], report: OnEvent, settle: Callable[[], None],
    ) -> None:  # fmt: skip
        self._state, self._reopen, self._load, self._begin = state, reopen, load, begin
        self._report, self._settle = report, settle
        self._loading = False
        self._replaced: set[str] = set()
        self._retirement: asyncio.Task[None] | None = None
        self.retiring: Served | None = None
        """The replaced bundle while requests still run on it."""
        self.thread: threading.Thread | None = None

    @property
    def stats(self) -> EngineStats | None:
        """Gauges of the served bundle, plus the requests that still run on the replaced one."""
        served, retiring = self._state.served, self.retiring
        if served is None:
            return None
        stats = served.engine.stats
        if retiring is None:
            return stats
        old = retiring.engine.stats
        return replace(stats, running=stats.running + old.running, waiting=stats.waiting + old.waiting)

    async def swap(self, named: str | None = None, allow_older: bool = False) -> Swapped:
        """Serve the bundle `named` (None: as at startup) from now on; returns when new requests go to it.

        Raises ApiError, which is also reported and counted: 409 during another swap, 503 while loading or draining, 502
        if the registry or remote fails, 507 without memory for two, 422 for a bundle that is refused or does not work.
        """
        try:
            swapped = await self._swap(named, allow_older)
        except ApiError as error:
            self._state.metrics.swap_refused(error.code or "")
            self._report(SwapRefused(str(error), error.code or ""))
            raise
        self._report(swapped)
        return swapped

    async def _swap(self, named: str | None, allow_older: bool) -> Swapped:
        began, old = time.monotonic(), self._state.served
        if self._loading or self.retiring is not None:
            raise refused(
                f"another swap is under way ({'loading' if self._loading else 'old requests end'}); try again when it "
                "is over", "swap_under_way", 409,
            )  # fmt: skip
        if old is None or self._state.draining:
            raise unavailable("the server is loading or shutting down; it cannot swap bundles now", 1.0, "not_ready")
        self._loading = True
        try:
            loaded = await self._beside(lambda: self._found(named, allow_older, old))
            if loaded is not None:
                await self._probe(loaded.served)
        finally:
            self._loading = False
        before = old.bundle.manifest.digest
        if loaded is None:
            return Swapped(old.model_name, before, before, time.monotonic() - began, 0, changed=False)
        self._replaced.add(before)
        self.retiring = old
        self._begin(loaded)
        seconds, now = time.monotonic() - began, loaded.served.bundle.manifest.digest
        self._replaced.discard(now)
        self._state.metrics.swapped(seconds)
        self._retirement = asyncio.create_task(self._retire(old))
        return Swapped(loaded.served.model_name, now, before, seconds, old.users.count)

    @low_priority()
    def _found(self, named: str | None, allow_older: bool, old: Served) -> Loaded | None:
        """None if the bundle is the served one; runs in a thread."""
        running, state = old.bundle, self._state
        pace = Pace(lambda: old.engine.stats.running > 0 and not state.draining)

        def on_progress(progress: Progress) -> None:
            del progress
            pace.rest()
            if state.draining:
                raise StoppedLoadingError

        try:
            bundle = as_bundle(self._reopen(named, on_progress))
            if bundle.manifest.digest == running.manifest.digest and old.engine.error is None:
                bundle.files.close()
                return None
            if not state.config.allow_model_change:
                check_model(bundle, running)
            if not allow_older:
                check_age(bundle, running, self._replaced)
            check_room(bundle)
            for digest in bundle.manifest.blobs:
                bundle.files.path(digest)
                pace.rest()
            loaded = self._load(bundle, on_progress)
            pace.rest()
            if state.draining:
                loaded.served.close()
                raise StoppedLoadingError
        except StoppedLoadingError:
            raise unavailable("the server is shutting down", 1.0, "draining") from None
        except ApiError:
            raise
        except UntrustedError as error:
            raise refused(str(error), "untrusted_bundle") from error
        except RemoteError as error:
            raise refused(str(error), "unreachable_bundle", 502) from error
        except LlmcError as error:
            raise refused(str(error), "broken_bundle") from error
        except Exception as error:  # libraries raise their own errors for a bad bundle
            raise refused(f"it does not open: {type(error).__name__}: {error}", "broken_bundle") from error
        return loaded

    async def _probe(self, served: Served) -> None:
        """Generate a few uncounted tokens as a test; the warm-up of a pooler has run every bucket."""
        if served.pooler is not None:
            return
        engine = served.generating
        try:
            async with asyncio.timeout(PROBE_S):
                stream = await engine.open(_probe_of(served))
                async for updates in stream:
                    for update in updates:
                        if update.finish_reason not in (None, "length"):
                            raise refused(f"it ended with {update.finish_reason!r}", "")
        except (LlmcError, TimeoutError) as error:
            await self._beside(lambda: served.close(STOP_S))
            why = str(error) or f"it took more than {PROBE_S:g} s"
            raise refused(f"{served.bundle.path}: a probe generation failed: {why}", "probe_failed") from error
        engine.work_between(iter(()))  # forgets the probe's content in its slot

    async def _retire(self, old: Served) -> None:
        began = time.monotonic()
        await old.users.gone()
        await self._beside(old.close)
        self.retiring = None
        seconds = time.monotonic() - began
        self._state.metrics.retired(seconds)
        self._report(Retired(old.bundle.manifest.digest, seconds))
        await self._beside(self._settle)

    async def _beside(self, work: Callable[[], T]) -> T:
        """In a daemon thread, which does not block the process's exit."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised where it is awaited
                done.set_exception(error)

        self.thread = threading.Thread(target=run, name="llmc-load", daemon=True)
        self.thread.start()
        return await asyncio.wrap_future(done)


def _probe_of(served: Served) -> Request:
    limits = served.limits
    ids = served.tokenizer.encode(PROBE)[: min(limits.longest_prompt, limits.max_model_len - PROBE_TOKENS)]
    tokens = max(1, min(PROBE_TOKENS, limits.max_model_len - len(ids)))
    return Request("swap-probe", ids or [0], SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True))
