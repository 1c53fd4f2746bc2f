"""`llmc serve` as a process: from the first line to the exit code, by signals, errors and hangs."""

from __future__ import annotations

import json
import signal
import socket
import struct
import time
from pathlib import Path

import psutil
import pytest

from llmc.buckets.traffic.source import Traffic
from llmc.testing.toy import write_toy
from tests.artifacts.helpers import child
from tests.server.live import completion, toy_bundle
from tests.server.process import Process
from tests.tiers import default_cases, full

HANGING = """
    import threading
    from tests.devices import always, watching
    steps = []
    def hang(step):
        steps.append(step)
        if len(steps) > {free}:
            print('{{"event": "hanging"}}', flush=True)
            threading.Event().wait()
    always(executor=watching(hang))
"""
"""Steps of the executor hang, once `free` of them have run."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_bundle(tmp_path_factory.mktemp("toy"), specialise=False)


@default_cases(1)
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_it_starts_answers_and_stops_with_nothing_left(bundle: Path, tmp_path: Path, signum: signal.Signals) -> None:
    traffic = tmp_path / "traffic.jsonl"
    with Process(tmp_path, bundle, "--port", 0, "--record-traffic", traffic) as server:
        listening = server.wait("listening")
        assert listening == {"event": "listening", "url": f"http://127.0.0.1:{server.port}", "open_to_all": False}
        ready = server.wait("ready")
        assert (ready["model"], ready["device"], ready["warmed"], ready["compilations"]) == ("toy", "fake", 2, 0)
        status, answer = server.complete()
        assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
        children = psutil.Process(server.child.pid).children(recursive=True)
        assert len(children) <= 2  # what chats are rendered in
        server.signal(signum)
        draining = server.wait("draining")
        assert (draining["signal"], draining["running"], draining["timeout_s"]) == (signum.name, 0, 30.0)
        assert server.wait("stopped")["cancelled"] == 0
        assert server.ended() == (0, "")
        assert not any(child.is_running() for child in children)
    with socket.create_server(("127.0.0.1", server.port)):
        pass
    (request,) = [json.loads(line) for line in traffic.read_text().splitlines()]
    assert (request["prompt_tokens"], request["output_tokens"]) == (4, 4)
    assert Traffic(str(traffic))


@full
def test_signals_that_request_nothing_end_nothing(bundle: Path, tmp_path: Path) -> None:
    """SIGUSR1 and SIGUSR2 as log rotation sends them; SIGHUP where it was ignored at the start, as nohup does."""
    ignore = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    with Process(tmp_path, bundle, "--port", 0, before=ignore) as server:
        server.ready()
        for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            server.signal(signum)
            assert server.complete()[0] == 200
        server.signal()
        server.wait("draining")
        server.wait("stopped")
        assert server.ended() == (0, "")


@full
def test_five_hundred_requests_at_once_and_a_close_are_no_error(bundle: Path, tmp_path: Path) -> None:
    """Pipelined: those behind the first used to write to a connection that was gone, with a stack trace each."""
    with Process(tmp_path, bundle, "--port", 0) as server:
        server.ready()
        for reset in (False, True):
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 500)
                if reset:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            assert server.ask("GET", "/health")[0] == 200
        server.signal()
        assert server.ended() == (0, "")


@full
def test_the_access_log_holds_neither_queries_nor_keys(bundle: Path, tmp_path: Path) -> None:
    with Process(tmp_path, bundle, "--port", 0, "--access-log", "--api-key", "a secret/key") as server:
        server.ready()
        for path in ("/health?api_key=a%20secret/key", "/v1/models/a%20secret%2Fkey", "/a%20secret/key"):
            server.ask("GET", path)
        server.signal()
        code, said = server.ended()
    assert code == 0
    assert "secret" not in said
    requested = [line.partition('"')[2] for line in said.splitlines()]
    assert requested == ['GET /health HTTP/1.1" 200', 'GET /v1/models/*** HTTP/1.1" 401', 'GET /*** HTTP/1.1" 401']


def test_a_kill_leaves_nothing_locked(bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "llmc.sock"
    for _ in range(2):
        with Process(tmp_path, bundle, "--uds", path) as server:
            server.ready()
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))
                connection.sendall(b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
            server.signal(signal.SIGKILL)
            assert server.ended()[0] == -signal.SIGKILL


def test_a_checkpoint_is_compiled_first_and_accesses_are_logged_where_requested(tmp_path: Path) -> None:
    model = write_toy(tmp_path / "toy")
    limits = ("--max-model-len", 32, "--max-num-seqs", 2)
    with Process(tmp_path, model, "--device", "fake", *limits, "--port", 0, "--access-log") as server:
        server.ready()
        assert server.complete(max_tokens=2)[0] == 200
        server.signal()
        code, said = server.ended()
    assert code == 0
    (line,) = said.splitlines()
    assert line.endswith('"POST /v1/completions HTTP/1.1" 200')


def test_a_bundle_that_cannot_be_opened_is_one_line_and_its_code(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with Process(tmp_path, tmp_path / "empty", "--port", 0) as server:
        server.wait("listening")
        code, said = server.ended()
    assert code == 5
    assert said.startswith("llmc: error: ") and said.count("\n") == 1


def test_while_it_loads_a_signal_ends_it_promptly_even_if_loading_hangs(bundle: Path, tmp_path: Path) -> None:
    with Process(tmp_path, bundle, "--port", 0, before=HANGING.format(free=0)) as server:
        server.wait("listening")
        server.wait("hanging")
        server.signal()
        assert server.wait("stopped")["cancelled"] == 0
        assert server.ended() == (0, "")


@default_cases(1)
@pytest.mark.parametrize(("signals", "timeout", "limits"), [(1, "0.2s", "GRACE_S = 0.5"), (2, "10m", "HURRY_S = 0.5")])
def test_a_graph_that_hangs_cannot_hold_the_process(
    bundle: Path, tmp_path: Path, signals: int, timeout: str, limits: str
) -> None:
    before = (
        HANGING.format(free=2)
        + f"""
    import llmc.server.serve as watchdog
    watchdog.{limits}
    """
    )
    with Process(tmp_path, bundle, "--port", 0, "--shutdown-timeout", timeout, before=before) as server:
        server.ready()
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            data = json.dumps(completion()).encode()
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n" % len(data) + data
            )
            server.wait("hanging")
            began = time.monotonic()
            server.signal()
            server.wait("draining")
            for _ in range(signals - 1):
                server.signal()
            ended = server.ended()
        assert ended == (
            128 + signal.SIGTERM, "llmc: the server did not stop in time and was ended; requests were cut\n"
        )  # fmt: skip
        assert time.monotonic() - began > 0.4, "it had its time to stop"


def test_ending_at_once_takes_child_processes_along(tmp_path: Path) -> None:
    """As when a compile in worker processes is interrupted."""
    process = child(
        """
        import multiprocessing, time
        from llmc.server.serve import end
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        worker.start()
        print(worker.pid)
        end(7)
        """
    )
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (7, "")
    assert not psutil.pid_exists(int(out))


def test_a_port_in_use_is_a_usage_error(bundle: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, Process(
        tmp_path, bundle, "--port", taken.getsockname()[1]
    ) as server:  # fmt: skip
        code, said = server.ended()
    assert code == 2
    assert "is in use; give another one with --port" in said and said.count("\n") == 1
