"""A tiny model that was compiled for a device, and all it takes to compile it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llmc.artifacts.store.store import Store
from llmc.buckets.limits import Limits
from llmc.buckets.plan import Plan
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline.compile import CompileResult, compile_bundle
from llmc.compiler.stages import StageReport
from llmc.runtime.bundle import Bundle
from llmc.testing.toy import toy_plan
from tests.compiler import tiny


def of_one_layer(folder: Path, device: str, case: str) -> Path:
    """A portable bundle with a prompt and a decode bucket: quickly made, and finished."""
    plan = toy_plan([(1, 16, 0)], [(2, 16)], Limits(16, 2, 16, 8))
    return Compiled.first(folder, case, plan, {"device": device, "quantize": "none", "verify": "none"}).path


@dataclass
class Compiled:
    """`requested`: what every compile asks for (`CompileOptions.of`), unless it says otherwise."""

    model: Path
    store: Store
    path: Path
    plan: Plan
    requested: Mapping[str, object]
    result: CompileResult = field(init=False)
    """Of `first`."""
    built: set[str] = field(init=False, default_factory=set)
    """Stages of the last compile that were not in the store."""

    @classmethod
    def first(
        cls, folder: Path, case: str, plan: Plan, requested: Mapping[str, object], store: Store | None = None,
        **options: object,
    ) -> Compiled:  # fmt: skip
        """The model `case` of tiny.py, written to `folder` and compiled there; in a store of its own, if none is
        named."""
        created = cls(
            tiny.write_model(folder / "model", case),
            store or Store(folder / "store"),
            folder / "bundle",
            plan,
            requested,
        )
        created.result = created.compile(created.path, **options)
        return created

    def compile(self, path: Path, plan: Plan | None = None, **options: object) -> CompileResult:
        """Compile again, into another bundle."""
        self.built = set()
        requested = CompileOptions.of(**{**self.requested, **options})  # type: ignore[arg-type]
        return compile_bundle(str(self.model), path, plan or self.plan, requested, self.store, self._keep)

    def blobs(self) -> list[bytes]:
        """All executables' own."""
        with Bundle.open(self.path).files as files:
            return [files.read(e.blob) for e in files.manifest.executables]

    def _keep(self, event: object) -> None:
        if isinstance(event, StageReport) and event.seconds is not None and not event.cached:
            self.built.add(event.name)
