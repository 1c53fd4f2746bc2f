"""A bundle's paged models, opened over one weights file and one block cache.

OpenVINO makes its primitives and packs weights when a model is opened: a compilation of the toolchain, counted as such
(CompilationCounter.opened), and never one that a step waits for.
"""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any

from llmc.errors import ArtifactError, DeviceError
from llmc.runtime.executors.openvino.device import MappedWeights, open_core, properties_for, read_paged, with_threads
from llmc.runtime.executors.openvino.paged_request import PagedRequest, StepRows

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest_schema import Executable
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.executors.compilations import CompilationCounter
    from llmc.runtime.executors.openvino.blocks import BlockCache

PACKED = 1.5
"""Memory of an open model of a fixed size over its weights in the file: 204–215 MB for 137 (benchmarks/RESULTS.md)"""

_CONSTANT = re.compile(rb'offset="(\d+)"[^>]* size="(\d+)"')


class PagedModels:
    """The model for every shape, and those for fixed numbers of decode rows, as many as the memory budget allows."""

    def __init__(
        self, bundle: Bundle, cache: BlockCache, filler: int, threads: int, compilations: CompilationCounter
    ) -> None:
        """`filler` is a block of the cache that no slot holds."""
        self._bundle = bundle
        self._cache = cache
        self._filler = filler
        self._compilations = compilations
        self._threads = threads
        self._weights = MappedWeights(bundle.files.path("weights"))
        self._any: PagedRequest | None = None
        self.fixed: dict[int, PagedRequest] = {}
        """By number of rows, what is open."""
        self._unopened = self._hottest_first()
        self._opener: threading.Thread | None = None

    @property
    def open_count(self) -> int:
        """Models open now."""
        return len(self.fixed) + (self._any is not None)

    def request(self, rows: int) -> PagedRequest:
        """The request of the model for `rows` rows, or for every shape (0)."""
        request = self.fixed[rows] if rows else self._any
        assert request is not None
        return request

    def open_any(self) -> None:
        """Open the model for every shape. Raises ArtifactError or DeviceError."""
        self._any = self._open(self._bundle.executable("any", None, None, None))

    def open_fixed(self) -> None:
        """Open the models of fixed sizes, before returning."""
        if self._opener is not None:
            self._opener.join()
        self._open_affordable()

    def _open_affordable(self) -> None:
        """Open as many of them as the memory budget allows; they all hold the same weights."""
        if self._unopened:
            size = PACKED * held_bytes(self._bundle.files.read(self._unopened[0][1].blob))
            del self._unopened[int(self._bundle.option("specialise_memory") / size) :]
        while self._unopened:
            rows, executable = self._unopened.pop(0)
            self.fixed = {**self.fixed, rows: self._open(executable)}

    def open_fixed_behind(self) -> None:
        """Open them beside the steps that run, if that has not begun."""
        if self._unopened and self._opener is None:
            self._opener = threading.Thread(target=self._open_quietly, name="llmc-open", daemon=True)
            self._opener.start()

    def _open_quietly(self) -> None:
        """What fails stays unopened: the model for every shape serves in its place."""
        try:
            self._open_affordable()
        except (ArtifactError, DeviceError):
            self._unopened.clear()

    def _hottest_first(self) -> list[tuple[int, Executable]]:
        """The models of fixed sizes: the largest decode batch, which a busy server runs, then one row, then the others
        from the largest down."""
        executables = self._bundle.manifest.executables
        fixed = sorted(((e.batch, e) for e in executables if e.phase == "decode" and e.batch), key=lambda f: -f[0])
        return fixed[:1] + sorted(fixed[1:], key=lambda f: (f[0] != 1, -f[0]))

    def _open(self, executable: Executable) -> PagedRequest:
        source = f"{self._bundle.path}: {executable}"
        manifest = self._bundle.manifest
        uniform = self._bundle.uniform_cache("openvino")
        heads = uniform.kv_heads, uniform.head_dim
        model = read_paged(self._bundle.files.read(executable.blob), self._weights, *heads, source)
        _require_agreement(model, self._bundle, source)
        try:
            properties = properties_for(manifest.options, executable.batch) | with_threads(self._threads)
        except (KeyError, TypeError, ValueError, StopIteration) as e:
            raise ArtifactError(
                f"{source}: the manifest does not say how it is opened ({type(e).__name__}: {e}); compile again: "
                f"{self._bundle.recompile_hint}"
            ) from e
        try:
            compiled = open_core().compile_model(model, "CPU", properties)
            self._compilations.opened(str(executable))
            request = PagedRequest(compiled, self._cache)
            request.infer(*StepRows.idle(executable.batch or 1, self._filler), 0)  # which packs the weights
        except RuntimeError as e:
            raise DeviceError(f"{source}: OpenVINO cannot open it: {str(e).splitlines()[-1]}") from e
        self._weights.drop_pages()
        return request

    def close(self) -> None:
        """Drop what is open."""
        self._unopened.clear()
        if self._opener is not None:
            self._opener.join()
        self.fixed = {}
        self._any = None


def _require_agreement(model: Any, bundle: Bundle, source: str) -> None:
    """Raise ArtifactError for a model that is not of the manifest's sizes: it would read beyond the block cache."""
    attention = [node for node in model.get_ops() if node.get_type_name() == "PagedAttentionExtension"]
    uniform = bundle.uniform_cache("openvino")
    held = uniform.kv_heads * uniform.head_dim
    widths = [[_width(node.input(i)) for i in range(3)] for node in attention]
    whole = all(keys == values == held and not queries % held for queries, keys, values in widths)
    outputs = [_width(output) for output in model.outputs if "logits" in output.get_names()]
    if not whole or len(attention) != uniform.layers or outputs != [bundle.size("vocab_size")]:
        raise ArtifactError(
            f"{source} is not a graph of the sizes that the manifest states; compile again: {bundle.recompile_hint}"
        )


def _width(port: Any) -> int:
    """The size of a port's last dimension; -1 where it is dynamic."""
    shape = port.get_partial_shape()
    return -1 if shape.rank.is_dynamic or shape[-1].is_dynamic else int(shape[-1].get_length())


def held_bytes(xml: bytes) -> int:
    """Bytes of a weights file that a model's constants are in; several may be in the same place."""
    return sum({int(offset): int(size) for offset, size in _CONSTANT.findall(xml)}.values())
