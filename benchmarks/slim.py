"""The files of the slim image that `llmc deploy docker` describes: their sizes, seconds of an install and of a start.

    python benchmarks/slim.py BUNDLE --work FOLDER [--rounds 7] [--json]

No container is run: the steps of the Dockerfile's stage `runtime` are, in a virtual environment in FOLDER, with the
wheel of this checkout and the versions of constraints.txt; then `llmc serve` with the environment of its stage `serve`.
Ready is when GET /ready answers 200. Answered is when a first completion of 8 tokens is there. A round begins after
the file cache has what is read; the first one does not count. Memory is the server's, with and without mapped files.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import psutil
from baselines.machine import describe

ROOT = Path(__file__).parents[1]


def install(bundle: Path, work: Path) -> tuple[Path, dict[str, str], float]:
    """The environment, made as the Dockerfile says, the variables that it sets, and the seconds that it took."""
    image, home = work / "image", work / "llmc"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    subprocess.run([sys.executable, "-m", "llmc", "deploy", "docker", "--bundle", bundle, "-o", image], check=True)
    wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", image / "wheels", ROOT]
    subprocess.run(wheel, check=True)
    text = (image / "Dockerfile").read_text()
    extras = re.search(r'AS runtime\nARG EXTRAS="(.*)"', text)
    assert extras is not None
    (built,) = (image / "wheels").glob("llmc_compiler-*.whl")
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # what is there, pip leaves out
    with_versions = plain | {"PIP_CONSTRAINT": str(image / "constraints.txt"), "PIP_NO_CACHE_DIR": "1"}
    pip = [home / "bin" / "pip", "-q"]
    subprocess.run([*pip, "install", f"{built}[{extras[1]}]"], check=True, env=with_versions)
    subprocess.run([*pip, "uninstall", "--yes", "setuptools", "pip"], check=True)
    seconds = time.perf_counter() - begun
    said = dict(re.findall(r"(\w+)=(\S+)", re.search(r"^ENV PATH=.*$", text, re.MULTILINE)[0]))
    return home, {
        **said, "PATH": f"{home}/bin:{os.environ['PATH']}", "HOME": str(work / "tmp"),
        "LLMC_CACHE_DIR": str(work / "tmp" / "llmc"),
    }, seconds  # fmt: skip


def size(folder: Path) -> int:
    """Bytes of its files."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


def request(port: int, method: str, path: str, body: dict | None = None) -> int:
    """The status, 0 where nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, json.dumps(body) if body else None, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except OSError:
        return 0
    finally:
        connection.close()


def start(home: Path, variables: dict[str, str], bundle: Path, model: str) -> dict[str, float]:
    """Seconds to ready and to an answer, and MB of memory."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    begun = time.perf_counter()
    command = [home / "bin" / "llmc", "serve", bundle, "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(command, env=variables, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as child:
        try:
            while request(port, "GET", "/ready") != 200:
                if child.poll() is not None:
                    raise SystemExit(f"llmc serve {bundle} ended")
                time.sleep(0.005)
            ready = time.perf_counter() - begun
            requested = {"model": model, "prompt": "The moon is", "max_tokens": 8}
            status = request(port, "POST", "/v1/completions", requested)
            assert status == 200, status
            answered = time.perf_counter() - begun
            held = psutil.Process(child.pid).memory_full_info()
        finally:
            child.send_signal(signal.SIGTERM)
    return {"ready_s": ready, "answered_s": answered, "rss_mb": held.rss / 1e6, "uss_mb": held.uss / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    requested = parser.parse_args()
    home, variables, seconds = install(requested.bundle, requested.work)
    packages = {
        path.name: size(path) for path in next(home.glob("lib/python*/site-packages")).iterdir() if path.is_dir()
    }
    (wheel,) = (requested.work / "image" / "wheels").glob("llmc_compiler-*.whl")
    model = json.loads((requested.bundle / "manifest.json").read_text())["model"]["name"]
    rounds = [start(home, variables, requested.bundle, model) for _ in range(requested.rounds + 1)][1:]
    found = {
        "machine": describe(), "wheel": wheel.stat().st_size, "environment": size(home),
        "bundle": size(requested.bundle),
        "install_s": seconds,
        "largest": dict(sorted(packages.items(), key=lambda p: -p[1])[:6]),
        **{name: median(one[name] for one in rounds) for name in rounds[0]},
    }  # fmt: skip
    if requested.json:
        print(json.dumps(found, indent=1))
        return
    largest = ", ".join(f"{name} {held / 1e6:.0f}" for name, held in found["largest"].items())
    print(
        f"wheel {found['wheel'] / 1e6:.1f} MB; environment {found['environment'] / 1e6:.0f} MB ({largest}); bundle "
        f"{found['bundle'] / 1e6:.0f} MB\n"
        f"installed in {found['install_s']:.0f} s; exec to ready {found['ready_s']:.2f} s, to an answer of 8 tokens "
        f"{found['answered_s']:.2f} s; memory {found['rss_mb']:.0f} MB, of its own {found['uss_mb']:.0f} MB"
    )


if __name__ == "__main__":
    main()
