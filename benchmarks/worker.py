"""The worker side of the harness: a request names a method and its arguments, the answer is its result."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def serve(engine: Any) -> None:
    """Answer requests until stdin closes; only answers go to the real stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answers.write(json.dumps({"ready": True}) + "\n")
    answers.flush()
    for line in sys.stdin:
        request = json.loads(line)
        result = getattr(engine, request["op"])(**request["args"])
        answers.write(json.dumps(result) + "\n")
        answers.flush()
