"""An encoder's executables on ONNX Runtime: one for every shape, or one per bucket, opened on first use.

Batches run one after another, each on all CPUs, because the process has one thread pool (session.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmc.errors import ArtifactError
from llmc.runtime.executors.base import EXECUTABLES, ExecutorDescription
from llmc.runtime.executors.compatibility import require_version
from llmc.runtime.executors.encoders import Encoder
from llmc.runtime.executors.onnxruntime.session import open_session

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Executable
    from llmc.runtime.bundle import Bundle


class OnnxRuntimeEncoder(Encoder):
    """Runs an encoder's executables on ONNX Runtime."""

    description: ClassVar[ExecutorDescription] = ExecutorDescription({"weights": "data", EXECUTABLES: "data"})

    @classmethod
    def check(cls, bundle: Bundle) -> None:
        import onnxruntime

        require_version(bundle, "onnxruntime", onnxruntime.__version__, "ONNX Runtime")

    def __init__(self, bundle: Bundle, threads: int) -> None:
        super().__init__(bundle, threads)
        if self.capabilities.exact:
            self._open(self.executable_for(1, 1))

    def encode(self, inputs: Mapping[str, NDArray[np.int64]], stream: int = 0) -> NDArray[np.float32]:
        session = self._open(self.executable_for(*inputs["token_ids"].shape))
        wanted = [given.name for given in session.get_inputs()]
        found: NDArray[np.float32] = session.run(None, {name: inputs[name] for name in wanted})[0]
        return found

    def _load(self, executable: Executable) -> Any:
        bundle = self.bundle
        bundle.files.path("weights")  # verified before the runtime maps it
        try:
            session = open_session(str(bundle.files.path(executable.blob)), self.threads)
        except Exception as error:
            raise ArtifactError(f"{bundle.path}: ONNX Runtime cannot open {executable}: {error}") from error
        self.compilations.loaded(str(executable))
        return session
