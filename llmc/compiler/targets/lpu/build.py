"""HyperDex's compiler over a checkpoint: a folder as it wants it, its process, and what it left there, stored."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.artifacts.digest import digest_bytes
from llmc.artifacts.key import canonical_json
from llmc.compiler.code import code_digest
from llmc.compiler.targets.base import Lowered
from llmc.errors import CompileError
from llmc.runtime.executors.lpu.artifact import MODEL, Artifact
from llmc.runtime.executors.lpu.hyperdex import PACKAGE, HyperDex, HyperDexToolchain

if TYPE_CHECKING:
    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.workspace import Workspace
    from llmc.compiler.checkpoint.base import Checkpoint
    from llmc.compiler.stages import Stages

COMPILE_S = 6 * 3600.0
"""After this the compiler counts as hung; how long it takes is not published."""

_CHECKPOINT = "ckpt"


@dataclass(frozen=True)
class LpuLowered(Lowered):
    """What HyperDex made, by the names that its files have in the bundle."""

    artifact: Artifact = field(kw_only=True)


def build(stages: Stages, wanted: Artifact, hyperdex: HyperDexToolchain) -> LpuLowered:
    """The artifact of the checkpoint, from the store if it is there; `wanted` has everything but its files.

    Raises CompileError where HyperDex fails, is killed or hangs, with the place of its log, which is kept.
    """
    arguments = asdict(wanted)
    del arguments["files"], arguments["hyperdex"]
    components = {
        **stages.reading(tokenizer=True),
        **arguments,
        f"toolchain.{PACKAGE}": hyperdex.version,
        "code": code_digest(build, type(stages.checkpoint)),
    }

    def make(workspace: Workspace) -> Mapping[str, Blob]:
        folder = workspace.folder / MODEL
        _write_checkpoint(stages.checkpoint, folder / _CHECKPOINT)
        before = _files(folder)
        given = {name: value for name, value in arguments.items() if name != "devices"}
        with HyperDex(hyperdex, CompileError) as process:
            options = {"num_device": wanted.devices, **given}
            process.ask("compile", COMPILE_S, model=str(folder), options=options)
        found = _files(folder)
        if not found.keys() - before.keys():
            raise CompileError("HyperDex's compiler ended without an error, and left no file")
        return {path: workspace.put_file(file) for path, file in sorted(found.items())}

    entry = stages.run("hyperdex", components, make)
    names = {path: f"lpu.{number:05d}" for number, path in enumerate(sorted(entry.outputs))}
    artifact = replace(wanted, files=names)
    digests = {path: blob.digest for path, blob in entry.outputs.items()}
    return LpuLowered(
        files={names[path]: digest for path, digest in digests.items()},
        components={"artifact": digest_bytes(canonical_json([asdict(artifact), digests]))},
        inputs={},
        artifact=artifact,
    )


def _write_checkpoint(checkpoint: Checkpoint, folder: Path) -> None:
    """As HyperDex finds one that it downloaded: a Hugging Face folder, copied, since HyperDex may change it."""
    from llmc.compiler.checkpoint.export.huggingface import is_plain_folder, write_folder

    if not is_plain_folder(checkpoint):
        write_folder(checkpoint, folder)
        return
    folder.mkdir(parents=True)
    for role, path in checkpoint.roles().items():
        shutil.copyfile(path, folder / role)


def _files(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
