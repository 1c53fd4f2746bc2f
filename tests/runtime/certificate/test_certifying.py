"""A certificate says what ran; and where anything compiles, starts or is written meanwhile, there is none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.buckets.capture.auxiliary import SAMPLING
from llmc.errors import LlmcError, VerificationError
from llmc.runtime.bundle import Bundle
from llmc.runtime.certificate import monitors
from llmc.runtime.certificate.certifying import Certifying, CertifyOptions, CompiledError
from llmc.runtime.certificate.checking import NEEDED
from llmc.runtime.certificate.document import Certificate
from llmc.runtime.executors.fake.executor import FakeExecutor
from tests.devices import use, watching
from tests.runtime.certificate.conftest import certify
from tests.tiers import default_cases
from tests.toy import Toy


def test_every_bucket_and_executable_ran_and_nothing_was_compiled(certified: Certificate, toys: dict[str, Toy]) -> None:
    manifest, plan = Bundle.open(toys["static"].bundle).manifest, toys["static"].plan
    assert certified.bundle == manifest.digest
    assert certified.compilations == 0
    assert {monitor.monitor for monitor in certified.monitors} == set(NEEDED)
    assert all(monitor.after == 0 for monitor in certified.monitors)
    assert [(b.phase, b.batch, b.query, b.context) for b in certified.buckets] == [
        (b.phase, b.batch, b.query, b.context) for b in plan.buckets
    ]
    assert all(b.replays == 1 for b in certified.buckets)
    assert sum(b.steps for b in certified.buckets) == sum(e.steps for e in certified.executables) > 60
    assert [e.key for e in certified.executables] == [e.key for e in manifest.executables]
    assert all(e.replays >= 1 for e in certified.executables)


def test_it_says_what_the_requests_were(certified: Certificate) -> None:
    requests = certified.requests
    assert (requests.count, requests.seed, sum(requests.kinds.values())) == (60, 0, 60)
    assert set(requests.kinds) == set(SAMPLING)
    assert set(requests.finished) <= {"stop", "length", "abort"}
    assert requests.finished["abort"] >= 1
    assert (requests.longest_prompt, requests.refused) == (31, {})
    assert requests.most_at_once > 4, "more than run at once"


def test_some_prompts_begin_in_the_cache(toys: dict[str, Toy]) -> None:
    assert certify(toys["static"].bundle, requests=300).requests.from_prefixes > 0


def test_it_says_where_it_ran(certified: Certificate) -> None:
    assert certified.toolchain["numpy"] == np.__version__
    assert certified.host.threads == 1
    assert set(certified.seconds) == {"open", "warm up", "replay", "requests"}


def test_the_same_seed_runs_the_same(certified: Certificate, toys: dict[str, Toy]) -> None:
    again = certify(toys["static"].bundle)
    assert again.requests == certified.requests
    assert again.buckets == certified.buckets


def test_a_bundle_that_runs_any_shape_says_so(toys: dict[str, Toy]) -> None:
    for kind in ("exact", "paged"):
        built = certify(toys[kind].bundle, requests=30)
        assert built.any_shape
        assert [e.replays > 0 for e in built.executables] == [True]


def test_a_bundle_without_a_tokenizer_is_certified_without_texts(tmp_path: Path) -> None:
    from llmc.testing.toy import write_toy

    toy = Toy.make(tmp_path)
    toy.compile(model=write_toy(tmp_path / "numbers", tokenizer=False), specialise=True)
    built = certify(toy.bundle, requests=30)
    assert list(built.requests.refused) == ["structured output"]
    assert "masks" in built.requests.kinds, "but for its words"
    assert "tokenizer" in built.requests.refused["structured output"]


# What must not happen


def once_ready(then: Callable[[], object]) -> type[FakeExecutor]:
    """A device that does `then` in one step in the middle of the requests."""

    class Broken(FakeExecutor):
        steps = 0

        def run(self, step: Any) -> Any:
            self.steps += self.compilations.is_ready
            if self.steps == 30:
                then()
            return super().run(step)

    return Broken


def jit() -> None:
    import jax

    jax.jit(lambda x: x - 1)(np.ones(9))


COMPILERS: dict[str, tuple[Callable[[], object], str]] = {
    "a function that JAX compiles": (jit, r"JAX compile events saw 1 \(jax: jit\(<lambda>\)\)"),
    "a file in a compile cache": (
        lambda: (Path(os.environ["TRITON_CACHE_DIR"]) / "kernel.cubin").write_bytes(b"code"),
        r"files in compile caches saw 1 \(triton: kernel.cubin\)",
    ),
}  # fmt: skip


@default_cases(2)
@pytest.mark.parametrize("what", COMPILERS)
def test_what_compiles_in_the_middle_is_named_and_nothing_is_certified(
    toys: dict[str, Toy], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import jax  # noqa: F401 - before the watch begins

    Path(os.environ["TRITON_CACHE_DIR"]).mkdir(parents=True)
    then, words = COMPILERS[what]
    use(monkeypatch, executor=once_ready(then))
    with pytest.raises(CompiledError, match=f"not certified: once it was ready, {words}"):
        certify(toys["static"].bundle)


def test_an_executable_that_is_opened_in_the_middle_counts(
    toys: dict[str, Toy], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgetful(FakeExecutor):
        def run(self, step: Any) -> Any:
            if step.phase == "decode" and step.batch == 2:
                self._programs.clear()
            return super().run(step)

    use(monkeypatch, executor=Forgetful)
    with pytest.raises(CompiledError, match=r"executables saw \d+ \(decode batch=2"):
        certify(toys["static"].bundle)


def test_a_monitor_that_goes_blind_in_the_middle_certifies_nothing(
    toys: dict[str, Toy], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, executor=once_ready(lambda: monkeypatch.setattr(monitors, "MOST_FILES", 0)))
    folder = Path(os.environ["TRITON_CACHE_DIR"])
    folder.mkdir(parents=True)
    (folder / "kernel.cubin").write_bytes(b"code")
    with pytest.raises(CompiledError, match=r"went blind once it was ready: files in compile caches: .* more than 0"):
        certify(toys["static"].bundle)


def test_what_is_compiled_before_it_is_ready_is_said(toys: dict[str, Toy], monkeypatch: pytest.MonkeyPatch) -> None:
    class Compiles(FakeExecutor):
        def open_all(self) -> None:
            super().open_all()
            self.compilations.opened("at open")

    use(monkeypatch, executor=Compiles)
    built = certify(toys["static"].bundle, requests=10)
    (own,) = (w for w in built.monitors if w.monitor == "executables")
    assert (own.before, own.names_before, own.after) == (1, ("at open",), 0)


def test_a_bucket_that_does_not_run_is_named(toys: dict[str, Toy], monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(step: Any) -> None:
        if step.batch == 2:
            raise RuntimeError("no room")

    use(monkeypatch, executor=watching(seen))
    with pytest.raises(LlmcError, match=r"not certified: 2 of the warm-up runs failed: .*RuntimeError: no room"):
        certify(toys["static"].bundle)


def test_a_request_that_fails_ends_it(toys: dict[str, Toy], monkeypatch: pytest.MonkeyPatch) -> None:
    class NanFilled(FakeExecutor):
        def run(self, step: Any) -> Any:
            logits = super().run(step)
            if self.compilations.is_ready and step.phase == "decode" and len(step.slots) == 4:
                logits[:] = np.nan
            return logits

    use(monkeypatch, executor=NanFilled)
    with pytest.raises(VerificationError, match="ended with an error; see the log"):
        certify(toys["static"].bundle)


def test_an_interrupt_is_passed_on(toys: dict[str, Toy], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    for executor in (once_ready(interrupt), watching(lambda _: interrupt())):
        use(monkeypatch, executor=executor)
        with pytest.raises(KeyboardInterrupt):
            certify(toys["static"].bundle)


def test_progress_is_reported_by_stage(toys: dict[str, Toy]) -> None:
    reported: dict[str, list[tuple[int, int]]] = {}
    Certifying(
        Bundle.open(toys["static"].bundle), certify=CertifyOptions(20),
        on_progress=lambda stage, text, done, total: reported.setdefault(stage, []).append((done, total)),
    ).run()  # fmt: skip
    assert list(reported) == ["warm up", "requests"]
    assert all(done <= total for of in reported.values() for done, total in of)
    assert all(done == total for done, total in (of[-1] for of in reported.values()))
    assert reported["requests"][-1] == (20, 20)
