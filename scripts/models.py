"""Writes the table of architectures in docs/models.md, from compiles of their tiny configurations on this host.

    python -m scripts.models              every architecture: some ten seconds each
    python -m scripts.models NAME …       these again; the other rows stay as the page has them

The page's other text is written by hand. Results for devices are recorded and the rest is computed, which
tests/test_models_page.py checks.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from llmc.artifacts.store.store import Store
from llmc.compiler.architectures import supported
from llmc.compiler.architectures.shared.architectures import architecture
from llmc.compiler.architectures.shared.wrappers import WRAPPERS
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.errors import LlmcError
from llmc.runtime.bundle import Bundle
from tests.compiler import tiny

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
BEGIN = "<!-- python -m scripts.models writes from here -->\n"
END = "<!-- to here -->\n"
USUAL = {"onnxruntime": "kernels", "openvino": "yes", "xla": "yes", "hpu": "yes"}
"""Device → the result that the sentence above the table states for all rows without an exception."""
SHOWN = 90

HEAD = f"""
Each architecture compiles for `onnxruntime` in int8 with llmc's kernels, and for `openvino`, `xla` and `hpu` in
float32, verified against transformers. The last column lists exceptions. These compiles used tiny configurations
with random weights, on a CPU.

Of a checkpoint with images ({", ".join(f"`{name}`" for name in WRAPPERS)}), llmc compiles the text part. The summary
of the compile names the parts that it leaves out. No architecture takes images.

The column GGUF has the `general.architecture` of GGUF files that llmc reads. Tests compare files that llama.cpp's own
converters write with the checkpoints that they were converted from. Mistral's files say `llama`. Of other models, llmc
reads the Hugging Face folder.

"""
COLUMNS = ("model_type", "models", "GGUF", "exceptions")


def row(name: str, exceptions: str) -> list[str]:
    """The cells of an architecture."""
    own = architecture({"model_type": name})
    return [name, own.summary.partition(":")[0], own.gguf.architecture if own.gguf else "", exceptions]


def exceptions_of(name: str) -> str:
    """The devices for which a compile has another result than `USUAL`, and that result."""
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.write_model(Path(folder) / "model", name)
        found = {device: outcome(model, device) for device in USUAL}
    return "; ".join(f"{device}: {result}" for device, result in found.items() if result != USUAL[device])


def outcome(model: Path, device: str) -> str:
    """The result of a compile: "yes", the kernels that a native bundle uses, or the error."""
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


def parts(page: str) -> tuple[str, str, str]:
    """A page as the text before the markers, the text between them, and the text behind them."""
    before, _, rest = page.partition(BEGIN)
    own, _, behind = rest.partition(END)
    return before + BEGIN, own, END + behind


def recorded(own: str) -> dict[str, list[str]]:
    """The rows between the markers, by architecture."""
    lines = [line.removeprefix("| ").removesuffix(" |") for line in own.splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.split(" | ", len(COLUMNS) - 1)] for line in lines]
    return {name.strip("`"): [name.strip("`"), *cells] for name, *cells in rows}


def written(rows: Iterable[Sequence[str]]) -> str:
    """The text between the markers."""
    lines = [f"| `{name}` | {' | '.join(cells)} |" for name, *cells in rows]
    return HEAD + "\n".join([f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *lines]) + "\n\n"


def main(names: Sequence[str]) -> None:
    """Write the rows of `names`, or all."""
    before, own, behind = parts(PAGE.read_text())
    known = recorded(own)
    rows = []
    for name in supported():
        kept = names and name not in names and name in known
        rows.append(row(name, known[name][-1] if kept else exceptions_of(name)))
        print(*rows[-1], sep=" | ", flush=True)
    PAGE.write_text(before + written(rows) + behind)


if __name__ == "__main__":
    main(sys.argv[1:])
