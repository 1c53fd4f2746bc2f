"""Trace files for the tests."""

from __future__ import annotations

from pathlib import Path

from llmc.buckets.traffic.events import TrafficRequest
from llmc.buckets.traffic.reader import Trace

SAMPLE = Path(__file__).parents[2] / "data" / "azure_conv_sample.csv"
"""1,500 requests of the Azure LLM inference trace 2023."""

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:01.2224670,879,55
"""


def written(folder: Path, name: str, text: str | bytes) -> Path:
    """`text` in a file of that name, byte for byte."""
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def read(folder: Path, name: str, text: str | bytes) -> list[TrafficRequest]:
    """The requests of a trace that holds `text`."""
    return list(Trace(written(folder, name, text)))
