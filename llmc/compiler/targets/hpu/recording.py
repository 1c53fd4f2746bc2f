"""Opens a bundle on a Gaudi device in a process of its own, and records the recipes that the compiler writes.

    python -m llmc.compiler.targets.hpu.recording BUNDLE

Runs every bucket twice, as `llmc warmup` does, with the KV cache that the bundle pins. A new process reads
PT_HPU_RECIPE_CACHE_CONFIG before the bridge is imported, and releases the device when it ends. It prints each
executable's number in the manifest when its bucket first ran. The last line on stderr is the error, if any.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from llmc.artifacts.bundle.reader import BundleFiles
from llmc.buckets.capture.options import CaptureOptions
from llmc.errors import CompileError, DeviceError, LlmcError
from llmc.runtime.bundle import Bundle
from llmc.runtime.startup.capturing import CaptureChoice, Capturing
from llmc.runtime.startup.opening import EngineOptions, open_executor
from llmc.runtime.startup.outcome import WarmUpOutcome
from llmc.runtime.startup.warming import Warmed, Warming
from llmc.settings import Settings


def record(bundle: Bundle, on_progress: Callable[[int], None]) -> None:
    """Warm the bundle up, and call `on_progress` with the number of each executable that ran.

    Raises DeviceError without a device, CompileError for a bucket that does not run, and the errors of opening.
    """
    numbers = {(e.phase, e.batch, e.query, e.context): i for i, e in enumerate(bundle.manifest.executables)}
    reported: set[int] = set()

    def ran(found: object, _done: int, _of: int) -> None:
        if not isinstance(found, Warmed) or found.error is not None:
            return
        b = found.bucket
        number = numbers[b.phase, b.batch, b.query, b.context]
        if number not in reported:
            reported.add(number)
            on_progress(number)

    executor = open_executor(bundle, EngineOptions())
    try:
        if executor.capabilities.in_place_of:
            raise DeviceError(f"{bundle.path}: this process found no {executor.capabilities.in_place_of} device")
        choice = CaptureChoice(CaptureOptions.of(bundle.settings))
        capturing = Capturing.of(executor, bundle.plan, choice)
        outcome = WarmUpOutcome(executor, Warming(executor, bundle.plan), capturing)
        outcome.run(ran)
    finally:
        executor.close()
    if outcome.interrupted:
        raise CompileError("it was interrupted")
    if outcome.failed:
        bucket, error = next(iter(outcome.failed.items()))
        raise CompileError(f"{len(outcome.failed)} buckets do not run on this device, first {bucket}: {error}")


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return the exit code."""
    try:
        bundle = Bundle(BundleFiles.open(Path(arguments[0])), Settings.from_environment())
        record(bundle, lambda number: print(number, flush=True))
    except LlmcError as error:
        print(str(error).replace("\n", " "), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
