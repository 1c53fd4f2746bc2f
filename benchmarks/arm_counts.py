"""Instructions and bytes of a token on an emulated ARM CPU: llmc's kernels and llama.cpp's, both counted under qemu.

    python benchmarks/arm_counts.py [--work FOLDER] [--tokens 64] [--steps 4] [--only NAME] [--top 8] [--json]

Counts are no times: an emulator has neither caches nor pipelines, so no speed is claimed. The model is the demo's file,
SmolLM2-135M in Q4_1. Contenders, each with one thread:

- llmc int8 and keep: a bundle in ONNX Runtime's own build for ARM, in an ARM Python. Its kernels are for any CPU with
  dot products of bytes.
- llama.cpp Q8_0 and Q4_0, made by its own quantiser, which it repacks as it loads them, and Q4_1, the file as it is:
  the release in requirements-baselines.lock, compiled for a Neoverse N1 by the compiler that compiles llmc's kernels.

A prompt runs twice, and the second time counts. Twice --steps steps follow, and the later half counts. All tokens are
given, so none is chosen. Bytes are those that instructions load and store, whether caches would have them or not. What
qemu does in a helper, such as clearing a cache line (dc zva), has no bytes. "kernels" are llmc's library of operators,
by source file, or llama.cpp's (libggml-cpu), by function. "else" is ONNX Runtime, Python, libllama and the C library.

It needs Debian's packages qemu-user (7 or 8), cmake and ninja-build, and for what it makes, once, Debian's archive and
a Python package index. All of that is in the work folder, 2 GB; nothing is installed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from counting.counts import NONE, Counts, read
from counting.symbols import Symbols
from counting.world import World

from llmc.compiler.checkpoint import DEMO, demo_path

PROMPT, FIRST, LATER = 1, 2, 3
"""The intervals that counting/steps.py and baseline.c make, after the first, which loads."""


LLMC, FILES = ("int8", "keep"), ("Q8_0", "Q4_1", "Q4_0")
Parts = Mapping[str, Counts]


def kernels_part(symbols: Symbols) -> Callable[[str, int], str]:
    """Names parts of llmc's runs: the source file of a function of the kernels, else the file."""

    def part(file: str, offset: int) -> str:
        if "/blobs/sha256/" in file:
            function, source = symbols.at(offset)
            return f"kernels: {source or 'any'}: {function}"
        return f"else: {Path(file).name}"

    return part


def baseline_part(libraries: Path) -> Callable[[str, int], str]:
    """The same for llama.cpp."""
    known = {path.name: Symbols(path) for path in libraries.glob("*.so") if path.name.startswith("libggml")}

    def part(file: str, offset: int) -> str:
        library = f"{Path(file).name.split('.so')[0]}.so"
        if library in known:
            return f"{'kernels' if library == 'libggml-cpu.so' else 'else'}: {library}: {known[library].at(offset)[0]}"
        return f"else: {Path(file).name}"

    return part


def bundle(work: Path, quantize: str) -> Path:
    """The demo compiled for this host, where it is verified, and for the CPU that qemu emulates."""
    built = work / quantize
    command = [
        sys.executable, "-m", "llmc", "compile", DEMO, "--device", "onnxruntime", "--quantize", quantize,
        "--cpu", "native,neoverse-n1", "--max-model-len", "1024", "--max-num-seqs", "1", "-o", built,
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return built


def measure(world: World, name: str, tokens: int, steps: int) -> tuple[str, Parts, Parts]:
    """The likeliest token in the end, the counts of a prompt's token, and of a step's, by part."""
    owner, form = name.split()
    if owner == "llmc":
        part = kernels_part(Symbols(world.kernels))
        command = world.python("steps.py", str(bundle(world.work, form)), str(tokens), str(steps))
    else:
        part = baseline_part(world.llama / "bin")
        file = demo_path() if form == "Q4_1" else world.quantised(demo_path(), form)
        command = world.baseline("run", str(file), str(tokens), str(steps))
    counted = world.work / f"{owner}-{form}."
    best = world.run(command, counted).strip()
    prompt, later = (read(Path(f"{counted}{interval}"), part) for interval in (PROMPT, LATER))
    per_token = ({p: c.per(count) for p, c in found.items()} for found, count in ((prompt, tokens), (later, steps)))
    return best, *per_token


def in_all(parts: Parts, begin: str = "") -> Counts:
    return sum((c for p, c in parts.items() if p.startswith(begin)), NONE)


def reported(name: str, kind: str, parts: Parts, top: int) -> str:
    whole = in_all(parts)
    lines = [f"{name}, {kind}: {millions(whole)}; kernels {millions(in_all(parts, 'kernels'))}"]
    largest = sorted(parts.items(), key=lambda p: -p[1].instructions)[:top]
    return "\n".join(
        [*lines, *(f"  {c.instructions / whole.instructions:6.1%}  {millions(c)}  {p}" for p, c in largest)]
    )


def millions(counts: Counts) -> str:
    instructions, loaded, stored = (count / 1e6 for count in counts)
    return f"{instructions:.2f} M instructions, {loaded:.2f} MB loaded, {stored:.2f} MB stored"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*(f"llmc {form}" for form in LLMC), *(f"llama.cpp {form}" for form in FILES)]
    parser.add_argument("--work", type=Path, default=Path(".bench/arm-counts"))
    parser.add_argument("--tokens", type=int, default=64, help="of the prompt, 2 to 400")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", choices=names, action="append")
    parser.add_argument("--top", type=int, default=8, help="parts that are told of each")
    parser.add_argument("--jobs", type=int, default=2, help="of the build of llama.cpp")
    parser.add_argument("--json", action="store_true")
    requested = parser.parse_args()
    if not (2 <= requested.tokens <= 400 and 1 <= requested.steps <= 50):
        parser.error("--tokens is 2 to 400, and --steps 1 to 50: the tokens given are all in SmolLM2's vocabulary")
    world = World(requested.work, requested.jobs)
    found = {}
    for name in requested.only or names:
        best, prompt, step = measure(world, name, requested.tokens, requested.steps)
        found[name] = {"likeliest token": best, "a prompt's token": prompt, "a step": step}
        if not requested.json:
            kinds = [reported(name, kind, found[name][kind], requested.top) for kind in ("a prompt's token", "a step")]
            print(f"{kinds[0]}\n{kinds[1]}\n  likeliest token in the end: {best}", flush=True)
    if requested.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
