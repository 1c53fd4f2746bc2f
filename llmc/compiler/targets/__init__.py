"""Targets: one module per device that llmc compiles for, imported on first use, and the options that they declare.

Other packages register targets in the entry-point group "llmc.targets" (docs/adding.md).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from llmc.compiler.options import SHARED, flag_of
from llmc.errors import InputError, LlmcError, UnknownNameError
from llmc.registry import Registry
from llmc.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from llmc.compiler.options import Option, OptionValue
    from llmc.compiler.targets.base import Target

TARGETS = Registry(
    "device",
    "llmc.targets",
    {
        "cpu": "llmc.compiler.targets.cpu:CpuTarget",
        "onnxruntime": "llmc.compiler.targets.onnxruntime.target:OnnxRuntimeTarget",
        "openvino": "llmc.compiler.targets.openvino.target:OpenVinoTarget",
        "hpu": "llmc.compiler.targets.hpu.target:HpuTarget",
        "inductor": "llmc.compiler.targets.inductor.target:InductorTarget",
        "xla": "llmc.compiler.targets.xla.target:XlaCpuTarget",
        "neuron": "llmc.compiler.targets.neuron.target:NeuronTarget",
        "tpu": "llmc.compiler.targets.xla.tpu:TpuTarget",
        "cuda": "llmc.compiler.targets.cuda.target:CudaTarget",
        "lpu": "llmc.compiler.targets.lpu:LpuTarget",
        "fake": "llmc.compiler.targets.fake:FakeTarget",
    },
    untold=("fake",),
)


class Declared(NamedTuple):
    """An option with the merged choices of all devices that take it, and those devices, sorted."""

    option: Option[Any]
    devices: tuple[str, ...]


def devices() -> list[str]:
    """Return the names that --device takes."""
    return TARGETS.names()


def offered() -> list[str]:
    """Return the devices that help texts list."""
    return TARGETS.reported()


def require_device(device: str) -> None:
    """Raise UnknownNameError, which lists the offered devices, unless the name before the colon is one."""
    if device.partition(":")[0] not in devices():
        raise UnknownNameError("device", device, offered(), other_names())


def _importable(named: Iterable[str]) -> Iterator[tuple[str, type[Any]]]:
    """Skips targets of other packages that cannot be imported."""
    for device in named:
        try:
            yield device, TARGETS.get(device)
        except (ImportError, LlmcError):
            continue


def other_names() -> dict[str, str]:
    """Return other names of devices → their names."""
    return {called: device for device, target in _importable(devices()) for called in target.description.also_called}


def selecting_adapters() -> list[str]:
    """Return the devices whose graphs take per-row LoRA adapters, for people."""
    return [device for device, target in _importable(offered()) if target.description.selects_adapters]


def declared() -> dict[str, Declared]:
    """Return the options that targets declare, by name. Raises InputError where two declare a name differently."""
    found: dict[str, Declared] = {}
    for device, target in _importable(devices()):
        for option in target.description.options:
            before = found.get(option.name)
            if option.name in SHARED:
                raise InputError(f"device {device} declares {option.flag}, which every device takes")
            if before is not None and (before.option.kind, before.option.is_size) != (option.kind, option.is_size):
                raise InputError(f"devices {before.devices[0]} and {device} declare {option.flag} of different types")
            merged = option if before is None else _merged(before.option, option, device)
            found[option.name] = Declared(merged, (*(before.devices if before else ()), device))
    return found


def _merged(one: Option[Any], other: Option[Any], device: str) -> Option[Any]:
    """With the choices of both; the help adds the other meaning under `device` if the help texts differ."""
    choices = tuple(dict.fromkeys((*one.choices, *other.choices)))
    return replace(
        one,
        choices=choices,
        metavar=one.metavar if choices == one.choices else "|".join(choices),
        help=one.help if other.help in one.help else f"{one.help} {device}: {other.help}",
    )


def check_own(option: Option[Any], value: OptionValue, device: str) -> None:
    """Raise InputError for a value that the device's option never takes, naming the devices that take it."""
    if option.choices and value not in option.choices:
        takers = [name for name, target in _importable(offered()) if _takes(target, option.name, value)]
        if takers:
            raise InputError(
                f"{option.flag} {value} is for {', '.join(takers)}; {device} takes {', '.join(option.choices)}"
            )
    option.check(value)


def _takes(target: type[Any], name: str, value: OptionValue) -> bool:
    return any(option.name == name and value in option.choices for option in target.description.options)


def refuse_foreign(name: str, value: OptionValue, device: str) -> None:
    """Raise InputError for an option of other devices, unless `value` means "not given", or an unknown one."""
    known = declared()
    if name not in known:
        raise UnknownNameError("option", name, {*SHARED, *known})
    known[name].option.check(value)
    if value != known[name].option.default:
        raise InputError(f"{flag_of(name)} is for {', '.join(known[name].devices)}; leave it out for {device}")


def open_target(device: str, settings: Settings | None = None) -> Target:
    """Open the target for `device`; `settings` default to the environment's. Raises UnknownNameError, InputError."""
    require_device(device)
    name, _, detail = device.partition(":")
    cls: type[Target] = TARGETS.get(name)
    settings = settings or Settings.from_environment()
    target = cls.of(detail, settings)
    target.settings = settings
    return target
