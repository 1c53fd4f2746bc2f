"""A loop's rounds on the fake target: what they do, why they end, and what a kill leaves."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmc import loop
from llmc.artifacts.bundle.manifest import read_manifest
from llmc.errors import InputError
from llmc.loop import AdminClient, LoopFolder, LoopOptions, Round, run_round, worth
from llmc.server.events import SwapRefused
from llmc.settings import Settings
from tests.server.live import Live
from tests.tiers import default_cases
from tests.toy import Toy

TOKEN = "the-token"


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    built = Toy.make(tmp_path)
    built.compile()
    return built


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Prompts of 5 tokens, of which the toy's plan pads each to 8 at least."""
    lines = [json.dumps({"time": float(at), "prompt_tokens": 5, "output_tokens": 3}) for at in range(40)]
    path = tmp_path / "traffic.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def requested(toy: Toy, recording: Path | None, **more: Any) -> LoopOptions:
    folder = LoopFolder(toy.bundle.with_name("loop"))
    folder.bundle("").mkdir(parents=True, exist_ok=True)
    given = {"bundle": str(toy.bundle), "traffic": None if recording is None else str(recording), **more}
    return LoopOptions(folder, model=str(toy.model), **given)


def ran(toy: Toy, what: LoopOptions) -> Round:
    return run_round(what, toy.store, Settings(), lambda _: None)


def log(what: LoopOptions) -> list[dict[str, Any]]:
    return [json.loads(line) for line in what.folder.log.read_text().splitlines()]


@pytest.fixture
def live(toy: Toy) -> Iterator[Live]:
    with Live(toy.bundle, reopen=lambda named, _: Path(named or toy.bundle), admin_tokens=(TOKEN,)) as server:
        yield server.ready()


def served_by(live: Live, toy: Toy, recording: Path | None, **more: Any) -> LoopOptions:
    return requested(toy, recording, bundle=None, client=AdminClient(f"http://127.0.0.1:{live.port}", TOKEN), **more)


# What a round does


def test_a_plan_for_the_traffic_is_compiled_and_swapped_in(live: Live, toy: Toy, recording: Path) -> None:
    what = served_by(live, toy, recording)
    done = ran(toy, what)
    assert (done.outcome, done.stage, done.requests) == ("swapped", "swap", 40)
    assert done.gain["prompt"] > 0.3
    assert done.built > 0 and done.graphs <= len(toy.plan.buckets)
    assert live.server.state.served is not None
    assert live.server.state.served.bundle.manifest.digest == done.digest
    assert what.folder.current.resolve() == Path(str(done.bundle))
    assert live.complete().status == 200
    assert log(what) == [done.to_dict()]
    again = ran(toy, what)
    assert (again.outcome, again.stage) == ("nothing", "plan")
    assert again.why == "the best plan saves less than 5.0%"


def test_the_servers_own_histograms_tell_the_traffic_of_a_round(live: Live, toy: Toy) -> None:
    what = served_by(live, toy, None)
    assert ran(toy, what).why == "no request since the last round"
    for _ in range(6):
        live.complete()
    assert ran(toy, what).requests == 6
    assert ran(toy, what).requests == 0, "they were the last round's"


def test_only_what_changed_is_compiled(toy: Toy, recording: Path) -> None:
    first = ran(toy, requested(toy, recording))
    assert first.outcome == "ready" and first.built > 0
    other = requested(toy, recording, bundle=str(toy.bundle), max_graphs=first.graphs)
    os.rename(Path(str(first.bundle)), Path(str(first.bundle)).with_name("gone"))  # noqa: PTH104
    second = ran(toy, other)
    assert (second.outcome, second.built, second.reused) == ("ready", 0, first.built + first.reused)


def test_a_dry_run_writes_neither_log_nor_bundle(live: Live, toy: Toy, recording: Path) -> None:
    what = served_by(live, toy, recording, dry_run=True)
    done = ran(toy, what)
    assert (done.outcome, done.stage) == ("planned", "compile")
    assert done.estimated_s is not None and done.bundle is None
    assert not what.folder.log.exists() and not what.folder.current.exists()


@pytest.mark.parametrize(("gain", "least", "is_worth"), [
    ({"prompt": 0.1, "decode": 0.0}, 0.05, True),
    ({"prompt": 0.1, "decode": -0.04}, 0.05, True),
    ({"prompt": 0.5, "decode": -0.05}, 0.05, False),
    ({"prompt": 0.04, "decode": 0.04}, 0.05, False),
    ({"prompt": 0.0, "decode": 0.0}, 0.0, False),
])  # fmt: skip
def test_a_plan_is_worth_it_where_one_phase_gains_and_none_loses_as_much(
    gain: dict[str, float], least: float, is_worth: bool
) -> None:
    assert worth(gain, least) is is_worth


# Budget


def test_a_compile_that_is_expected_to_take_longer_does_not_begin(
    toy: Toy, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "llmc.compiler.pipeline.compilation.Compilation.dry_run", lambda *_: {"estimated_seconds": 90.0, "cached": 1}
    )
    done = ran(toy, requested(toy, recording, budget_s=60.0))
    assert (done.outcome, done.why) == ("nothing", "compiling takes about 90 s, and a round may take 60 s")


def test_a_compile_that_takes_longer_ends_and_the_next_round_goes_on(
    toy: Toy, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "llmc.compiler.pipeline.compilation.Compilation.dry_run", lambda *_: {"estimated_seconds": 0.0, "cached": 1}
    )
    done = ran(toy, requested(toy, recording, budget_s=0.0))
    assert (done.outcome, done.bundle) == ("stopped", None)
    assert ran(toy, requested(toy, recording)).outcome == "ready"


# What goes wrong


def test_a_refused_bundle_leaves_server_and_link_as_they_were(
    live: Live, toy: Toy, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmc.server import swapping

    monkeypatch.setattr(swapping, "available_memory", lambda: 0)
    what = served_by(live, toy, recording)
    done = ran(toy, what)
    assert (done.outcome, done.stage) == ("refused", "swap")
    assert "no room for two bundles" in done.why
    assert [e.code for e in live.events if isinstance(e, SwapRefused)] == ["no_memory"]
    assert what.folder.current.resolve() == toy.bundle
    assert live.complete().status == 200


@default_cases(2)
@pytest.mark.parametrize(("change", "said"), [
    ({"client": AdminClient("http://127.0.0.1:9", TOKEN)}, "does not answer"),
    ({"traffic": "nowhere.jsonl"}, "nowhere.jsonl"),
    ({"model": "nowhere"}, "nowhere"),
    ({"bundle": "nowhere"}, "not a bundle"),
])  # fmt: skip
def test_what_cannot_be_reached_fails_the_round(toy: Toy, recording: Path, change: dict[str, Any], said: str) -> None:
    what = replace(requested(toy, recording), **change)
    done = ran(toy, what)
    assert done.outcome == "failed" and said in done.why
    assert log(what)[0]["outcome"] == "failed"


def test_a_wrong_token_says_what_to_do(live: Live, toy: Toy, recording: Path) -> None:
    what = requested(toy, recording, client=AdminClient(f"http://127.0.0.1:{live.port}", "wrong"), bundle=None)
    assert "with the same LLMC_ADMIN_TOKEN" in ran(toy, what).why


def test_two_loops_do_not_share_a_folder(toy: Toy) -> None:
    folder = LoopFolder(toy.bundle.with_name("loop"))
    with folder.held(), pytest.raises(InputError, match="another llmc loop uses this folder"), folder.held():
        pass


def test_the_newest_bundles_stay_and_those_in_use(tmp_path: Path) -> None:
    folder = LoopFolder(tmp_path)
    built = [folder.bundle(f"{number:064x}") for number in (1 << 220, 2 << 220, 3 << 220, 4 << 220)]
    for at, one in enumerate(built):
        one.mkdir(parents=True)
        os.utime(one, (at, at))
    folder.trim(built[0])
    assert [one.exists() for one in built] == [True, False, True, True]


# Interrupts


@default_cases(2)
@pytest.mark.parametrize("stage", ["evaluate", "plan", "compile", "swap"])
def test_a_kill_leaves_all_whole_and_the_next_round_does_it(toy: Toy, recording: Path, stage: str) -> None:
    what = requested(toy, recording)

    class Killed(Round):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if (name, value) == ("stage", stage):
                os.kill(os.getpid(), signal.SIGKILL)

    def child() -> None:
        loop.Round = Killed  # type: ignore[misc]
        ran(toy, what)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert not what.folder.log.exists() and not what.folder.current.exists()
    done = ran(toy, what)
    assert done.outcome == "ready"
    assert (done.built == 0) is (stage == "swap"), "what was compiled is in the store"
    assert read_manifest(what.folder.current).digest == done.digest


def test_a_kill_between_swap_and_link_is_built_good(live: Live, toy: Toy, recording: Path) -> None:
    what = served_by(live, toy, recording)
    done = ran(toy, what)
    what.folder.point(toy.bundle)
    assert ran(toy, what).outcome == "nothing"
    assert what.folder.current.resolve() == Path(str(done.bundle))


def test_an_interrupt_is_logged(toy: Toy, recording: Path) -> None:
    what = requested(toy, recording)

    def interrupt(event: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_round(what, toy.store, Settings(), interrupt)
    assert [(line["stage"], line["outcome"]) for line in log(what)] == [("compile", "interrupted")]


def test_under_load_a_round_loses_no_request(live: Live, toy: Toy, recording: Path) -> None:
    over, statuses = threading.Event(), []

    def ask() -> None:
        while not over.is_set():
            statuses.append(live.complete(max_tokens=12, stream=True).status)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert ran(toy, served_by(live, toy, recording)).outcome == "swapped"
    over.set()
    for thread in threads:
        thread.join()
    assert set(statuses) == {200}
