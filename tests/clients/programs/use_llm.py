"""The command line program llm, with a model in extra-openai-models.yaml."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from worker import GREETING, Forecast, Said, Server, run

MODELS = """
- model_id: served
  model_name: {model}
  api_base: {url}
  supports_tools: true
  supports_schema: true
"""
FUNCTIONS = """
import json, os

def get_weather(city: str, days: int) -> str:
    "The weather in a city."
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps([city, days]) + "\\n")
    return f"{days * 10 + 1} degrees in {city}"
"""


def llm(server: Server, *words: str) -> tuple[subprocess.CompletedProcess[str], list[tuple[str, int]]]:
    """The program's end, and the calls of its tool."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "extra-openai-models.yaml").write_text(MODELS.format(model=server.model, url=server.url))
        calls = Path(folder) / "calls"
        calls.touch()
        done = subprocess.run(
            [str(Path(sys.executable).with_name("llm")), "prompt", "-m", "served", "--usage", *words],
            env=os.environ | {"LLM_USER_PATH": folder, "CALLS": str(calls)},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        found = [(city, days) for city, days in map(json.loads, calls.read_text().splitlines())]
        return done, found


def said(server: Server, *words: str) -> Said:
    done, calls = llm(server, *words)
    assert done.returncode == 0, done.stderr
    usage = re.search(r"Token usage: ([\d,]+) input, ([\d,]+) output", done.stderr)
    tokens = None if usage is None else (int(usage[1].replace(",", "")), int(usage[2].replace(",", "")))
    return Said(done.stdout.removesuffix("\n"), usage=tokens, calls=calls)


def chat(server: Server) -> Said:
    return said(server, GREETING, "--no-stream")


def stream(server: Server) -> Said:
    """The program streams by default; its output shows no chunks."""
    return said(server, GREETING)


def loop(server: Server) -> Said:
    return said(server, server.question, "--functions", FUNCTIONS, "--no-stream")


def loop_streamed(server: Server) -> Said:
    return said(server, server.question, "--functions", FUNCTIONS)


def structured(server: Server) -> Said:
    found = said(server, server.question, "--schema", json.dumps(Forecast.model_json_schema()))
    found.value = Forecast.model_validate_json(found.text).model_dump()
    return found


def too_long(server: Server) -> Said:
    done, _ = llm(server, "x" * 40_000)
    assert done.returncode != 0
    return Said(str(done.returncode), value=done.stderr)


run(
    {
        "chat": chat, "stream": stream, "loop": loop, "loop_streamed": loop_streamed, "structured": structured,
        "too_long": too_long,
    }
)  # fmt: skip
