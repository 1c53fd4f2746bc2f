"""One key of all that a compile makes, known before anything is made: what a CI's cache of the store is named by."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import Key, canonical_json
from llmc.compiler.code import package_digest
from llmc.compiler.pipeline.lookup import ignore
from llmc.compiler.stages import Stages
from llmc.platforms import EXTRAS
from llmc.runtime.host import cpu_features

if TYPE_CHECKING:
    from llmc.artifacts.store.store import Store
    from llmc.buckets.plan import Plan
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.options import CompileOptions
    from llmc.settings import Settings

PLACE = ("jobs", "executor", "address", "worker_memory")
"""Options that say where and how fast something is compiled, and change none of it."""
BASE = ("numpy", "onnxruntime", "tokenizers")


def compile_key(
    checkpoint: Checkpoint, plan: Plan, options: CompileOptions, store: Store, settings: Settings
) -> Key:  # fmt: skip
    """Equal keys stand for compiles that make the same on hosts of the same processor: checkpoint, buckets, options,
    all of llmc's code and the packages that it may compile with. What differs in any of these may still make the same.

    Hashes the checkpoint, and makes nothing.
    """
    stages, asked = Stages(store, checkpoint, plan, ignore, settings), options.to_dict()
    packages = {*BASE, *EXTRAS}
    versions = {name: version for name in packages if (version := _version(name)) is not None}
    return Key(
        "local-compile",  # of no entry: none may come from elsewhere either
        {
            "checkpoint": stages.checkpoint_digest(),
            "buckets": digest_bytes(canonical_json([[b.phase, b.batch, b.query, b.context] for b in plan.buckets])),
            **{f"limit.{name}": value for name, value in plan.limits.to_dict().items()},
            **{f"option.{name}": repr(value) for name, value in asked.items() if name not in PLACE},
            **{f"toolchain.{name}": version for name, version in versions.items()},
            "isa": " ".join(cpu_features()),
            "code": package_digest(),
        },
    )


def _version(module: str) -> str | None:
    try:
        return metadata.version(module.replace("_", "-"))
    except metadata.PackageNotFoundError:
        return None
