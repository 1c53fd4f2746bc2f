"""The child side of a worker: runs one engine in any Python, and answers requests of worker.py.

    PYTHON launch.py ENGINE.py JSON

ENGINE.py has a class `Engine`; the JSON object's members are its constructor's keywords, and its methods are the
operations. Messages are one JSON object a line: {"op": method, "args": {keyword: value}} on stdin, {"ok": result} or
{"error": text} on stdout. The first answer, {"ok": {}}, says that the engine is open. Output of libraries goes to
stderr. The process ends when stdin does. Only the standard library is imported, because another engine's environment
has no llmc.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any


def serve(engine_file: str, options: dict[str, Any]) -> None:
    """Open the engine and answer requests until stdin closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(member: str, value: Any) -> None:
        answers.write(json.dumps({member: value}) + "\n")
        answers.flush()

    try:
        engine = _load(engine_file).Engine(**options)
    except Exception as error:  # noqa: BLE001 - reported to the parent process
        answer("error", _words(error))
        return
    answer("ok", {})
    for line in sys.stdin:
        request = json.loads(line)
        method = getattr(engine, request["op"], None)
        if method is None:
            answer("error", "this engine does not do that")
            continue
        try:
            result = method(**request["args"])
        except Exception as error:  # noqa: BLE001 - as above
            answer("error", _words(error))
        else:
            answer("ok", result)


def _load(path: str) -> Any:
    spec = spec_from_file_location("engine", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # this folder: a file in it would hide a library of the same name
    modules: dict[str, Any] = sys.modules  # a None entry makes the import fail
    modules["openvino_telemetry"] = None
    serve(sys.argv[1], json.loads(sys.argv[2]))
