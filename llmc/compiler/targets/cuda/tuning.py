"""`--tuning`: how a compile for a described GPU selects its matmul kernels.

    tuning = "model" | "none" | "auto" | FILE | digest

FILE is the output of `llmc tune`. Keys and manifests hold its digest in place of the path. The store keeps the content,
where a later compile with the digest finds it. "auto" takes all results in the store that hold for the GPU. Matmuls
without a result use XLA's cost model, except with "none".

Without help, XLA takes the first entry of a list: with jax 0.10.2 and an H100, tiles of 16 × 8, steps of 16 along the
sum, one stage and two warps for every matmul size (GetDefaultConfig in xla/backends/gpu/autotuner/triton.cc, 0c1ab89;
observed). Results of a GPU are looked up first; XLA's cost model orders the list (`OptimizeConfigsWithCostModel`,
xla/backends/gpu/autotuner/triton/cost_model_config_optimization.cc, 80c095f). Neither leaves a path in the executable:
results are passed under a name that XLA resolves with an environment variable (tsl::io::ResolveTestPrefixes), the model
by XLA_FLAGS, since PJRT takes no map options. XLA reads both once a process, so each executable gets its own process.

XLA writes its autotuning results on a host with a GPU, and reads them where there is none:

    AutotuneResults = 1 version, 4 results*          Entry = 1 device, 2 hlo, 3 result, 4 version

XLA's lookup key has two texts: `hlo`, the canonical form of the fused computation, and `device`, the GPU's capability,
multiprocessors, clock, bandwidth, L2 cache and cuDNN version. Clocks and cuDNN of a real GPU differ a little from the
described one's. llmc therefore stores results without `device`, refuses those of another GPU model (`require_fits`),
and writes the described GPU's text for XLA.

Sources: openxla/xla, xla/autotune_results.proto as embedded in jax-cuda13-pjrt 0.10.2; AutotuneCacheKey
(xla/service/gpu/autotuning/autotune_cache_key.cc, 19ea682); LoadAutotuneResults with the version that it accepts
(autotuner_cache.cc, 09cc560). Observed with 0.10.2, compiling for a described H100: results under these keys change a
matmul's tiles or select cuBLASLt. XLA ignores an unknown key. It refuses a truncated file, a duplicate key or another
version with INVALID_ARGUMENT or INTERNAL.
"""

from __future__ import annotations

import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from llmc.artifacts.digest import digest_bytes, is_digest
from llmc.artifacts.temporaries import temporary_folder
from llmc.compiler.options import Option
from llmc.compiler.targets.tuning import RESULTS, STAGE, Results, parse_results, read_bytes, read_results, write_results
from llmc.errors import ArtifactError, InputError
from llmc.runtime.executors.envelope import ExecutableFile, write_envelope
from llmc.runtime.executors.xla import wire
from llmc.runtime.executors.xla.client import toolchain_version
from llmc.runtime.executors.xla.envelope import FORM
from llmc.settings import variables

if TYPE_CHECKING:
    from llmc.artifacts.store.workspace import Workspace
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.stages import Stages
    from llmc.compiler.targets.base import Lowered

VERSION = 3
"""The only version of AutotuneResults that XLA reads (kVersion)."""

BANDWIDTH_SHARE = 0.1
"""Largest relative difference between a real GPU's bandwidth, which XLA computes from clock and bus, and the described
one's. The nearest GPU with as many multiprocessors has 1.4 times the bandwidth (H100 and H200).
"""

_DEVICE = re.compile(
    r"CUDA: (?P<capability>\d+\.\d+), Cores: (?P<cores>\d+), GPU clock: [\d.]+ GHz, "
    r"Memory bandwidth: (?P<bandwidth>\d{1,9}) GB/s, L2 cache: (?P<l2>[\d.]+) MB, DNN version: (?P<cudnn>[\d.]+)"
)


class AutotuneEntry(NamedTuple):
    """One XLA result; `result` is a serialised AutotuneResult."""

    device: str
    hlo: str
    result: bytes


def parse(data: bytes) -> list[AutotuneEntry]:
    """Parse serialised AutotuneResults. Raises ArtifactError for anything else."""
    try:
        members = list(wire.fields(data))
        if not any((number, value) == (1, VERSION) for number, _, value in members):
            raise ArtifactError(f"XLA's autotuning results are not of version {VERSION}, the one that llmc knows")
        return [_entry(wire.as_bytes(value)) for number, _, value in members if number == 4]
    except (IndexError, KeyError, TypeError, ValueError) as e:
        raise ArtifactError(f"these are not autotuning results of XLA ({type(e).__name__}: {e})") from e


def _entry(message: bytes) -> AutotuneEntry:
    members = {number: value for number, _, value in wire.fields(message)}
    device, hlo, result = (wire.as_bytes(members[number]) for number in (1, 2, 3))
    return AutotuneEntry(device.decode(), hlo.decode(), result)


def serialise(found: Mapping[str, bytes], device: str) -> bytes:
    """Serialise AutotuneResults for XLA's device text `device`; equal arguments give equal bytes."""
    entries = (
        wire.field(1, device.encode()) + wire.field(2, hlo.encode()) + wire.field(3, result)
        for hlo, result in sorted(found.items())
    )
    return wire.field(1, VERSION) + b"".join(wire.field(4, entry) for entry in entries)


def device_text(config: str) -> str:
    """Return XLA's key text for the target configuration `config` (GpuTargetConfigProto as text)."""

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
    given = dict(re.findall(r"(\w+): (\d+)", message[1])) if message else {}
    return ".".join(given.get(name, "0") for name in names)


def built_for(device: str, gpu: str, compiler: str) -> dict[str, str]:
    """Return what results hold for: XLA's device text, the GPU's product name, XLA's version."""
    return {"gpu": gpu, "device": device, "compiler": compiler}


def require_fits(results: Results, device: str, compiler: str, source: str) -> None:
    """Raise ArtifactError, naming every difference, unless `results` hold for `device` and `compiler`."""
    given, wanted = _read(results.built_for.get("device", "")), _read(device)
    built_by = results.built_for.get("compiler", "none")
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
    if built_by != compiler:
        differ.append(f"jax, jaxlib and plug-in {built_by}, not {compiler}")
    if differ:
        raise ArtifactError(
            f"{source}: results of {results.built_for.get('gpu', 'a GPU')} that do not hold here: {'; '.join(differ)}"
            "; run llmc tune on such a GPU with these versions, or compile with --tuning model"
        )


def _read(device: str) -> dict[str, str]:
    """The members of XLA's device text; {} for another text."""
    found = _DEVICE.fullmatch(device)
    return found.groupdict() if found else {}


MODEL, NONE, AUTO = "model", "none", "auto"
WORDS = (MODEL, NONE, AUTO)
TUNING = Option(
    "tuning", str, MODEL,
    "How matmul kernels are selected: XLA's cost model (model), results of llmc tune in a file or in the store "
    "(auto) and for other matmuls the model, or XLA's first candidate (none).",
    metavar="FILE|auto|model|none",
)  # fmt: skip
INPUT = "tuning"
"""Name of the results among the compile inputs, and of their digest among a key's components."""


class Tuning:
    """The tuning choice of one target, for the GPU with target configuration `config`."""

    def __init__(self, config: str) -> None:
        self.device = device_text(config)
        self._given: dict[str, bytes] = {}

    def configured(self, options: CompileOptions) -> CompileOptions:
        """Replace a file name by its digest. Raises InputError and ArtifactError."""
        value = TUNING.of(options)
        if value in WORDS or is_digest(value):
            return options
        data = read_bytes(Path(value))
        self._require_fits(parse_results(data, value), value)
        digest = digest_bytes(data)
        self._given[digest] = data
        return options.changed(**{TUNING.name: digest})

    def lowered(self, stages: Stages, lowered: Lowered, options: CompileOptions) -> Lowered:
        """Add the results that a compile uses, if any. Raises InputError where the store no longer has them."""
        value = TUNING.of(options)
        if value in (MODEL, NONE):
            return lowered
        data = self._in_store(stages) if value == AUTO else self._given.get(value)
        if value == AUTO and data is None:
            return lowered
        digest = value if data is None else digest_bytes(data)

        def build(workspace: Workspace) -> Mapping[str, Any]:
            if data is None:
                raise InputError(f"{TUNING.flag}: the store has no tuning results {digest[:19]}; give their file again")
            return {RESULTS: workspace.put_bytes(data)}

        path = stages.path(stages.run(STAGE, {"results": digest}, build).outputs[RESULTS])
        self._require_fits(read_results(path), f"tuning results {digest[:19]}")
        inputs, components = {**lowered.inputs, INPUT: path}, {**lowered.components, INPUT: digest}
        return replace(lowered, inputs=inputs, components=components)

    def _in_store(self, stages: Stages) -> bytes | None:
        """All results that hold for the GPU, as one file; the newer of two for one matmul."""
        found: dict[str, bytes] = {}
        built_for: Mapping[str, str] = {}
        for entry in sorted(stages.store.entries(STAGE), key=lambda entry: entry.created):
            blob = entry.outputs.get(RESULTS)
            try:
                if blob is None:
                    continue
                results = parse_results(stages.store.get_bytes(blob.digest), "the store")
                self._require_fits(results, "the store")
            except ArtifactError:
                continue
            found |= results.found
            built_for = results.built_for
        return write_results(Results(built_for, found)) if found else None

    def _require_fits(self, results: Results, source: str) -> None:
        require_fits(results, self.device, toolchain_version("cuda"), source)

    def for_xla(self, lowered: Lowered) -> bytes | None:
        """Return the results in XLA's format; None without any."""
        path = lowered.inputs.get(INPUT)
        return None if path is None else serialise(read_results(path).found, self.device)


def summary(looked: Looked | None, lowered: Lowered, options: CompileOptions) -> dict[str, Any]:
    """Summarise for the manifest: kernel selection, results digest, and how many matmuls of all executables have a
    result.
    """
    value = TUNING.of(options)
    found: dict[str, Any] = {"by": value if value in WORDS else "results"}
    if INPUT in lowered.components:
        found["results"] = lowered.components[INPUT]
    return found if looked is None else {**found, "tuned": looked.tuned, "of": looked.matmuls}


def reported(found: Mapping[str, Any]) -> list[str]:
    """Format `summary` as a line for people."""
    if not found:
        return []
    others = "the first of XLA's list" if found["by"] == NONE else "XLA's cost model"
    if "of" not in found:
        return [f"matmuls: kernels by {others}"]
    rest = found["of"] - found["tuned"]
    tuned = f"{found['tuned']} of {found['of']} tuned on a GPU"
    return [f"matmuls: {tuned}" + (f", kernels of {rest} by {others}" if rest else "")]


RESULTS_NAME = "llmc-tuning.pb"
FLAGS = "XLA_FLAGS"
_FOLDER = "TEST_UNDECLARED_OUTPUTS_DIR"
LOAD_RESULTS: Mapping[str, str] = {"xla_gpu_load_autotune_results_from": f"{_FOLDER}/{RESULTS_NAME}"}
COST_MODEL = "--xla_gpu_experimental_cost_model_gemm_tiling_options=filter=0"
"""Selects the configuration of the default list that the cost model ranks fastest."""

_REPORTED = {"TF_CPP_VMODULE": "autotuner_cache=1", "TF_CPP_MIN_LOG_LEVEL": "0"}
"""Makes XLA log a line for each matmul that it looks up (AutotunerCache::TryFindInCache)."""

_MEMBER = "products"
_LINE = re.compile(r"I\d{4} ")
_HIT = re.compile(r"\] (In-memory|File-based) autotune cache hit")
_MISS = re.compile(r"\] Autotune cache miss")


@dataclass
class Looked:
    """How many matmuls of one executable XLA looked up, identical ones counted once, and how many it found."""

    matmuls: int = 0
    tuned: int = 0


def noted(data: bytes, looked: Looked) -> bytes:
    """Add the header member "products", {"of": …, "tuned": …}, to executable file `data`, if XLA reported any."""
    if not looked.matmuls:
        return data
    parsed = ExecutableFile.parse(data, "an executable", FORM)
    members = {**parsed.header, _MEMBER: {"of": looked.matmuls, "tuned": looked.tuned}}
    return write_envelope(members, {name: bytes(parsed.section(name)) for name in parsed.names}, FORM)


def noted_in(files: Sequence[Path]) -> Looked | None:
    """Sum the matmul counts in the headers of executable files; None where no header has any."""
    headers = [ExecutableFile.parse(file.read_bytes(), str(file), FORM).header for file in files]
    found = [header[_MEMBER] for header in headers if _MEMBER in header]
    return Looked(sum(each["of"] for each in found), sum(each["tuned"] for each in found)) if found else None


@contextmanager
def choosing(results: bytes | None, *, model: bool) -> Iterator[tuple[Mapping[str, str], Looked]]:
    """Provide XLA's compile options, and the look-ups it reports, which are complete after the block.

    `results` are AutotuneResults, or None. With `model`, the cost model selects kernels for matmuls without a result.
    """
    looked = Looked()
    with temporary_folder("products") as folder:
        if results is not None:
            (Path(folder) / RESULTS_NAME).write_bytes(results)
        flags = " ".join(filter(None, (variables((FLAGS,)).get(FLAGS), COST_MODEL if model else "")))
        with _environment({**_REPORTED, _FOLDER: str(folder), FLAGS: flags}), _counting(looked):
            yield (LOAD_RESULTS if results is not None else {}), looked


@contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    before = variables(wanted)
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted:
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _counting(looked: Looked) -> Iterator[None]:
    """Capture C++ stderr, count look-up lines, and pass the others on."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as taken:
        os.dup2(taken.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            taken.seek(0)
            for line in taken.read().decode(errors="replace").splitlines(keepends=True):
                looked.tuned += bool(_HIT.search(line))
                looked.matmuls += bool(_HIT.search(line) or _MISS.search(line))
                if line.strip() and not _LINE.match(line):
                    os.write(2, line.encode())
