"""Build a certificate: warm up, replay every bucket, run random requests, then read the monitors."""

from __future__ import annotations

import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from typing import TYPE_CHECKING

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import canonical_json
from llmc.cpus import usable_cpus
from llmc.errors import LlmcError
from llmc.runtime.certificate.document import BucketUsed, Certificate, CertifiedHost, Requests, Used
from llmc.runtime.certificate.monitors import Account, Watch, process_monitors
from llmc.runtime.certificate.requests import Driven, RandomRequests, StepCounter, admitted_kinds, drive
from llmc.runtime.host import cpu_features, host_memory
from llmc.runtime.startup.auxiliary import AuxiliaryWarming
from llmc.runtime.startup.capturing import CaptureChoice, Capturing
from llmc.runtime.startup.opening import EngineOptions, open_engine, open_executor
from llmc.runtime.startup.outcome import WarmUpOutcome
from llmc.runtime.startup.warming import Warming
from llmc.runtime.step import exact
from llmc.version import __version__

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.engine.engine import LLMEngine
    from llmc.runtime.executors.base import Executor

REQUESTS = 500
SHOWN = 5
"""Maximum number of names in an error message."""
PACKAGES: Mapping[str, str] = {
    "onnxruntime": "onnxruntime", "openvino": "openvino", "jax": "jax", "jaxlib": "jaxlib", "libtpu": "libtpu",
    "jax-cuda13-pjrt": "jax_plugins.xla_cuda13",
    "torch": "torch", "habana-torch-plugin": "habana_frameworks", "libneuronxla": "libneuronxla", "numpy": "numpy",
    "llguidance": "llguidance",
}  # fmt: skip
"""Distributions that can change what runs, and the module of each."""

OnStage = Callable[[str, str, int, int], None]
"""Called with the stage, the item just finished, the number done and the total."""


@dataclass(frozen=True)
class CertifyOptions:
    """Number and seed of the random requests.

    `uses`: how often traffic runs each bucket, for Warming. `capture`: how a device that captures graphs divides its
    memory.
    """

    requests: int = REQUESTS
    seed: int = 0
    uses: Mapping[Bucket, int] | None = None
    capture: CaptureChoice = field(default_factory=CaptureChoice)


class CompiledError(LlmcError):
    """Something was compiled after the bundle was ready; the message names the monitor and what it saw."""


@dataclass
class Certifying:
    """One certification run over a bundle; `outcome` is its warm-up outcome once the warm-up has started."""

    bundle: Bundle
    options: EngineOptions = field(default_factory=EngineOptions)
    certify: CertifyOptions = field(default_factory=CertifyOptions)
    on_progress: OnStage = lambda *_: None
    outcome: WarmUpOutcome | None = None

    def run(self) -> Certificate:
        """Run all stages and return the certificate.

        Raises CompiledError if something was compiled, or if a working monitor went blind. Raises LlmcError if a bucket
        fails, VerificationError if a request ends with an error, KeyboardInterrupt on interrupt, and any error of
        opening the bundle.
        """
        self._seconds: dict[str, float] = {}
        with Watch(process_monitors(self.bundle.settings, self.bundle.manifest.device)) as watch:
            with self._timed("open"):
                executor = open_executor(self.bundle, self.options)
            try:
                return self._with(executor, watch)
            finally:
                executor.close()

    def _with(self, executor: Executor, watch: Watch) -> Certificate:
        watch.add(executor.compilations.monitors)
        counter = StepCounter()
        plan = self.bundle.plan
        with ExitStack() as stack:
            engine: LLMEngine | None = None

            def auxiliary() -> AuxiliaryWarming:
                nonlocal engine
                engine = open_engine(self.bundle, executor, self.options, counter)
                stack.callback(engine.close)
                return AuxiliaryWarming(engine, plan)

            warming = Warming(executor, plan, uses=self.certify.uses)
            capturing = Capturing.of(executor, plan, self.certify.capture)
            self.outcome = WarmUpOutcome(executor, warming, capturing, auxiliary, watch.ready)
            with self._timed("warm up"):
                self.outcome.run(
                    lambda ran, done, total: self.on_progress("warm up", getattr(ran, "name", str(ran)), done, total)
                )
            _require_warm(self.outcome)
            assert engine is not None
            with self._timed("replay"):
                replays = _replayed(executor, warming, self.bundle)
            kinds, refused = admitted_kinds(engine)
            vocab, end_ids = engine.core.vocab_size, self.bundle.eos_token_ids
            offers = engine.core.offers
            random = RandomRequests(plan, executor, vocab, kinds, self.certify.seed, end_ids, offers)
            with self._timed("requests"):
                driven = self._driven(engine, counter, random)
            accounts, blinded = watch.accounts(), watch.blinded
        _require_none_compiled(accounts, blinded)
        return self._certificate(executor, accounts, replays, counter, driven, refused)

    def _driven(self, engine: LLMEngine, counter: StepCounter, random: RandomRequests) -> Driven:
        count = self.certify.requests
        counter.counts = True
        try:
            return drive(
                engine, random.take(count), 2 * self.bundle.plan.limits.max_num_seqs, self.certify.seed,
                lambda done: self.on_progress("requests", f"{done} requests", done, count),
            )  # fmt: skip
        finally:
            counter.counts = False

    def _certificate(
        self, executor: Executor, accounts: list[Account], replays: Counter[Bucket | str], counter: StepCounter,
        driven: Driven, refused: Mapping[str, str],
    ) -> Certificate:  # fmt: skip
        manifest, plan = self.bundle.manifest, self.bundle.plan
        verification = canonical_json(manifest.verification) if manifest.verification else None
        steps = counter.buckets
        assert self.outcome is not None
        captured = None if self.outcome.capturing is None else self.outcome.capturing.outcome
        return Certificate(
            llmc=__version__,
            created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            bundle=manifest.digest,
            device=manifest.device,
            executor=manifest.executor,
            plan=manifest.plan,
            verification=None if verification is None else digest_bytes(verification),
            any_shape=executor.capabilities.exact,
            graphs=None if captured is None else sum(len(phase.captured) for phase in captured.phases),
            executables=tuple(
                Used(str(e), e.key, e.state, e.blob, replays[str(e)], counter.executables[str(e)])
                for e in manifest.executables
            ),
            buckets=tuple(
                BucketUsed(*shape, replays[b], steps[shape])
                for b in plan.buckets
                for shape in [(b.phase, b.batch, b.query, b.context)]
            ),
            monitors=tuple(accounts),
            requests=Requests(
                driven.requests, self.certify.seed, dict(driven.finished), dict(driven.kinds), refused,
                driven.prompt_tokens, driven.longest_prompt, driven.tokens, driven.most_at_once, counter.prefixes,
            ),
            host=host(self.options.threads or self.bundle.settings.threads),
            accelerator=dict(executor.description.host()),
            toolchain=toolchain(),
            seconds=self._seconds,
        )  # fmt: skip

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[stage] = round(time.perf_counter() - began, 3)


def _require_warm(outcome: WarmUpOutcome) -> None:
    if outcome.interrupted:
        raise KeyboardInterrupt
    failed = {**{str(bucket): error for bucket, error in outcome.failed.items()}, **outcome.failed_auxiliary}
    if failed:
        some = "; ".join(f"{name}: {type(e).__name__}: {e}" for name, e in list(failed.items())[:SHOWN])
        raise LlmcError(f"not certified: {len(failed)} of the warm-up runs failed: {some}")
    if outcome.capturing is not None and outcome.capturing.failure:
        raise LlmcError(f"not certified: {outcome.capturing.failure}")


def _replayed(executor: Executor, warming: Warming, bundle: Bundle) -> Counter[Bucket | str]:
    """Count the runs of each bucket and executable in the second warm-up pass.

    If the executor takes any shape, this also runs a decode step at each executable's own batch size.
    """
    found: Counter[Bucket | str] = Counter()
    for one in warming.steps:
        found[executor.executable_of(one.step)] += 1
        if not executor.capabilities.exact:
            found[one.bucket] += 1
    if executor.capabilities.exact:
        for rows in sorted({e.batch for e in bundle.manifest.executables if e.batch and e.batch <= executor.slots}):
            for slot in range(rows):
                executor.run(exact("prompt", [slot], [[0]], [0]))
            step = exact("decode", range(rows), [[0]] * rows, [1] * rows)
            executor.run(step)
            found[executor.executable_of(step)] += 1
    return found


def _require_none_compiled(accounts: list[Account], blinded: list[str]) -> None:
    seen = [account for account in accounts if account.after]
    if seen:
        words = [
            f"{a.monitor} saw {a.after} ({', '.join(a.names_after[:SHOWN])}"
            f"{', …' if len(a.names_after) > SHOWN else ''})" for a in seen
        ]  # fmt: skip
        raise CompiledError(f"not certified: once it was ready, {'; '.join(words)}")
    if blinded:
        raise CompiledError(f"not certified: a monitor went blind once it was ready: {'; '.join(blinded)}")


def host(threads: int) -> CertifiedHost:
    """Describe this host; `threads` is the executor's thread count."""
    return CertifiedHost(
        platform.system(), platform.machine(), cpu_features(), usable_cpus(), threads, host_memory()
    )  # fmt: skip


def toolchain() -> dict[str, str]:
    """Return the versions of Python and of the imported PACKAGES."""
    found = {"python": platform.python_version()}
    for package, module in PACKAGES.items():
        if module in sys.modules and (version := installed(package)) is not None:
            found[package] = version
    return found


def installed(package: str) -> str | None:
    """Return the version of an installed distribution, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
