"""A store that answers every key with the entry most like it, so that a compile makes all its keys and builds nothing.

What a key is made of can so be changed one input at a time: the keys behind it keep their inputs, and do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from llmc.artifacts.digest import Blob
from llmc.artifacts.key import LOCAL, Key
from llmc.artifacts.store.entries import Entry
from llmc.artifacts.store.store import Build, Store
from llmc.buckets.plan import Plan
from llmc.compiler.options import CompileOptions
from llmc.compiler.pipeline import compile as pipeline
from llmc.compiler.pipeline import verification
from llmc.compiler.pipeline.compile import compile_bundle
from llmc.compiler.targets.base import Shape, Target

Keys = list[Key]
DEVICES = ("fake", "cpu", "hpu")


class EchoStore(Store):
    """Over the root of a store that has a compile's results; `other` replaces outputs, by (kind, output)."""

    def __init__(self, root: Path, known: Mapping[str, list[Entry]], other: Mapping[tuple[str, str], Blob]) -> None:
        super().__init__(root)
        self.known = known
        self.other = other
        self.requested: Keys = []

    def get_or_build(self, key: Key, build: Build) -> tuple[Entry, bool]:
        return (super().get_or_build(key, build)) if key.is_local else (self._echo(key), True)

    def lookup(self, key: Key, *, verify: bool = False) -> Entry | None:
        if not key.is_local:
            return self._echo(key)
        found = super().lookup(key, verify=verify)
        return None if found is None else self._replaced(found)

    def _echo(self, key: Key) -> Entry:
        self.requested.append(key)
        return self._replaced(min(self.known[key.kind], key=lambda entry: len(key.explain(entry.key))))

    def _replaced(self, found: Entry) -> Entry:
        """An entry, shared or the store's own copy of it, with other outputs."""
        built = found.key.kind.removeprefix(LOCAL)
        replaced = {name: blob for (kind, name), blob in self.other.items() if kind == built and name in found.outputs}
        return found._replace(outputs={**found.outputs, **replaced})


@dataclass
class Keyed:
    """One compile, whose keys are asked for again and again with something changed."""

    model: Path
    store: Store
    plan: Plan
    options: dict[str, Any]
    known: dict[str, list[Entry]] = field(default_factory=dict)

    def build(self) -> None:
        """Compile for real, and remember the entries."""
        compile_bundle(*self._requested(self.store, self.model, self.plan, {}), lambda _: None)
        for entry in self.store.entries():
            self.known.setdefault(entry.key.kind, []).append(entry)

    def ask(
        self, *, model: Path | None = None, plan: Plan | None = None,
        other: Mapping[tuple[str, str], Blob] | None = None, **options: Any,
    ) -> Keys:  # fmt: skip
        """All keys of the compile in order, but those of one machine and the bundle's, which follows from the rest."""
        echo = EchoStore(self.store.root, self.known, other or {})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline, "write_bundle", lambda *_: None)
            patch.setattr(verification, "readable", lambda *_: True)  # the nearest outcome is another part's
            compile_bundle(*self._requested(echo, model or self.model, plan or self.plan, options), lambda _: None)
        return [key for key in echo.requested if key.kind != "bundle"]

    def _requested(
        self, store: Store, model: Path, plan: Plan, options: dict[str, Any]
    ) -> tuple[str, Path, Plan, CompileOptions, Store]:
        requested = CompileOptions.of(**{"verify": "all", "jobs": 1, **self.options, **options})
        return str(model), self.store.root.parent / "bundle", plan, requested, store


Compiled = Callable[[str], tuple[Keyed, Keys]]
"""The compile for a device, and its keys."""


def changed(before: Keys, after: Keys) -> set[str]:
    """ "kind:component" of every component in which keys at the same place differ."""
    assert [key.kind for key in before] == [key.kind for key in after]
    found = set()
    for one, other in zip(before, after, strict=True):
        assert (one == other) == (one.digest == other.digest) == (not one.explain(other))
        found |= {f"{one.kind}:{difference.name}" for difference in one.explain(other)}
    return found


def components(keys: Keys) -> set[str]:
    """Every "kind:component"."""
    return {f"{key.kind}:{name}" for key in keys for name in key.components}


def reshape(patch: pytest.MonkeyPatch, target: type[Target], **sizes: Any) -> None:
    """Let the first shape that a target asks for have other sizes."""
    original = target.shapes

    def shapes(self: Target, buckets: Any, options: CompileOptions) -> list[Shape]:
        from dataclasses import replace

        first, *rest = original(self, buckets, options)
        return [replace(first, **sizes), *rest]

    patch.setattr(target, "shapes", shapes)
