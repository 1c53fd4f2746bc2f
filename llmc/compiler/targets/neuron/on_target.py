"""Compiles a bundle's modules to NEFFs with neuronx-cc, on any host that has it, with or without a Neuron device.

`modules` translates a portable module for neuronx-cc, replacing XLA's own constructs by Neuron's:

- `topk` becomes the custom call AwsNeuronTopK, configured with the number of values (nkipy, core/backend/hlo.py).
- `replica-id`, the rank's number, becomes a constant; such a module differs for each rank.
- Inputs and outputs are named "input0", "input1" … and "output0" … for the NEFF, by frontend attributes of parameters
  and of the result (torch-neuronx's modules, nkipy).
- Outputs that alias an input must do so.

Fields by their numbers in xla/service/hlo.proto (openxla/xla at jaxlib 0.10.2), as in executors/neuron/module.py;
HloInstructionProto: 3 shape, 8 literal, 9 parameter_number, 28 custom_call_target, 35 id, 43 backend_config, 50
custom_call_has_side_effect, 68 frontend_attributes, 77 custom_call_api_version, 81 k, 85 largest.

`host_files` are written next to a bundle, for serving with vLLM:

    arguments, environment, config.yaml …    the plan for the server (`llmc plan export`)
    cpu-compile.sh                           vLLM Neuron's own cross-compile, and its cache packed
    serve.env                                makes a graph that was not compiled a server error

VLLM_NEURON_FRAMEWORK selects the server: none is vLLM Neuron, the current plug-in; neuronx-distributed-inference is its
predecessor, which cannot compile without a device. transformers-neuronx has no files here, and a warning says so. The
variables are those of Neuron SDK 2.33's documentation, "CPU Compilation".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from llmc.artifacts.log import logger
from llmc.buckets.plan import Plan
from llmc.compiler.targets.host_files import exported, rendered, server_files
from llmc.compiler.targets.neuron import neuronx_cc
from llmc.compiler.targets.neuron.neuronx_cc import NEURON_CONFIG, NeuronChip, NeuronConfig
from llmc.compiler.targets.on_target import EachExecutable
from llmc.compiler.targets.xla.hlo_ids import COMPUTATIONS, ID, INSTRUCTIONS, ROOT_ID
from llmc.errors import CompileError, DeviceError, InputError
from llmc.integrations import bucket_rules
from llmc.runtime.executors.neuron.executor import NeuronExecutor
from llmc.runtime.executors.neuron.files import NeuronFile, write_native
from llmc.runtime.executors.xla import wire
from llmc.runtime.executors.xla.slot_executor import SLOT_PROGRAMS

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Executable
    from llmc.artifacts.key import Value
    from llmc.runtime.bundle import Bundle
    from llmc.settings import Settings

TOP_K = "AwsNeuronTopK"

_OPCODE, _SHAPE, _LITERAL, _PARAMETER, _TARGET, _CONFIG = 2, 3, 8, 9, 28, 43
_ATTRIBUTES, _K, _LARGEST = 68, 81, 85
_ALIASES, _ENTRY = 8, 6
_COMPUTATION_ID = 5
_MUST = 2


def modules(file: NeuronFile) -> list[bytes]:
    """Return the modules for neuronx-cc: one for all ranks, or one for each."""
    ranks = range(file.header.devices) if "replica-id" in file.module.operators else range(1)
    return [_module(file.hlo, rank, len(file.module.outputs)) for rank in ranks]


def _module(hlo: bytes, rank: int, outputs: int) -> bytes:
    entry = next((value for number, _, value in wire.fields(hlo) if number == _ENTRY), 0)
    out = bytearray()
    for number, kind, value in wire.fields(hlo):
        built = value
        if number == COMPUTATIONS:
            built = _computation(wire.as_bytes(value), rank, entry, outputs)
        elif number == _ALIASES:
            built = _must(wire.as_bytes(value))
        out += wire.field(number, built, kind)
    return bytes(out)


def _computation(message: bytes, rank: int, entry: int | bytes, outputs: int) -> bytes:
    listed = list(wire.fields(message))
    is_entry = next((value for number, _, value in listed if number == _COMPUTATION_ID), 0) == entry
    root = next((value for number, _, value in listed if number == ROOT_ID), 0) if is_entry else None
    return b"".join(
        wire.field(n, _instruction(wire.as_bytes(v), rank, is_entry, root, outputs) if n == INSTRUCTIONS else v, k)
        for n, k, v in listed
    )


def _instruction(message: bytes, rank: int, is_entry: bool, root: int | bytes | None, outputs: int) -> bytes:
    found = {number: value for number, _, value in wire.fields(message)}
    opcode, left_out, added = found.get(_OPCODE), set[int](), b""
    if opcode == b"topk":
        left_out = {_OPCODE, _K, _LARGEST}
        added = (
            wire.field(_OPCODE, b"custom-call") + wire.field(_TARGET, TOP_K.encode())
            + wire.field(_CONFIG, str(int(found[_K])).encode())
        )  # fmt: skip
    elif opcode == b"replica-id":
        left_out = {_OPCODE}
        literal = wire.field(1, found[_SHAPE]) + wire.field(6, wire.varint(rank))  # LiteralProto: shape, u32s
        added = wire.field(_OPCODE, b"constant") + wire.field(_LITERAL, literal)
    elif opcode == b"parameter" and is_entry:
        left_out = {_ATTRIBUTES}
        added = _attribute("neff_input_names", f"input{int(found.get(_PARAMETER, 0))}")
    elif is_entry and found.get(ID) == root:
        left_out = {_ATTRIBUTES}
        added = _attribute("neff_output_names", ",".join(f"output{i}" for i in range(outputs)))
    kept = b"".join(wire.field(n, v, k) for n, k, v in wire.fields(message) if n not in left_out)
    return kept + added


def _attribute(name: str, value: str) -> bytes:
    return wire.field(_ATTRIBUTES, wire.field(1, wire.field(1, name.encode()) + wire.field(2, value.encode())))


def _must(config: bytes) -> bytes:
    """HloInputOutputAliasProto whose entries (1) are of kind (4) MUST_ALIAS."""
    return b"".join(
        wire.field(
            1, b"".join(wire.field(n, _MUST if n == 4 else v, k) for n, k, v in wire.fields(wire.as_bytes(entry)))
        )
        for _, _, entry in wire.fields(config)
    )


SERVER, PREDECESSOR = "vllm-neuron", "nxd"
TEMPLATES = ("cpu-compile.sh",)
STRICT = "NEURON_LIBTORCH_DISABLE_GRAPH_CAPTURE_BACKEND=1\nVLLM_NEURON_DISABLE_WARMUP_COMPILE=1\n"


def host_files(plan: Plan, chip: str, framework: str | None) -> Mapping[str, str]:
    """Return the texts by file name."""
    if framework == "transformers-neuronx":
        logger().warning(
            "VLLM_NEURON_FRAMEWORK=%s: no files are written for it, since it is no longer released", framework
        )
        return {}
    name = SERVER if framework is None else PREDECESSOR
    server = bucket_rules(name)
    length = plan.limits.max_model_len
    given = {"max_model_len": length, "max_num_seqs": plan.limits.max_num_seqs, "max_num_batched_tokens": length}
    try:
        limits = server.limits(given)
    except InputError as error:
        logger().warning("no bucket file for %s: %s", name, error)
        return {}
    found = exported(name, plan, limits)
    texts = dict(server_files(name, found))
    if found is None or name == PREDECESSOR:
        return texts
    values = {"chip": chip, "arguments": repr(json.dumps(keywords(found.arguments)))}
    return {**texts, "serve.env": STRICT, **rendered("llmc.compiler.targets.neuron", TEMPLATES, values)}


def keywords(arguments: Sequence[str]) -> dict[str, object]:
    """Convert a server's flags to keywords of vllm.LLM."""
    found: dict[str, object] = {}
    for argument in arguments:
        flag, _, value = argument.partition(" ")
        name = flag.removeprefix("--").replace("-", "_")
        if not value:
            found[name.removeprefix("no_")] = not name.startswith("no_")
            continue
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


class NeffCompiler(EachExecutable):
    """Compiles NEFFs for a chip."""

    executor: ClassVar[str] = "neuron"
    programs: ClassVar[tuple[str, ...]] = SLOT_PROGRAMS

    def __init__(self, chip: NeuronChip, settings: Settings) -> None:
        self._chip, self._settings = chip, settings

    def lacks(self) -> str:
        try:
            neuronx_cc.require()
        except DeviceError as e:
            return str(e)
        here = NeuronExecutor.description.host().get("target")
        if here is None:
            return (
                f"this host has no NeuronCores; to compile for {self._chip.name} anyway, set "
                f"NEURON_PLATFORM_TARGET_OVERRIDE={self._chip.name}"
            )
        if here != self._chip.name:
            return (
                f"this host is for {here}, the bundle for {self._chip.name}; compile it again with --device "
                f"neuron:{here}, or compile it on such a host"
            )
        return ""

    def host(self) -> Mapping[str, str]:
        """The chip: a NEFF runs with any Neuron runtime that is not older than its compiler."""
        return {"target": self._chip.name}

    def pins(self, bundle: Bundle) -> Mapping[str, Value]:
        arguments = neuronx_cc.arguments(self._chip, self._lnc(bundle))
        return {"neuronx_cc": neuronx_cc.require().version, "neuronx_cc_arguments": " ".join(arguments)}

    def compile(self, bundle: Bundle, executable: Executable) -> bytes:
        return self._neffs(bundle, executable.blob, str(executable))

    def compile_program(self, bundle: Bundle, name: str) -> bytes:
        return self._neffs(bundle, name, name)

    def host_files(self, bundle: Path, plan: Plan) -> Mapping[str, str]:
        return host_files(plan, self._chip.name, self._settings.neuron_framework)

    def _lnc(self, bundle: Bundle) -> int:
        requested = NeuronConfig.parse(str(bundle.manifest.options.get(NEURON_CONFIG.name, ""))).lnc
        return self._chip.lnc(self._settings.neuron_cores if requested is None else requested)

    def _neffs(self, bundle: Bundle, file: str, name: str) -> bytes:
        portable = NeuronFile.parse(bundle.files.read(file), f"{bundle.path}: {name}")
        if (built_for := portable.header.topology) != self._chip.name:
            raise CompileError(
                f"{bundle.path}: its modules are for {built_for}, this host is for {self._chip.name}; compile it again "
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
        built = {"target": self._chip.name, "lnc": lnc, "compiler": compiler.version}
        return write_native(portable, neffs, built)
