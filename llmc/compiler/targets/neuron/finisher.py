"""NEFFs of a bundle's modules, by neuronx-cc: on any host that has it, a Neuron device or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from llmc.compiler.targets.finishing import EachExecutable
from llmc.compiler.targets.neuron import neuronx_cc
from llmc.compiler.targets.neuron.chips import Chip
from llmc.compiler.targets.neuron.for_compiler import modules
from llmc.compiler.targets.neuron.neuron_config import NEURON_CONFIG, NeuronConfig
from llmc.errors import CompileError, DeviceError
from llmc.runtime.executors.neuron.executor import NeuronExecutor
from llmc.runtime.executors.neuron.files import NeuronFile, write_native
from llmc.runtime.executors.xla.slot_executor import SLOT_PROGRAMS

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest_schema import Executable
    from llmc.artifacts.key import Value
    from llmc.runtime.bundle import Bundle
    from llmc.settings import Settings


class NeuronFinisher(EachExecutable):
    """For a chip."""

    executor: ClassVar[str] = "neuron"
    programs: ClassVar[tuple[str, ...]] = SLOT_PROGRAMS

    def __init__(self, chip: Chip, settings: Settings) -> None:
        self._chip, self._settings = chip, settings

    def lacks(self) -> str:
        """neuronx-cc, of a version that is known, and a chip that is compiled for."""
        try:
            neuronx_cc.require()
        except DeviceError as e:
            return str(e)
        here = NeuronExecutor.description.host().get("target")
        if here is None:
            return (
                f"this host has no NeuronCores; to compile for {self._chip.name} all the same, set "
                f"NEURON_PLATFORM_TARGET_OVERRIDE={self._chip.name}"
            )
        if here != self._chip.name:
            return (
                f"this host is for {here}, the bundle for {self._chip.name}; compile it again with --device "
                f"neuron:{here}, or finish it on such a host"
            )
        return ""

    def host(self) -> Mapping[str, str]:
        """The chip: a NEFF runs with any Neuron runtime that is not older than its compiler."""
        return {"target": self._chip.name}

    def pins(self, bundle: Bundle) -> Mapping[str, Value]:
        """The compiler and its arguments."""
        arguments = neuronx_cc.arguments(self._chip, self._lnc(bundle))
        return {"neuronx_cc": neuronx_cc.require().version, "neuronx_cc_arguments": " ".join(arguments)}

    def finish(self, bundle: Bundle, executable: Executable) -> bytes:
        """The NEFFs of a bucket's module."""
        return self._neffs(bundle, executable.blob, str(executable))

    def finish_program(self, bundle: Bundle, name: str) -> bytes:
        """The NEFFs of a program that works on slots."""
        return self._neffs(bundle, name, name)

    def _lnc(self, bundle: Bundle) -> int:
        """NeuronCores of a logical one."""
        asked = NeuronConfig.parse(str(bundle.manifest.options.get(NEURON_CONFIG.name, ""))).lnc
        return self._chip.lnc(self._settings.neuron_cores if asked is None else asked)

    def _neffs(self, bundle: Bundle, file: str, name: str) -> bytes:
        portable = NeuronFile.parse(bundle.files.read(file), f"{bundle.path}: {name}")
        if (made_for := portable.header.topology) != self._chip.name:
            raise CompileError(
                f"{bundle.path}: its modules are for {made_for}, this host is for {self._chip.name}; compile it again "
                f"with --device neuron:{self._chip.name}"
            )
        compiler = neuronx_cc.require()
        lnc, seconds = self._lnc(bundle), bundle.option("neuronx_cc_timeout", neuronx_cc.SECONDS)
        arguments = neuronx_cc.arguments(self._chip, lnc)
        logs = self._settings.user_cache_dir / "logs" / neuronx_cc.TOOL
        listed = modules(portable)
        names = [name] if len(listed) == 1 else [f"{name} rank {rank}" for rank in range(len(listed))]
        neffs = [
            compiler.compile(module, each, arguments, seconds, logs) for module, each in zip(listed, names, strict=True)
        ]
        made = {"target": self._chip.name, "lnc": lnc, "compiler": compiler.version}
        return write_native(portable, neffs, made)
