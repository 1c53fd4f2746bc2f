"""Replace the served bundle without losing a request.

opened and checked next to the old one → loaded and warm → probed → new requests run on it → the old one drains → it is
closed

An error before new requests run on it leaves the old bundle serving. Only one swap runs at a time, until the old bundle
is closed. Opening and warming up pause between their parts while requests run (pacing.py).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from llmc.artifacts.bundle.trust import UntrustedError
from llmc.artifacts.remotes.base import RemoteError
from llmc.errors import LlmcError
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.requests import Request
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.server.admission import check_age, check_model, check_room, refused
from llmc.server.errors import ApiError, unavailable
from llmc.server.events import OnEvent, Retired, Swapped, SwapRefused
from llmc.server.loading import StoppedLoadingError, as_bundle
from llmc.server.pacing import Pace, low_priority

if TYPE_CHECKING:
    from llmc.runtime.engine.observer import EngineStats
    from llmc.server.loading import Loaded
    from llmc.server.state import Progress, Served, ServerState

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
        """Return the bundle checked, open and warm, or None if it is the served one; runs in a thread."""
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
        """Generate a few uncounted tokens as a test, and close the bundle on failure.

        For other models the warm-up has run every bucket.
        """
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
        """Return the result of `work`, run in a daemon thread that does not block the process's exit."""
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
