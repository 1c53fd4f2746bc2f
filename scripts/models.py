"""Writes docs/models.md: what each family of models compiles for, as compiles of its tiny configuration show it here.

    python -m scripts.models              every family: some ten seconds each
    python -m scripts.models NAME …       these again; the other rows stay as the page has them

Devices are recorded, all else is computed: tests/test_models_page.py holds the page to that.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import transformers

from llmc.artifacts.store.store import Store
from llmc.compiler.architectures import supported
from llmc.compiler.architectures.shared.families import family, size_of
from llmc.compiler.architectures.shared.wrappers import WRAPPERS
from llmc.compiler.checkpoint import read_config
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.errors import CheckpointError, LlmcError
from llmc.runtime.bundle import Bundle
from tests.compiler import tiny

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
DEVICES = ("onnxruntime", "openvino", "xla", "hpu")
MEMORIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""GiB."""
TOKENS, BYTES = 4096, 2
SHOWN = 90

HEAD = f"""# Models

A checkpoint whose `model_type` is in the first column compiles, with transformers' own code of that model. Code that a
checkpoint brings (`auto_map`) is never run. Every family is tested with random weights in a tiny configuration: 16
greedy tokens, and the logits of ragged, padded, poisoned batches, are those of unbatched transformers (`pytest
tests/models`; [a new family](adding-an-architecture.md)). A compile compares your own checkpoint too. One that does not
match is refused.

Of checkpoints with parts for images too (`model_type` {", ".join(f"`{name}`" for name in WRAPPERS)}) the text part is
compiled, by its own family; the summary of the compile names what is left out. Images are not taken.

`python -m scripts.models` writes this page. The columns of devices are what compiles of the tiny configurations gave on
a CPU: for onnxruntime in int8, by llmc's [kernels](kernels.md) or by the runtime's own operators; for the others in
float32, verified against transformers ("yes"). Gaudi's programs (hpu) ran on the CPU.

The last columns are of transformers {transformers.__version__}'s configuration class with its default values, which are
not those of every checkpoint: parameters by llmc's own estimate (matrices, without norms and biases), and the least of
{", ".join(map(str, MEMORIES))} GiB that holds them in {8 * BYTES} bits,
with the cache of one sequence of {TOKENS:,} tokens. None of these was run for the table.

"""
TAIL = """
## Images

No family takes images. What that would need, so that nobody plans on half of it:

- A graph of the vision tower and its projector for each bucket of images and patches. It has no cache, as graphs of
  [encoders](encoders.md), and the planner would need the sizes of recorded images beside lengths of texts.
- Prompt graphs that take rows of hidden states at marked tokens in place of embeddings, as one more input.
- Positions of three axes (Qwen), attention in both directions among the tokens of one image (Gemma 3), features that
  are added to several layers (Qwen3-VL): each is one more fact of a family, and one more input of attention.
- Reading and resizing images in the runtime as transformers' processors do, with bounds on bytes and pixels; parts of a
  message in the server; prefixes that are equal only if their images are.
- A reference and a gate with images: the text part alone says nothing about them.
"""
COLUMNS = ("model_type", *DEVICES, "what it is", "configuration", "parameters", "fits")


def row(name: str, devices: Sequence[str]) -> list[str]:
    """The line of a family."""
    return [name, *devices, *computed(name)]


def computed(name: str) -> list[str]:
    """What of its line needs no compile: notes, configuration, parameters and memory."""
    found = family({"model_type": name})
    built = getattr(transformers, found.model_class).config_class
    try:
        size = size_of(published(built().to_dict() | {"model_type": name}), name)
    except (CheckpointError, TypeError, ValueError):
        return [found.summary, f"`{built.__name__}`", "not known", "not known"]
    needed = BYTES * (size.parameters + TOKENS * size.cache_values)
    fits = next((f"{memory:,} GiB" for memory in MEMORIES if needed <= memory << 30), f"over {MEMORIES[-1]:,} GiB")
    return [found.summary, f"`{built.__name__}`", count(size.parameters), fits]


def published(config: Mapping[str, object]) -> Mapping[str, object]:
    """A configuration as llmc reads it from a config.json."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config, default=str))
        return read_config(path)


def count(parameters: int) -> str:
    """For people."""
    return f"{parameters / 1e9:,.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:,.0f} M"


def devices_of(name: str) -> list[str]:
    """What a compile for each device gives."""
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.write_model(Path(folder) / "model", name)
        return [outcome(model, device) for device in DEVICES]


def outcome(model: Path, device: str) -> str:
    """A word, or why it is refused."""
    native = device == "onnxruntime"
    options = CompileOptions(device, quantize="int8" if native else "none", verify="none" if native else "all")
    path = model.parent / device
    try:
        compile_bundle(str(model), path, tiny.kinds_plan(), options, Store(model.parent / "store"), lambda _: None)
    except LlmcError as error:
        return f"no: {cell(str(error).replace(str(model), 'MODEL'), SHOWN)}"
    if not native:
        return "yes"
    return "kernels" if Bundle.open(path).manifest.options.get("kernels") == "llmc" else "operators"


def cell(text: str, most: int) -> str:
    """Text that fits a table."""
    text = " ".join(text.split()).replace("|", "/")
    return text if len(text) <= most else text[:most].rsplit(" ", 1)[0] + " …"


def recorded(page: str) -> dict[str, list[str]]:
    """The rows of a page, by family."""
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): [cells[0].strip("`"), *cells[1:]] for cells in rows}


def written(rows: Iterable[Sequence[str]]) -> str:
    """The page."""
    lines = [" | ".join([f"`{cells[0]}`", *cells[1:]]) for cells in rows]
    table = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *(f"| {line} |" for line in lines)]
    return HEAD + "\n".join(table) + "\n" + TAIL


def main(names: Sequence[str]) -> None:
    """See the module."""
    known = recorded(PAGE.read_text()) if PAGE.exists() else {}
    rows = []
    for name in supported():
        devices = known[name][1 : 1 + len(DEVICES)] if names and name not in names and name in known else None
        rows.append(row(name, devices or devices_of(name)))
        print(*rows[-1], sep=" | ", flush=True)
    PAGE.write_text(written(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
