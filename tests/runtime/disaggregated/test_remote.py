"""A prefill side behind a socket: tokens, bounds, keys, connections that are lost, peers that send anything else."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.compiler.verification.toy_reference import ToyReference
from llmc.errors import ArtifactError, DeviceError
from llmc.runtime.bundle import Bundle
from llmc.runtime.disaggregated import remote, wire
from llmc.runtime.disaggregated.facts import SideFacts
from llmc.runtime.disaggregated.remote import RemotePrefiller
from llmc.runtime.disaggregated.server import PrefillServer
from llmc.runtime.disaggregated.wire import Frames, PeerAddress, enter
from llmc.runtime.disaggregated.worker import PrefillWorker
from llmc.runtime.engine.batched_core import BatchedCore
from llmc.runtime.engine.kv_transfer import Prefilled, PrefillFailed
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.executors import open_executor
from llmc.testing.toy import VOCAB
from tests.tiers import examples
from tests.timing import PATIENCE_S, until
from tests.toy import Toy

SEQS = 4
GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


def serve(toy: Toy, address: str = "tcp", key: str | None = None, bound: int | None = None, port: int = 0) -> Any:
    """A server, and the address it listens at."""
    bundle = Bundle.open(toy.bundle)
    worker = PrefillWorker(bundle, lambda: open_executor(bundle, SEQS + 1), 2)
    if address == "tcp":
        listener = socket.create_server(("127.0.0.1", port))
        found = PeerAddress("127.0.0.1", listener.getsockname()[1])
    else:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(address)
        listener.listen()
        found = PeerAddress(path=address)
    return PrefillServer(worker, listener, key, bound), found


def engine_of(toy: Toy, connect: Callable[[SideFacts], RemotePrefiller]) -> BatchedCore:
    bundle = Bundle.open(toy.bundle)
    executor = open_executor(bundle, SEQS + 1)
    return BatchedCore(bundle.plan, executor, VOCAB, min_prefix=2, prefiller=connect(SideFacts.of(bundle, executor)))


@pytest.fixture(scope="module")
def facts(toys: dict[str, Toy]) -> SideFacts:
    bundle = Bundle.open(toys["static"].bundle)
    return SideFacts.of(bundle, open_executor(bundle, SEQS))


@pytest.fixture(scope="module", params=["tcp", "unix"])
def pair(toys: dict[str, Toy], request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[BatchedCore]:
    where = "tcp" if request.param == "tcp" else str(tmp_path_factory.mktemp("s") / "s")
    server, address = serve(toys["ragged"], where, "a key")
    engine = engine_of(toys["static"], lambda mine: RemotePrefiller(address, mine, "a key"))
    yield engine
    assert engine.prefiller is not None
    engine.prefiller.close()
    server.close()


prompts = st.lists(st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=27), min_size=1, max_size=6)


@given(requested=prompts)
@examples(20, database=None, derandomize=True)
def test_tokens_are_those_of_one_process(pair: BatchedCore, trusted: ToyReference, requested: list[list[int]]) -> None:
    assert pair.complete(requested, [GREEDY] * len(requested)) == [trusted.greedy(one, 4) for one in requested]


def test_two_clients_have_each_their_own(toys: dict[str, Toy], trusted: ToyReference) -> None:
    server, address = serve(toys["static"])
    engines = [engine_of(toys[kind], lambda mine: RemotePrefiller(address, mine)) for kind in ("static", "ragged")]
    built: dict[int, list[list[int]]] = {}

    def run(at: int) -> None:
        given = [[at + 1, at + 2, n] for n in range(6)]
        built[at] = engines[at].complete(given, [GREEDY] * 6)

    threads = [threading.Thread(target=run, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == {at: [trusted.greedy([at + 1, at + 2, n], 4) for n in range(6)] for at in range(2)}
    assert server.connections == 2
    for engine in engines:
        assert engine.prefiller is not None
        engine.prefiller.close()
    until(lambda: server.connections == 0)
    server.close()


def test_a_client_that_takes_nothing_bounds_what_is_computed_and_kept(toys: dict[str, Toy], facts: SideFacts) -> None:
    server, address = serve(toys["static"], bound=2)
    slow = RemotePrefiller(address, facts)
    for number in range(50):
        slow.submit(number, [1, 2, number])
    until(lambda: len(slow._came) == 2)
    time.sleep(0.1)
    assert len(slow._came) == 2
    assert server.served < 50 or len(slow._requested) == 48, "small frames fit the sockets, but not the client's memory"
    numbers: list[int] = []
    while len(numbers) < 50:
        assert slow.wait(PATIENCE_S)
        numbers += [one.number for one in slow.take(1)]
    assert numbers == list(range(50))
    slow.close()
    server.close()


def test_a_cancelled_prompt_never_comes(toys: dict[str, Toy], facts: SideFacts) -> None:
    server, address = serve(toys["static"], bound=1)
    client = RemotePrefiller(address, facts)
    for number in range(5):
        client.submit(number, [1, 2, number])
    until(lambda: client.has_news)
    for number in range(4):
        client.cancel(number)
    assert client.wait(PATIENCE_S)
    assert [one.number for one in client.take(8)] == [4]
    client.close()
    server.close()


@pytest.mark.parametrize(
    ("server_key", "client_key", "said"),
    [("a", "b", "refuses the key"), ("a", None, "requires a key"), (None, "b", "requires no key")],
)
def test_who_has_another_key_stays_out(
    toys: dict[str, Toy], facts: SideFacts, server_key: str | None, client_key: str | None, said: str
) -> None:
    server, address = serve(toys["static"], key=server_key)
    with pytest.raises(DeviceError, match=said):
        RemotePrefiller(address, facts, client_key)
    until(lambda: server.connections == 0)
    server.close()


def test_a_server_that_does_not_know_the_key_gets_no_prompt(facts: SideFacts) -> None:
    """It has listened to another handshake, and answers with what it heard."""
    listener = socket.create_server(("127.0.0.1", 0))

    def replay() -> None:
        frames = Frames(listener.accept()[0])
        frames.send({"kind": "hello", "version": wire.VERSION, "nonce": "0" * 64, "keyed": True})
        frames.receive()
        frames.send({"kind": "welcome", "proof": "f" * 64, "facts": facts.to_json(), "bound": 1})
        assert frames.receive(PATIENCE_S) is None
        frames.release()

    thread = threading.Thread(target=replay)
    thread.start()
    with pytest.raises(DeviceError, match="does not know the key; no prompt was sent to it"):
        RemotePrefiller(PeerAddress("127.0.0.1", listener.getsockname()[1]), facts, "secret")
    thread.join()
    listener.close()


def test_nobody_there_is_an_error_that_says_what_to_start(facts: SideFacts) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(DeviceError, match=rf"no prefill side .* llmc prefill BUNDLE --listen 127.0.0.1:{port}"):
        RemotePrefiller(PeerAddress("127.0.0.1", port), facts)


def test_another_model_is_refused_at_the_start(toys: dict[str, Toy], facts: SideFacts, tmp_path: Path) -> None:
    other = Toy.make(tmp_path, seed=7)
    other.compile()
    server, address = serve(other)
    with pytest.raises(ArtifactError, match="their checkpoints differ"):
        RemotePrefiller(address, facts)
    server.close()


# Lost connections


def test_what_was_not_answered_is_requested_again_when_the_server_is_back(
    toys: dict[str, Toy], trusted: ToyReference
) -> None:
    server, address = serve(toys["static"])
    engine = engine_of(toys["static"], lambda mine: RemotePrefiller(address, mine, patience_s=PATIENCE_S))
    client = engine.prefiller
    assert isinstance(client, RemotePrefiller)
    server.close()
    until(lambda: client._lost_s is not None)
    for number, prompt in enumerate([[1, 2], [3, 4, 5]]):
        engine.add(number, prompt, engine.sampler(prompt, GREEDY))
    back, _ = serve(toys["ragged"], port=address.port)
    built = engine.complete([[7, 8]], [GREEDY])
    assert built == [trusted.greedy([7, 8], 4)] and client.connections == 2
    while engine.has_work:
        engine.step()
    until(lambda: back.served >= 3)  # counted after it was sent, so perhaps after it was read
    assert back.served == 3
    client.close()
    back.close()


def test_while_nobody_is_there_prompts_run_where_they_are_decoded(toys: dict[str, Toy], trusted: ToyReference) -> None:
    server, address = serve(toys["static"])
    engine = engine_of(toys["static"], lambda mine: RemotePrefiller(address, mine, patience_s=0.1))
    server.close()
    for prompt in ([1, 2], [3, 4, 5]):
        assert engine.complete([prompt], [GREEDY]) == [trusted.greedy(prompt, 4)]
    assert engine.prefiller is not None
    engine.prefiller.close()


@pytest.mark.parametrize("cut", [0, 3, 12, 40, 200, -1])
def test_a_torn_frame_loses_the_connection_and_no_request(
    toys: dict[str, Toy], trusted: ToyReference, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """The first connection ends after so many bytes of its first prefix."""
    server, address = serve(toys["static"])
    send, torn = Frames.send_prefix, []

    class Cut:
        def __init__(self, inner: socket.socket) -> None:
            self.inner, self.sent = inner, bytearray()

        def sendall(self, data: Any) -> None:
            self.sent += bytes(data)

        def __getattr__(self, name: str) -> Any:  # for whoever receives meanwhile
            return getattr(self.inner, name)

    def send_torn(self: Frames, *arguments: Any) -> int:
        if torn:
            return send(self, *arguments)
        torn.append(True)
        inner = self._socket
        self._socket = Cut(inner)  # type: ignore[assignment]
        send(self, *arguments)
        inner.sendall(self._socket.sent[:cut])  # type: ignore[attr-defined]
        self._socket = inner
        inner.shutdown(socket.SHUT_RDWR)
        raise OSError("cut")

    monkeypatch.setattr(Frames, "send_prefix", send_torn)
    engine = engine_of(toys["static"], lambda mine: RemotePrefiller(address, mine))
    given = [[1, 2, 3], [4, 5]]
    assert engine.complete(given, [GREEDY] * 2) == [trusted.greedy(one, 4) for one in given]
    assert isinstance(engine.prefiller, RemotePrefiller) and engine.prefiller.connections == 2
    engine.prefiller.close()
    server.close()


# Peers that send anything else


class Imposter:
    """Listens, shakes hands as a server does, and answers prompts with whatever `answer` sends."""

    def __init__(self, facts: SideFacts, answer: Callable[[Frames, dict[str, Any]], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = PeerAddress("127.0.0.1", self._listener.getsockname()[1])
        self._facts, self._answer = facts, answer
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                frames = Frames(self._listener.accept()[0])
            except OSError:
                return
            try:
                frames.send({"kind": "hello", "version": wire.VERSION, "nonce": "0" * 64, "keyed": False})
                frames.receive()
                frames.send({"kind": "welcome", "proof": "", "facts": self._facts.to_json(), "bound": 4})
                while (header := frames.receive()) is not None:
                    frames.take(1 << 20)
                    self._answer(frames, header)
            except (OSError, wire.WireError):
                pass
            frames.close()
            frames.release()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def prefix_of(number: int, length: int, **more: Any) -> dict[str, Any]:
    return {
        "kind": "prefix", "number": number, "length": length, "dtype": "f32", "cached": 0, "queue_s": 0.0,
        "prefill_s": 0.0, "export_s": 0.0, **more,
    }  # fmt: skip


HOSTILE: dict[str, Callable[[Frames, int], None]] = {
    "too short": lambda f, n: f.send(prefix_of(n, 3), b"\0" * 40),
    "no payload": lambda f, n: f.send(prefix_of(n, 3)),
    "too long": lambda f, n: f._socket.sendall(wire._head(prefix_of(n, 3), 1 << 60)),
    "huge header": lambda f, n: f._socket.sendall(wire._HEAD.pack(0xFFFFFFFF, 0)),
    "no JSON": lambda f, n: f._socket.sendall(wire._HEAD.pack(4, 0) + b"\xff{{{"),
    "NaN": lambda f, n: f._socket.sendall(wire._HEAD.pack(16, 0) + b'{"number": NaN }'),
    "another length": lambda f, n: f.send(prefix_of(n, 4), b"\0" * (4 * VOCAB + 128)),
    "another dtype": lambda f, n: f.send(prefix_of(n, 3, dtype="u8"), b"\0" * (4 * VOCAB + 96)),
    "a length that is no number": lambda f, n: f.send({**prefix_of(n, 3), "length": "3"}, b"\0" * (4 * VOCAB + 96)),
    "more cached than there is": lambda f, n: f.send(prefix_of(n, 3, cached=3), b"\0" * (4 * VOCAB + 96)),
    "seconds that are none": lambda f, n: f.send(prefix_of(n, 3, queue_s=-1), b"\0" * (4 * VOCAB + 96)),
    "of a kind that is none": lambda f, n: f.send(prefix_of(n, 3, kind="x"), b"\0" * (4 * VOCAB + 96)),
    "an endless answer to nothing": lambda f, n: f._socket.sendall(wire._head(prefix_of(n + 1, 3), 1 << 60)),
    "HTTP": lambda f, n: f._socket.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
}


@pytest.mark.parametrize("answer", HOSTILE.values(), ids=list(HOSTILE))
def test_an_answer_that_is_none_loses_the_connection_and_then_the_prompt_runs_here(
    toys: dict[str, Toy], trusted: ToyReference, facts: SideFacts, answer: Callable[[Frames, int], None]
) -> None:
    peer = Imposter(facts, lambda frames, header: answer(frames, header["number"]))
    engine = engine_of(toys["static"], lambda mine: RemotePrefiller(peer.address, mine, patience_s=0.2))
    assert engine.complete([[1, 2, 3]], [GREEDY]) == [trusted.greedy([1, 2, 3], 4)]
    assert engine.prefiller is not None
    engine.prefiller.close()
    peer.close()


def test_logits_that_are_no_numbers_fail_the_request_alone(toys: dict[str, Toy], facts: SideFacts) -> None:
    def answer(frames: Frames, header: dict[str, Any]) -> None:
        logits = np.full(VOCAB, np.nan, np.float32)
        frames.send_prefix(prefix_of(header["number"], 3), logits, [np.zeros((1, 3, 8), np.float32)], "f32")

    peer = Imposter(facts, answer)
    engine = engine_of(toys["static"], lambda mine: RemotePrefiller(peer.address, mine))
    assert engine.complete([[1, 2, 3]], [GREEDY]) == [[]]
    assert engine.prefiller is not None
    engine.prefiller.close()
    peer.close()


@pytest.fixture(scope="module")
def server(toys: dict[str, Toy]) -> Iterator[tuple[PrefillServer, PeerAddress]]:
    built, address = serve(toys["static"])
    yield built, address
    built.close()


def still_serves(address: PeerAddress, facts: SideFacts) -> bool:
    client = RemotePrefiller(address, facts)
    client.submit(0, [1, 2, 3])
    assert client.wait(PATIENCE_S)
    [one] = client.take(1)
    client.close()
    return isinstance(one, Prefilled)


PROMPT = {"kind": "prompt", "number": 0, "priority": 0, "cache_dtype": "f32"}
IDS = np.array([1, 2, 3], "<i8").tobytes()


@contextmanager
def entered(address: PeerAddress) -> Iterator[Frames]:
    """Frames of a connection that the server has let in, whose socket is given back whatever comes."""
    frames = Frames(address.connect(1))
    try:
        enter(frames, None, "there")
        yield frames
    finally:
        frames.release()


@pytest.mark.parametrize(
    ("header", "payload"),
    [
        ({**PROMPT, "number": "0"}, IDS), ({**PROMPT, "number": 1 << 70}, IDS), ({**PROMPT, "number": True}, IDS),
        ({**PROMPT, "priority": None}, IDS), ({**PROMPT, "kind": "model"}, IDS), ({"kind": "cancel", "number": 1}, IDS),
        (PROMPT, b""), (PROMPT, b"\0" * 12), (PROMPT, b"\0" * 8 * 32), (PROMPT, b"\xff" * 8),
        (PROMPT, np.array([VOCAB], "<i8").tobytes()), ({}, b""), ({"number": 0, "x": "y" * 100}, b""),
    ],
)  # fmt: skip
def test_a_client_that_sends_anything_else_is_cut_off_and_others_are_served(
    server: tuple[PrefillServer, PeerAddress], facts: SideFacts, header: dict[str, Any], payload: bytes
) -> None:
    with entered(server[1]) as frames:
        frames.send(header, payload)
        assert frames.receive(PATIENCE_S) is None
    assert still_serves(server[1], facts)


def test_a_prompt_number_that_is_in_use_is_refused(server: tuple[PrefillServer, PeerAddress], facts: SideFacts) -> None:
    with entered(server[1]) as frames:
        with suppress(OSError):
            for _ in range(64):  # some answers may come before the same number does again
                frames.send(PROMPT, IDS)
        with suppress(wire.WireError, OSError):  # the connection may end within an answer
            while frames.receive(PATIENCE_S) is not None:
                frames.skip(1 << 20)
    assert still_serves(server[1], facts)


@given(data=st.binary(max_size=300))
@examples(50, database=None, derandomize=True)
def test_bytes_of_any_kind_end_a_connection_and_nothing_else(
    server: tuple[PrefillServer, PeerAddress], data: bytes
) -> None:
    with server[1].connect(1) as peer, suppress(ConnectionError):
        peer.sendall(data)
        try:
            peer.shutdown(socket.SHUT_WR)
        except OSError as e:
            assert e.errno == errno.ENOTCONN, "the server may have ended the connection by now"
        while peer.recv(1 << 16):
            pass


def test_the_server_is_as_before_after_all_that(server: tuple[PrefillServer, PeerAddress], facts: SideFacts) -> None:
    assert still_serves(server[1], facts)
    until(lambda: server[0].connections == 0)


def test_connections_that_say_nothing_are_bounded_and_given_up(
    toys: dict[str, Toy], facts: SideFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmc.runtime.disaggregated.wire.HANDSHAKE_S", 1.0)
    monkeypatch.setattr("llmc.runtime.disaggregated.server.MAX_CONNECTIONS", 3)
    built, address = serve(toys["static"])
    silent: Sequence[socket.socket] = [address.connect(1) for _ in range(3)]
    until(lambda: built.connections == 3)
    with address.connect(1) as fourth:
        assert not fourth.recv(1), "one too many"
    until(lambda: built.connections == 0)
    assert still_serves(address, facts)
    for one in silent:
        one.close()
    built.close()


def test_a_connection_that_is_lost_whenever_a_prompt_comes_is_not_tried_for_ever(
    facts: SideFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Imposter(facts, lambda frames, header: frames.close())
    client = RemotePrefiller(peer.address, facts)
    client.submit(5, [1, 2, 3])
    assert client.wait(PATIENCE_S)
    [failed] = client.take(1)
    assert isinstance(failed, PrefillFailed) and failed.number == 5 and not failed.passing
    assert client.connections == remote.TRIES + 1
    client.close()
    peer.close()
