"""benchmarks/arm_counts.py without its contenders: its plugin counts a program whose counts are known."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmc.compiler.targets.onnxruntime.kernels import build

PROGRAM = """
static long word[2];
static void call(long number) {
  register long a __asm__("x0") = 0, b __asm__("x1") = 0, n __asm__("x8") = number;
  __asm__ volatile("svc 0" : "+r"(a) : "r"(b), "r"(n) : "memory");
}
__attribute__((noinline)) static void around(long times) {
  __asm__ volatile("1: ldr x3, [%1]\\n ldp x4, x5, [%1]\\n str w3, [%1]\\n subs %0, %0, #1\\n b.ne 1b"
                   : "+r"(times) : "r"(word) : "x3", "x4", "x5", "memory", "cc");
}
void _start(void) {
  for (int i = 0; i < 3; i++) {
    around(100L << i);
    call(141);
  }
  call(93);
}
"""
"""100, 200 and 400 times five instructions, 24 bytes loaded and 4 stored, with getpriority() after each."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("program")
    (folder / "known.c").write_text(PROGRAM)
    built = folder / "known"
    flags = ("-target", "aarch64-linux-musl", "-O1", "-nostdlib", "-static", "-ffreestanding")
    done = build.zig(("cc", *flags, str(folder / "known.c"), "-o", str(built)), folder)
    assert done.returncode == 0, done.stderr
    return built


@pytest.mark.full
def test_the_plugin_counts_what_a_program_runs_loads_and_stores(of: Any, program: Path) -> None:
    qemu = shutil.which("qemu-aarch64")
    if qemu is None:
        pytest.skip("no emulator of this machine: apt-get install qemu-user")
    symbols = of("counting.symbols").Symbols(program)
    plugin = program.parent / "plugin.so"
    done = build.zig(of("counting.world").plugin(plugin), program.parent)
    assert done.returncode == 0, done.stderr
    counted = program.parent / "counted."
    subprocess.run([qemu, "-plugin", f"{plugin},out={counted}", program], check=True, timeout=120)

    def part(file: str, offset: int) -> str:
        assert file == str(program)
        return " of ".join(symbols.at(offset))

    runs = [of("counting.counts").read(Path(f"{counted}{i}"), part) for i in range(3)]
    first, second, third = (run["around of known.c"] for run in runs)
    assert [a - b for a, b in zip(second, first, strict=True)] == [100 * 5, 100 * 24, 100 * 4]
    assert [a - b for a, b in zip(third, second, strict=True)] == [200 * 5, 200 * 24, 200 * 4]


def test_functions_of_a_stripped_file_are_not_known(of: Any, program: Path) -> None:
    stripped = program.parent / "stripped"
    (program.parent / "one.c").write_text("int one(void) { return 1; }")
    flags = ("-target", "aarch64-linux-musl", "-shared", "-nostdlib", "-s", "-fvisibility=hidden")
    assert build.zig(("cc", *flags, str(program.parent / "one.c"), "-o", str(stripped)), program.parent).returncode == 0
    assert of("counting.symbols").Symbols(stripped).at(1 << 16) == ("", "")


def test_counts_of_a_part_are_added_up_for_each_token(of: Any, tmp_path: Path) -> None:
    counts = of("counting.counts")
    (tmp_path / "0").write_text("10 8 4 ff /a folder/lib.so\n20 0 2 100 /a folder/lib.so\n1 0 0 0 -\n")
    found = counts.read(tmp_path / "0", lambda file, offset: "low" if offset < 256 else file)
    assert found == {"low": counts.Counts(11, 8, 4), "/a folder/lib.so": counts.Counts(20, 0, 2)}
    assert (found["low"] + found["/a folder/lib.so"]).per(2) == (15.5, 4, 3)


@pytest.mark.parametrize(
    "requested", [("--tokens", "401"), ("--tokens", "1"), ("--steps", "0"), ("--only", "llmc int4")]
)
def test_what_cannot_be_counted_is_refused(
    of: Any, requested: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["arm_counts.py", *requested])
    with pytest.raises(SystemExit, match="2"):
        of("arm_counts").main()
