"""The Python API: plan, compile, open and generate. `from llmc import LLM, SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.api.vllm_arguments import split
from llmc.paths import is_dir, is_file
from llmc.runtime.llm import BundleLLM

if TYPE_CHECKING:
    from llmc.artifacts.store.store import Store
    from llmc.buckets.encoding import EncodePlan
    from llmc.buckets.plan import Plan
    from llmc.compiler.pipeline.compilation import Compilation
    from llmc.compiler.pipeline.compile import CompileResult, Reporter


def plan(model: str | Path | None = None, **flags: Any) -> Plan:
    """Plan the buckets for a checkpoint: a Hugging Face folder, a config.json, a .gguf file or a hub name.

    Keywords are those of `llmc.compiler.pipeline.planning.PlanArguments`: max_model_len, max_num_seqs,
    max_num_batched_tokens, block_size, max_prompt_len (ints), strategy (a name), the ranges prompt_batch, prompt_seq,
    prompt_context, decode_batch, decode_seq as (min, step, max), from_file, traffic and bench (paths), max_graphs,
    max_padding (a fraction), max_compile_time (seconds), max_graph_memory (bytes) and others. Raises InputError for
    unusable values, CheckpointError if the model cannot be read.
    """
    from llmc.compiler.pipeline.planning import plan_for

    return plan_for(None if model is None else str(model), **flags)


def prepare(
    model: str | Path,
    *,
    device: str | None = None,
    plan: Plan | EncodePlan | Path | None = None,
    quantize: str | None = None,
    dtype: str = "auto",
    specialise: bool | None = None,
    verify: str = "sample",
    require_native: bool = False,
    sample_top_k: int = 0,
    jobs: int | None = None,
    cache_dir: str | Path | None = None,
    store: Store | None = None,
    task: str | None = None,
    lora: Sequence[str | Path] = (),
    lora_modules: Mapping[str, str | Path] | None = None,
    **more: Any,
) -> Compilation:
    """Prepare a compile: inspect its `key`, `dry_run` and `programs`, then run it with `compile`.

    Needs the extra `compile`. A config.json as `model` compiles without weights, which are bound when the bundle is
    opened. `lora` lists folders of LoRA adapters to merge; `lora_modules` maps names to adapters that requests choose
    (docs/lora.md). Options that devices declare are keywords too: `tensor_parallel`, `kv_cache_dtype`, `kernels` …, as
    in `llmc compile --help`. `device` defaults to the environment's (`Settings.device`: cpu on most hosts). The buckets
    come from `plan`, its file, or the keywords of `llmc.plan`. `store` replaces the one in `cache_dir`. `task` is
    "generate", "embed" or "score", by default what the checkpoint's files say (docs/encoders.md).

    Raises CheckpointError, InputError and DeviceError.
    """
    from llmc.artifacts.local.opening import open_store
    from llmc.compiler.checkpoint import with_adapters
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.pipeline.compilation import Compilation
    from llmc.compiler.targets import declared
    from llmc.settings import Settings

    settings = Settings.from_environment()
    device = device or settings.device
    own = {name: more.pop(name) for name in declared() if name in more}
    options = CompileOptions.of(
        device, quantize=quantize, dtype=dtype, specialise=specialise, verify=verify, require_native=require_native,
        jobs=jobs or settings.threads, sample_top_k=sample_top_k, **own,
    )  # fmt: skip
    choices = list((lora_modules or {}).items())
    named = with_adapters(str(model), lora, choices) if lora or choices else model
    if store is None:
        store = open_store(cache_dir, settings, device)
    return Compilation.of(named, options, store, settings, task=task, plan=plan, **more)


def compile(  # noqa: A001 - llmc.compile is the verb of this package
    model: str | Path, output: str | Path, *, report: Reporter | None = None, **arguments: Any
) -> CompileResult:
    """Compile a checkpoint into the bundle folder `output`. `arguments` are those of `prepare`.

    `report` is called for each stage and executable. Raises CheckpointError, CompileError, VerificationError,
    DeviceError, CapacityError or ArtifactError, and then leaves `output` unchanged.
    """
    return prepare(model, **arguments).compile(Path(output), report or (lambda _: None))


class LLM(BundleLLM):
    """Offline inference with vLLM's interface: `LLM(model=…).generate(prompts, SamplingParams(…))`.

    `model` is a bundle (a folder or a reference, see artifacts/local/references.py) or a checkpoint. A checkpoint is
    compiled first, or taken from the store, with the given device, limits and options of `llmc.compile`. A bundle, also
    one in NEURON_COMPILED_ARTIFACTS for device neuron, keeps its own options; a warning names each option that differs.
    `weights` is the checkpoint for a bundle compiled without weights (docs/models.md). Further arguments are those of
    EngineOptions and vLLM's (api/vllm_arguments.py).
    """

    def __init__(
        self, model: str | Path, *, device: str | None = None, threads: int | None = None, keep_steps: bool = False,
        weights: str | Path | None = None, **arguments: Any,
    ) -> None:  # fmt: skip
        compiled, engine = split(arguments, device)
        bundle = bundle_of(str(model), device, compiled, weights=None if weights is None else str(weights))
        super().__init__(bundle, threads, keep_steps, **engine)


def bundle_of(
    model: str, device: str | None = None, options: dict[str, Any] | None = None, report: Reporter | None = None,
    store: Store | None = None, weights: str | None = None,
) -> Path:  # fmt: skip
    """The bundle folder of `model`, compiled with `options` of `compile` if a checkpoint, and bound to `weights`."""
    bundle = _bundle_of(model, device, options, report, store)
    if weights is None:
        return bundle
    from llmc.compiler.pipeline.bind import bound

    if store is None:
        from llmc.artifacts.local.opening import open_store
        from llmc.settings import Settings

        store = open_store(None, Settings.from_environment(), device)
    return bound(bundle, weights, store, report)


def _bundle_of(
    model: str, device: str | None, options: dict[str, Any] | None, report: Reporter | None, store: Store | None
) -> Path:
    options = dict(options or {})
    making = {**options, "report": report, "store": store}
    path = Path(model)
    if is_dir(path) and _is_bundle(path):
        return _matching(path, device, options)
    from llmc.artifacts.local.precompiled import load, path_for
    from llmc.artifacts.local.references import resolve
    from llmc.settings import Settings

    settings = Settings.from_environment()
    if names_bundle(model):
        return _matching(resolve(model, settings, store), device, options)
    device = device or settings.device
    location = path_for(device, model, settings.neuron_artifacts)
    if location is not None:
        if load(location) is not None:
            return _matching(location, device, options, model)
        compile(model, location, device=device, **making)
        return location
    import hashlib

    from llmc.artifacts.store.layout import Layout

    requested = (str(path.absolute()), device, sorted(options.items()))
    name = hashlib.sha256(repr(requested).encode()).hexdigest()[:16]
    output = Layout(settings.cache_dir_for(device)).bundles / name
    compile(model, output, device=device, **making)
    return output


def names_bundle(model: str) -> bool:
    """Whether `model` can only be a bundle: a reference, a manifest, or a folder that is not a checkpoint."""
    from llmc.artifacts.local.references import is_reference

    path = Path(model)
    return _is_bundle(path) if is_dir(path) else path.name == "manifest.json" or is_reference(model)


def _is_bundle(folder: Path) -> bool:
    return is_file(folder / "manifest.json") or not (is_file(folder / "config.json") or any(folder.glob("*.gguf")))


def _matching(path: Path, device: str | None, options: dict[str, Any], model: str | None = None) -> Path:
    """Warns if the arguments differ from the options that the bundle was compiled with."""
    if device is None and not options:
        return path
    from llmc.artifacts.bundle.manifest import read_manifest
    from llmc.artifacts.local.precompiled import describe_differences, differences
    from llmc.artifacts.log import logger
    from llmc.compiler.pipeline.requested import requested_members

    manifest = read_manifest(path)
    found = differences(manifest, requested_members(manifest, device, options, model))
    if found:
        logger().warning(
            "%s is loaded as it was compiled, although requested otherwise: %s", path, describe_differences(found)
        )
    return path
