"""XLA's autotuner on a host with the GPU: it compiles each portable program, timing every candidate of every matmul.

XLA writes all results that its process knows after each compilation (xla_gpu_dump_autotune_results_to). It reads those
of earlier runs once, before the first (xla_gpu_load_autotune_results_from), and does not time them again. Level 4,
XLA's default, checks each candidate's output against the others' (openxla/xla, xla/debug_options_flags.cc; flag
descriptions in jax-cuda13-pjrt 0.10.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.artifacts.temporaries import temporary_folder
from llmc.compiler.targets.cuda.tuning import built_for, parse, serialise
from llmc.compiler.targets.tuning import Results, Tuner
from llmc.errors import CompileError, DeviceError, LlmcError
from llmc.platforms import how_to_install
from llmc.runtime.executors.envelope import ExecutableFile
from llmc.runtime.executors.xla.client import toolchain_version
from llmc.runtime.executors.xla.envelope import FORM, StepHeader
from llmc.runtime.executors.xla.hosts import HOSTS
from llmc.runtime.executors.xla.programs import compile_exported
from llmc.runtime.nvidia import gpus

if TYPE_CHECKING:
    from llmc.artifacts.bundle.manifest import Executable
    from llmc.runtime.bundle import Bundle

LEVEL = 4


class CudaTuner(Tuner):
    """Runs XLA's autotuner on a host that has the GPU."""

    def lacks(self) -> str:
        from llmc.compiler.targets.cuda.toolkit import EXTRA, PLUGIN, versions

        try:
            versions()
        except DeviceError:
            return f"XLA's plug-in; {how_to_install(PLUGIN, EXTRA)}"
        return "" if gpus() else "an NVIDIA GPU; run llmc tune on its host, and copy the file (-o) here"

    def tune(self, bundle: Bundle, executable: Executable, known: Results | None) -> Results | None:
        source = f"{bundle.path}: {executable}"
        parsed = ExecutableFile.parse(bundle.files.read(executable.blob), source, FORM)
        header = StepHeader.parse(parsed.header, source)
        devices = HOSTS["cuda"].open(header.devices, 1)
        entries = parse(self._dumped(parsed.section("export"), header, devices, source, known))
        if not entries:
            return known
        device = entries[0].device
        here = built_for(device, str(devices[0].device_kind), toolchain_version("cuda"))
        results = Results(here, {entry.hlo: entry.result for entry in entries if entry.device == device})
        return results if known is None else known.merged(results)

    def _dumped(
        self, blob: memoryview, header: StepHeader, devices: Sequence[Any], source: str, known: Results | None
    ) -> bytes:
        """The results that XLA wrote while compiling a portable program."""
        with temporary_folder("tune") as folder:
            dump = Path(folder, "found.pb")
            options: dict[str, str | int | bool] = {
                "xla_gpu_autotune_level": LEVEL,
                "xla_gpu_dump_autotune_results_to": str(dump),
            }
            if known is not None:
                before = Path(folder, "known.pb")
                before.write_bytes(serialise(known.found, known.built_for.get("device", "")))
                options["xla_gpu_load_autotune_results_from"] = str(before)
            try:
                compile_exported(blob, header, devices, source, options)
            except LlmcError:
                raise
            except Exception as e:
                raise CompileError(f"{source}: XLA cannot compile it for {devices[0].device_kind}: {e}") from e
            if not dump.exists():
                raise CompileError(
                    f"{source}: XLA wrote no autotuning results; does XLA_FLAGS turn autotuning off on this host?"
                )
            return dump.read_bytes()
