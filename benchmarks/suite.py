"""The whole benchmark, one command: baselines on the same weights in turn, and llmc's own figures. `make bench`.

    python benchmarks/suite.py --baseline-python .venv-baselines/bin/python [--work .bench] [--quick] [--trace FILE]

Writes results.json and results.html into the folder --work, after every stage, so that an interrupted run keeps what it
has. Stages are comparisons (models.py; goals.py says what is wanted of them) and programs of this folder, whose output
is in WORK/STAGE.log. `--quick` has the demo model's comparison only, with few rounds: no figures to publish.
`--only` names stages; `--kinds` and `--baselines` what the comparisons measure and with whom, as in compare.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

import goals
import models
from baselines import page
from baselines.environment import interpreter
from baselines.measure import questions
from baselines.report_text import text
from baselines.results import Comparison
from baselines.scope import KINDS, Scope

from llmc.errors import LlmcError

HERE = Path(__file__).parent
SAMPLE = HERE.parent / "tests" / "data" / "azure_conv_sample.csv"
EVERY_S = 10.0
"""Seconds between two lines of progress."""
COMPILE_MINUTES, ENGINES, ANSWER_S = 10.0, 10, 1.5
"""About what a comparison takes on two cores: compiling everything, and how many engines answer how fast."""


@dataclass(frozen=True)
class Stage:
    """`minutes` on two cores, for the time that is left; `run` returns what goes into results.json."""

    name: str
    minutes: float
    run: Callable[[], object]


class Clock:
    """Says how far the suite is, and about how long it will still take."""

    def __init__(self, stages: list[Stage]) -> None:
        self.stages, self.began, self.index = stages, time.monotonic(), 0
        self.part, self._reported = 0.0, 0.0

    def on_progress(self, words: str) -> None:
        """A line at once."""
        self._reported = time.monotonic()
        stage = self.stages[self.index]
        print(
            f"[{self.index + 1}/{len(self.stages)}] {stage.name}: {words}; {self._left()}", file=sys.stderr, flush=True
        )

    def progress(self, words: str, done: int, total: int) -> None:
        """A line now and then; parts of a stage count as equally long."""
        self.part = done / max(1, total)
        if time.monotonic() - self._reported >= EVERY_S or done == total:
            self.on_progress(f"{done} of {total}, {words}")

    def _left(self) -> str:
        """By the stages' own minutes, and how these have held so far."""
        done = sum(s.minutes for s in self.stages[: self.index]) + self.part * self.stages[self.index].minutes
        left = sum(s.minutes for s in self.stages) - done
        elapsed = (time.monotonic() - self.began) / 60
        pace = elapsed / done if done > 1 else 1.0
        return f"{elapsed:.0f} min gone, about {max(1, left * pace):.0f} left"


class Suite:
    """The stages over one work folder."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.work: Path = args.work.absolute()
        self.work.mkdir(parents=True, exist_ok=True)
        self.python = interpreter(args.baseline_python)
        self.args = args
        scope = Scope(kinds=KINDS, trace=args.trace)
        if args.kinds:
            scope = scope.only(args.kinds)
        if args.rounds:
            scope = replace(scope, rounds=args.rounds)
        self.scope = scope.quick() if args.quick else scope
        stages = self._stages()
        known = [stage.name for stage in stages]
        wanted = args.only.split(",") if args.only else known[:1] if args.quick else known
        if unknown := [name for name in wanted if name not in known]:
            raise SystemExit(f"unknown stage {unknown[0]}; known: {', '.join(known)}")
        self.clock = Clock([stage for stage in stages if stage.name in wanted])
        self.results: dict[str, object] = {}
        self.comparisons: list[Comparison] = []
        self.interrupted = False

    def _stages(self) -> list[Stage]:
        work, soak = self.work, self.args.soak_minutes
        demo_q8 = work / "baselines-demo" / "gguf-q8_0.gguf"
        serving = work / "demo-serving-llmc-onnxruntime-int8"
        comparing = COMPILE_MINUTES + questions(self.scope) * ENGINES * ANSWER_S / 60
        found = [
            Stage(f"compare-{model.name}", comparing, lambda model=model: self._compare(model))
            for model in (replace(m, baselines=self.args.baselines or m.baselines) for m in models.MODELS)
        ]
        programs = (
            ("compile-times", 6.0, ["compile_times.py", "--work", work / "compile-times"]),
            ("memory", 1.0, ["memory.py", work / "compile-times" / "specialised"]),
            ("soak", soak + 1.0, ["soak.py", serving, "--minutes", soak, "--log", work / "soak-server.log"]),
            ("xla", 5.0, ["xla.py", "--work", work]),
            ("store", 3.0, ["store.py", "--work", work]),
            ("faults", 20.0, ["faults.py", "--folder", work, "--baseline-python", self.python]),
        )  # fmt: skip
        if self.args.guidellm is not None:
            command = ["serving_load.py", self.args.trace, "--bundle", serving, "--guidellm", self.args.guidellm,
                       "--baseline-python", self.python, "--gguf", demo_q8, "--logs", work / "logs"]  # fmt: skip
            programs = (*programs, ("serving-load", 15.0, command))
        for name, minutes, command in programs:
            found.append(Stage(name, minutes, lambda name=name, command=command: self._program(name, command)))
        if self.args.traces is not None:
            command = ["planning.py", self.args.traces]
            found.append(Stage("planning", 10.0, lambda: self._program("planning", command)))
        return found

    def _compare(self, model: models.Model) -> object:
        setting = models.Setting(
            self.work, self.python, self.args.threads, self.scope, self.clock.on_progress, self.clock.progress
        )  # fmt: skip
        found = models.run(model, setting)
        self.comparisons.append(found)
        self.interrupted |= bool(found.unfinished)
        print(text(found) + "\n" + "\n".join(goals.report(found)) + "\n", flush=True)
        return found.to_dict() | {"goals": goals.report(found)}

    def _program(self, name: str, command: list[object]) -> object:
        log = self.work / f"{name}.log"
        output = self.work / f"{name}.json"
        writes = [] if name == "memory" else ["-o", str(output)]
        with log.open("w") as out:
            code = subprocess.run(
                [sys.executable, str(HERE / str(command[0])), *map(str, command[1:]), *writes],
                stdout=out, stderr=subprocess.STDOUT, check=False,
            ).returncode  # fmt: skip
        said = log.read_text()
        print(f"== {name} (exit {code})\n{said}", flush=True)
        return {"exit": code, "said": said, "json": json.loads(output.read_text()) if writes and not code else None}

    def run(self) -> int:
        """All stages; how many failed."""
        failed = 0
        for index, stage in enumerate(self.clock.stages):
            self.clock.index, self.clock.part = index, 0.0
            self.clock.on_progress("begins")
            try:
                result = stage.run()
                failed += isinstance(result, dict) and bool(result.get("exit"))
            except (LlmcError, OSError, subprocess.SubprocessError) as error:
                result, failed = {"error": str(error)}, failed + 1
                self.clock.on_progress(f"FAILED: {error}")
            self.results[stage.name] = result
            self._write()
            if self.interrupted:
                raise SystemExit(f"interrupted in {stage.name}: results.json has what was measured")
        return failed

    def _write(self) -> None:
        (self.work / "results.json").write_text(json.dumps(self.results, indent=1))
        more = ""
        for found in self.comparisons:
            more += f"<h2>Goals: {escape(found.model)}</h2><pre>{escape(chr(10).join(goals.report(found)))}</pre>"
        for name, result in self.results.items():
            said = result.get("said") or result.get("error") if isinstance(result, dict) else None
            if said:
                more += f"<h2>{escape(name)}</h2><pre>{escape(str(said))}</pre>"
        page.draw(self.work / "results.html", self.comparisons, "llmc: benchmarks", more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline-python", required=True)
    parser.add_argument("--work", type=Path, default=Path(".bench"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", help="comma-separated stages")
    parser.add_argument("--kinds", help="comma-separated measurements")
    parser.add_argument("--baselines", help="comma-separated, in the place of each model's own, as in compare.py")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trace", type=Path, default=SAMPLE, help="request lengths; default: the sample of the tests")
    parser.add_argument("--traces", type=Path, help="folder of the Azure traces, for planning.py")
    parser.add_argument("--guidellm", help="the program, for serving_load.py")
    parser.add_argument("--soak-minutes", type=float, default=60.0)
    args = parser.parse_args()
    failed = Suite(args).run()
    print(f"wrote {args.work / 'results.json'} and {args.work / 'results.html'}", file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
