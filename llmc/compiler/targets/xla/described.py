"""Targets for described machines: any host compiles executables for them, and their memory is known.

A device's memory is checked before anything is compiled, and again with XLA's figures for each executable. Verification
compiles the same portable programs for this host's CPU.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from llmc.compiler.targets.base import cache_for
from llmc.compiler.targets.description import contract_tested
from llmc.compiler.targets.xla.target import CACHE_SLOTS, TENSOR_PARALLEL, XLA, XlaCosts, XlaLowered, XlaTarget
from llmc.compiler.weights.stage import ITEM_BYTES
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.stages import Stages
    from llmc.compiler.targets.base import Lowered
    from llmc.compiler.targets.xla.build import Machine
    from llmc.compiler.targets.xla.capacity import CachePart, DescribedMachine, Need
    from llmc.compiler.targets.xla.sharding import Dims
    from llmc.compiler.verification.limits import VerificationPolicy
    from llmc.runtime.cache_shape import CacheTensor
    from llmc.runtime.executors.xla.client import Platform

COMPILING = ("llmc.compiler.targets.xla.build", "llmc.compiler.targets.xla.scan_layers")
"""Modules that a compiling process imports, in addition to the target's own."""

_DEGREES = (2, 4, 8, 16, 32, 64)
"""Degrees of tensor parallelism that an error about memory may propose."""


DESCRIBED = replace(XLA, hardware=contract_tested("the portable programs inside were run and verified on CPU"))


def listed(machine: DescribedMachine, generation: str, shape: str, chips: int, hosts: int) -> dict[str, Any]:
    """Return a row of `Topologies.known`."""
    return {
        "name": machine.name, "generation": generation, "shape": shape, "chips": chips, "devices": machine.devices,
        "hosts": hosts, "hbm_bytes_per_device": machine.usable_bytes,
    }  # fmt: skip


class DescribedCosts(XlaCosts):
    """Cost estimates for a described machine. Verification compiles each program for this CPU first."""

    def __init__(self, topology: DescribedMachine) -> None:
        self._topology = topology

    def memory(self, options: CompileOptions) -> tuple[int, str] | None:
        devices = TENSOR_PARALLEL.of(options)
        return devices * self._topology.usable_bytes, f"of {devices} of the devices of {self._topology.name}"


class DescribedTarget(XlaTarget):
    """A target for a described machine."""

    platform: ClassVar[Platform]
    """XLA's platform."""

    def __init__(self, detail: str = "") -> None:
        self._detail = detail

    @classmethod
    def of(cls, detail: str, settings: Settings) -> Self:
        return cls(detail)

    @property
    @abstractmethod
    def topology(self) -> DescribedMachine:
        """The machine to compile for. Raises InputError listing the known ones."""

    @property
    def verification(self) -> VerificationPolicy:
        return replace(super().verification, each=False, portable=True)

    def lighter(self, options: CompileOptions) -> Sequence[str]:
        """Return flags under which steps would take less temporary memory."""
        return ()

    def configure(self, options: CompileOptions) -> CompileOptions:
        self._devices(options)
        return super().configure(options)

    def _devices(self, options: CompileOptions) -> tuple[int, str]:
        topology = self.topology
        return topology.devices, f"topology {topology.name}"

    def machine(self, options: CompileOptions) -> Machine:
        from llmc.compiler.targets.xla.build import Machine, host_machine

        degree, topology = TENSOR_PARALLEL.of(options), self.topology
        host_machine(degree, self.settings.threads)  # JAX must be configured before its first use
        devices = tuple(topology.describe()[:degree])
        return Machine(self.platform, topology.name, devices)

    def described_machine(self) -> dict[str, str]:
        return self.topology.components

    def require_fits(self, stages: Stages, options: CompileOptions, layout: Mapping[str, Any]) -> None:
        self._require(stages, options, layout, [])

    def _require(
        self, stages: Stages, options: CompileOptions, layout: Mapping[str, Any], memories: Sequence[Mapping[str, int]]
    ) -> Need:
        """A device's memory need with XLA's figures for each executable. Raises CompileError if it has less."""
        from llmc.compiler.targets.xla.capacity import Cache, Need, require_fits

        limits, config, topology = stages.plan.limits, stages.checkpoint.config, self.topology
        groups, fixed = cache_for(self, stages, options).groups, CACHE_SLOTS.of(options) is not None

        def need(degree: int) -> tuple[Need, Cache]:
            cache = Cache.of(_cache_parts(layout, groups, degree), limits, fixed, topology.array_bytes)
            weights = _weight_bytes(layout, config, degree, topology)
            return Need.of(weights, cache.bytes(limits.max_num_seqs, limits.max_model_len), memories), cache

        found, cache = need(TENSOR_PARALLEL.of(options))
        wider = [d for d in _DEGREES if TENSOR_PARALLEL.of(options) < d <= topology.devices]
        require_fits(found, topology, cache, limits, {d: need(d)[0] for d in wider}, self.lighter(options))
        return found

    def analyse(
        self, stages: Stages, lowered: Lowered, files: Sequence[Path], options: CompileOptions
    ) -> dict[str, Any]:
        found = super().analyse(stages, lowered, files, options)
        memories = [e["memory"] for e in found["executables"]]
        assert isinstance(lowered, XlaLowered)
        need = self._require(stages, options, lowered.layout, memories)
        memory = {**asdict(need), "total": need.total, "available": self.topology.usable_bytes}
        return {"topology": self.topology.name, "device_memory": memory, **found}


def _share(shape: Sequence[int], dims: Dims, degree: int) -> tuple[int, ...]:
    return tuple(n if dim is None else n // degree for n, dim in zip(shape, dims, strict=True))


def _weight_bytes(layout: Mapping[str, Any], config: Mapping[str, Any], degree: int, machine: DescribedMachine) -> int:
    from llmc.compiler.targets.xla.sharding import weight_shardings

    split = weight_shardings({w["name"]: tuple(w["shape"]) for w in layout["weights"]}, config, degree)
    return sum(
        machine.array_bytes(_share(w["shape"], split[w["name"]].dims, degree), ITEM_BYTES[w["dtype"]])
        for w in layout["weights"]
    )


def _cache_parts(layout: Mapping[str, Any], groups: Sequence[Sequence[CacheTensor]], degree: int) -> list[CachePart]:
    from llmc.compiler.targets.xla.capacity import CachePart
    from llmc.compiler.targets.xla.sharding import cache_dims

    return [
        CachePart(
            array["kind"], _share(array["shape"], cache_dims(group[0], degree), degree), ITEM_BYTES[array["dtype"]]
        )
        for array, group in zip(layout["cache"], groups, strict=True)
    ]
