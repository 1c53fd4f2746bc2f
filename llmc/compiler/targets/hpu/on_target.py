"""On-target compilation on a Gaudi host: every bucket is run, and the recipes of Gaudi's compiler join the bundle.

The programs stay unchanged. Recipes hold only for a pinned number of KV cache blocks, enough for as many whole
sequences as a server holds at once, and for dtype and tensor parallel size. A rerun after an interrupt finds the first
run's recipes in the same folder, and compiles the others.

    python -m llmc.compiler.targets.hpu.on_target BUNDLE

records in a process of its own, which reads PT_HPU_RECIPE_CACHE_CONFIG before the bridge is imported, and releases the
device when it ends. It runs every bucket twice, as `llmc warmup` does, with the KV cache that the bundle pins, and
prints each executable's number in the manifest when its bucket first ran. The last line on stderr is the error, if any.

`host_files` are written next to a bundle, for a Gaudi host:

    buckets.txt, environment, arguments, kubernetes-env.yaml   the plan for vllm-gaudi (`llmc plan export`)
    finish.sh, finish-job.yaml                                 compile the bundle there, and warm it up

If vllm-gaudi's rules leave nothing of a plan, only the last two are written, with a warning. The resource
habana.ai/gaudi is that of Intel's device plugin (docs.habana.ai, Intel Gaudi Base Operator DaemonSets, 2026).
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from llmc.artifacts.atomic_write import make_folder
from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.bundle.trust import RECIPES
from llmc.artifacts.bundle.writer import write_bundle
from llmc.artifacts.digest import Blob, digest_bytes, digest_file
from llmc.artifacts.key import Value, canonical_json
from llmc.artifacts.third_party.base import merge
from llmc.artifacts.third_party.contents import scan_tree
from llmc.buckets.capture.options import CaptureOptions
from llmc.compiler.targets.host_files import exported, rendered, server_files
from llmc.compiler.targets.on_target import OnExecutable, WholeBundle
from llmc.compiler.targets.workers import last_lines
from llmc.errors import CompileError, DeviceError, LlmcError
from llmc.integrations.vllm_gaudi.cache import VARIABLE, GaudiCache
from llmc.runtime.bundle import Bundle
from llmc.runtime.executors.hpu.recipes import KV_BLOCKS, Recipes, local_folder
from llmc.runtime.startup.capturing import CaptureChoice, Capturing
from llmc.runtime.startup.opening import EngineOptions, open_executor
from llmc.runtime.startup.outcome import WarmUpOutcome
from llmc.runtime.startup.warming import Warmed, Warming
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.buckets.plan import Plan

SERVER = "vllm-gaudi"
TEMPLATES = ("finish.sh", "finish-job.yaml")
LONGEST_NAME = 63
"""The most characters of a Kubernetes name (RFC 1123 label)."""


def host_files(bundle: Path, plan: Plan) -> Mapping[str, str]:
    """Return the texts by file name."""
    return {**server_files(SERVER, exported(SERVER, plan)), **_jobs(bundle)}


def _jobs(bundle: Path) -> Mapping[str, str]:
    location = bundle.absolute()
    label = re.sub(r"[^a-z0-9]+", "-", f"finish-{location.name}".lower()).strip("-")
    values = {
        "bundle": shlex.quote(str(location)),
        "mounted": json.dumps(f"/bundles/{location.name}"),
        "name": label[:LONGEST_NAME].rstrip("-"),
    }
    return rendered("llmc.compiler.targets.hpu", TEMPLATES, values)


RECORDING = "llmc.compiler.targets.hpu.on_target"
ROOM_MIB = 1 << 20
"""The bridge deletes the oldest recipes of a larger folder; this keeps all of one recording."""

INSTALL = "install Intel's Gaudi software (docs.habana.ai, Installation), and llmc in its Python environment"
FLUSH_SECONDS = 30.0
"""How long an interrupted recording may take to write its recipes."""


_log = logging.getLogger("llmc")


class RecipeCompiler(WholeBundle):
    """Compiles bundles on a Gaudi host."""

    executor: ClassVar[str] = "hpu"

    def lacks(self) -> str:
        if find_spec("habana_frameworks") is None:
            return f"habana_frameworks.torch is not installed; {INSTALL}"
        return "" if self.host() else "this host has no Gaudi device that its driver lists, or no habana-torch-plugin"

    def pins(self, bundle: Bundle) -> Mapping[str, Value]:
        plan = bundle.plan
        sequences = max(plan.limits.max_num_seqs, *(b.batch for b in plan.buckets)) + EngineOptions().prefix_slots
        capacity = max(plan.limits.max_model_len, *(b.context + b.query for b in plan.buckets))
        blocks = -(-sequences * capacity // plan.limits.block_size)
        return {KV_BLOCKS: blocks, "dtype": str(bundle.manifest.options.get("dtype")), "tensor_parallel": 1}

    def compile(
        self, bundle: Bundle, pins: Mapping[str, Value], folder: Path, reported: OnExecutable
    ) -> Mapping[str, Path]:
        """The cache folder outlives an interrupt for the next run."""
        manifest = bundle.manifest
        draft = manifest.changed(options={**manifest.options, **pins})
        write_bundle(folder / "draft", draft, {digest: bundle.files.path(digest) for digest in draft.blobs})
        identity = digest_bytes(canonical_json([draft.digest, dict(self.host())]))
        cache = local_folder(bundle.settings, f"recording-{identity[7:23]}")
        make_folder(cache)
        self._run(folder / "draft", cache, bundle, reported)
        return self._left(cache, folder)

    def host_files(self, bundle: Path, plan: Plan) -> Mapping[str, str]:
        return host_files(bundle, plan)

    def _run(self, draft: Path, cache: Path, bundle: Bundle, reported: OnExecutable) -> None:
        """In a process of its own, which does not outlive this call."""
        log = cache.with_suffix(".log")
        environment = {**os.environ, VARIABLE: f"{cache}/,false,{ROOM_MIB}"}
        with log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", RECORDING, str(draft)], stdout=subprocess.PIPE, stderr=errors, env=environment,
                text=True,
            )  # fmt: skip
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    if line.strip().isdecimal():
                        reported(bundle.manifest.executables[int(line)])
                code = process.wait()
            finally:
                _end(process)
        if code == 0:
            log.unlink()
            return
        words = " | ".join(last_lines(log)) or f"exit code {code}"
        kind = DeviceError if code == DeviceError.exit_code else CompileError
        raise kind(f"{bundle.path}: it cannot be opened on this Gaudi device: {words}; the log: {log}")

    def _left(self, cache: Path, folder: Path) -> Mapping[str, Path]:
        """The recipe index, and each recipe file by digest, moved to `folder`."""
        foreign = GaudiCache()
        whole = scan_tree(cache, foreign.leaves_out)
        torn = foreign.incomplete(whole)
        for unit, why in sorted(torn.items()):
            _log.info("recipe %s %s: left out", unit, why)
        tree = whole.without(torn, foreign.unit)
        if not list(foreign.entries(tree)):
            raise CompileError(
                f"{cache}: the Gaudi software wrote no recipes; check whether it may write to this folder"
            )
        found: dict[str, Path] = {}
        files = {}
        for path, file in tree.files.items():
            digest = digest_file(cache / path)
            files[path] = Blob(digest, file.size)
            found[digest] = folder / digest.removeprefix("sha256:")
            shutil.move(cache / path, found[digest])
        index = folder / RECIPES
        index.write_bytes(Recipes(files, merge(foreign.facts(tree))).to_bytes())
        shutil.rmtree(cache, ignore_errors=True)
        return {RECIPES: index, **found}


def _end(process: subprocess.Popen[str]) -> None:
    """End a running recording; it gets an interrupt, and time to write its recipes."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(FLUSH_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


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
