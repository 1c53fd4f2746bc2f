"""Runs under HyperDex's Python: compiles a model for LPUs, or opens one and generates. Imports nothing of llmc.

Standard input and output carry one JSON object per line, requests and answers. HyperDex's output goes to standard
error, which is the log. An answer has "error" if the request failed. Names, arguments and order of HyperDex's calls are
those of Hyper-Accel/docs, docs/huggingface_api.md at b0ba3ab (HyperDex-Toolchain 1.5.1), and of Hyper-Accel/vllm,
vllm/worker/lpu_model_runner.py at a10068c.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO


class Device:
    """An opened model and its running generation."""

    def __init__(self) -> None:
        self.model: Any = None
        self.streamer: Any = None
        self.stream: Any = None

    def compile(self, model: str, options: dict[str, Any]) -> dict[str, Any]:
        """Compile the checkpoint in MODEL/ckpt; HyperDex writes its output next to it."""
        from hyperdex.tools import AutoCompiler

        AutoCompiler().compile(model_id=model, **options)
        return {}

    def open(self, model: str, gpus: int, lpus: int) -> dict[str, Any]:
        """Load a compiled model into the devices' memory."""
        from hyperdex.transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

        self.model = AutoModelForCausalLM.from_pretrained(model, device_map={"gpu": gpus, "lpu": lpus})
        tokenizer = AutoTokenizer.from_pretrained(model)
        self.streamer = TextStreamer(tokenizer, use_print=False, use_sse=True, skip_special_tokens=True)
        return {}

    def begin(self, prompt: list[int], arguments: dict[str, Any]) -> dict[str, Any]:
        """Start a generation; the previous one must have ended."""
        self.stream = self.model.generate_yield(prompt, streamer=self.streamer, **arguments)
        return {}

    def next(self) -> dict[str, Any]:
        """The next token; null if the device has ended."""
        found = next(self.stream, None)
        return {"token": None if found is None else int(found[0])}

    def end(self) -> dict[str, Any]:
        """End the generation."""
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.close()
        return {}


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer requests until there are no more."""
    device = Device()
    for line in requests:
        request = json.loads(line)
        try:
            answer = getattr(device, request.pop("do"))(**request)
        except BaseException as error:  # noqa: BLE001 - HyperDex ends some failures with SystemExit
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    sys.path[:] = [index for index in sys.path if Path(index).resolve() != here]  # the modules next to this are llmc's
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, own)
