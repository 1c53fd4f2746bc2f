"""XLA's autotuning results of a card: as XLA writes them on a host that has one, and reads them where there is none.

    AutotuneResults = 1 version, 4 results*          Entry = 1 device, 2 hlo, 3 result, 4 version

XLA looks a product up by text: `hlo`, the computation that was fused with it in a canonical form, and `device`, the
card's capability, multiprocessors, clock, bandwidth, L2 cache and version of cuDNN as text. Clocks and cuDNN of a real
card differ a little from those of the described one, so llmc keeps the results without the second text, refuses those
of another sort of card (`require_fits`), and writes the described card's text for XLA.

Sources: openxla/xla, xla/autotune_results.proto as embedded in jax-cuda13-pjrt 0.10.2; AutotuneCacheKey
(xla/service/gpu/autotuning/autotune_cache_key.cc, 19ea682); LoadAutotuneResults with the version that it accepts
(autotuner_cache.cc, 09cc560). Seen with 0.10.2, compiling for a described H100: results under these keys change the
tiles of a product or make cuBLASLt compute it; an unknown key is passed over; a file of another version, with a key
twice or cut off is refused with INVALID_ARGUMENT or INTERNAL.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from llmc.compiler.targets.tuning import Results
from llmc.errors import ArtifactError
from llmc.runtime.executors.xla import wire

VERSION = 3
"""Of AutotuneResults, the only one that XLA reads (kVersion)."""

BANDWIDTH_SHARE = 0.1
"""How far a real card's bandwidth, which XLA computes of its clock and bus, may lie from the described one's. The next
sort of card with as many multiprocessors is 1.4 times as fast (H100 and H200)."""

_DEVICE = re.compile(
    r"CUDA: (?P<capability>\d+\.\d+), Cores: (?P<cores>\d+), GPU clock: [\d.]+ GHz, "
    r"Memory bandwidth: (?P<bandwidth>\d{1,9}) GB/s, L2 cache: (?P<l2>[\d.]+) MB, DNN version: (?P<cudnn>[\d.]+)"
)


class Entry(NamedTuple):
    """One result, as XLA has it: `result` is the bytes of an AutotuneResult."""

    device: str
    hlo: str
    result: bytes


def parse(data: bytes) -> list[Entry]:
    """The entries of serialised AutotuneResults. Raises ArtifactError for what XLA did not write."""
    try:
        members = list(wire.fields(data))
        if not any((number, value) == (1, VERSION) for number, _, value in members):
            raise ArtifactError(f"XLA's autotuning results are not of version {VERSION}, the one that llmc knows")
        return [_entry(wire.as_bytes(value)) for number, _, value in members if number == 4]
    except (IndexError, KeyError, TypeError, ValueError) as e:
        raise ArtifactError(f"these are no autotuning results of XLA's ({type(e).__name__}: {e})") from e


def _entry(message: bytes) -> Entry:
    members = {number: value for number, _, value in wire.fields(message)}
    device, hlo, result = (wire.as_bytes(members[number]) for number in (1, 2, 3))
    return Entry(device.decode(), hlo.decode(), result)


def serialise(found: Mapping[str, bytes], device: str) -> bytes:
    """AutotuneResults for the card that XLA names `device`; equal arguments give equal bytes."""
    entries = (
        wire.field(1, device.encode()) + wire.field(2, hlo.encode()) + wire.field(3, result)
        for hlo, result in sorted(found.items())
    )
    return wire.field(1, VERSION) + b"".join(wire.field(4, entry) for entry in entries)


def device_text(config: str) -> str:
    """How XLA names the card of the target configuration `config` (GpuTargetConfigProto as text) in its keys."""

    def of(name: str, default: str = "") -> str:
        found = re.search(rf"\b{name}: (\S+)", config)
        return found[1] if found else default

    capability = re.search(r"cuda_compute_capability \{([^}]*)\}", config)
    cudnn = re.search(r"dnn_version_info \{([^}]*)\}", config)
    bandwidth = math.floor(float(of("memory_bandwidth")) / 1e9 + 0.5)
    return (
        f"CUDA: {_numbers(capability, 'major', 'minor')}, Cores: {of('core_count')}, "
        f"GPU clock: {float(of('clock_rate_ghz')):g} GHz, Memory bandwidth: {bandwidth:g} GB/s, "
        f"L2 cache: {int(of('l2_cache_size')) / (1 << 20):g} MB, "
        f"DNN version: {_numbers(cudnn, 'major', 'minor', 'patch')}"
    )


def _numbers(message: re.Match[str] | None, *names: str) -> str:
    """The message's numbers, 0 where one is left out, between points."""
    given = dict(re.findall(r"(\w+): (\d+)", message[1])) if message else {}
    return ".".join(given.get(name, "0") for name in names)


def made_for(device: str, card: str, compiler: str) -> dict[str, str]:
    """What results hold for: `device` is XLA's text for the card, `card` its product, `compiler` XLA's version."""
    return {"card": card, "device": device, "compiler": compiler}


def require_fits(results: Results, device: str, compiler: str, source: str) -> None:
    """Raise ArtifactError, with all that differs, unless `results` hold for the card that XLA names `device` and for
    this compiler."""
    given, wanted = _read(results.made_for.get("device", "")), _read(device)
    made_by = results.made_for.get("compiler", "none")
    differ = [
        f"{what} {given.get(name, 'none')}, not {wanted[name]}"
        for name, what in (("capability", "compute capability"), ("cores", "multiprocessors"), ("l2", "MB of L2 cache"))
        if given.get(name) != wanted[name]
    ]
    if abs(float(given.get("bandwidth", 0)) - float(wanted["bandwidth"])) > BANDWIDTH_SHARE * float(
        wanted["bandwidth"]
    ):
        differ.append(f"GB/s {given.get('bandwidth', 'none')}, not {wanted['bandwidth']}")
    if given.get("cudnn", "").partition(".")[0] != wanted["cudnn"].partition(".")[0]:
        differ.append(f"cuDNN {given.get('cudnn', 'none')}, not {wanted['cudnn'].partition('.')[0]}")
    if made_by != compiler:
        differ.append(f"jax, jaxlib and plug-in {made_by}, not {compiler}")
    if differ:
        raise ArtifactError(
            f"{source}: results of {results.made_for.get('card', 'a card')} that do not hold here: {'; '.join(differ)}"
            "; run llmc tune on such a card with these versions, or compile with --tuning model"
        )


def _read(device: str) -> dict[str, str]:
    """XLA's text for a card, cut into its members; {} for another text."""
    found = _DEVICE.fullmatch(device)
    return found.groupdict() if found else {}
