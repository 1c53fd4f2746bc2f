"""What the counted programs need, made in a work folder: an ARM Python, ONNX Runtime for it, llama.cpp, the plugin.

Nothing is installed on this system. What the work folder has is not made again.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from llmc.compiler.targets.onnxruntime.kernels import build

HERE = Path(__file__).parent
SET = "neon-dotprod"
CPU, COMPILER_S = "neoverse-n1", "-mcpu=neoverse_n1"
DEBS = (
    "python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "libc6", "zlib1g", "libexpat1", "libgcc-s1",
    "libstdc++6", "libffi8", "libssl3",
)  # fmt: skip
CPUINFO = """processor\t: 0
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""
"""A Neoverse N1's: qemu 7 shows programs the host's, on which ONNX Runtime's library crashes as it is loaded."""
CMAKE = (
    "-GNinja", "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
    "-DGGML_NATIVE=OFF", "-DGGML_OPENMP=OFF", "-DLLAMA_BUILD_COMMON=OFF", "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_TOOLS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_IS_DEV=OFF",
)  # fmt: skip
FTYPES = {"Q4_0": 2, "Q8_0": 7}
"""llama.cpp's numbers of kinds of files."""


def plugin(built: Path) -> tuple[str, ...]:
    """The C compiler's command line that builds plugin.c into `built`."""
    return (
        "cc", "-O2", "-shared", "-fPIC", "-nostdlib", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror",
        str(HERE / "plugin.c"), "-o", str(built),
    )  # fmt: skip


class World:
    """Commands that run in qemu with what is counted; `jobs` compile llama.cpp."""

    def __init__(self, work: Path, jobs: int) -> None:
        self.work, self.jobs = work.resolve(), jobs
        self.root, self.site, self.plugin = (self.work / name for name in ("root", "site", "plugin.so"))
        self.llama = self.work / "llama"
        self.kernels = self.work / "kernels.so"
        self.work.mkdir(parents=True, exist_ok=True)
        if not (self.root / "proc").is_dir():
            self._make_root()
        if not self.site.is_dir():
            self._make_site()
        self._zig(*plugin(self.plugin))
        flags = [flag for flag in build.FLAGS if flag != "-s"]  # the same code as a bundle's, with the functions' names
        sources = [str(path) for path in sorted(build.SOURCE.glob("*.c"))]
        self._zig("cc", *build.TARGETS[SET], *flags, *sources, "-o", str(self.kernels))
        if not (self.llama / "baseline").is_file():
            self._make_llama()

    def python(self, program: str, *given: str) -> tuple[str, ...]:
        """The command of a program of this folder in ARM's Python."""
        return (str(self.root / "usr/bin/python3.11"), str(HERE / program), *given)

    def baseline(self, *given: str) -> tuple[str, ...]:
        return (str(self.llama / "baseline"), *given)

    def run(self, command: Sequence[str], count_to: Path | None = None) -> str:
        """What it printed, in an emulated CPU; intervals are counted into files whose names begin with `count_to`."""
        counted = () if count_to is None else ("-plugin", f"{self.plugin},out={count_to}")
        paths = {"PYTHONPATH": f"{self.site}:{HERE.parents[1]}", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
        return self._do("qemu-aarch64", "-cpu", CPU, "-L", str(self.root), *counted, *command, env=paths)

    def quantised(self, source: Path, kind: str) -> Path:
        """A GGUF file of this kind, made by llama.cpp from another."""
        built = self.work / f"{kind}.gguf"
        if not built.is_file():
            self.run(self.baseline("quantise", str(source), f"{built}.part", str(FTYPES[kind])))
            Path(f"{built}.part").replace(built)
        return built

    def _do(self, *command: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
        cache = {"ZIG_GLOBAL_CACHE_DIR": str(self.work / "zig"), "ZIG_LOCAL_CACHE_DIR": str(self.work / "zig")}
        done = subprocess.run(
            command, env=os.environ | cache | (env or {}), cwd=cwd or self.work, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stderr[-2000:]}")
        return done.stdout

    def _zig(self, *given: str) -> None:
        self._do(sys.executable, "-m", "ziglang", *given)

    def _pip(self, *given: str) -> None:
        self._do(sys.executable, "-m", "pip", "download", "-q", "--no-deps", *given)

    def _make_root(self) -> None:
        apt = self.work / "apt"
        for folder in ("lists/partial", "cache/archives/partial", "debs"):
            (apt / folder).mkdir(parents=True, exist_ok=True)
        (apt / "status").touch()
        options = (
            "APT::Architecture=arm64", "APT::Architectures=arm64", "APT::Sandbox::User=root", f"Dir::State={apt}",
            f"Dir::State::status={apt}/status", f"Dir::State::lists={apt}/lists", f"Dir::Cache={apt}/cache",
        )  # fmt: skip
        get = ("apt-get", *(word for option in options for word in ("-o", option)))
        self._do(*get, "update")
        self._do(*get, "download", *DEBS, cwd=apt / "debs")
        for deb in sorted((apt / "debs").glob("*.deb")):
            self._do("dpkg-deb", "-x", str(deb), str(self.root))
        cpus = self.root / "sys/devices/system/cpu"
        cpus.mkdir(parents=True)
        for name in ("present", "possible", "online"):
            (cpus / name).write_text("0\n")
        (self.root / "proc").mkdir()
        (self.root / "proc/cpuinfo").write_text(CPUINFO)

    def _make_site(self) -> None:
        wheels = self.work / "wheels"
        platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (17, 27, 28)]
        names = [f"{name}=={version(name)}" for name in ("onnxruntime", "numpy")]
        self._pip(*platforms, "--python-version=311", "--only-binary=:all:", "-d", str(wheels), *names)
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as opened:
                opened.extractall(self.site)

    def _make_llama(self) -> None:
        lock = (HERE.parent / "requirements-baselines.lock").read_text()
        locked = re.search(r"^llama-cpp-python==[\d.]+", lock, re.MULTILINE)
        assert locked is not None
        source = self.work / locked[0].replace("==", "-").replace("-cpp-", "_cpp_", 1)
        if not source.is_dir():
            self._pip("--no-binary=:all:", "-d", str(self.work), locked[0])
            self._do("tar", "xf", f"{source}.tar.gz")
        source /= "vendor/llama.cpp"
        compilers = []
        for language, name in (("C", "cc"), ("CXX", "c++")):
            script = self.work / name
            target = f"-target aarch64-linux-gnu.2.28 {COMPILER_S}"
            script.write_text(f'#!/bin/sh\nexec {sys.executable} -m ziglang {name} {target} "$@"\n')
            script.chmod(0o755)
            compilers.append(f"-DCMAKE_{language}_COMPILER={script}")
        self._do("cmake", "-S", str(source), "-B", str(self.llama), *CMAKE, *compilers)
        self._do("ninja", "-C", str(self.llama), f"-j{self.jobs}", "llama")
        libraries = self.llama / "bin"
        self._do(
            str(self.work / "cc"), "-O2", f"-I{source}/include", f"-I{source}/ggml/include", str(HERE / "baseline.c"),
            f"-L{libraries}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{libraries}", "-o",
            str(self.llama / "baseline"),
        )  # fmt: skip
