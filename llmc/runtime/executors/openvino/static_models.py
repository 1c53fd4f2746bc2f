"""A bundle's models of one shape, opened when they are needed: native ones imported, portable ones compiled."""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import TYPE_CHECKING

import openvino as ov

from llmc.artifacts.bundle.native import HEAD_BYTES, code_in
from llmc.errors import ArtifactError
from llmc.runtime.executors.openvino.device import WHOLE_SHAPES, MappedWeights, open_core, version, with_threads
from llmc.runtime.executors.openvino.device_blob import FORM, DeviceBlob
from llmc.runtime.executors.openvino.plugins import plugin_name
from llmc.runtime.executors.openvino.static_blob import open_blob
from llmc.runtime.executors.openvino.static_request import StaticRequest

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest_schema import Executable
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.compilations import CompilationCounter

LEAST_OPEN = 2


class StaticModels:
    """Requests for executables. Each open one holds the weights once more, as its kernels want them.

    So that verifying a plan of many buckets fits, those used last stay open as long as half of the memory that was free
    at first holds them, and `keep_all` ends that.
    """

    def __init__(
        self, bundle: Bundle, device: str, threads: int, top_k: int, compilations: CompilationCounter
    ) -> None:  # fmt: skip
        self._bundle = bundle
        self._device = device
        self._top_k = top_k
        self._compilations = compilations
        self._weights = MappedWeights(bundle.files.path("weights"))
        self._properties = with_threads(threads) | WHOLE_SHAPES if device == "CPU" else {}
        self._open: OrderedDict[str, StaticRequest] = OrderedDict()
        each = max(1, bundle.files.path("weights").stat().st_size)
        self._most: float = max(LEAST_OPEN, _free_memory() // (2 * each))

    def __len__(self) -> int:
        return len(self._open)

    def keep_all(self) -> None:
        """Close nothing from now on."""
        self._most = float("inf")

    def request(self, executable: Executable, serving: bool) -> StaticRequest:
        """The request of an executable; `serving`: a step waits for it, so that compiling it counts as such.

        Raises ArtifactError for what OpenVINO cannot open.
        """
        key = executable.blob
        if key not in self._open:
            while len(self._open) >= self._most:
                self._open.popitem(last=False)
            self._open[key] = self._opened(executable, serving)
        self._open.move_to_end(key)
        return self._open[key]

    def _opened(self, executable: Executable, serving: bool) -> StaticRequest:
        source, again = f"{self._bundle.path}: {executable}", self._bundle.recompile_hint
        data = self._bundle.files.read(executable.blob)
        native = executable.state == "native" or code_in(data[:HEAD_BYTES]) is not None
        if native:
            self._bundle.files.require_native(str(executable))
        if native and data.startswith(FORM.magic[:-1]):
            native = self._device != "CPU"
            compiled = self._of_device(data, source, again)
        elif native:
            compiled = open_blob(data, self._bundle.files.path("weights"), self._options(), source, again)
        else:
            compiled = self._compiled(data, source, again)
        self._weights.drop_pages()
        if native or not serving:
            self._compilations.opened(str(executable))
        else:
            self._compilations.record(str(executable))
        assert executable.batch is not None
        assert executable.query is not None
        shape = executable.batch, executable.query, executable.context or 0
        try:
            if compiled.output("logits").shape[-1] != self._bundle.size("vocab_size"):
                raise ValueError("its logits are not as many as the manifest's vocabulary")
            states = not self._bundle.plan.limits.contexts
            return StaticRequest(compiled, self._bundle.cache_shape, *shape, states, self._top_k)
        except ValueError as e:
            raise ArtifactError(f"{source} is no model of that shape: {e}; compile again: {again}") from e

    def _options(self) -> dict[str, object]:
        asked = self._bundle.manifest.options["properties"] if self._device == "CPU" else {}
        return {**asked, **self._properties}

    def _of_device(self, data: bytes, source: str, again: str) -> ov.CompiledModel:
        """The part for the device where it is here, else the portable one on this CPU."""
        blob = DeviceBlob.parse(data, source)
        if self._device == "CPU":
            return self._compiled(blob.ir, source, again)
        return blob.open_on(self._device, source, again)

    def _compiled(self, xml: bytes, source: str, again: str) -> ov.CompiledModel:
        """What the device's own host does to a portable model."""
        try:
            model = open_core().read_model(xml, self._weights.tensor)
            return open_core().compile_model(model, plugin_name(self._device), self._options())
        except RuntimeError as e:
            reason = next((line for line in reversed(str(e).splitlines()) if line.strip()), "")
            raise ArtifactError(
                f"{source}: OpenVINO {version()} cannot compile it for {self._device} ({reason.strip()}); compile "
                f"again: {again}"
            ) from e

    def close(self) -> None:
        """Close everything."""
        self._open.clear()


def _free_memory() -> int:
    """Bytes of memory that nothing uses, the system's caches included in what is used."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0
