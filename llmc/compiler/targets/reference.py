"""The models that executables are compared with, by name; none is imported before it is opened."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.verification.probes import Reference


@dataclass(frozen=True)
class ReferenceModel:
    """A reference for executables: its name in keys and manifests, its place ("module:class", made of a checkpoint),
    and the packages that its predictions depend on."""

    name: str
    place: str
    packages: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """Where its code is."""
        return self.place.partition(":")[0]

    def open(self, checkpoint: Checkpoint) -> Reference:
        """The model with the checkpoint's weights."""
        made: Reference = getattr(import_module(self.module), self.place.partition(":")[2])(checkpoint)
        return made


TRANSFORMERS = ReferenceModel(
    "transformers",
    "llmc.compiler.verification.transformers_reference:TransformersReference",
    ("torch", "transformers"),
)
TOY = ReferenceModel("toy", "llmc.compiler.verification.toy_reference:ToyReference")
