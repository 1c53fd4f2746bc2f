"""The chips that neuronx-cc can compile for, by their names for `--target`.

Memory is per NeuronCore, or per logical core of several. Sources: AWS Neuron documentation, "NeuronCores architecture"
and "Logical NeuronCore configuration"; `neuronx-cc compile --help` 2.27 for --lnc ("only valid for Trn2 targets. On
Trn2, the default is 2").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmc.errors import InputError, UnknownNameError

GIB = 1 << 30


@dataclass(frozen=True)
class NeuronChip:
    """A chip: its name, and the bytes of a core by the number of NeuronCores in a logical one ("--lnc")."""

    name: str
    memory: Mapping[int, int]
    default_lnc: int = 1
    cores: int = 2
    """NeuronCores of a chip."""

    def lnc(self, requested: int | None) -> int:
        """Return the NeuronCores of a logical one. Raises InputError for a number that the chip does not offer."""
        if requested is None:
            return self.default_lnc
        if requested not in self.memory:
            raise InputError(
                f"logical_nc_config {requested} is not offered for {self.name}; offered: "
                f"{', '.join(map(str, self.memory))}"
            )
        return requested


CHIPS = {
    "trn1": NeuronChip("trn1", {1: 16 * GIB}),
    "inf2": NeuronChip("inf2", {1: 16 * GIB}),
    "trn2": NeuronChip("trn2", {1: 12 * GIB, 2: 24 * GIB}, 2, 8),
}
DEFAULT = "trn2"
"""The chip of `--device neuron` where NEURON_PLATFORM_TARGET_OVERRIDE names none."""


def chip_of(name: str) -> NeuronChip:
    """Look up a chip. Raises UnknownNameError listing the known ones."""
    if name not in CHIPS:
        raise UnknownNameError("Neuron target", name, CHIPS)
    return CHIPS[name]
