"""On-target compilation for the fake device, the example of on_target.py: it adds the device's name to executables."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, ClassVar

from llmc.artifacts.key import canonical_json
from llmc.compiler.targets.on_target import EachExecutable
from llmc.runtime.executors.fake import device

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Executable
    from llmc.runtime.bundle import Bundle


class FakeOnTargetCompiler(EachExecutable):
    """Writes the device's name into each executable."""

    executor: ClassVar[str] = "fake"

    def lacks(self) -> str:
        return (
            "" if device.here else "this host has no fake device; attach one: llmc.runtime.executors.fake.device.here"
        )

    def compile(self, bundle: Bundle, executable: Executable) -> bytes:
        return canonical_json(json.loads(bundle.files.read(executable.blob)) | {"gpu": self.host()["gpu"]})
