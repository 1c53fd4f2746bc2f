"""Which values of prompts' tokens are handed on in bfloat16, as products take them (kernels/source/words.h)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from llmc.compiler.targets.onnxruntime.emitter import DECODING, OWN

_DECODING = 3
_DEPTH = 32
"""Numbers that the kernels take at once: the results of a gate fill such."""


def hand_on_words(nodes: list[Any], outputs: Iterable[str]) -> None:
    """Let norms and gates that products alone read give what they round anyway, in place of floats.

    nodes: NodeProtos of one graph whose products take prompts in bfloat16; changed in place. outputs: values that
    the graph gives, which stay as they are.
    """
    readers: dict[str, list[tuple[Any, int]]] = defaultdict(list)
    for node in nodes:
        for at, name in enumerate(node.input):
            readers[name].append((node, at))
    kept = set(outputs)
    for node in nodes:
        name = node.output[0]
        if not _gives(node) or name in kept or not readers[name] or not all(_takes(*by) for by in readers[name]):
            continue
        if node.op_type == "AddNorm":
            node.input.append(DECODING)
        node.output.extend([*[""] * (2 - len(node.output)), f"{name}_words"])
        for reader, _ in readers[name]:
            reader.input.append(f"{name}_words")


def _gives(node: Any) -> bool:
    if not _multiplies_prompts(node):
        return bool(node.domain == OWN and node.op_type == "AddNorm")
    sizes = {a.name: a.i for a in node.attribute}
    return bool(sizes["gated"]) and sizes["rows"] % (2 * _DEPTH) == 0


def _takes(node: Any, at: int) -> bool:
    return at == 0 and _multiplies_prompts(node)


def _multiplies_prompts(node: Any) -> bool:
    """Whether it is a product with all of a step's tokens, with those of prompts in bfloat16."""
    ours = node.domain == OWN and node.op_type == "Linear"
    return ours and len(node.input) > _DECODING and node.input[_DECODING] == DECODING
