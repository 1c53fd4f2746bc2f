"""Sampling of a server's /metrics over a period: repeated scrapes and their increase."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

from llmc.buckets.traffic.formats.prometheus.exposition import samples
from llmc.buckets.traffic.formats.prometheus.increase import Increase
from llmc.buckets.traffic.length_histogram import Lengths
from llmc.errors import InputError

MAX_ANSWER_BYTES = 16 << 20
"""Bytes of one answer; a vLLM server's are 200 KB."""

ANSWER_SECONDS = 10.0
"""Seconds that one answer may take, from the connection to its last byte."""

CHUNK_BYTES = 1 << 16

SCHEMES = ("http", "https")

OnScrape = Callable[[float, float, int], None]
"""Called after each scrape with the elapsed seconds, the total seconds, and the requests seen so far."""


def is_url(text: str) -> bool:
    """Return whether traffic is named by a URL, not by a file."""
    return text.partition("://")[0] in SCHEMES and "://" in text


def sample(
    url: str,
    seconds: float,
    every: float,
    report: OnScrape = lambda *_: None,
    *,
    answer_seconds: float = ANSWER_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> Lengths:
    """Return the histograms of requests to the server at `url` during `seconds`, scraped every `every` seconds.

    The duration is from the first answer to the last. A restart in between loses the requests since the previous
    scrape. An interrupt, or a server that stops answering, ends the sampling: the requests until then are returned,
    with a note. Raises KeyboardInterrupt where there are none. Raises InputError, naming the URL, for a server that
    does not answer in time, answers with an error, with more than MAX_ANSWER_BYTES, or without the histograms.
    """
    if not seconds > 0 or not every > 0:
        raise InputError(f"sampling for {seconds} seconds, each {every}: both must be above 0")
    found = Increase(url)
    first = last = 0.0
    index = 0
    ended = ""
    while not index or last - first < seconds:
        try:
            if index:
                sleep(max(0.0, min(first + index * every, first + seconds) - now()))
            answer = fetch(url, answer_seconds)
        except (KeyboardInterrupt, InputError) as error:
            if index < 2:
                raise
            ended = str(error) or f"{url}: sampling was interrupted"
            break
        last = now()
        first = first if index else last
        found.add(samples(answer.split("\n")))
        index += 1
        report(min(last - first, seconds), seconds, found.requests if index > 1 else 0)
    lengths = found.lengths(last - first)
    if ended:
        note = f"{ended}; the requests of {last - first:.0f} of {seconds:.0f} seconds are kept"
        lengths = replace(lengths, notes=(*lengths.notes, note))
    return lengths


def fetch(url: str, seconds: float = ANSWER_SECONDS) -> str:
    """Return the text at `url`, complete within `seconds`. Raises InputError like `sample`."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InputError(f"{url}: is not a URL: {error}; give one like http://localhost:8000/metrics") from None
    if parts.scheme not in SCHEMES or not host:
        raise InputError(f"{url}: is not the URL of a server; give one like http://localhost:8000/metrics")
    connect = HTTPConnection if parts.scheme == "http" else HTTPSConnection
    connection = connect(host, port, timeout=seconds)
    target = (parts.path or "/metrics") + (f"?{parts.query}" if parts.query else "")
    try:
        return _read(connection, target, url, seconds)
    except TimeoutError:
        raise InputError(f"{url}: did not answer within {seconds:g} seconds; is it the server's /metrics?") from None
    except (OSError, HTTPException, ValueError) as error:
        raise InputError(f"{url}: cannot be read: {error or type(error).__name__}; is the server running?") from None
    finally:
        connection.close()


def _read(connection: HTTPConnection, target: str, url: str, seconds: float) -> str:
    until = time.monotonic() + seconds
    connection.request("GET", target, headers={"Accept": "text/plain;version=0.0.4"})
    response = connection.getresponse()
    if response.status != 200:
        raise InputError(f"{url}: answered {response.status} {response.reason:.60}; give the address of its /metrics")
    text = bytearray()
    while chunk := response.read1(CHUNK_BYTES):
        text += chunk
        if len(text) > MAX_ANSWER_BYTES:
            raise InputError(f"{url}: answered more than {MAX_ANSWER_BYTES >> 20} MiB; is it the server's /metrics?")
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if connection.sock is not None:
            connection.sock.settimeout(left)
    return text.decode("utf-8", "replace")
