"""A traced program is written as torch writes it, less what tells where it was traced."""

from __future__ import annotations

import io
import json
import zipfile

import torch

from llmc.compiler.frontend.trace import trace_weightless
from llmc.compiler.program.to_export import serialise
from llmc.runtime.portable_program import MODEL, ROOT
from tests.compiler import tiny
from tests.tiers import full


@full
def test_it_is_torchs_own_file_without_debug_information() -> None:
    exported = trace_weightless(tiny.config("llama-three-layers"), "two_part", cached=False).exported
    buffer = io.BytesIO()
    torch.export.save(exported, buffer)
    with zipfile.ZipFile(buffer) as archive:
        known = json.loads(archive.read(ROOT + MODEL))
    for node in known["graph_module"]["graph"]["nodes"]:
        node["metadata"] = {}
    assert serialise(exported) == known
