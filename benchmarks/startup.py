"""Where the time from exec to the first token goes: by phase, by import, by file.

    python benchmarks/startup.py BUNDLE [--way api|cli] [--runs 15] [--python PY] [--json FILE] [--plot FILE.png]

Each round runs three fresh processes, so that what one kind of measuring costs does not show in another: a plain one
(wall time to the first token's text, and the CPU time of the process so far), one whose phases and opened files are
noted (startup_child.py), and one with `-X importtime`. Everything is a median over the rounds, after one that does not
count. `--way api` is `LLM(bundle).stream(...)` in a script, `--way cli` is `llmc generate`. What a runtime's native
code opens (weights, shared objects) is not among the files. `--plot` needs the extra `plot`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
QUESTION = "What is gravity?"
_IMPORT = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \| ( *)(\S+)")
_TICK = os.sysconf("SC_CLK_TCK")


def plain(python: str, way: str, bundle: str) -> tuple[float, float]:
    """Milliseconds to the first token's text, and of CPU until then."""
    if way == "api":
        command = [python, str(HERE / "first_token_llmc.py"), bundle, QUESTION]
    else:
        command = [python, "-m", "llmc", "generate", bundle, "--chat", "--max-tokens", "1", "--prompt", QUESTION]
    start = time.perf_counter()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        line = process.stdout.readline()
        wall = time.perf_counter() - start
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        _, errors = process.communicate()
    if not line:
        raise SystemExit(f"no first token: {errors.decode(errors='replace')}")
    return 1e3 * wall, 1e3 * (int(fields[11]) + int(fields[12])) / _TICK


def traced(python: str, way: str, bundle: str, *flags: str) -> tuple[dict, str]:
    """The child's report, and what it wrote to stderr."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [python, *flags, str(HERE / "startup_child.py"), way]
        command += [str(time.perf_counter()), str(report), bundle, QUESTION]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode or not report.exists():
            raise SystemExit(f"the traced process failed: {done.stderr[-2000:]}")
        return json.loads(report.read_text()), done.stderr


def imports(stderr: str) -> dict[str, tuple[float, float]]:
    """Milliseconds by module, itself and with what it imported, as `-X importtime` tells."""
    found = (_IMPORT.match(line) for line in stderr.splitlines())
    return {m[4]: (int(m[1]) / 1e3, int(m[2]) / 1e3) for m in found if m}


def measure(python: str, way: str, bundle: str, runs: int) -> dict:
    """All figures; milliseconds and bytes."""
    walls, cpus = [], []
    phases: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    modules: dict[str, list[tuple[float, float]]] = defaultdict(list)
    files: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for turn in range(runs + 1):
        wall, cpu = plain(python, way, bundle)
        report, _ = traced(python, way, bundle)
        _, stderr = traced(python, way, bundle, "-X", "importtime")
        print(f"\rround {turn} of {runs}: {wall:.0f} ms", end="", file=sys.stderr, flush=True)
        if not turn:
            continue
        walls.append(wall)
        cpus.append(cpu)
        for name, thread, start, end in report["phases"]:
            phases[name, thread].append((start, end))
        for path, size, at in {path: (path, size, at) for path, size, at in reversed(report["files"])}.values():
            files[path].append((size, at))
        for name, took in imports(stderr).items():
            modules[name].append(took)
    print(file=sys.stderr)
    return {
        "bundle": bundle,
        "way": way,
        "runs": runs,
        "wall_ms": walls,
        "cpu_ms": cpus,
        "phases": sorted(
            (
                {"name": n, "thread": t, "start_ms": median(a for a, _ in v), "ms": median(b - a for a, b in v)}
                for (n, t), v in phases.items()
            ),
            key=lambda p: p["start_ms"],
        ),
        "imports": sorted(
            (
                {"module": n, "self_ms": median(a for a, _ in v), "cumulative_ms": median(b for _, b in v)}
                for n, v in modules.items()
            ),
            key=lambda m: -m["self_ms"],
        ),
        "files": sorted(
            ({"path": p, "bytes": v[0][0], "at_ms": median(at for _, at in v)} for p, v in files.items()),
            key=lambda f: f["at_ms"],
        ),
    }


def packages(found: list[dict]) -> list[tuple[str, int, float]]:
    """Modules and milliseconds of their own, by package, the dearest first."""
    count: dict[str, int] = defaultdict(int)
    own: dict[str, float] = defaultdict(float)
    for one in found:
        package = one["module"].partition(".")[0]
        count[package] += 1
        own[package] += one["self_ms"]
    return sorted(((p, count[p], own[p]) for p in own), key=lambda p: -p[2])


def show(result: dict, top: int) -> None:
    """Tables."""
    walls = result["wall_ms"]
    print(
        f"exec to first token ({result['way']}): {median(walls):.0f} ms (min {min(walls):.0f}, max {max(walls):.0f}),"
    )
    print(f"CPU {median(result['cpu_ms']):.0f} ms; medians of {result['runs']} rounds\n")
    print(f"{'phase':36s} {'thread':8s} {'from ms':>9s} {'ms':>9s}")
    for one in result["phases"]:
        print(f"{one['name']:36s} {one['thread']:8s} {one['start_ms']:9.1f} {one['ms']:9.1f}")
    print(f"\n{'package':24s} {'modules':>8s} {'self ms':>9s}   (with what measuring imports costs)")
    for package, count, own in packages(result["imports"])[:top]:
        print(f"{package:24s} {count:8d} {own:9.1f}")
    print(f"\n{'module':52s} {'self ms':>9s} {'cumulative':>11s}")
    for one in result["imports"][:top]:
        print(f"{one['module']:52s} {one['self_ms']:9.1f} {one['cumulative_ms']:11.1f}")
    files = result["files"]
    print(f"\n{len(files)} files opened, {sum(f['bytes'] for f in files) / 1e6:.1f} MB; the largest:")
    for one in sorted(files, key=lambda f: -f["bytes"])[:top]:
        print(f"{one['bytes'] / 1e3:9.1f} kB  at {one['at_ms']:7.1f} ms  {one['path']}")


def plot(result: dict, path: str) -> None:
    """A waterfall: a row for each phase, a colour for each thread."""
    from matplotlib.figure import Figure

    phases = result["phases"]
    figure = Figure(figsize=(10, 0.34 * len(phases) + 1.4), layout="constrained")
    axis = figure.subplots()
    colours = {"main": "#3465a4", "beside": "#ce5c00"}
    for row, one in enumerate(phases):
        axis.barh(row, one["ms"], left=one["start_ms"], color=colours[one["thread"]], height=0.7)
        axis.text(one["start_ms"] + one["ms"], row, f" {one['ms']:.0f}", va="center", fontsize=8)
    axis.set_yticks(range(len(phases)), [one["name"] for one in phases], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("ms since exec, traced (blue: the interpreter's thread, orange: the one that opens the executor)")
    axis.set_title(f"exec to first token: {median(result['wall_ms']):.0f} ms untraced, {result['way']}", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--way", choices=("api", "cli"), default="api")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--top", type=int, default=20, help="rows of a table")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE")
    args = parser.parse_args()
    if not (Path(args.bundle) / "manifest.json").is_file():
        parser.error(f"{args.bundle} is no bundle folder: it has no manifest.json; make one with `llmc compile`")
    result = measure(args.python, args.way, str(Path(args.bundle).absolute()), max(1, args.runs))
    show(result, args.top)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))
    if args.plot:
        plot(result, args.plot)


if __name__ == "__main__":
    main()
