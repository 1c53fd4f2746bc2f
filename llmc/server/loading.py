"""Load a bundle from disk until it is open, warm and ready to serve; runs in a thread next to the server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from llmc.artifacts.local.origins import verification_origin
from llmc.errors import ArtifactError, InputError, LlmcError
from llmc.runtime.bundle import Bundle
from llmc.runtime.engine.async_engine import AsyncEngine
from llmc.runtime.startup.opening import EngineOptions, open_engine, open_executor
from llmc.runtime.startup.prefilling import warm_prompts
from llmc.runtime.text.confined_chat import ConfinedTemplate
from llmc.runtime.text.confined_encoding import ConfinedEncoder
from llmc.server.state import Progress, Served, ServerConfig
from llmc.server.warming import STAGE, Warm, warm

if TYPE_CHECKING:
    from llmc.server.warming import OnProgress, WarmUp

OpenBundle = Callable[[Callable[[Progress], None]], Path | Bundle]
"""Finds or builds the bundle to serve, and reports its progress; raises LlmcError."""


class StoppedLoadingError(Exception):
    """The process was stopped while loading."""


@dataclass(frozen=True)
class Loaded:
    """A loaded bundle; `warm`: its warm-up, with `compilations`; `origin`: of its verification
    (artifacts/local/origins.py).
    """

    served: Served
    warm: Warm
    compilations: int
    origin: str

    @classmethod
    def of(cls, served: Served, warm: Warm, compilations: int) -> Loaded:
        """Build a Loaded with the bundle's own origin."""
        bundle = served.bundle
        return cls(served, warm, compilations, verification_origin(bundle.files, None, bundle.settings).name)


def as_bundle(found: Path | Bundle) -> Bundle:
    """Open a path now, so that a link that moves later does not change what is read."""
    return found if isinstance(found, Bundle) else Bundle.open(found.resolve())


def read_grammars(served: Served, config: ServerConfig) -> None:
    """Load grammar support in advance, if the server is configured to. After an error, requests that need it get the
    error.
    """
    if served.pooler is None and config.warm_aside:
        with contextlib.suppress(LlmcError):
            served.generating.engine.constraints(at_once=False)


def load(
    open_bundle: OpenBundle, config: ServerConfig, options: EngineOptions, warm_up: WarmUp, on_progress: OnProgress
) -> Loaded:
    """Open a bundle, run its graphs as `warm_up` says, and start the engine without observers.

    `on_progress` receives all progress; it may raise StoppedLoadingError to stop. Raises LlmcError if the bundle is
    unavailable or cannot be served here, and closes everything.
    """
    on_progress(Progress("open"))
    bundle = as_bundle(open_bundle(on_progress))
    on_progress(Progress("tokenizer"))
    if "tokenizer.json" not in bundle.manifest.files:
        raise ArtifactError(
            f"{bundle.path}: no tokenizer in the bundle, and a server takes text; compile a checkpoint that has a "
            f"tokenizer.json: {bundle.recompile_hint}"
        )
    tokenizer = bundle.tokenizer
    tokenizer.load()
    _ = tokenizer.width  # computed now, because it reads the whole vocabulary
    name = _served_name(bundle, config)
    if bundle.task != "generate":
        return _load_pooler(bundle, name, config, options, on_progress)
    template = None
    with contextlib.ExitStack() as opened:
        if bundle.chat_template is not None:
            template = ConfinedTemplate(
                bundle.chat_template,
                bundle.special_tokens,
                config.chat_format or bundle.chat_format,
                config.template_limits,
            )
            opened.callback(template.close)
            if config.warm_aside:
                template.start()  # the process starts while the executor opens
        executor = open_executor(bundle, options)
        opened.callback(executor.close)
        warmed = warm(executor, bundle.plan, warm_up, on_progress)
        if template is not None and config.warm_aside:
            template.check()
        engine = open_engine(bundle, executor, options)
        if (prefiller := engine.core.prefiller) is not None:
            opened.callback(prefiller.close)
            on_progress(Progress("prefill side"))
            prefiller.prepare(warm_prompts)
        running = AsyncEngine(engine, config.max_queued_requests, on_close=executor.close)
        opened.pop_all()
    encoder = ConfinedEncoder(lambda: bundle.files.read("tokenizer.json"))
    return Loaded.of(Served(bundle, running, tokenizer, encoder, template, name), warmed, executor.compilations.count)


def _load_pooler(
    bundle: Bundle, name: str, config: ServerConfig, options: EngineOptions, on_progress: OnProgress
) -> Loaded:
    """Open an embedding or scoring bundle and run every bucket, or one text of each length if any shape runs."""
    from llmc.runtime.pooling.pooler import AsyncPooler, Pooler
    from llmc.runtime.startup.pool_warming import PoolWarming

    pooler = Pooler(bundle, options.threads)
    try:
        warming = PoolWarming(pooler)
        on_progress(Progress(STAGE, 0, len(warming.buckets)))
        for done, warmed in enumerate(warming.run(), 1):
            if warmed.error is not None:
                raise warmed.error
            on_progress(Progress(STAGE, done, len(warming.buckets)))
        pooler.encoder.compilations.ready()
    except BaseException:
        pooler.close()
        raise
    encoder = ConfinedEncoder(lambda: bundle.files.read("tokenizer.json"))
    engine = AsyncPooler(pooler, config.max_queued_requests)
    compiled = pooler.encoder.compilations.count
    return Loaded.of(
        Served(bundle, engine, bundle.tokenizer, encoder, None, name), Warm(len(warming.buckets)), compiled
    )


def _served_name(bundle: Bundle, config: ServerConfig) -> str:
    """Return the requested or own model name. Raises InputError if an adapter has it."""
    name = config.served_model_name or model_name(bundle)
    if any(adapter.name == name for adapter in bundle.adapters):
        raise InputError(f"--served-model-name {name}: an adapter of the bundle is called that; give the model another")
    return name


def model_name(bundle: Bundle) -> str:
    """Return the model's name without its folders, or the bundle's name."""
    name = str(bundle.manifest.model.get("name") or bundle.manifest.provenance.get("model") or "")
    return PurePath(name).name or bundle.path.name
