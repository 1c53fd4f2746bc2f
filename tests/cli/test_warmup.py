"""`llmc warmup` as typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmc.buckets.plan import Plan
from llmc.runtime.bundle import Bundle
from tests.cli.helpers import Llmc
from tests.devices import use, watching
from tests.manifests import edit_manifest
from tests.toy import Toy


@pytest.fixture
def static(tmp_path: Path) -> Path:
    """A bundle with one executable a bucket."""
    toy = Toy.make(tmp_path / "static")
    toy.compile(specialise=True)
    return toy.bundle


def plan_of(bundle: Path) -> Plan:
    return Bundle.open(bundle).plan


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException, **where: Any) -> None:
    """The fake device raises `error` in steps whose fields are these."""

    def seen(step: Any) -> None:
        if all(getattr(step, name) == value for name, value in where.items()):
            raise error

    use(monkeypatch, executor=watching(seen))


def traffic(folder: Path, *requests: tuple[int, int]) -> Path:
    file = folder / "traffic.jsonl"
    lines = [
        json.dumps({"timestamp": i, "prompt_tokens": prompt, "output_tokens": output})
        for i, (prompt, output) in enumerate(requests)
    ]
    file.write_text("\n".join(lines) + "\n")
    return file


def test_every_bucket_runs_twice_and_nothing_is_compiled(llmc: Llmc, static: Path) -> None:
    found = llmc("warmup", static, "--json").json
    plan = plan_of(static)
    assert (found["device"], found["compilations"], found["missing"], found["interrupted"]) == ("fake", [], [], False)
    for phase, buckets in (("prompt", plan.prompt), ("decode", plan.decode)):
        counted = found["phases"][phase]
        assert (counted["buckets"], counted["warm"], counted["failed"]) == (len(buckets), len(buckets), 0)
        assert counted["first_s"] > 0 and counted["replay_s"] > 0
    assert all(one["replay_s"] > 0 and one["error"] is None for one in found["buckets"])


def test_the_report_has_a_line_a_phase(llmc: Llmc, static: Path) -> None:
    ran = llmc("warmup", static, "-q")
    assert (ran.code, ran.err) == (0, "")
    plan = plan_of(static)
    head, columns, prompt, decode, auxiliary, compilations, *_ = ran.out.splitlines()
    assert head == f"{static} on fake"
    assert columns.split() == ["buckets", "warm", "failed", "first", "run", "replay"]
    assert prompt.split()[:4] == ["prompt", *[str(len(plan.prompt))] * 2, "0"]
    assert decode.split()[:4] == ["decode", *[str(len(plan.decode))] * 2, "0"]
    assert auxiliary.startswith("also run: ") and auxiliary.endswith(" s")
    assert compilations == "compilations: 0"


def test_a_bundle_that_runs_any_shape_says_why_two_steps_are_all(llmc: Llmc, tmp_path: Path) -> None:
    toy = Toy.make(tmp_path)
    toy.compile(specialise=False)
    ran = llmc("warmup", toy.bundle)
    assert ran.code == 0
    assert ran.out.splitlines()[1] == "any shape runs as it is: one prefill and one decode step warm it up"


def test_with_traffic_the_bucket_that_it_uses_most_comes_first(llmc: Llmc, static: Path, here: Path) -> None:
    found = llmc("warmup", static, "--traffic", traffic(here, *[(3, 5)] * 20), "--json").json
    bucket = plan_of(static).lookup("prompt", 1, 3, 0)
    assert bucket is not None
    assert found["buckets"][0]["bucket"] == [bucket.batch, bucket.query, bucket.context]


def test_what_fails_is_named_with_exit_code_1_and_the_rest_is_warmed(
    llmc: Llmc, static: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = plan_of(static).decode[1]
    failing(monkeypatch, RuntimeError("no room"), phase="decode", batch=broken.batch, context=broken.context)
    ran = llmc("warmup", static, "--json", "-q")
    assert ran.code == 1
    assert ran.err.startswith(f"llmc: error: {static}: 1 of its buckets does not run here: {broken}: RuntimeError: no")
    found = json.loads(ran.out)
    assert [one["error"] for one in found["buckets"]].count(None) == len(found["buckets"]) - 1
    assert found["phases"]["decode"]["failed"] == 1


def test_an_interrupt_shows_what_ran(llmc: Llmc, static: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, KeyboardInterrupt(), phase="decode")
    ran = llmc("warmup", static, "-q")
    plan = plan_of(static)
    assert ran.code == 130
    assert f"not warmed up: {len(plan.buckets)} of {len(plan.buckets)} buckets" in ran.err
    assert ran.out.splitlines()[2].split()[:2] == ["prompt", str(len(plan.prompt))]


# Bad input


def test_no_bundle_is_one_line(llmc: Llmc) -> None:
    assert "nowhere" in llmc("warmup", "nowhere").failed(5)


def test_a_bundle_of_a_device_that_is_not_here_says_so(llmc: Llmc, static: Path) -> None:
    edit_manifest(static, lambda fields: fields["toolchain"].update(fake="0.9"))
    assert "compiled with the fake device 0.9, this host has 1.0" in llmc("warmup", static).failed(5)


def test_traffic_that_no_bucket_serves_is_refused(llmc: Llmc, static: Path, here: Path) -> None:
    said = llmc("warmup", static, "--traffic", traffic(here, (5000, 9))).failed(2)
    assert said.startswith("none of the 1 requests of the trace fits: 0 of 1 requests admitted, left out: 1")


def test_traffic_that_is_none_is_refused(llmc: Llmc, static: Path, here: Path) -> None:
    (here / "notes.txt").write_text("buy milk\n")
    assert "notes.txt" in llmc("warmup", static, "--traffic", "notes.txt").failed(2)
