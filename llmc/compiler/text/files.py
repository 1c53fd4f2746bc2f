"""Tokenizer and chat template of a checkpoint, as files of a bundle; with a large vocabulary an index of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from llmc.compiler.code import code_digest
from llmc.compiler.stages import Stages
from llmc.compiler.text.vocabulary import build_index
from llmc.errors import ArtifactError, CheckpointError, NoTokenizerError
from llmc.runtime.text.confined_encoding import require_sound
from llmc.runtime.text.vocabulary import VOCABULARY

if TYPE_CHECKING:
    from llmc.artifacts.digest import Blob
    from llmc.artifacts.store.workspace import Workspace


def text_files(stages: Stages) -> dict[str, str]:
    """Digest of each file by name; a checkpoint without a tokenizer makes a bundle that takes token ids.

    Raises CheckpointError for a tokenizer that is damaged, or that runtime/text/bounds.py refuses.
    """

    def build(workspace: Workspace) -> Mapping[str, Blob]:
        made = {}
        try:
            tokenizer = stages.checkpoint.tokenizer_json()
        except NoTokenizerError as e:
            workspace.meta["no_tokenizer"] = str(e)
        else:
            try:
                require_sound(tokenizer)
            except ArtifactError as error:
                raise CheckpointError(f"{stages.checkpoint.path}: {error}") from error
            made["tokenizer.json"] = workspace.put_bytes(tokenizer)
            index = build_index(tokenizer)
            if index is not None:
                made[VOCABULARY] = workspace.put_bytes(index)
        template = stages.checkpoint.chat_template()
        if template:
            made["chat_template.jinja"] = workspace.put_bytes(template.encode())
        return made

    components = {**stages.reading(tokenizer=True), "code": code_digest(text_files, type(stages.checkpoint))}
    return {name: blob.digest for name, blob in stages.run("tokenizer", components, build).outputs.items()}
