"""`llmc compile`: compile a checkpoint into a verified bundle, or complete a portable one on its device's own host."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.buckets.render.text import counted
from llmc.cli import output as console
from llmc.cli.options import (
    DTYPE_CHOICES,
    DeviceOptions,
    address_flag,
    argument,
    device_flag,
    executor_flag,
    flag,
    one_of,
    plan_flag,
    quantize_flag,
    size,
    store_flag,
    switch,
    task_flag,
)
from llmc.cli.output import CompileProgress, close_bars, echo
from llmc.cli.planning import PlanningFlags
from llmc.cli.results import (
    on_target_lines,
    print_disaggregated,
    print_estimate,
    print_key,
    print_programs,
    print_result,
)
from llmc.compiler.targets import offered
from llmc.errors import InputError, LlmcError
from llmc.paths import expanded, is_dir
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.artifacts.store.store import Store
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.pipeline.compilation import Compilation
    from llmc.compiler.pipeline.on_target import OnTargetResult
    from llmc.runtime.bundle import Bundle


_NUMBERS, _ADAPTERS, _DISAGGREGATED = "Model and graphs", "LoRA adapters", "Two devices"
_WHERE, _OUTCOME = "Compile jobs", "Checks and output"


@dataclass(frozen=True, kw_only=True)
class CompileCommand(DeviceOptions, PlanningFlags):
    """Compile a model into a bundle: one graph per bucket, verified against the reference model.

    Finished work is kept in the artifact store. After an interrupt, or with a larger plan, only missing graphs are
    compiled. Executables that another host left portable are completed when you compile on the target device's own
    host.

    \b
    Example:
      llmc compile smollm2-demo -o bundle
      llmc compile ./SmolLM2-135M-Instruct --max-model-len 2048 --max-num-seqs 4 -o bundle
      llmc compile ./model --device openvino --traffic requests.csv --max-graphs 24 -o bundle
      llmc compile ./model --device hpu --max-model-len 1024 --dry-run
      llmc compile ./model --lora ./my-adapter --quantize int8 -o bundle
      llmc compile --resume -o bundle
    """

    brief = True

    model: str | None = argument("MODEL", "A model folder, .gguf file or hub name.", default=None)
    device: str | None = device_flag(
        None, "Target device (llmc devices). Default: cpu, or lpu if NUM_LPU_DEVICES is set."
    )
    output: Path | None = flag(
        None,
        "BUNDLE",
        "Bundle folder. Default: ./MODEL-DEVICE.llmc; for neuron, NEURON_COMPILED_ARTIFACTS.",
        names="--output -o",
    )
    quantize: str | None = quantize_flag(
        "Weight format. Default: the device's; keep for a block-quantized GGUF with llmc's kernels.",
    )
    plan: Path | None = plan_flag()
    dry_run: bool = switch("--dry-run", "Print what would be compiled, then stop.")
    resume: bool = switch(
        "--resume",
        "Continue the interrupted compile of -o BUNDLE with its flags; or complete a portable BUNDLE on its "
        "device's own host.",
    )
    cache_dir: Path | None = store_flag()
    as_json: bool = switch("--json", "Print the result as JSON.")
    prefill_device: str | None = flag(
        None,
        "X",
        "Compile for two devices: X runs prefill, --decode-device decodes.",
        _DISAGGREGATED,
        autocompletion=one_of(offered),
    )
    decode_device: str | None = device_flag(None, "The device that decodes.", panel=_DISAGGREGATED, metavar="Y")
    dtype: str = flag(
        "auto",
        DTYPE_CHOICES,
        "Precision of unquantized values. [default: auto: f32; bf16 for openvino int8 if the CPU supports it]",
        _NUMBERS,
        show_default=False,
    )
    specialise: bool | None = switch(
        "--specialise/--no-specialise",
        "One executable per bucket, or one for all shapes. Default: the faster one as measured for the device.",
        _NUMBERS,
        default=None,
    )
    sample_top_k: int = flag(
        0,
        "K",
        "Graphs also return the K (1 … 256) largest logits with their ids, which is enough for most sampling. "
        "0: full logits only.",
        _NUMBERS,
    )
    config: str | None = flag(
        None, "FILE", "A config.json in place of MODEL; weights are bound when the bundle is opened.", _NUMBERS
    )
    lora: list[str] | None = flag(
        None, "ADAPTER", "A LoRA adapter (a PEFT folder) to merge into MODEL. Repeatable.", _ADAPTERS
    )
    lora_modules: list[str] | None = flag(
        None, "NAME=ADAPTER …", "LoRA adapters that requests select by name, as in vLLM.", _ADAPTERS
    )
    task: str | None = task_flag()
    jobs: int | None = flag(None, "N", "Parallel compile jobs. Default: the number of CPUs.", _WHERE, names="--jobs -j")
    executor: str = executor_flag("Compile on this host, or on a Ray cluster with one executable per CPU.", _WHERE)
    address: str | None = address_flag(_WHERE)
    worker_memory: str | None = flag(None, "SIZE", "Cluster memory that each executable reserves.", _WHERE)
    verify: str = flag(
        "sample",
        "sample|all|none",
        "Compare every executable with the reference model. sample runs sampled buckets, all runs all, with two NaN "
        "fills.",
        _OUTCOME,
    )
    require_native: bool = switch(
        "--require-native", "Fail if an executable would need on-target compilation.", _OUTCOME
    )
    emit: str | None = flag(
        None,
        "program|lowered|key",
        "Print the traced or lowered programs, or one key for the whole compile, then stop.",
        _OUTCOME,
    )
    result: Path | None = flag(None, "FILE", "Also write the result here as JSON, for llmc report.", _OUTCOME)

    def run(self) -> None:
        from llmc.artifacts.local.opening import open_store
        from llmc.compiler.options import CompileOptions
        from llmc.compiler.pipeline.compilation import Compilation

        if self.jobs is not None and self.jobs < 1:
            raise InputError(f"--jobs {self.jobs} must be at least 1")
        settings, model = Settings.from_environment(), self._with_adapters()
        max_size = size("LLMC_CACHE_MAX_SIZE", settings.cache_max_size)
        options = CompileOptions(
            self.device or settings.device, self.quantize, self.dtype, self.specialise, self.verify,
            self.require_native, self.jobs or settings.threads, self.sample_top_k, self.own, self.executor,
            self.address, size("--worker-memory", self.worker_memory),
        )  # fmt: skip
        if self.prefill_device or self.decode_device:
            self._disaggregated(model, options, settings)
            return
        if self.resume and not (model or self.config):
            if not (self.dry_run or self.emit) and on_target_instead(
                self.output, self.cache_dir, options, self.as_json
            ):
                return
            requested, output = Compilation.resumed(self.output, self.cache_dir, settings)
        else:
            store = open_store(self.cache_dir, settings, options.device)
            requested = self._requested(model, options, store, settings)
            output = self.output or requested.default_output
        close_bars()
        if self.emit is not None:
            self._show(requested)
            return
        if self.dry_run:
            print_estimate(requested.dry_run(), self.as_json)
            return
        again = (
            "run it again to continue" if requested.encodes else f"continue with `llmc compile --resume -o {output}`"
        )
        console.going_on = f"; finished work is kept: {again}"
        with CompileProgress(self.as_json and not sys.stderr.isatty()) as progress:
            done = requested.compile(output, progress, resumable=True)
        print_result(requested.with_host_files(done), self.as_json, self.result)
        if max_size is not None and not requested.encodes:
            _trim(requested.store, max_size)

    def _requested(self, model: str | None, options: CompileOptions, store: Store, settings: Settings) -> Compilation:
        from llmc.compiler.checkpoint import open_checkpoint
        from llmc.compiler.pipeline.compilation import Compilation
        from llmc.compiler.pipeline.encoding import GENERATE, settled_task

        if model is not None and self.config is not None:
            raise InputError("MODEL and --config were both given; give one of them")
        named = model if self.config is None else _config_file(self.config)
        if named is None:
            raise InputError(
                "name the MODEL to compile (or --resume -o BUNDLE to continue an interrupted compile, or --config FILE "
                "to compile without weights)"
            )
        checkpoint = open_checkpoint(named)
        task = settled_task(checkpoint, GENERATE if self.config is not None else self.task)
        planning: dict[str, Any] = {}
        if task is not None:
            planning = self.arguments_to_encode(task)
        elif self.plan is None:
            planning = self.arguments()
        elif self.given():
            raise InputError(f"--plan already defines the buckets; leave out {', '.join(self.given())}")
        return Compilation.of(checkpoint, options, store, settings, task=task or GENERATE, plan=self.plan, **planning)

    def _show(self, requested: Compilation) -> None:
        if self.emit == "key":
            print_key(requested.key(), self.as_json)
            return
        with CompileProgress(hidden=False) as progress:
            programs = list(requested.programs(str(self.emit), progress))
        print_programs(programs, self.output, self.as_json)

    def _disaggregated(self, model: str | None, options: CompileOptions, settings: Settings) -> None:
        from llmc.artifacts.local.opening import open_store
        from llmc.compiler.pipeline.compilation import compile_disaggregated, stem_of

        prefill, decode = self.prefill_device, self.decode_device
        resumed = self.resume and not (model or self.config)
        others = self.device or resumed or self.emit or self.dry_run or self.result
        if prefill is None or decode is None or others:
            raise InputError(
                "give --prefill-device X and --decode-device Y together, in place of --device and without --resume, "
                "--dry-run, --emit or --result (after an interrupt run the same command again; finished work is kept)"
            )
        store = open_store(self.cache_dir, settings, decode)
        requested = self._requested(model, replace(options, device=decode), store, settings)
        close_bars()
        output = self.output or Path(f"{stem_of(requested.checkpoint.requested)}-{prefill}-{decode}.llmc")
        with CompileProgress(self.as_json and not sys.stderr.isatty()) as progress:
            result = compile_disaggregated(requested, output, prefill, progress)
        print_disaggregated(result, self.as_json)

    def _with_adapters(self) -> str | None:
        from llmc.compiler.checkpoint import with_adapters

        adapters, named = self.lora or [], self.lora_modules or []
        if (adapters or named) and self.model is None:
            raise InputError(
                f"{[*adapters, *named][0]} is an adapter, but no MODEL is given; name the MODEL it belongs to"
            )
        choices = [(name, path) for name, _, path in (one.partition("=") for one in named)]
        for one, (name, path) in zip(named, choices, strict=True):
            if not name or not path:
                raise InputError(
                    f"--lora-modules {one}: write each adapter as NAME=ADAPTER; requests select it by NAME"
                )
        return None if self.model is None else with_adapters(self.model, adapters, choices)


def _trim(store: Store, max_size: int) -> None:
    """An error here never fails a finished compile."""
    from llmc.artifacts.gc import collect
    from llmc.cli.cache.space import did_something, summary

    try:
        found = collect(store.layout, max_size=max_size)
    except (LlmcError, OSError) as error:
        text = f"LLMC_CACHE_MAX_SIZE: the store was not trimmed: {error}"
    else:
        if not did_something(found):
            return
        text = f"LLMC_CACHE_MAX_SIZE: {'; '.join(summary(found, store.root))}"
    if not console.quiet:
        echo(text, err=True)


def _config_file(config: str) -> str:
    """The path of config.json itself, because a folder would also bring the weights in it."""
    path = expanded(config)
    if is_dir(path):
        path /= "config.json"
    if path.suffix != ".json":
        raise InputError(f"--config {config}: not a config.json; to compile a checkpoint, give it as MODEL")
    return str(path)


def on_target_instead(output: Path | None, cache_dir: Path | None, options: CompileOptions, as_json: bool) -> bool:
    """Complete the portable bundle `output` and print the result; False if nothing is to be completed."""
    from llmc.artifacts.local.opening import open_store
    from llmc.compiler.pipeline.on_target import can_compile_on_target

    if output is None or not can_compile_on_target(output):
        return False
    settings = Settings.from_environment()
    result = compile_portable(output, open_store(cache_dir, settings), settings, options.jobs, options.verify, as_json)
    if as_json:
        echo(json.dumps(result.to_json()))
        return True
    echo(
        f"{result.bundle}: {counted(result.native + result.portable, 'executable')}; native {result.native}, portable "
        f"{result.portable}; {result.bytes / 1e6:,.1f} MB; {result.seconds:.1f} s"
    )
    for line in on_target_lines(result.to_json()):
        echo(line)
    return True


def compile_portable(
    output: Path, store: Store, settings: Settings, jobs: int, verify: str, as_json: bool
) -> OnTargetResult:  # fmt: skip
    """Complete the bundle in place, with progress on stderr. Raises what `compile_on_target` raises."""
    from llmc.compiler.pipeline.on_target import compile_on_target

    console.going_on = f"; finished work is kept: continue with `llmc compile --resume -o {output}`"
    with console.CompileProgress(as_json and not sys.stderr.isatty()) as progress:
        return compile_on_target(output, store, progress, jobs=jobs, verify=verify, settings=settings)


def on_target_first(bundle: Bundle, store: Store, settings: Settings, as_json: bool) -> Bundle:
    """The bundle, completed here if it can and has to be; one in a store is left alone: its name is a digest."""
    from llmc.artifacts.bundle.reader import IN_STORE
    from llmc.compiler.pipeline.on_target import on_target_here, unfinished
    from llmc.compiler.pipeline.resolve import target_of
    from llmc.runtime.bundle import Bundle

    if settings.open_portable or not unfinished(bundle) or on_target_here(target_of(bundle.manifest)) is None:
        return bundle
    if bundle.path.resolve().parent.name == IN_STORE:
        echo(f"llmc: {bundle.path} is inside a store, so its portable executables are not compiled: write it to a "
              f"folder with llmc cache pull REFERENCE -o FOLDER, and use that", err=True)  # fmt: skip
        return bundle
    result = compile_portable(bundle.path, store, settings, settings.threads, "sample", as_json)
    if not console.quiet:
        echo("\n".join(on_target_lines(result.to_json())), err=True)
    return Bundle.open(bundle.path, settings)
