"""TPUs that are only described: `--device tpu:v5e-2x2` compiles for that slice on any host, with libtpu's compiler.

Graphs, weights and cache are those of the xla target. The memory of a chip is checked before anything is compiled, and
again with XLA's figures for each executable. Nothing was run on a TPU: verification compiles the same portable programs
for this host's CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from llmc.compiler.stages import version_of
from llmc.compiler.targets.base import StaticTarget
from llmc.compiler.targets.costs import Cost, Verifying
from llmc.compiler.targets.hardware import Hardware, contract_tested
from llmc.compiler.targets.xla.target import CACHE_SLOTS, TENSOR_PARALLEL, XlaLowered, XlaTarget
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.stages import Stages
    from llmc.compiler.targets.base import Lowered
    from llmc.compiler.targets.xla.build import Machine
    from llmc.compiler.targets.xla.capacity import Need
    from llmc.compiler.targets.xla.topology import Topology
    from llmc.runtime.accelerators import Cards


_DEGREES = (2, 4, 8, 16, 32, 64)
"""Degrees of tensor parallelism that an error about memory may propose."""


class TpuTarget(XlaTarget):
    """See the module's docstring."""

    name: ClassVar[str] = "tpu"
    compile_needs: ClassVar[tuple[str, ...]] = ("torch", "transformers", "safetensors", "jax", "libtpu")
    install: ClassVar[str] = "pip install 'llmc[compile,tpu]'"
    hardware: ClassVar[Hardware] = contract_tested("the portable programs inside were run and verified on CPU")
    guide: ClassVar[str] = "docs/tpu.md"
    rolls_by_default: ClassVar[bool] = True
    fresh_process: ClassVar[tuple[str, ...]] = (
        "llmc.compiler.targets.xla.build",
        "llmc.compiler.targets.xla.scan_layers",
        __name__,
    )
    executable_seconds: ClassVar[float] = 4.0
    # verification compiles each program for this CPU first, and does not run the TPU's executables
    verifies_each: ClassVar[bool] = False
    graph_bytes = StaticTarget.graph_bytes
    workspace_bytes = StaticTarget.workspace_bytes
    graph_bytes_source: ClassVar[str] = StaticTarget.graph_bytes_source
    verifying: ClassVar[Verifying] = Verifying(
        begin=Cost(fixed=1.0), opened=Cost(fixed=1.5), step=Cost(parameters=0.02), tokens=Cost(parameters=2.2)
    )

    def __init__(self, detail: str = "") -> None:
        self._detail = detail

    @classmethod
    def of(cls, detail: str, settings: Settings) -> Self:
        """Of a topology such as "v5e-2x2"; it is only needed, and read, where something is compiled."""
        return cls(detail)

    @classmethod
    def topologies(cls) -> list[dict[str, Any]]:
        """Every slice that libtpu can be asked for."""
        from llmc.compiler.targets.xla.topology import known, shown

        return [
            {
                "name": topology.name,
                "generation": topology.generation,
                "shape": shown(topology.shape),
                "chips": topology.chips,
                "devices": topology.devices,
                "hosts": topology.hosts,
                "hbm_bytes_per_device": topology.hbm_bytes_per_device,
            }
            for topology in known()
        ]

    def cards(self) -> tuple[Cards, ...]:
        """TPU chips."""
        from llmc.runtime.accelerators import TPU

        return (TPU,)

    def lacks(self) -> str:
        """A TPU, on most hosts."""
        from llmc.runtime.executors.xla.client import has_tpu

        return "" if has_tpu() else "needs a TPU host"

    @property
    def topology(self) -> Topology:
        """The slice that is compiled for; raises InputError listing the known ones."""
        from llmc.compiler.targets.xla.topology import parse_topology

        return parse_topology(self._detail)

    def configure(self, options: CompileOptions) -> CompileOptions:
        """Refuses a topology that is not known."""
        self._devices(options)
        return super().configure(options)

    def _devices(self, options: CompileOptions) -> tuple[int, str]:
        topology = self.topology
        return topology.devices, f"topology {topology.name}"

    def memory(self, options: CompileOptions) -> tuple[int, str] | None:
        """Of the devices that a graph is sharded over."""
        devices, topology = TENSOR_PARALLEL.of(options), self.topology
        return devices * topology.hbm_bytes_per_device, f"of {devices} of the devices of {topology.name}"

    def toolchain(self) -> dict[str, str]:
        """JAX, and the compiler in libtpu with its flags."""
        arguments = self.settings.libtpu_arguments
        return {
            **super().toolchain(), "libtpu": version_of("libtpu", "tpu"),
            **({"LIBTPU_INIT_ARGS": arguments} if arguments else {}),
        }  # fmt: skip

    def isa(self) -> tuple[str, ...]:
        """None of a host's."""
        return ()

    def machine(self, options: CompileOptions) -> Machine:
        """The topology's first devices, as many as graphs are sharded over."""
        from llmc.compiler.targets.xla.build import Machine
        from llmc.runtime.executors.xla.client import open_client

        open_client("cpu", TENSOR_PARALLEL.of(options), self.settings.threads)
        devices = self.topology.describe()[: TENSOR_PARALLEL.of(options)]
        return Machine("tpu", self.topology.name, tuple(devices))

    def described_machine(self) -> dict[str, str]:
        """The topology."""
        return {"topology": self.topology.name}

    def require_fits(self, stages: Stages, options: CompileOptions, layout: Mapping[str, Any]) -> None:
        """Raise CompileError where weights and cache alone do not fit a device."""
        self._require(stages, options, layout, [])

    def _require(
        self, stages: Stages, options: CompileOptions, layout: Mapping[str, Any], memories: Sequence[Mapping[str, int]]
    ) -> Need:
        """The memory that a device needs, with XLA's figures for each executable; raises CompileError if it has
        less.
        """
        from llmc.compiler.targets.xla.capacity import Cache, Need, require_fits

        limits, config = stages.plan.limits, stages.checkpoint.config

        def need(degree: int) -> tuple[Need, Cache]:
            weights, keys, item = _shares(layout, config, degree)
            cache = Cache.of(keys, item, limits, CACHE_SLOTS.of(options) is not None)
            return Need.of(weights, cache.bytes(limits.max_num_seqs, limits.max_model_len), memories), cache

        found, cache = need(TENSOR_PARALLEL.of(options))
        wider = [d for d in _DEGREES if TENSOR_PARALLEL.of(options) < d <= self.topology.devices]
        require_fits(found, self.topology, cache, limits, {d: need(d)[0] for d in wider})
        return found

    def analyse(
        self, stages: Stages, lowered: Lowered, files: Sequence[Path], options: CompileOptions
    ) -> dict[str, Any]:
        """Memory, work and collectives of all executables on one chip; raises CompileError where they do not fit."""
        found = super().analyse(stages, lowered, files, options)
        memories = [e["memory"] for e in found["executables"]]
        assert isinstance(lowered, XlaLowered)
        need = self._require(stages, options, lowered.layout, memories)
        memory = {**asdict(need), "total": need.total, "available": self.topology.hbm_bytes_per_device}
        return {"topology": self.topology.name, "device_memory": memory, **found}


def _shares(layout: Mapping[str, Any], config: Mapping[str, Any], degree: int) -> tuple[int, list[int], int]:
    """On one of `degree` devices: bytes of the weights, shape of its share of the keys, bytes of a number there."""
    from llmc.compiler.targets.xla.capacity import device_bytes
    from llmc.compiler.targets.xla.sharding import cache_dims, weight_shardings
    from llmc.compiler.weights.weightless import ITEM_BYTES

    def share(shape: Sequence[int], dims: Sequence[str | None]) -> list[int]:
        return [n if dim is None else n // degree for n, dim in zip(shape, dims, strict=True)]

    split = weight_shardings({w["name"]: tuple(w["shape"]) for w in layout["weights"]}, config, degree)
    weights = sum(
        device_bytes(share(w["shape"], split[w["name"]].dims), ITEM_BYTES[w["dtype"]]) for w in layout["weights"]
    )
    keys = layout["cache"][0]
    return weights, share(keys["shape"], cache_dims(config, degree)), ITEM_BYTES[keys["dtype"]]
