"""The journal next to a bundle while its compile runs, for `llmc compile --resume`.

`.<bundle>.compile.json` = {"schema": 1, "model": str, "output": str, "options": {…}, "plan": {…}}. It is written when a
compile starts, and removed when the bundle is published or the request is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from llmc.buckets.plan import Plan
from llmc.compiler.options import CompileOptions
from llmc.errors import ArtifactError, CheckpointError, DeviceError, InputError

SCHEMA = 1


@dataclass(frozen=True)
class Journal:
    """The request of a compile."""

    model: str
    plan: Plan
    options: CompileOptions
    output: Path

    @classmethod
    def exists(cls, output: Path) -> bool:
        """Whether a compile of the bundle `output` was interrupted."""
        return _path(output).exists()

    @classmethod
    def read(cls, output: Path | None) -> Journal:
        """Read the journal of the bundle `output`. Raises InputError when it is missing or cannot be read."""
        if output is None:
            raise InputError("--resume needs -o BUNDLE, the bundle whose compile was interrupted")
        path = _path(output)
        try:
            data = json.loads(path.read_bytes())
            if data["schema"] != SCHEMA:
                raise ValueError(f"schema {data['schema']}")
            plan = Plan.from_json(json.dumps(data["plan"]), str(path))
            return cls(str(data["model"]), plan, CompileOptions.of(**data["options"]), output)
        except FileNotFoundError:
            raise InputError(f"nothing to resume: no interrupted compile of {output} (looked for {path})") from None
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise InputError(f"{path}: cannot be read ({e}); run the compile again with its flags") from e

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keep the journal while a compile runs; it stays after a failure from which --resume may succeed."""
        path = _path(self.output)
        data = {
            "schema": SCHEMA, "model": self.model, "output": str(self.output), "options": self.options.to_dict(),
            "plan": self.plan.to_dict(),
        }  # fmt: skip
        with suppress(OSError):  # without room for it, the compile itself reports the error
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f"{path.name}.{os.getpid()}")
            temporary.write_text(json.dumps(data))
            temporary.replace(path)
        try:
            yield
        except (InputError, CheckpointError, DeviceError, ArtifactError):  # a resumed compile would raise these again
            path.unlink(missing_ok=True)
            raise
        path.unlink(missing_ok=True)


def _path(output: Path) -> Path:
    resolved = Path(os.path.realpath(output))
    return resolved.parent / f".{resolved.name}.compile.json"
