"""OpenVINO models of one shape each, over slots of contiguous caches: for devices without paged attention.

A model reads a cache of exactly its context and returns what is new, which the executor writes to its place; decode
steps over the same slots in the same bucket copy nothing else. Where the bundle's device is here, models run on it;
where it is not, on the CPU, which proves plan, padding and numbers as verification does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from llmc.errors import ArtifactError, InputError
from llmc.runtime.executors.base import Executor
from llmc.runtime.executors.ort_caches import Tensors
from llmc.runtime.host import cpu_features
from llmc.runtime.openvino.device import open_core, require_device, version
from llmc.runtime.openvino.static_cache import ContextCache
from llmc.runtime.openvino.static_models import StaticModels
from llmc.runtime.sampling.top import TopLogits

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle
    from llmc.runtime.step import Step

Array = NDArray[np.float32]
DEVICE = "openvino_device"
"""The manifest's option that names the device: CPU, GPU, GPU.1, NPU …"""


class OpenVinoStaticExecutor(Executor):
    """See the module's docstring."""

    name: ClassVar[str] = "openvino-static"

    @classmethod
    def check(cls, bundle: Bundle) -> None:
        """Refuse a bundle of another OpenVINO, and native executables of another instruction set."""
        made_with, here = bundle.manifest.toolchain.get("openvino"), version()
        if made_with != here:
            raise ArtifactError(
                f"{bundle.path}: compiled with OpenVINO {made_with}, this host has {here}; install "
                f"openvino=={made_with}, or compile again: {bundle.recompile_hint}"
            )
        wanted, host = set(bundle.manifest.isa), set(cpu_features())
        if wanted and wanted != host:
            differs = [f"without {f}" for f in sorted(wanted - host)] + [f"with {f}" for f in sorted(host - wanted)]
            raise ArtifactError(
                f"{bundle.path}: compiled for another CPU; this host is {', '.join(differs)}. "
                f"Compile again here: {bundle.recompile_hint}"
            )
        require_device("CPU")

    def __init__(self, bundle: Bundle, slots: int, capacity: int, threads: int) -> None:
        super().__init__(bundle, slots, capacity, threads)
        model, buckets = bundle.manifest.model, bundle.plan.buckets
        sizes = 2 * int(model["layers"]), int(model["kv_heads"]), int(model["head_dim"])
        decode = [(b.batch, b.context) for b in buckets if b.phase == "decode"] or [(0, 0)]
        staged = [b.batch * b.context for b in buckets if b.phase == "prompt"]
        self.device = _device(str(bundle.manifest.options.get(DEVICE, "CPU")))
        rows, longest = (max(values) for values in zip(*decode, strict=True))
        self._cache = ContextCache(sizes, slots, capacity, rows, longest)
        self._staging = Tensors(*sizes, max(staged, default=0))
        self._models = StaticModels(bundle, self.device, sizes, threads, self.top_k)
        self._logits: Array | None = None

    @property
    def exact(self) -> bool:
        """No: every model has one shape."""
        return False

    def executable_of(self, step: Step) -> str:
        """Name of the executable in the manifest."""
        return str(self.bundle.executable(step.phase, step.batch, step.query, step.context))

    def warm(self, steps: list[tuple[str, int, int, int]]) -> None:
        """Open the named models."""
        for shape in steps:
            self._models.request(self.bundle.executable(*shape), serving=False)

    def open_all(self) -> None:
        """Open every model, and keep them open."""
        self._models.keep_all()
        for executable in self.bundle.manifest.executables:
            self._models.request(executable, serving=False)

    def run(self, step: Step) -> Array:
        """One step at the model's shape. Dummy rows read what is not theirs, and keep nothing."""
        self._run(step)
        return self.logits()

    def run_top(self, step: Step) -> TopLogits:
        """As `run`; the model's TopK is stable: of equal values the lower id comes first."""
        self._require_top()
        top = self._run(step)
        assert top is not None
        return top

    def logits(self) -> Array:
        """The last step's, in the request's memory."""
        if self._logits is None:
            raise InputError("no step has run yet, so there are no logits")
        return self._logits

    def _run(self, step: Step) -> TopLogits | None:
        self._check_step(step)
        for row, slot in enumerate(step.slots):
            self._cache.require_held(slot, int(step.past_lengths[row]))
        executable = self.bundle.executable(step.phase, step.batch, step.query, step.context)
        request = self._models.request(executable, serving=True)
        self._logits, top = request.infer(step, self._past(step))
        self._cache.append(step, request.new)
        return top

    def _past(self, step: Step) -> Array | None:
        """The first `context` tokens of each row's slot, [tensors, rows, heads, context, head_dim]."""
        if step.phase == "decode":
            return self._cache.begin_decode(step).array
        if not step.context:
            return None
        self._staging.reserve(step.batch, step.context)
        for row, slot in enumerate(step.slots):
            past = int(step.past_lengths[row])
            self._staging.array[:, row, :, :past] = self._cache.read(slot, past)
        return self._staging.array

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy between the homes of two slots."""
        self._cache.copy(source, target, length)

    def export_prefix(self, slot: int, length: int) -> list[Array]:
        """Copies out of the slot's home."""
        return list(self._cache.read(slot, length).copy())

    def import_prefix(self, slot: int, prefix: list[Array]) -> None:
        """Copy into the slot's home."""
        length, tensors = prefix[0].shape[1], len(self._cache.home.array)
        if len(prefix) != tensors or length > self.capacity:
            raise InputError(f"{len(prefix)} tensors of {length} tokens do not fit {tensors} of {self.capacity} tokens")
        self._cache.write(slot, 0, np.stack(prefix))

    def poison(self, slot: int, start: int, value: float) -> None:
        """Overwrite what no live token owns, in homes and in both layouts."""
        self._cache.poison(slot, start, value)
        self._staging.poison(value)

    def memory(self) -> dict[str, int]:
        """Bytes of homes and layouts, and the number of models open."""
        return {"cache": self._cache.nbytes + self._staging.nbytes, "open_executables": len(self._models)}

    @property
    def in_place_of(self) -> str:
        """The GPU or NPU, which may have been asked for and not found."""
        wanted = str(self.bundle.manifest.options.get(DEVICE, "CPU"))
        return "" if wanted == self.device else wanted

    def close(self) -> None:
        """Close models and drop the logits."""
        self._models.close()
        self._logits = None


def _device(wanted: str) -> str:
    """`wanted` where this host has it, the CPU elsewhere."""
    here = open_core().available_devices
    return wanted if wanted in here or any(d.split(".")[0] == wanted for d in here) else "CPU"
