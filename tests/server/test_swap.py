"""Another bundle in place of the one that is served: no request is lost, and what does not work changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.bundle.manifest import read_manifest
from llmc.artifacts.bundle.reader import blob_path
from llmc.buckets.plan import Plan
from llmc.server import swapping
from llmc.server.errors import ApiError
from llmc.server.events import Retired, Swapped, SwapRefused
from llmc.server.swapping import check_age
from llmc.testing.toy import toy_plan
from tests.server.live import Answer, Gate, Live
from tests.server.process import Process
from tests.tiers import full
from tests.timing import PATIENCE_S, until
from tests.toy import Toy

TOKEN = "the-token"


def smaller_plan() -> Plan:
    """The toy's plan without its first decode bucket."""
    plan = toy_plan()
    return replace(plan, buckets=tuple(bucket for bucket in plan.buckets if bucket != plan.decode[0]))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    toy = Toy.make(tmp_path_factory.mktemp("swap"))
    toy.compile()
    toy.compile(smaller_plan(), bundle=toy.bundle.with_name("two"))
    return toy


@pytest.fixture
def one(built: Toy) -> Path:
    return built.bundle


@pytest.fixture
def two(built: Toy) -> Path:
    return built.bundle.with_name("two")


@contextmanager
def serving(bundle: Path, ready: bool = True, **options: Any) -> Iterator[Live]:
    options = {"admin_tokens": (TOKEN,), **options}
    with Live(bundle, reopen=lambda named, _: Path(named or bundle), **options) as live:
        yield live.ready() if ready else live


def swap(live: Live, bundle: Path | None = None, **more: Any) -> Answer:
    body = {**({} if bundle is None else {"bundle": str(bundle)}), **more}
    return live.ask("POST", "/admin/bundle", body, Authorization=f"Bearer {TOKEN}")


def digest(bundle: Path) -> str:
    return read_manifest(bundle).digest


def refused(live: Live, answer: Answer, code: str, status: int = 422) -> str:
    """The message of a refusal, after which requests are answered as before and it is counted."""
    assert (answer.status, answer.json["error"]["code"]) == (status, code), answer.text
    message = str(answer.json["error"]["message"])
    assert live.wait(SwapRefused, lambda e: e.message == message).code == code
    assert f'llmc:bundle_swaps_total{{model_name="toy",reason="{code}",result="refused"}}' in live.get("/metrics").text
    assert live.complete().status == 200
    return message


# Taken


def test_new_requests_run_on_the_new_bundle_and_it_is_reported(one: Path, two: Path) -> None:
    with serving(one) as live:
        before = live.complete().json["choices"][0]["text"]
        answer = swap(live, two)
        assert answer.status == 200
        assert answer.json | {"seconds": 0} == {
            "model": "toy", "digest": digest(two), "previous": digest(one), "seconds": 0, "draining": 0,
            "changed": True,
        }  # fmt: skip
        assert live.wait(Retired).digest == digest(one)
        assert live.complete().json["choices"][0]["text"] == before
        assert f'llmc:bundle_info{{digest="{digest(two)}",model_name="toy"}} 1.0' in live.get("/metrics").text
        assert live.gauge("bundle_swap_seconds_count") == live.gauge("bundle_drain_seconds_count") == 1
        seen = live.ask("GET", "/admin/bundle", Authorization=f"Bearer {TOKEN}").json
        assert (seen["bundle"], seen["digest"]) == (str(two), digest(two))
        assert seen["plan"]["decode"] == smaller_plan().to_dict()["decode"]


def test_the_probe_and_the_warm_up_are_in_no_count(one: Path, two: Path) -> None:
    with serving(one) as live:
        assert swap(live, two).status == 200
        live.wait(Retired)
        assert live.gauge("prompt_tokens_total") == live.gauge("generation_tokens_total") == 0
        assert live.stats.retained_slots == 0
        live.complete()
        assert live.gauge("generation_tokens_total") == 4, "the new engine is observed"


def test_what_runs_on_the_old_bundle_ends_there(one: Path, two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with serving(one) as live:
        whole = live.complete(max_tokens=10).json["choices"][0]["text"]
        old = live.server.state.served
        assert old is not None
        begun = len(gate.steps)
        gate.hold()
        stream = live.call(stream=True, max_tokens=10)
        gate.wait(begun + 1)
        swapping = threading.Thread(target=lambda: swap(live, two))
        swapping.start()
        until(lambda: len(gate.steps) > begun + 1)  # the new one's warm-up has come to the gate, too
        gate.let()
        assert live.wait(Swapped).changed
        answer = stream.answer
        assert "".join(c["choices"][0]["text"] for c in answer.chunks) == whole
        assert answer.text.endswith("data: [DONE]\n\n")
        swapping.join()
        live.wait(Retired)
        assert old.users.count == 0
        assert live.server.state.served is not old


def test_a_request_that_was_given_the_old_bundle_may_still_begin_on_it(
    one: Path, two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the body's end and the engine lie templates and tokens, and the swap falls there."""
    from llmc.server.routes import completions

    plain, went, go = completions.completion_prompts, threading.Event(), threading.Event()

    async def slow(*arguments: Any) -> Any:
        import asyncio

        went.set()
        await asyncio.to_thread(go.wait, PATIENCE_S)
        return await plain(*arguments)

    with serving(one) as live:
        monkeypatch.setattr(completions, "completion_prompts", slow)
        call = live.call()
        assert went.wait(PATIENCE_S)
        monkeypatch.setattr(completions, "completion_prompts", plain)
        assert swap(live, two).json["draining"] == 1
        assert live.complete().status == 200
        assert not [e for e in live.events if isinstance(e, Retired)]
        refused(live, swap(live, one, allow_older=True), "swap_under_way", 409)
        go.set()
        assert call.answer.status == 200
        live.wait(Retired)


@full
def test_under_load_nothing_fails_and_each_stream_is_of_one_bundle(tmp_path: Path, one: Path) -> None:
    """Two models of one size: which one a stream's tokens come from shows."""
    other = Toy.make(tmp_path, seed=7)
    other.compile()
    with serving(one, allow_model_change=True) as live:
        texts = {live.complete(max_tokens=12).json["choices"][0]["text"]}
        answers: list[Answer] = []
        over = threading.Event()

        def ask() -> None:
            while not over.is_set():
                answers.append(live.complete(max_tokens=12, stream=True))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for index, bundle in enumerate((other.bundle, one, other.bundle), 1):
            assert swap(live, bundle, allow_older=True).status == 200
            until(lambda index=index: sum(isinstance(e, Retired) for e in live.events) == index)
        over.set()
        for thread in threads:
            thread.join()
        texts.add(live.complete(max_tokens=12).json["choices"][0]["text"])
        assert len(texts) == 2
        assert {a.status for a in answers} == {200}
        assert {"".join(c["choices"][0]["text"] for c in a.chunks) for a in answers} <= texts


def test_the_same_bundle_again_changes_nothing(one: Path) -> None:
    with serving(one) as live:
        served = live.server.state.served
        assert swap(live).json["changed"] is False
        assert live.server.state.served is served


def test_a_link_that_moves_is_read_again(tmp_path: Path, one: Path, two: Path) -> None:
    """And the old bundle is read where it was, not where the link points by now."""
    link = tmp_path / "current"
    link.symlink_to(one)
    with serving(link) as live:
        assert live.server.state.served is not None
        assert live.server.state.served.bundle.path == one
        link.unlink()
        link.symlink_to(two)
        assert swap(live).json["digest"] == digest(two)


def test_an_engine_that_died_is_replaced(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(one) as live:
        assert live.server.state.served is not None
        monkeypatch.setattr(live.server.state.served.engine, "_error", RuntimeError("lost"))
        assert live.get("/health").status == 503
        assert swap(live).json["changed"] is True
        assert live.get("/health").status == 200


# Refused


def broken(bundle: Path, folder: Path, spoil: Callable[[Path], None]) -> Path:
    """A copy with one executable spoilt."""
    copy = Path(shutil.copytree(bundle, folder / "copy"))
    blob = blob_path(copy, read_manifest(copy).executables[0].blob)
    blob.chmod(0o644)
    spoil(blob)
    return copy


@pytest.mark.parametrize(("spoil", "said"), [
    (lambda blob: blob.write_bytes(blob.read_bytes()[:-1]), "expected"),
    (lambda blob: blob.write_bytes(b"x" * blob.stat().st_size), "was altered"),
    (lambda blob: blob.unlink(), "is missing"),
])  # fmt: skip
def test_a_bundle_that_does_not_verify_is_refused(
    one: Path, two: Path, tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    with serving(one, warm_up="open") as live:
        assert said in refused(live, swap(live, broken(two, tmp_path, spoil)), "broken_bundle")
        assert "not a bundle" in refused(live, swap(live, tmp_path / "nowhere"), "broken_bundle")


def test_a_truncated_manifest_is_refused(one: Path, two: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(two, tmp_path / "copy"))
    manifest = copy / "manifest.json"
    manifest.chmod(0o644)
    manifest.write_bytes(manifest.read_bytes()[:100])
    with serving(one) as live:
        assert "manifest.json" in refused(live, swap(live, copy), "broken_bundle")


def test_another_model_is_refused_unless_it_is_allowed(one: Path, tmp_path: Path) -> None:
    other = Toy.make(tmp_path, seed=7)
    other.compile()
    with serving(one) as live:
        said = refused(live, swap(live, other.bundle), "other_model")
        assert "checkpoint differ" in said and "--allow-model-change" in said
    with serving(one, allow_model_change=True) as live:
        assert swap(live, other.bundle).status == 200


def test_going_back_is_refused_unless_it_is_allowed(one: Path, two: Path) -> None:
    with serving(one) as live:
        assert swap(live, two).status == 200
        live.wait(Retired)
        said = refused(live, swap(live, one), "older_bundle")
        assert "this server served it before, and replaced it" in said
        assert swap(live, one, allow_older=True).json["digest"] == digest(one)


def test_what_an_older_llmc_wrote_is_older() -> None:
    def of(version: str) -> Any:
        from types import SimpleNamespace

        return SimpleNamespace(path="b", manifest=SimpleNamespace(llmc=version, digest=version))

    for newer in ("0.1.0", "0.2.0", "1.0", "0.1.0+local"):
        check_age(of(newer), of("0.1.0"), ())
    with pytest.raises(ApiError, match=r"llmc 0\.1\.0 wrote it, and 0\.10\.0 the running one"):
        check_age(of("0.1.0"), of("0.10.0"), ())


def test_an_unsigned_bundle_is_refused_where_signatures_are_requested(
    one: Path, two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(one) as live:
        monkeypatch.setenv("LLMC_REQUIRE_SIGNATURES", "1")
        assert "sign" in refused(live, swap(live, two), "untrusted_bundle")


def test_without_room_for_two_the_figures_are_reported(one: Path, two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(one) as live:
        monkeypatch.setattr(swapping, "available_memory", lambda: 100 << 20)
        said = refused(live, swap(live, two), "no_memory", 507)
        assert "needs 256" in said and "100 MiB are available; free 156" in said
        monkeypatch.setattr(swapping, "available_memory", lambda: None)
        assert swap(live, two).status == 200


def test_a_graph_that_fails_in_the_warm_up_is_refused(one: Path, two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with serving(one) as live:
        gate.fail(ValueError("no such kernel"))
        answer = swap(live, two)
        gate._error = None
        assert "ValueError: no such kernel" in refused(live, answer, "broken_bundle")


def test_a_probe_that_fails_or_hangs_is_refused(one: Path, two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    steps = len(smaller_plan().buckets)
    with serving(one) as live:
        monkeypatch.setattr(swapping, "PROBE_S", 1.0)
        monkeypatch.setattr(swapping, "STOP_S", 0.2)
        begun = len(gate.steps)
        gate.hold()
        gate.let(steps)
        answer = swap(live, two)
        assert len(gate.steps) == begun + steps + 1
        gate.let()
        assert "it took more than 1 s" in refused(live, answer, "probe_failed")


def test_a_second_swap_is_refused_while_one_is_under_way(one: Path, two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with serving(one) as live:
        begun = len(gate.steps)
        gate.hold()
        first: list[Answer] = []
        swapping = threading.Thread(target=lambda: first.append(swap(live, two)))
        swapping.start()
        gate.wait(begun + 1)
        second = swap(live, two)
        assert (second.status, second.json["error"]["code"]) == (409, "swap_under_way")
        live.server.reload()
        until(lambda: sum(isinstance(e, SwapRefused) for e in live.events) == 2)
        gate.let()
        swapping.join()
        assert first[0].status == 200


def test_while_it_loads_or_drains_it_takes_none(one: Path, two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    gate.hold()
    with serving(one, ready=False) as live:
        gate.wait(1)
        assert swap(live, two).status == 503
        gate.let()
        live.ready()
        begun = len(gate.steps)
        gate.hold()
        call = live.call()
        gate.wait(begun + 1)
        live.server.stop()
        until(lambda: live.server.state.draining)
        assert swap(live, two).status == 503
        gate.let()
        assert call.answer.status == 200


def test_a_stop_in_mid_swap_ends_the_server(one: Path, two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with serving(one) as live:
        begun = len(gate.steps)
        gate.hold()
        live.server._swapper._reopen = lambda named, on_progress: two  # as a link that moved
        live.server.reload()
        gate.wait(begun + 1)
        live.server.stop()
        gate.let()
        live.join()
        assert live.error is None
        until(lambda: not live.server.loading)


def test_a_stop_lets_requests_on_both_bundles_end(one: Path, two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with serving(one) as live:
        old = live.server.state.served
        assert old is not None
        old.users.add(1)  # a client that reads slowly
        assert swap(live, two).json["draining"] == 1
        begun = len(gate.steps)
        gate.hold()
        call = live.call()
        gate.wait(begun + 1)
        live.server.stop()
        gate.let()
        assert call.answer.status == 200
        live.join()
        assert live.error is None
        assert not old.engine._thread.is_alive()  # type: ignore[union-attr]


# Who may ask


def test_without_a_token_there_is_no_such_route(one: Path) -> None:
    with serving(one, admin_tokens=(), api_keys=("key",)) as live:
        answer = live.ask("POST", "/admin/bundle", {}, Authorization="Bearer key")
        assert (answer.status, answer.json["error"]["code"]) == (404, "unknown_url")


def test_only_the_token_opens_it_and_it_opens_nothing_else(one: Path) -> None:
    with serving(one, api_keys=("key",)) as live:
        for path in ("/admin/bundle", "/admin/other"):
            for header in ("", "Bearer key", f"Bearer {TOKEN}x", f"Basic {TOKEN}"):
                assert live.ask("POST", path, {}, Authorization=header).status == 401
        assert live.ask("GET", "/v1/models", Authorization=f"Bearer {TOKEN}").status == 401
        assert live.ask("GET", "/v1/models", Authorization="Bearer key").status == 200
        assert swap(live).status == 200
        assert "/admin/bundle" not in live.ask("GET", "/openapi.json", Authorization="Bearer key").text


@pytest.mark.parametrize("body", [{"bundle": ""}, {"bundle": 1}, {"bundle": "x" * 5000}, {"allow_older": "yes"}, []])
def test_bad_bodies_are_named(one: Path, body: Any) -> None:
    with serving(one) as live:
        answer = live.ask("POST", "/admin/bundle", body, Authorization=f"Bearer {TOKEN}")
        assert answer.status == 400
        assert live.complete().status == 200


# As a process


def test_a_hangup_swaps_what_the_link_points_to_by_now(one: Path, two: Path, tmp_path: Path) -> None:
    link = tmp_path / "current"
    link.symlink_to(one)
    with Process(tmp_path, link, "--port", 0).ready() as server:
        fresh = tmp_path / "fresh"
        fresh.symlink_to(two)
        os.replace(fresh, link)  # noqa: PTH105
        server.signal(signal.SIGHUP)
        swapped = server.wait("swapped")
        assert (swapped["digest"], swapped["previous"]) == (digest(two), digest(one))
        assert server.wait("retired")["digest"] == digest(one)
        assert server.complete()[0] == 200
        link.unlink()
        server.signal(signal.SIGHUP)
        assert server.wait("swaprefused")["code"] == "broken_bundle"
        assert server.complete()[0] == 200
        server.signal()
        server.wait("draining")
        server.wait("stopped")
        assert server.ended() == (0, "")


@full
def test_a_server_whose_terminal_is_gone_ends(one: Path, tmp_path: Path) -> None:
    import subprocess
    import sys

    from tests.artifacts.helpers import REPO

    ours, theirs = os.openpty()
    code = (
        "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "from llmc.cli.main import main\nsys.exit(main())"
    )
    command = [sys.executable, "-c", code, "serve", str(one), "--port", "0", "--json"]
    with subprocess.Popen(
        command, cwd=REPO, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "LLMC_CACHE_DIR": str(tmp_path)},
    ) as child:  # fmt: skip
        os.close(theirs)
        assert child.stdout is not None
        assert [json.loads(child.stdout.readline())["event"] for _ in range(2)] == ["listening", "ready"]
        os.close(ours)
        child.send_signal(signal.SIGHUP)
        assert [json.loads(line)["event"] for line in child.stdout] == ["draining", "stopped"]
        assert child.wait(PATIENCE_S) == 0
