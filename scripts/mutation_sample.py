"""Measures what share of small faults the tests find: makes mutants of llmc by a seed, and runs the nearest tests.

    python -m scripts.mutation_sample --tiers default,full --jobs 2 --json mutants.json
    python -m scripts.mutation_sample --list --seed 7

Half of the mutants are in five areas (AREAS), in equal parts. The others are anywhere else in llmc. Each line with a
mutant is as likely as any other of its area. The sample follows from a hash of the seed and the text of each line, so
two checkouts have the same mutants where their lines are the same. `--root` measures another checkout.

Each mutant is made in a copy of the checkout. Its tests are the files that import the mutated module, in this order:

1. the mirrored path: for llmc/a/b.py tests/a/test_b*.py, then the rest of tests/a/;
2. the fewest imports between the test and the module;
3. the smallest file.

They run until the first failure, two minutes at most. A failure counts if the same test passes without the mutant. At
the limit, a mutant counts as killed if the running test hangs because of it. A mutant that one tier kills counts as
killed in the tiers after it.

mutmut, cosmic-ray and mutatest do not fit: none samples lines alike in two checkouts, and they run one command for all
mutants or choose tests by coverage, which misses the processes that tests start.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from scripts.mutants import Mutant, mutants_of
from scripts.mutation_judge import TIERS, Judge, Verdict

ROOT = Path(__file__).resolve().parents[1]
AREAS = {
    "planner": (
        "llmc/buckets/plan.py", "llmc/buckets/planner/planner.py", "llmc/buckets/lookup.py", "llmc/buckets/coverage.py",
        "llmc/buckets/strategies/", "llmc/buckets/optimise/",
    ),
    "store": (
        "llmc/artifacts/store/", "llmc/artifacts/bundle/", "llmc/artifacts/verified_files.py",
        "llmc/artifacts/digest.py", "llmc/artifacts/atomic_write.py",
    ),
    "padding": (
        "llmc/runtime/step.py", "llmc/runtime/engine/batched_core.py", "llmc/runtime/executors/slot_cache.py",
        "llmc/runtime/executors/openvino/paged_cache.py", "llmc/runtime/executors/encoders.py",
        "llmc/runtime/pooling/modules.py", "llmc/runtime/pooling/pooler.py",
    ),
    "sampling": ("llmc/runtime/engine/sampling/",),
    "key": (
        "llmc/artifacts/key.py", "llmc/compiler/pipeline/compilation.py", "llmc/compiler/code.py",
        "llmc/compiler/code.py",
    ),
}  # fmt: skip
"""Files and folders of each area."""
REST = "rest"


class Sampled(NamedTuple):
    """A mutant of a file, relative to the root. `id` is made of the file, the text of the line and the change."""

    id: str
    area: str
    file: str
    mutant: Mutant
    source: bytes

    def lines(self) -> tuple[str, str]:
        """The line before, and after."""
        before, after = self.source, self.mutant.applied(self.source)
        begin = before.rfind(b"\n", 0, self.mutant.start) + 1
        ends = before.find(b"\n", self.mutant.end), after.find(b"\n", self.mutant.start + len(self.mutant.text))
        texts = before[begin : ends[0]], after[begin : ends[1]]
        return texts[0].decode().strip(), texts[1].decode().strip()

    def title(self) -> str:
        """Which it is, in a line."""
        return f"{self.id} {self.area} {self.file}:{self.mutant.line} {self.mutant.kind}"

    def record(self) -> dict[str, Any]:
        """What the JSON file says of it; results come beside."""
        before, after = self.lines()
        return {
            "id": self.id, "area": self.area, "file": self.file, "line": self.mutant.line, "kind": self.mutant.kind,
            "before": before, "after": after,
        }  # fmt: skip


def area_of(file: str) -> str:
    """The area of a file."""
    return next((area for area, parts in AREAS.items() if file.startswith(parts)), REST)


def sample(root: Path, seed: int, count: int) -> list[Sampled]:
    """About `count` mutants: a tenth in each of the five areas, the others in the rest; fewer where lines run out."""
    lines: dict[str, list[tuple[str, str, bytes, list[Mutant]]]] = {area: [] for area in (*AREAS, REST)}
    for path in sorted(root.glob("llmc/**/*.py")):
        file, source = path.relative_to(root).as_posix(), path.read_bytes()
        texts, seen = source.decode().split("\n"), Counter[str]()
        by_line: dict[int, list[Mutant]] = {}
        for mutant in mutants_of(source):
            by_line.setdefault(mutant.line, []).append(mutant)
        for line, mutants in sorted(by_line.items()):
            text = texts[line - 1].strip()
            seen[text] += 1
            lines[area_of(file)].append((f"{file}\n{text}\n{seen[text]}", file, source, mutants))
    each = max(1, round(count / 10))
    chosen: list[Sampled] = []
    for area, known in lines.items():
        wanted = len(chosen) + (max(1, count - each * len(AREAS)) if area == REST else each)
        for key, file, source, mutants in sorted(known, key=lambda line: _hash(seed, line[0])):
            if len(chosen) == wanted:
                break
            named = [(f"{key}\n{location} {m.kind} {m.text}", m) for location, m in enumerate(mutants)]
            ordered = sorted(named, key=lambda one: _hash(seed, one[0]))
            if valid := next(((name, m) for name, m in ordered if m.is_valid(source)), None):
                chosen.append(Sampled(_hash(0, valid[0])[:8], area, file, valid[1], source))
    return chosen


def _hash(seed: int, text: str) -> str:
    return hashlib.sha256(f"{seed}\n{text}".encode()).hexdigest()


class Report:
    """The results so far, by mutant and tier, on the terminal and in a JSON file."""

    def __init__(self, chosen: Sequence[Sampled], tiers: Sequence[str], seed: int, file: Path | None) -> None:
        self._chosen, self._tiers, self._file = chosen, tiers, file
        self._seed = seed
        self._results: dict[str, dict[str, Any]] = {one.id: {} for one in chosen}

    def resume(self) -> None:
        """Take what the file has of these mutants."""
        if self._file is not None and self._file.exists():
            for record in json.loads(self._file.read_text())["mutants"]:
                if record["id"] in self._results:
                    self._results[record["id"]] = record["results"]

    def add(self, sampled: Sampled, tier: str, verdict: Verdict) -> None:
        """Keep a result."""
        self._results[sampled.id][tier] = verdict._asdict()
        if self._file is not None:
            mutants = [one.record() | {"results": self._results[one.id]} for one in self._chosen]
            partial = self._file.with_name(self._file.name + ".partial")
            partial.write_text(json.dumps({"seed": self._seed, "mutants": mutants}, indent=1) + "\n")
            partial.replace(self._file)

    def has(self, sampled: Sampled, tier: str) -> bool:
        """Whether a tier was run against a mutant."""
        return tier in self._results[sampled.id]

    def is_killed(self, sampled: Sampled, tiers: Sequence[str]) -> bool:
        """Whether one of these tiers kills a mutant."""
        found = self._results[sampled.id]
        return any(found.get(tier, {}).get("status") == "killed" for tier in tiers)

    def summary(self) -> str:
        """A table for each tier, and the changes that survive it."""
        text = []
        for number, tier in enumerate(self._tiers, 1):
            so_far = self._tiers[:number]
            run = [one for one in self._chosen if self.is_killed(one, so_far) or self.has(one, tier)]
            alive = [one for one in run if not self.is_killed(one, so_far)]
            text.append(f"\n{tier:12} mutants  killed  survived  at the limit  share killed")
            for area in (*AREAS, REST, "all"):
                ours = [one for one in run if area in (one.area, "all")]
                left = [one for one in alive if area in (one.area, "all")]
                late = sum(self._results[one.id][tier]["status"] == "survived (time)" for one in left)
                share = f"{1 - len(left) / len(ours):.1%}" if ours else "-"
                text.append(f"{area:12} {len(ours):7} {len(ours) - len(left):7} {len(left):9} {late:13} {share:>13}")
            for one in alive:
                before, after = one.lines()
                status = self._results[one.id][tier]["status"]
                text.append(f"{status}: {one.title()}\n  - {before}\n  + {after}")
        return "\n".join(text)


def measure(judge: Judge, chosen: Sequence[Sampled], tiers: Sequence[str], jobs: int, report: Report) -> None:
    """Run each tier against what those before it left alive."""
    for number, tier in enumerate(tiers):
        left = [one for one in chosen if not report.is_killed(one, tiers[:number]) and not report.has(one, tier)]
        began = time.monotonic()
        with ThreadPoolExecutor(jobs) as pool:
            running = {
                pool.submit(judge.verdict, one.file, one.source, one.mutant.applied(one.source), tier): one
                for one in left
            }
            try:
                for done, future in enumerate(as_completed(running), 1):
                    one, verdict = running[future], future.result()
                    report.add(one, tier, verdict)
                    minutes = (time.monotonic() - began) / done * (len(left) - done) / 60
                    print(
                        f"{tier} {done}/{len(left)}  {verdict.status}  {one.title()}  {verdict.seconds:.0f} s  "
                        f"{verdict.by}  about {minutes:.0f} min left", flush=True,
                    )  # fmt: skip
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                judge.stop()
                raise


def main() -> int:
    """Make the sample, and run or list it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to measure (default: this one)")
    parser.add_argument("--seed", type=int, default=49, help="which sample (default: %(default)s)")
    parser.add_argument("--mutants", type=int, default=120, help="about how many (default: %(default)s)")
    parser.add_argument("--tiers", default="default", help=f"one or more of {', '.join(TIERS)}, in order, with commas")
    parser.add_argument("--only", action="append", metavar="ID", help="this mutant alone; may be given several times")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results, after each mutant")
    parser.add_argument("--resume", action="store_true", help="keep the results in FILE and run what it lacks")
    parser.add_argument("--limit", type=float, default=120, help="seconds for a mutant (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the sample and run nothing")
    options = parser.parse_args()
    tiers = options.tiers.split(",")
    if unknown := set(tiers) - set(TIERS):
        parser.error(f"no tier {', '.join(sorted(unknown))}; there are {', '.join(TIERS)}")
    root = options.root.resolve()
    chosen = sample(root, options.seed, options.mutants)
    if options.only:
        chosen = [one for one in chosen if one.id in options.only]
    print(f"seed {options.seed}: {len(chosen)} mutants of {root}", flush=True)
    if options.list:
        for one in chosen:
            before, after = one.lines()
            print(f"{one.title()}\n  - {before}\n  + {after}")
        return 0
    report = Report(chosen, tiers, options.seed, options.json)
    if options.resume:
        report.resume()
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            measure(Judge(root, Path(scratch), options.jobs, options.limit), chosen, tiers, options.jobs, report)
    except KeyboardInterrupt:
        print("interrupted; --json FILE --resume goes on from here", file=sys.stderr)
        return 130
    finally:
        print(report.summary())
    return 0


if __name__ == "__main__":
    sys.exit(main())
