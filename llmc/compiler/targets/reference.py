"""The models that executables are compared with, by name; none is imported before it is opened."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.verification.probes import LogitReference


@dataclass(frozen=True)
class ReferenceModel:
    """A reference for executables: its name in keys and manifests, its place ("module:class", made of a checkpoint),
    the packages that its predictions depend on, and what finds the layer where a model that does not match differs
    ("module:function" of a checkpoint and a number of tokens), where there is such."""

    name: str
    place: str
    packages: tuple[str, ...] = ()
    layers: str | None = None

    @property
    def module(self) -> str:
        """Where its code is."""
        return self.place.partition(":")[0]

    def open(self, checkpoint: Checkpoint) -> LogitReference:
        """The model with the checkpoint's weights."""
        made: LogitReference = _named(self.place)(checkpoint)
        return made

    def first_difference(self, checkpoint: Checkpoint, longest: int) -> str:
        """In which layer the model differs, in words, "" where nothing can say it; over texts of `longest` tokens."""
        return str(_named(self.layers)(checkpoint, longest)) if self.layers else ""


def _named(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


TRANSFORMERS = ReferenceModel(
    "transformers",
    "llmc.compiler.verification.transformers_reference:TransformersReference",
    ("torch", "transformers"),
    layers="llmc.compiler.verification.layers:first_difference",
)
TOY = ReferenceModel("toy", "llmc.compiler.verification.toy_reference:ToyReference")
