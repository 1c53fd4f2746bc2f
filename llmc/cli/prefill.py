"""`llmc prefill`: run prefill for other processes."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.buckets.render.text import counted
from llmc.cli import output as messages
from llmc.cli.options import Command, bundle_argument, flag, switch, threads_flag
from llmc.cli.output import echo
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.runtime.disaggregated.server import PrefillServer
    from llmc.server.listening import Listener


@dataclass(frozen=True, kw_only=True)
class PrefillCommand(Command):
    """Run prefill for other processes or hosts, which use it with llmc serve or llmc generate --prefill ADDRESS.

    The keys, values and last logits of each prompt are sent back. If the address is reachable from other hosts, set the
    same LLMC_PREFILL_KEY on both sides. The connection is not encrypted, so use a private network or a tunnel.

    \b
    Example:
      llmc prefill prefill-bundle --listen unix:/run/llmc-prefill
      llmc generate decode-bundle --prefill unix:/run/llmc-prefill --prompt "The capital of France is"
      LLMC_PREFILL_KEY=$KEY llmc prefill prefill-bundle --listen 0.0.0.0:8100
      LLMC_PREFILL_KEY=$KEY llmc serve decode-bundle --prefill tcp://prefill-host:8100
    """

    bundle: str = bundle_argument()
    listen: str = flag(
        "127.0.0.1:8100", "HOST:PORT|unix:PATH", "Address to listen on; port 0 takes a free one and prints it."
    )
    max_waiting: int | None = flag(
        None, "N", "Finished prompts that may wait for one client. Default: one batch.", min=1
    )
    prefix_slots: int | None = flag(None, "N", "Cache slots kept for prefixes.", min=0)
    threads: int | None = threads_flag()
    end_with_input: bool = switch(
        "--end-with-input", "Exit when standard input closes, as when the parent process ends."
    )
    as_json: bool = switch("--json", "Print a JSON line when listening and at the end.")

    def run(self) -> None:
        from llmc.runtime.bundle import Bundle
        from llmc.runtime.startup.opening import EngineOptions
        from llmc.runtime.startup.prefilling import serve_prefill

        began = time.perf_counter()
        stop = threading.Event()
        with ExitStack() as stack:
            for one in (signal.SIGTERM, signal.SIGINT):
                stack.callback(signal.signal, one, signal.signal(one, lambda *_: stop.set()))
            opened = Bundle.open(self.bundle)
            if opened.prefill is not None:
                opened = Bundle.open(opened.prefill, opened.settings)
            listener = _listener(self.listen, opened.settings.prefill_key)
            chosen: dict[str, Any] = {"threads": self.threads, "prefix_slots": self.prefix_slots}
            options = EngineOptions(**{name: value for name, value in chosen.items() if value is not None})
            try:
                server = serve_prefill(opened, options, listener.socket, self.max_waiting)
                try:
                    _report(server, listener, time.perf_counter() - began, self.as_json)
                    if self.end_with_input:
                        threading.Thread(target=_watch_input, args=(stop,), daemon=True).start()
                    stop.wait()
                finally:
                    server.close()
            finally:
                listener.close()
        if self.as_json:
            echo(json.dumps({"event": "stopped", "served": server.served}))
        elif not messages.quiet:
            echo(f"llmc: stopped; {counted(server.served, 'prompt')} served", err=True)


def _watch_input(stop: threading.Event) -> None:
    while sys.stdin.buffer.read(1 << 16):
        pass
    stop.set()


def _listener(text: str, key: str | None) -> Listener:
    from llmc.runtime.disaggregated.wire import PeerAddress
    from llmc.server.listening import listen, listen_unix

    address = PeerAddress.parse(text if text.startswith("unix:") else f"tcp://{text.removeprefix('tcp://')}")
    assert address is not None
    built = listen_unix(Path(address.path)) if address.path else listen(address.host, address.port)
    if not built.local and key is None:
        built.close()
        raise InputError(
            f"--listen {text} is reachable from other hosts, but no key is set: set LLMC_PREFILL_KEY here and on the "
            "clients, or listen on 127.0.0.1"
        )
    return built


def _report(server: PrefillServer, listener: Listener, seconds: float, as_json: bool) -> None:
    where = f"unix:{listener.path}" if listener.path is not None else listener.url.replace("http://", "tcp://")
    if as_json:
        facts = asdict(server.worker.facts)
        reported = {"event": "listening", "address": where, "seconds": seconds, "facts": facts}
        echo(json.dumps(reported))
    elif not messages.quiet:
        echo(f"llmc: ready in {seconds:.1f} s; listening on {where}", err=True)
