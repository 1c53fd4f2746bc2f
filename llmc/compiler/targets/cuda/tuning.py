"""`--tuning`: what chooses the kernels of products in a compile for a described card.

    tuning = "model" | "none" | "auto" | FILE | digest

FILE is what `llmc tune` wrote. In keys and manifests its digest stands for it, so that a path is in neither; the
content is kept in the store, where a later compile with the digest finds it. "auto" takes all results in the store
that hold for the card. Products without a result get what XLA's cost model chooses, but with "none".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.artifacts.digest import digest_bytes, is_digest
from llmc.compiler.options import Option
from llmc.compiler.targets.cuda.autotuning import device_text, require_fits, serialise
from llmc.compiler.targets.tuning import RESULTS, STAGE, Results
from llmc.compiler.targets.tuning_file import parse_results, read_bytes, read_results, write_results
from llmc.errors import ArtifactError, InputError
from llmc.runtime.executors.xla.client import toolchain_version

if TYPE_CHECKING:
    from llmc.artifacts.store.workspace import Workspace
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.stages import Stages
    from llmc.compiler.targets.base import Lowered
    from llmc.compiler.targets.cuda.products import Looked

MODEL, NONE, AUTO = "model", "none", "auto"
WORDS = (MODEL, NONE, AUTO)
TUNING = Option(
    "tuning", str, MODEL,
    "Who chooses the kernels of products: XLA's cost model (model), results of llmc tune in a file or in the store "
    "(auto) and for other products the model, or nobody (none).",
    metavar="FILE|auto|model|none",
)  # fmt: skip
INPUT = "tuning"
"""Name of the results among what compiling needs, and of their digest among a key's components."""


class Tuning:
    """What one target was given, for a card with the target configuration `config`."""

    def __init__(self, config: str) -> None:
        self.device = device_text(config)
        self._given: dict[str, bytes] = {}

    def configured(self, options: CompileOptions) -> CompileOptions:
        """With the digest of a file in place of its name. Raises InputError where it cannot be read, ArtifactError for
        results that do not hold here."""
        value = TUNING.of(options)
        if value in WORDS or is_digest(value):
            return options
        data = read_bytes(Path(value))
        self._require_fits(parse_results(data, value), value)
        digest = digest_bytes(data)
        self._given[digest] = data
        return options.changed(**{TUNING.name: digest})

    def lowered(self, stages: Stages, lowered: Lowered, options: CompileOptions) -> Lowered:
        """With the results that a compile uses, if any. Raises InputError where they are not in the store any more."""
        value = TUNING.of(options)
        if value in (MODEL, NONE):
            return lowered
        data = self._in_store(stages) if value == AUTO else self._given.get(value)
        if value == AUTO and data is None:
            return lowered
        digest = value if data is None else digest_bytes(data)

        def build(workspace: Workspace) -> Mapping[str, Any]:
            if data is None:
                raise InputError(f"{TUNING.flag}: the store has no tuning results {digest[:19]}; name their file again")
            return {RESULTS: workspace.put_bytes(data)}

        path = stages.path(stages.run(STAGE, {"results": digest}, build).outputs[RESULTS])
        self._require_fits(read_results(path), f"tuning results {digest[:19]}")
        inputs, components = {**lowered.inputs, INPUT: path}, {**lowered.components, INPUT: digest}
        return replace(lowered, inputs=inputs, components=components)

    def _in_store(self, stages: Stages) -> bytes | None:
        """All that hold for the card, as one file; of two for one product the newer."""
        found: dict[str, bytes] = {}
        made_for: Mapping[str, str] = {}
        for entry in sorted(stages.store.entries(STAGE), key=lambda entry: entry.created):
            blob = entry.outputs.get(RESULTS)
            try:
                if blob is None:
                    continue
                results = parse_results(stages.store.get_bytes(blob.digest), "the store")
                self._require_fits(results, "the store")
            except ArtifactError:
                continue
            found |= results.found
            made_for = results.made_for
        return write_results(Results(made_for, found)) if found else None

    def _require_fits(self, results: Results, source: str) -> None:
        require_fits(results, self.device, toolchain_version("cuda"), source)

    def for_xla(self, lowered: Lowered) -> bytes | None:
        """The results of a compile as XLA reads them; None where it has none."""
        path = lowered.inputs.get(INPUT)
        return None if path is None else serialise(read_results(path).found, self.device)


def summary(looked: Looked | None, lowered: Lowered, options: CompileOptions) -> dict[str, Any]:
    """For the manifest: what chose, the digest of results, and how many products of all executables have one.

    A product that several executables have counts in each; one that an executable has in many layers counts once.
    """
    value = TUNING.of(options)
    found: dict[str, Any] = {"by": value if value in WORDS else "results"}
    if INPUT in lowered.components:
        found["results"] = lowered.components[INPUT]
    return found if looked is None else {**found, "tuned": looked.tuned, "of": looked.products}


def told(found: Mapping[str, Any]) -> list[str]:
    """`summary`, in a line for people."""
    if not found:
        return []
    others = "XLA's list, its first" if found["by"] == NONE else "XLA's cost model"
    if "of" not in found:
        return [f"products: kernels by {others}"]
    rest = found["of"] - found["tuned"]
    tuned = f"{found['tuned']} of {found['of']} tuned on a card"
    return [f"products: {tuned}" + (f", kernels of {rest} by {others}" if rest else "")]
