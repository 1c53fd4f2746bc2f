"""Nothing phones home: whole commands under strace see no address but this machine's, and leave no telemetry behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from llmc.quiet import TELEMETRY_OFF
from tests.artifacts.helpers import REPO
from tests.compiler import tiny

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("strace") is None, reason="no strace: apt-get install strace"),
]
_REACHED = re.compile(r"(?:connect|sendto|sendmsg|sendmmsg)\(.*sa_family=AF_INET.*")
_HERE = re.compile(r'inet_addr\("127\.|inet_pton\(AF_INET6, "::1"')
Started = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and an empty home."""
    folder = tmp_path_factory.mktemp("world")
    tiny.write_model(folder / "model", "llama")
    (folder / "home").mkdir()
    return folder


def start(world: Path, *command: str, **environment: str) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LLMC_", "XDG_")) and k not in TELEMETRY_OFF}
    home = {"HOME": str(world / "home"), "LLMC_CACHE_DIR": str(world / "cache"), "PYTHONPATH": str(REPO)}
    traced = ["strace", "-f", "-qq", "--seccomp-bpf", "-e", "trace=network", "-o", str(world / "trace")]
    return subprocess.Popen(
        [*traced, sys.executable, *command], cwd=world, env={**kept, **home, **environment}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def run(world: Path, *command: str, **environment: str) -> str:
    with start(world, *command, **environment) as process:
        said = process.communicate(timeout=120)[0]
    assert process.returncode == 0, said
    return said


def left(world: Path) -> list[str]:
    """Files below the home, but for what Python and llmc themselves keep there."""
    files = [p.relative_to(world / "home").as_posix() for p in (world / "home").rglob("*") if p.is_file()]
    return [name for name in files if "zig" not in name]


def reached(world: Path) -> list[str]:
    lines = (world / "trace").read_text().splitlines()
    return [line for line in lines if _REACHED.search(line) and not _HERE.search(line)]


def test_the_whole_way_from_a_model_to_an_answer_is_quiet(world: Path) -> None:
    llmc = ("-m", "llmc")
    limits = ("--max-model-len", "32", "--max-num-seqs", "2", "--kernels", "onnxruntime")
    run(world, *llmc, "compile", "model", "--device", "onnxruntime", *limits, "-o", "bundle", "-q")
    assert (reached(world), left(world)) == ([], [])
    run(world, *llmc, "generate", "bundle", "--prompt", "a", "--max-tokens", "2")
    assert (reached(world), left(world)) == ([], [])
    with start(world, *llmc, "serve", "bundle", "--port", "0") as server:
        assert server.stdout is not None
        url = next(line for line in server.stdout if "listening on" in line).split()[-1]
        while "ready" not in server.stdout.readline():
            pass
        requested = urllib.request.Request(
            f"{url}/v1/completions", b'{"prompt": "a", "max_tokens": 2}', {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(requested, timeout=30) as answer:
            assert answer.status == 200
        time.sleep(1.0)  # for what is sent behind the requests
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)
        server.communicate(timeout=30)
    assert (reached(world), left(world)) == ([], [])


def test_the_check_sees_what_it_is_there_for(world: Path) -> None:
    session = """
        import socket, onnxruntime
        from tests.compiler.targets.onnxruntime.kernels.single import run
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.connect(("192.0.2.1", 53))
    """
    loud = {**dict.fromkeys(TELEMETRY_OFF, "0"), "CI": ""}  # in CI onnxruntime is quiet of its own accord
    run(world, "-c", "import textwrap; exec(textwrap.dedent('''" + session + "'''))", **loud)
    assert len(reached(world)) == 1
    assert left(world), "onnxruntime leaves files of its telemetry"
    for path in (world / "home").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_openvino_s_converter_has_no_telemetry(world: Path) -> None:
    pytest.importorskip("openvino")
    reported = run(world, "-c", (
        "import llmc.runtime.executors.openvino, sys, openvino.tools.ovc.convert_impl as c; "
        "print(c.tm.__name__, sys.modules['openvino_telemetry'])"
    ))  # fmt: skip
    assert reported.split() == ["openvino.tools.ovc.telemetry_stub", "None"]


@pytest.mark.parametrize("name", TELEMETRY_OFF)
def test_what_the_user_has_set_stays(world: Path, name: str) -> None:
    show = f"import llmc, os; print(os.environ[{name!r}])"
    assert run(world, "-c", show).strip() == TELEMETRY_OFF[name]
    assert run(world, "-c", show, **{name: "mine"}).strip() == "mine"
