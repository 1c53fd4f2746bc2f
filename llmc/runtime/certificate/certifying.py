"""Making a certificate: warm up, replay every bucket, run random requests, ask the witnesses."""

from __future__ import annotations

import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from typing import TYPE_CHECKING

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import canonical_json
from llmc.cpus import usable_cpus
from llmc.errors import LlmcError, VerificationError
from llmc.runtime.certificate.document import BucketUsed, Certificate, Host, Numbers, Requests, Used
from llmc.runtime.certificate.driving import Driven, StepCounter, drive
from llmc.runtime.certificate.requests import RandomRequests, admitted_kinds
from llmc.runtime.certificate.watch import Account, Watch, process_witnesses
from llmc.runtime.host import cpu_features, host_memory
from llmc.runtime.startup.beside import BesideWarming
from llmc.runtime.startup.capturing import CaptureChoice, Capturing
from llmc.runtime.startup.opening import EngineOptions, open_engine, open_executor
from llmc.runtime.startup.outcome import Outcome
from llmc.runtime.startup.warming import Warming
from llmc.runtime.step import exact
from llmc.version import __version__

if TYPE_CHECKING:
    from llmc.buckets.bucket import Bucket
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.certificate.requests import RandomRequest
    from llmc.runtime.engine.engine import LLMEngine
    from llmc.runtime.engine.requests import Request, Update
    from llmc.runtime.executors.base import Executor

TIE_NATS = 1e-3
"""Two tokens whose log probabilities are this near are a tie, which another bucket's order of sums may break."""


@dataclass(frozen=True)
class Repeats:
    """Requests that were repeated; of these, those of equal tokens, and those whose first other token was a tie."""

    repeated: int = 0
    equal: int = 0
    ties: int = 0
    differing: tuple[str, ...] = ()


def repeat(
    engine: LLMEngine,
    answers: Sequence[tuple[RandomRequest, list[int]]],
    tell: Callable[[int], None] = lambda _: None,
) -> Repeats:
    """Run each request again, alone; `tell` hears how many have. `engine` reuses no prefix. Raises whatever the
    executor raises."""
    equal = ties = 0
    differing = []
    for number, (one, answer) in enumerate(answers, 1):
        alone = [token for update in _run(engine, one.request) for token in update.token_ids]
        if alone == answer:
            equal += 1
        elif _is_tie(engine, one.request, answer, alone):
            ties += 1
        else:
            differing.append(one.request.request_id)
        tell(number)
    return Repeats(len(answers), equal, ties, tuple(differing))


def _run(engine: LLMEngine, request: Request) -> list[Update]:
    engine.add(engine.prepare(request))
    updates: list[Update] = []
    while engine.has_work:
        updates += engine.step()
    return updates


def _is_tie(engine: LLMEngine, request: Request, answer: Sequence[int], alone: Sequence[int]) -> bool:
    """Whether, where two answers part, the token of each is as probable as that of the other."""
    pairs = zip(answer, alone, strict=False)
    at = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    if at is None:
        return False
    known = replace(request, params=replace(request.params, logprobs=2, max_tokens=at + 1))
    said = [logprobs for update in _run(engine, known) for logprobs in update.logprobs]
    if len(said) <= at:
        return False
    top = dict(said[at].top)
    return answer[at] in top and alone[at] in top and abs(top[answer[at]] - top[alone[at]]) < TIE_NATS


REQUESTS = 500
REPEATED = 32
"""Requests that are repeated alone, about."""
SHOWN = 5
"""Names that an error shows."""
PACKAGES: Mapping[str, str] = {
    "onnxruntime": "onnxruntime", "openvino": "openvino", "jax": "jax", "jaxlib": "jaxlib", "libtpu": "libtpu",
    "jax-cuda13-pjrt": "jax_plugins.xla_cuda13",
    "torch": "torch", "habana-torch-plugin": "habana_frameworks", "libneuronxla": "libneuronxla", "numpy": "numpy",
    "llguidance": "llguidance",
}  # fmt: skip
"""Distributions that decide what runs, and their modules."""

Tell = Callable[[str, str, int, int], None]
"""Hears of a stage, what was done of it, how much is done, and of how much."""


@dataclass(frozen=True)
class CertifyOptions:
    """How many random requests, from which seed; `uses` is how often traffic runs each bucket, see Warming; `capture`:
    how a device that captures graphs divides its memory."""

    requests: int = REQUESTS
    seed: int = 0
    uses: Mapping[Bucket, int] | None = None
    capture: CaptureChoice = field(default_factory=CaptureChoice)


class CompiledError(LlmcError):
    """Something was compiled once the bundle was ready; the message names who saw it and what it was."""


@dataclass
class Certifying:
    """One run over a bundle; `outcome` is that of its warm-up, once there is one."""

    bundle: Bundle
    options: EngineOptions = field(default_factory=EngineOptions)
    certify: CertifyOptions = field(default_factory=CertifyOptions)
    tell: Tell = lambda *_: None
    outcome: Outcome | None = None

    def run(self) -> Certificate:
        """The certificate.

        Raises CompiledError where something was compiled, or a witness that saw went blind; LlmcError where a bucket
        does not run; VerificationError where a request ended with an error, or its answer in float32 is another one
        alone; KeyboardInterrupt where it is interrupted; and what opening the bundle raises.
        """
        self._seconds: dict[str, float] = {}
        with Watch(process_witnesses(self.bundle.settings, self.bundle.manifest.device)) as watch:
            with self._timed("open"):
                executor = open_executor(self.bundle, self.options)
            try:
                return self._with(executor, watch)
            finally:
                executor.close()

    def _with(self, executor: Executor, watch: Watch) -> Certificate:
        watch.add(executor.witnesses())
        counter = StepCounter()
        plan = self.bundle.plan
        with ExitStack() as stack:

            def open_closing(options: EngineOptions, observer: StepCounter | None = None) -> LLMEngine:
                opened = open_engine(self.bundle, executor, options, observer)
                stack.callback(opened.close)
                return opened

            engine: LLMEngine | None = None

            def beside() -> BesideWarming:
                nonlocal engine
                engine = open_closing(self.options, counter)
                return BesideWarming(engine, plan)

            warming = Warming(executor, plan, uses=self.certify.uses)
            capturing = Capturing.of(executor, plan, self.certify.capture)
            self.outcome = Outcome(executor, warming, capturing, beside, watch.ready)
            with self._timed("warm up"):
                self.outcome.run(
                    lambda ran, done, total: self.tell("warm up", getattr(ran, "name", str(ran)), done, total)
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
            with self._timed("repeats"):
                alone = open_closing(replace(self.options, enable_prefix_caching=False))
                count = len(driven.answers)
                repeats = repeat(alone, driven.answers, lambda n: self.tell("repeats", f"{n} repeats", n, count))
            accounts, blinded = watch.accounts(), watch.blinded
        _require_none_compiled(accounts, blinded)
        return self._certificate(executor, accounts, replays, counter, driven, refused, self._numbers(repeats))

    def _driven(self, engine: LLMEngine, counter: StepCounter, random: RandomRequests) -> Driven:
        count = self.certify.requests
        counter.counts = True
        try:
            return drive(
                engine, random.take(count), 2 * self.bundle.plan.limits.max_num_seqs, self.certify.seed,
                max(1, count // (4 * REPEATED)), lambda done: self.tell("requests", f"{done} requests", done, count),
            )  # fmt: skip
        finally:
            counter.counts = False

    def _numbers(self, repeats: Repeats) -> Numbers:
        options = self.bundle.manifest.options
        computes = options.get("quantize", "none") == "none" and options.get("dtype", "f32") == "f32"
        if computes and repeats.differing:
            raise VerificationError(
                f"{self.bundle.path}: alone, requests {', '.join(repeats.differing[:SHOWN])} give other tokens than "
                f"beside others ({len(repeats.differing)} of {repeats.repeated}), in float32: `llmc verify` finds where"
            )
        return Numbers(computes, repeats.repeated, repeats.equal, repeats.ties, len(repeats.differing))

    def _certificate(
        self, executor: Executor, accounts: list[Account], replays: Counter[Bucket | str], counter: StepCounter,
        driven: Driven, refused: Mapping[str, str], numbers: Numbers,
    ) -> Certificate:  # fmt: skip
        manifest, plan = self.bundle.manifest, self.bundle.plan
        verification = canonical_json(manifest.verification) if manifest.verification else None
        steps = counter.buckets
        assert self.outcome is not None
        captured = None if self.outcome.capturing is None else self.outcome.capturing.outcome
        return Certificate(
            llmc=__version__,
            made=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            bundle=manifest.digest,
            device=manifest.device,
            executor=manifest.executor,
            plan=manifest.plan,
            verification=None if verification is None else digest_bytes(verification),
            any_shape=executor.exact,
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
            witnesses=tuple(accounts),
            requests=Requests(
                driven.requests, self.certify.seed, dict(driven.finished), dict(driven.kinds), refused,
                driven.prompt_tokens, driven.longest_prompt, driven.tokens, driven.most_at_once, counter.prefixes,
            ),
            numbers=numbers,
            host=host(executor.threads),
            card=dict(executor.host()),
            toolchain=toolchain(),
            seconds=self._seconds,
        )  # fmt: skip

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[stage] = round(time.perf_counter() - began, 3)


def _name(ran: object) -> str:
    return str(getattr(ran, "name", ran))


def _require_warm(outcome: Outcome) -> None:
    if outcome.interrupted:
        raise KeyboardInterrupt
    failed = {**{str(bucket): error for bucket, error in outcome.failed.items()}, **outcome.failed_beside}
    if failed:
        some = "; ".join(f"{name}: {type(e).__name__}: {e}" for name, e in list(failed.items())[:SHOWN])
        raise LlmcError(f"not certified: {len(failed)} of what is warmed up failed: {some}")
    if outcome.capturing is not None and outcome.capturing.failure:
        raise LlmcError(f"not certified: {outcome.capturing.failure}")


def _replayed(executor: Executor, warming: Warming, bundle: Bundle) -> Counter[Bucket | str]:
    """How often the second pass of the warm-up ran each bucket and executable. Where any shape runs, decode steps of
    each executable's own batch are run now."""
    found: Counter[Bucket | str] = Counter()
    for one in warming.steps:
        found[executor.executable_of(one.step)] += 1
        if not executor.exact:
            found[one.bucket] += 1
    if executor.exact:
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
            f"{a.witness} saw {a.after} ({', '.join(a.names_after[:SHOWN])}"
            f"{', …' if len(a.names_after) > SHOWN else ''})" for a in seen
        ]  # fmt: skip
        raise CompiledError(f"not certified: once it was ready, {'; '.join(words)}")
    if blinded:
        raise CompiledError(f"not certified: a witness went blind once it was ready: {'; '.join(blinded)}")


def host(threads: int) -> Host:
    """This host, and the threads that an executor has on it."""
    return Host(
        platform.system(), platform.machine(), cpu_features(), usable_cpus(), threads, host_memory()
    )  # fmt: skip


def toolchain() -> dict[str, str]:
    """Versions of Python and of the packages in this process that decide what runs."""
    found = {"python": platform.python_version()}
    for package, module in PACKAGES.items():
        if module in sys.modules and (version := installed(package)) is not None:
            found[package] = version
    return found


def installed(package: str) -> str | None:
    """The version of a distribution on this host; None: it is not here."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
