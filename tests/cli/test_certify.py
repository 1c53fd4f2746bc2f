"""`llmc warmup --certify` and `llmc verify --certificate` as typed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from llmc.runtime.executors.fake.executor import FakeExecutor
from tests.cli.helpers import Llmc
from tests.devices import use, watching
from tests.tiers import default_cases
from tests.toy import Toy


@pytest.fixture
def static(tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle with one executable a bucket."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    toy = Toy.make(tmp_path / "static")
    toy.compile(specialise=True)
    return toy.bundle


CERTIFY = ("--certify", "c.json", "--requests", 40)


def test_a_signed_certificate_is_built_and_checked(llmc: Llmc, static: Path, here: Path) -> None:
    ran = llmc("warmup", static, *CERTIFY, "--sign", "release", "-q")
    assert ran.code == 0, ran
    lines = ran.out.splitlines()
    assert lines[0] == f"{static} on fake"
    assert "then 40 random requests in" in lines[1]
    assert lines[2].startswith("11 of 11 buckets replayed, ")
    assert "compilations: 0 once it was ready" in lines
    assert "  files in compile caches: 0 before, 0 after" in lines
    assert lines[-1].startswith("c.json: signed by key ")

    said = llmc("verify", static, "--certificate", "c.json").failed(5)
    assert "is not signed by a key that is trusted here" in said
    assert llmc("cache", "trust", "release.pub", "--name", "us").code == 0
    ran = llmc("verify", static, "--certificate", "c.json")
    assert ran.code == 0, ran
    assert ran.out.startswith(f"c.json: valid for {static}, signed by us (")
    found = llmc("verify", static, "--certificate", "c.json", "--json").json
    assert (found["compilations"], found["requests"], found["signed_by"]["name"]) == (0, 40, "us")


def test_an_unsigned_one_is_said_to_be_one(llmc: Llmc, static: Path, here: Path) -> None:
    built = llmc("warmup", static, *CERTIFY, "--seed", 5, "--json").json
    assert (built["signed"], built["compilations"], built["requests"]["seed"]) == (False, 0, 5)
    assert json.loads((here / "c.json").read_text())["signature"] is None
    assert "is not signed" in llmc("verify", static, "--certificate", "c.json").failed(5)
    ran = llmc("verify", static, "--certificate", "c.json", "--allow-unsigned")
    assert ran.code == 0
    assert ", not signed, created " in ran.out


def test_the_key_may_be_that_of_the_environment(llmc: Llmc, static: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_SIGNING_KEY", "release")
    assert llmc("warmup", static, *CERTIFY, "--json").json["signed"]


def test_an_edited_count_is_refused(llmc: Llmc, static: Path, here: Path) -> None:
    assert llmc("warmup", static, *CERTIFY, "-q").code == 0
    document = json.loads((here / "c.json").read_text())
    document["certificate"]["compilations"] = 7
    (here / "c.json").write_text(json.dumps(document))
    said = llmc("verify", static, "--certificate", "c.json", "--allow-unsigned").failed(5)
    assert "it says 7 compilations, its monitors 0" in said
    document["certificate"]["compilations"] = 1
    document["certificate"]["monitors"][0]["after"] = {"count": 1, "names": ["ptxas"]}
    (here / "c.json").write_text(json.dumps(document))
    said = llmc("verify", static, "--certificate", "c.json", "--allow-unsigned").failed(4)
    assert "files in compile caches saw 1 (ptxas): it certifies nothing" in said


class Compiles(FakeExecutor):
    """Writes a file into Triton's cache in the middle of the requests."""

    steps = 0

    def run(self, step: Any) -> Any:
        self.steps += self.compilations.is_ready
        if self.steps == 20:
            Path(os.environ["TRITON_CACHE_DIR"], "kernel.cubin").write_bytes(b"code")
        return super().run(step)


def test_where_something_was_compiled_there_is_no_certificate(
    llmc: Llmc, static: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "c.json").write_text("an older one")
    (here / "triton").mkdir()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(here / "triton"))
    use(monkeypatch, executor=Compiles)
    ran = llmc("warmup", static, *CERTIFY, "-q")
    assert ran.code == 1
    seen = "files in compile caches saw 1 (triton: kernel.cubin)"
    assert ran.err == f"llmc: error: {static}: not certified: once it was ready, {seen}\n"
    assert (here / "c.json").read_text() == "an older one"


def test_an_interrupt_writes_nothing(llmc: Llmc, static: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(step: Any) -> None:
        if step.phase == "decode":
            raise KeyboardInterrupt

    use(monkeypatch, executor=watching(interrupt))
    ran = llmc("warmup", static, *CERTIFY, "-q")
    assert ran.code == 130
    assert "not certified" in ran.err
    assert not (here / "c.json").exists()


def test_python_does_the_same(llmc: Llmc, static: Path, here: Path) -> None:
    from llmc.api.measuring import certify

    assert llmc("cache", "trust", "release.pub").code == 0
    stages: set[str] = set()
    built = certify(static, "python.json", requests=20, sign="release", report=lambda stage, *_: stages.add(stage))
    assert (built.compilations, built.requests.count, stages) == (0, 20, {"warm up", "requests"})
    assert llmc("verify", static, "--certificate", "python.json").code == 0


# Bad input


@default_cases(2)
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--requests", 5), "--requests needs a certificate"),
        (("--sign", "release"), "--sign needs a certificate"),
        (("--certify", "missing/c.json"), "the folder missing for the certificate does not exist"),
        (("--certify", "c.json", "--sign", "nowhere"), "nowhere"),
    ],
)
def test_what_cannot_be_is_one_line(llmc: Llmc, static: Path, flags: tuple[object, ...], words: str) -> None:
    assert words in llmc("warmup", static, *flags).failed(2)


def test_a_certificate_is_checked_alone(llmc: Llmc, static: Path) -> None:
    said = llmc("verify", static, "--certificate", "c.json", "--all").failed(2)
    assert said == "--certificate runs nothing: leave out --reference and --all"
    assert "c.json: the certificate cannot be read" in llmc("verify", static, "--certificate", "c.json").failed(5)
