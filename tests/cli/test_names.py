"""Whatever text stands where a path, a model or a bundle is named: one line that says so, never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.helpers import Llmc
from tests.tiers import default_cases

NAMES = {
    "longer than a file's name": "n" * 300,
    "longer than a path": "folder/" * 800,
    "with a zero byte": "a\0b",
    "of no user": "~nobody-of-this-name/x",
    "not text": "a\udcffb",
    "below a file": "plain/x",
    "empty": "",
}
COMMANDS = [
    "plan {}", "plan --config {}", "plan {toy} --from-file {}", "plan {toy} --traffic {}", "plan {toy} -o {}",
    "plan {toy} --plot {}.html", "plan show {}", "plan evaluate {} --traffic t.csv",
    "compile {} --device fake -o b", "compile {toy} --device fake --plan {} -o b",
    "compile {toy} --device fake --max-model-len 32 -o {}", "compile --config {} --device fake -o b",
    "compile {toy} --device fake --cache-dir {} -o b", "compile --resume -o {}",
    "plan --fleet {}", "report {}", "report {bundle} --compiled {}", "report {bundle} --certificate {}",
    "verify {}", "verify {bundle} --reference {}", "verify {bundle} --cache-dir {}",
    "generate {} -p a", "generate {bundle} --prompts {}", "generate {bundle} -p a --weights {}",
    "serve {}", "bench {}",
    "bench {bundle} -o {}", "bench {bundle} --texts {}",
    "cache show {}", "cache explain {} {}", "cache push {}", "cache push here {}", "cache pull {}", "cache export {}",
    "cache import {}", "cache trust {}", "cache keygen {}", "cache sign {}", "cache sign {bundle} --key {}",
    "cache pin {}", "cache unpin {}", "cache ls --cache-dir {}", "cache ls --plot {}.html",
    "cache ls --cache-dir {} --plot store.html", "cache gc --cache-dir {}", "cache verify {}",
]  # fmt: skip
CASES = [
    pytest.param(command, names[(index + more) % len(names)], id=f"{command}-{names[(index + more) % len(names)]}")
    for names in [list(NAMES)]
    for index, command in enumerate(COMMANDS)
    for more in (0, 3)
]
"""Two names for each command, and each name for several."""


@pytest.fixture
def toy(built: Path) -> Path:
    return built / "toy"


@default_cases(15)
@pytest.mark.parametrize(("command", "name"), CASES)
def test_a_name_that_is_none_is_reported_in_one_line(
    llmc: Llmc, toy: Path, here: Path, bundle: Path, command: str, name: str
) -> None:
    (here / "plain").write_text("")
    words = [w.replace("{}", NAMES[name]).format(toy=toy, bundle=bundle) for w in command.split()]
    ran = llmc(*words, "-q")
    assert ran.code in (0, 1, 2, 3, 5), ran
    assert "unexpected" not in ran.err and "Traceback" not in ran.err, ran
    if ran.code:
        assert ran.err.startswith(("llmc: error: ", "Usage: ")), ran


def test_a_prompt_is_no_name(llmc: Llmc, bundle: Path) -> None:
    ran = llmc("generate", bundle, "--prompt", "ab " * 2000, "--max-tokens", 2, "-q")
    assert "tokens" in ran.failed(2) and "max_model_len" in ran.err
    for prompt in ("a" * 256, "~nobody-of-this-name", "a/b" * 100):
        assert llmc("generate", bundle, "--prompt", prompt, "--max-tokens", 2, "-q").code in (0, 2)
