"""`llmc compile`: a checkpoint in, a verified bundle out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmc.cli.compiled import print_estimate, print_key, print_programs, print_result
from llmc.cli.flags import takes_own_options
from llmc.cli.grouped_help import add
from llmc.cli.options import StoreFlag, TaskFlag, device_option, one_of, option
from llmc.cli.output import echo
from llmc.cli.planning import PlanningFlags, plan_from_flags, takes_planning_flags
from llmc.cli.pooled_planning import pooled_plan_of
from llmc.cli.quantities import size
from llmc.compiler.options import LOCAL, Value
from llmc.compiler.targets.declared import offered
from llmc.errors import InputError, LlmcError
from llmc.paths import expanded, is_dir

if TYPE_CHECKING:
    from llmc.artifacts.store.store import Store
    from llmc.buckets.plan import Plan
    from llmc.compiler.checkpoint import Checkpoint
    from llmc.compiler.options import CompileOptions
    from llmc.settings import Settings

_NUMBERS, _ADAPTERS, _HYBRIDS = "Numbers and graphs", "LoRA adapters", "Hybrids"
_WHERE, _OUTCOME = "Where it compiles", "Checks and outcome"


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    add(app, "compile", takes_own_options(takes_planning_flags(compile_command)))


def compile_command(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A model folder, .gguf file or hub name.", show_default=False),
    ] = None,
    *,
    device: Annotated[
        str | None,
        device_option("--device", "What to compile for; see llmc devices. Default: cpu, or lpu for NUM_LPU_DEVICES."),
    ] = None,
    output: Annotated[
        Path | None,
        option(
            "--output -o",
            "BUNDLE",
            "Bundle folder. Default: MODEL-DEVICE.llmc here; for neuron, NEURON_COMPILED_ARTIFACTS.",
        ),
    ] = None,
    quantize: Annotated[
        str | None,
        option(
            "--quantize",
            "none|int8|fp8|int4|keep",
            "Weights. Default: the device's; with llmc's kernels a GGUF in blocks has keep, which decodes faster than "
            "int8 and is nearer to the model.",
        ),
    ] = None,
    flags: PlanningFlags,
    plan: Annotated[Path | None, option("--plan", "PLAN", "A plan file of llmc plan -o.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be compiled, and stop.")] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the interrupted compile of -o BUNDLE, with its flags; or finish a portable BUNDLE on its "
            "device's own host.",
        ),
    ] = False,
    cache_dir: StoreFlag = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
    prefill_device: Annotated[
        str | None,
        option(
            "--prefill-device",
            "X",
            "Make a hybrid: prompts on device X, handed over to --decode-device.",
            autocompletion=one_of(offered),
            rich_help_panel=_HYBRIDS,
        ),
    ] = None,
    decode_device: Annotated[
        str | None,
        device_option("--decode-device", "The device of a hybrid that decodes.", "Y", rich_help_panel=_HYBRIDS),
    ] = None,
    dtype: Annotated[
        str,
        option(
            "--dtype",
            "auto|f32|bf16|f16",
            "Unquantised numbers. [default: auto: f32; bf16 for openvino int8 on a CPU that computes in it]",
            show_default=False,
            rich_help_panel=_NUMBERS,
        ),
    ] = "auto",
    specialise: Annotated[
        bool | None,
        typer.Option(
            "--specialise/--no-specialise",
            help="One executable per bucket, or one that covers all. Default: what was measured best for the device.",
            rich_help_panel=_NUMBERS,
        ),
    ] = None,
    sample_top_k: Annotated[
        int,
        option(
            "--sample-top-k",
            "K",
            "Graphs return the K (1 … 256) largest logits and their ids, too: all that most sampling needs. "
            "0: all logits only.",
            rich_help_panel=_NUMBERS,
        ),
    ] = 0,
    config: Annotated[
        str | None,
        option(
            "--config",
            "FILE",
            "A config.json in place of MODEL: weights are bound when it is opened.",
            rich_help_panel=_NUMBERS,
        ),
    ] = None,
    lora: Annotated[
        list[str] | None,
        option(
            "--lora",
            "ADAPTER",
            "A LoRA adapter (a PEFT folder) to merge into MODEL; repeatable.",
            rich_help_panel=_ADAPTERS,
        ),
    ] = None,
    lora_modules: Annotated[
        list[str] | None,
        option(
            "--lora-modules",
            "NAME=ADAPTER …",
            "LoRA adapters that requests choose by name, as in vLLM.",
            rich_help_panel=_ADAPTERS,
        ),
    ] = None,
    task: TaskFlag = None,
    jobs: Annotated[
        int | None, option("--jobs -j", "N", "Executables at once. Default: CPUs.", rich_help_panel=_WHERE)
    ] = None,
    executor: Annotated[
        str,
        option(
            "--executor",
            "local|ray",
            "Where executables are compiled: here, or one a CPU of a Ray cluster.",
            rich_help_panel=_WHERE,
        ),
    ] = LOCAL,
    address: Annotated[
        str | None,
        option(
            "--address",
            "HOST:PORT",
            "That cluster. Default: RAY_ADDRESS, or the one that runs on this host.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    worker_memory: Annotated[
        str | None,
        option("--worker-memory", "SIZE", "Memory of the cluster that one executable takes.", rich_help_panel=_WHERE),
    ] = None,
    verify: Annotated[
        str,
        option(
            "--verify",
            "sample|all|none",
            "Run every executable against the reference model, sampled buckets or all under two poisons.",
            rich_help_panel=_OUTCOME,
        ),
    ] = "sample",
    require_native: Annotated[
        bool,
        typer.Option(
            "--require-native",
            help="Fail when executables would need finishing on the device's host.",
            rich_help_panel=_OUTCOME,
        ),
    ] = False,
    emit: Annotated[
        str | None,
        option(
            "--emit",
            "program|lowered|key",
            "Show the traced or lowered programs, or one key of it all, and stop.",
            rich_help_panel=_OUTCOME,
        ),
    ] = None,
    result: Annotated[
        Path | None,
        option("--result", "FILE", "Also write the outcome here as JSON, for llmc report.", rich_help_panel=_OUTCOME),
    ] = None,
    own: dict[str, Value],
) -> None:
    """Compile every bucket's graph for a device into a bundle, verified against the reference model.

    What was compiled before comes from the store: an interrupted compile, or one whose plan grew, does only what is
    missing. On the device's own host, what other hosts leave portable is finished, too.

    \b
    Example:
      llmc compile smollm2-demo -o bundle
      llmc compile ./SmolLM2-135M-Instruct --max-model-len 2048 --max-num-seqs 4 -o bundle
      llmc compile ./model --device openvino --traffic requests.csv --max-graphs 24 -o bundle
      llmc compile ./model --device hpu --max-model-len 1024 --dry-run
      llmc compile ./model --lora ./my-adapter --quantize int8 -o bundle
      llmc compile --resume -o bundle
    """
    from llmc.artifacts.local.opening import open_store
    from llmc.artifacts.local.precompiled import place_for, replacing
    from llmc.cli import output as console
    from llmc.cli.finishing import finish_instead
    from llmc.cli.journal import Journal
    from llmc.cli.output import CompileProgress, close_bars
    from llmc.compiler.checkpoint import open_checkpoint
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.pipeline.dry_run import dry_run as estimate_compile
    from llmc.compiler.pipeline.emit import emit as emit_programs
    from llmc.compiler.pipeline.finish import compile_and_finish, write_host_files
    from llmc.compiler.targets import open_target
    from llmc.settings import Settings

    _require_positive(jobs)
    settings, model = Settings.from_environment(), _with_adapters(model, lora or [], lora_modules or [])
    max_size = size("LLMC_CACHE_MAX_SIZE", settings.cache_max_size)
    options = CompileOptions(
        device or settings.device, quantize, dtype, specialise, verify, require_native, jobs or settings.threads,
        sample_top_k, own, executor, address, size("--worker-memory", worker_memory),
    )  # fmt: skip
    resumed = resume and not (model or config)
    if prefill_device or decode_device:
        alone = device is None and not (resumed or emit or dry_run or result)
        _hybrid(prefill_device, decode_device, alone, (model, config, plan, flags), options, output, cache_dir, as_json)
        return
    if (resumed and not (dry_run or emit) and finish_instead(output, cache_dir, settings, options, as_json)) or (
        model is not None
        and _pooled(model, task, flags, plan, options, output, result, cache_dir, as_json, dry_run, emit)
    ):
        return
    if resumed:
        journal = Journal.read(output)
        checkpoint, made, options = open_checkpoint(journal.model), journal.plan, journal.options
        place, shown_in, output = None, output, journal.output
    else:
        open_target(options.device, settings)
        checkpoint, made = _planned(model, config, plan, flags, options)
        close_bars()
        place = None if output else place_for(options.device, checkpoint.asked, settings.neuron_artifacts)
        shown_in = output
        output = output or place or Path(f"{_stem(checkpoint.asked)}-{options.device}.llmc")
        journal = Journal(checkpoint.asked, made, options, output)
    store = open_store(cache_dir, settings, options.device)
    if emit is not None:
        _show(emit, emit_programs, (checkpoint, made, options, store), settings, shown_in, as_json)
        return
    if dry_run:
        print_estimate(estimate_compile(checkpoint, made, options, store, settings), as_json)
        return

    console.going_on = f"; what is done is kept: go on with `llmc compile --resume -o {output}`"
    shown = CompileProgress(as_json and not sys.stderr.isatty())
    with replacing(place), shown as progress, journal.running():
        done = compile_and_finish(checkpoint, output, made, options, store, progress, settings)
    print_result(write_host_files(done), as_json, result)
    if max_size is not None:
        _trim(store, max_size)


def _pooled(
    model: str, task: str | None, flags: PlanningFlags, plan_file: Path | None, options: CompileOptions,
    output: Path | None, result: Path | None, cache_dir: Path | None, as_json: bool, dry_run: bool, emit: str | None,
) -> bool:  # fmt: skip
    """Compile a model that embeds or scores, or say what that would do; False for one that generates."""
    made = pooled_plan_of(model, task, flags, plan_file)
    if made is None:
        return False
    from llmc.artifacts.local.opening import open_store
    from llmc.cli import output as console
    from llmc.cli.output import CompileProgress
    from llmc.compiler.pipeline.emit import emit_encoder
    from llmc.compiler.pipeline.encoding import compile_encoder
    from llmc.compiler.pipeline.encoding_dry_run import dry_run_encoder
    from llmc.settings import Settings

    checkpoint, plan = made
    shown_in = output
    output = output or Path(f"{_stem(checkpoint.asked)}-{options.device.replace(':', '-')}.llmc")
    settings = Settings.from_environment()
    store = open_store(cache_dir, settings, options.device)
    if emit is not None:
        _show(emit, emit_encoder, (checkpoint, plan, options, store), settings, shown_in, as_json)
        return True
    if dry_run:
        print_estimate(dry_run_encoder(checkpoint, plan, options, store), as_json)
        return True
    console.going_on = "; what is done is kept: run it again to go on"
    with CompileProgress(as_json and not sys.stderr.isatty()) as progress:
        done = compile_encoder(checkpoint, output, plan, options, store, progress)
    print_result(done, as_json, result)
    return True


def _show(
    emit: str, programs_of: Callable[..., Iterable[tuple[str, str]]],
    compiled: tuple[Checkpoint, Plan, CompileOptions, Store], settings: Settings, output: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Print the key of what would be compiled, or its programs."""
    from llmc.cli.output import CompileProgress
    from llmc.compiler.pipeline.compile_key import compile_key

    if emit == "key":
        print_key(compile_key(*compiled, settings), as_json)
        return
    with CompileProgress(hidden=False) as progress:
        programs = list(programs_of(*compiled, emit, progress))
    print_programs(programs, output, as_json)


def _require_positive(jobs: int | None) -> None:
    if jobs is not None and jobs < 1:
        raise InputError(f"--jobs {jobs} must be at least 1")


def _hybrid(
    prefill: str | None, decode: str | None, alone: bool,
    asked: tuple[str | None, str | None, Path | None, PlanningFlags], options: CompileOptions, output: Path | None,
    cache_dir: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Compile what was `asked` for two devices into one folder, and say what was done."""
    from llmc.artifacts.local.opening import open_store
    from llmc.cli.compiled import print_hybrid
    from llmc.cli.output import CompileProgress, close_bars
    from llmc.compiler.pipeline.hybrid import compile_hybrid
    from llmc.compiler.targets import open_target
    from llmc.settings import Settings

    if prefill is None or decode is None or not alone:
        raise InputError(
            "a hybrid takes --prefill-device X and --decode-device Y together, in place of --device, and neither "
            "--resume nor --dry-run, --emit or --result (what is done of an interrupted one is kept: run it again)"
        )
    settings = Settings.from_environment()
    open_target(decode, settings)
    options = replace(options, device=decode)
    checkpoint, plan = _planned(*asked, options)
    close_bars()
    output = output or Path(f"{_stem(checkpoint.asked)}-{prefill}-{decode}.llmc")
    store = open_store(cache_dir, settings, decode)
    with CompileProgress(as_json and not sys.stderr.isatty()) as progress:
        result = compile_hybrid(checkpoint, output, plan, prefill, options, store, progress, settings)
    print_hybrid(result, as_json)


def _trim(store: Store, max_size: int) -> None:
    """Keep the store below LLMC_CACHE_MAX_SIZE; an error in this never fails a finished compile."""
    from llmc.artifacts.gc.collect import collect
    from llmc.cli import output
    from llmc.cli.cache.space import did_something, summary

    try:
        found = collect(store.layout, max_size=max_size)
    except (LlmcError, OSError) as error:
        text = f"LLMC_CACHE_MAX_SIZE: the store was not trimmed: {error}"
    else:
        if not did_something(found):
            return
        text = f"LLMC_CACHE_MAX_SIZE: {'; '.join(summary(found, store.root))}"
    if not output.quiet:
        echo(text, err=True)


def _planned(
    model: str | None, config: str | None, plan: Path | None, flags: PlanningFlags, options: CompileOptions
) -> tuple[Checkpoint, Plan]:
    """What is compiled, MODEL or the file of --config, and its plan."""
    from llmc.buckets.plan import Plan
    from llmc.compiler.checkpoint import open_checkpoint

    if model is not None and config is not None:
        raise InputError("MODEL and --config were both given; give one of them")
    if config is not None:
        model = _config_file(config)
    if model is None:
        raise InputError(
            "name the MODEL to compile (or --resume -o BUNDLE, to go on with an interrupted compile; or --config FILE, "
            "for a configuration alone)"
        )
    checkpoint = open_checkpoint(model)
    if plan is None:
        return checkpoint, plan_from_flags(flags, checkpoint, device=options.device, options=options)
    if flags.given():
        raise InputError(f"--plan has the buckets already; leave out {', '.join(flags.given())}")
    return checkpoint, Plan.load(plan)


def _with_adapters(model: str | None, adapters: list[str], named: list[str]) -> str | None:
    from llmc.compiler.checkpoint import with_adapters

    if (adapters or named) and model is None:
        raise InputError(f"{[*adapters, *named][0]} is an adapter of a MODEL; give that, too")
    choices = [(name, path) for name, _, path in (one.partition("=") for one in named)]
    for one, (name, path) in zip(named, choices, strict=True):
        if not name or not path:
            raise InputError(f"--lora-modules {one}: give each adapter as NAME=ADAPTER, NAME being what requests say")
    return None if model is None else with_adapters(model, adapters, choices)


def _config_file(config: str) -> str:
    """The file itself, so that weights beside it do not count."""
    path = expanded(config)
    if is_dir(path):
        path /= "config.json"
    if path.suffix != ".json":
        raise InputError(f"--config {config}: a config.json is needed; give a checkpoint as MODEL")
    return str(path)


def _stem(model: str) -> str:
    path = Path(model)
    return path.resolve().parent.name if path.name == "config.json" else path.stem
