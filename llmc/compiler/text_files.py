"""Tokenizer and chat template of a checkpoint, as files of a bundle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from llmc.compiler.stages import Stages, code_digest
from llmc.errors import CheckpointError

if TYPE_CHECKING:
    from llmc.artifacts.blobs import Blob
    from llmc.artifacts.workspace import Workspace


def text_files(stages: Stages) -> dict[str, str]:
    """Digest of each file by name; a checkpoint without a tokenizer makes a bundle that takes token ids."""

    def build(workspace: Workspace) -> Mapping[str, Blob]:
        made = {}
        try:
            made["tokenizer.json"] = workspace.put_bytes(stages.checkpoint.tokenizer_json())
        except CheckpointError as e:
            workspace.meta["no_tokenizer"] = str(e)
        template = stages.checkpoint.chat_template()
        if template:
            made["chat_template.jinja"] = workspace.put_bytes(template.encode())
        return made

    components = {**stages.reading(tokenizer=True), "code": code_digest("llmc.compiler.checkpoint", __name__)}
    return {name: blob.digest for name, blob in stages.run("tokenizer", components, build).outputs.items()}
