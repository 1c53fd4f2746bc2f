"""Static OpenVINO models of the tiny cases, with weights, as functions that tests/compiler/frontend replays."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import openvino as ov
import torch

from llmc.compiler.program.fuse import fuse
from llmc.compiler.program.import_fx import import_program
from llmc.compiler.program.ir import Graph
from llmc.compiler.targets.openvino.formats import Constants, WeightFormat, set_placements, to_xml
from llmc.compiler.targets.openvino.graph_model import caches_of
from llmc.compiler.targets.openvino.static import StaticModel
from llmc.compiler.weights.recipes import write_weights
from llmc.runtime.executors.openvino.device import WHOLE_SHAPES, open_core
from tests.compiler import tiny
from tests.compiler.frontend.test_frontend import Run, Tensors, fused
from tests.compiler.replay import SPARE, ringed

Sizes = tuple[int, int, int]
Format = Callable[[Constants], WeightFormat]
EXACT = {
    "INFERENCE_PRECISION_HINT": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
    "INFERENCE_NUM_THREADS": 1,
    **WHOLE_SHAPES,
}
POSITIONS = 128


class Parameters:
    """A tiny model's parameters as a checkpoint stores them."""

    def __init__(self, case: str) -> None:
        self._tensors = dict(tiny.model(case).named_parameters()) | dict(tiny.model(case).named_buffers())

    def tensor_names(self) -> list[str]:
        return list(self._tensors)

    def tensor(self, name: str) -> np.ndarray:
        found: np.ndarray = self._tensors[name].numpy()
        return found

    def quantised_blocks(self, name: str) -> None:
        return None


@cache
def graph(case: str) -> Graph:
    return fuse(import_program(fused(case), POSITIONS))


def from_graph(case: str, weights: WeightFormat, sizes: Sizes, states: bool = False) -> ov.Model:
    return StaticModel(graph(case), weights, *sizes, states=states, cache=ringed(case, SPARE)).model


def with_weights(
    case: str, sizes: Sizes, folder: Path, weights: Format = WeightFormat, states: bool = False
) -> ov.Model:  # fmt: skip
    """A model that was written as XML over a weights file, and read back."""
    constants = Constants()
    xml = to_xml(from_graph(case, weights(constants), sizes, states), folder)
    out = io.BytesIO()
    placements = write_weights(constants.recipes, Parameters(case), constants.tables, out)
    return read(set_placements(xml, placements), out.getvalue())


def read(xml: str, weights: bytes) -> ov.Model:
    return open_core().read_model(xml.encode(), ov.Tensor(np.frombuffer(weights, np.uint8).copy()))


def run_of(case: str, folder: Path) -> Run:
    """Models in float32, one for each size that is asked for."""
    compiled: dict[tuple[Sizes, bool], ov.CompiledModel] = {}
    held, shape = caches_of(graph(case)), ringed(case, SPARE)
    kv = shape.kv

    def run(token_ids: torch.Tensor, past: torch.Tensor, new: torch.Tensor, kept: Tensors) -> Tensors:
        # where all are rings, the context is any that is longer
        contexts = [t.shape[2] + (t.shape[2] == said.ring) for t, said in zip(kept, shape, strict=False) if said in kv]
        key = (*token_ids.shape, max(contexts, default=0)), bool(kept)
        if key not in compiled:
            built = with_weights(case, key[0], folder, states=bool(kept))
            compiled[key] = open_core().compile_model(built, "CPU", EXACT)
        step = {"token_ids": token_ids, "past_lengths": past, "new_lengths": new}
        given = {name: t.numpy().astype(np.int32) for name, t in step.items()}
        given |= {name: np.ascontiguousarray(t.numpy()) for name, t in zip((v.name for v in held), kept, strict=False)}
        return [torch.from_numpy(np.array(value)) for value in compiled[key](given).values()]

    return run
