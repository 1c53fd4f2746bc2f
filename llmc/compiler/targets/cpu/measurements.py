"""Measured times and memory of engines on a CPU, and the cases that each measurement applies to.

    file = {"schema": 2, "measured": [record…]}
    record = {"machine": text, "isa": [feature, …], "threads": number, "model": text, "model_type": text,
              "parameters": number, "versions": {package: version},
              "engines": {engine: {quantisation: one}}}
    one = {"options": {"kernels", "dtype", "specialise"}   as its target configured them
           "decode_ms": {batch: ms of a step}, "prefill_ms": {tokens: ms}, "start_s": seconds from exec to the first
           token, "memory_bytes": proportional set size with 8 sequences}

A record holds for a host that has every feature of `isa`, for as many threads, for models of the same type of up to
SIZES times its parameters or as many times fewer, for the same versions, and for the same options.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.errors import InputError

SCHEMA = 2
KEPT = Path(__file__).with_name("measurements.json")
OWN = Path("measurements", "cpu.json")
"""The user's own, in the cache folder."""

SIZES = 4.0
"""How many times larger or smaller a model may be than the measured one; times and memory are scaled between them."""

OPTIONS = ("kernels", "dtype", "specialise")
"""The options of an engine, besides the quantisation, that its figures depend on."""


@dataclass(frozen=True)
class CpuCase:
    """What a measurement is looked up for: this host, these versions, and a model.

    `options`: engine → its OPTIONS as they would be compiled with, and "quantize" where that is known.
    """

    isa: Sequence[str]
    threads: int
    model_type: str
    parameters: int
    versions: Mapping[str, str]
    options: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Measured:
    """One record; see the module's docstring."""

    machine: str
    isa: frozenset[str]
    threads: int
    model: str
    model_type: str
    parameters: int
    versions: Mapping[str, str]
    engines: Mapping[str, Mapping[str, Mapping[str, Any]]]

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Measured:
        """From its JSON; raises KeyError, TypeError, ValueError or AttributeError for any other value."""
        engines = {
            engine: {kind: _checked(one) for kind, one in kinds.items()} for engine, kinds in data["engines"].items()
        }
        versions = {str(name): str(version) for name, version in data["versions"].items()}
        return cls(
            str(data["machine"]), frozenset(data["isa"]), int(data["threads"]), str(data["model"]),
            str(data["model_type"]), int(data["parameters"]), versions, engines,
        )  # fmt: skip

    def unfit(self, case: CpuCase, kinds: Mapping[str, str]) -> str:
        """Why the record says nothing about a case with each engine's quantisation, in words; empty where it does."""
        if missing := sorted(self.isa - set(case.isa)):
            return f"on a CPU with {', '.join(missing)}"
        if self.threads != case.threads:
            return f"with {self.threads} threads, not {case.threads}"
        if self.model_type != case.model_type:
            return f"for {self.model_type}, not {case.model_type}"
        if not 1 / SIZES <= case.parameters / self.parameters <= SIZES:
            return f"for {self.parameters / 1e6:,.4g} M parameters, not {case.parameters / 1e6:,.4g} M"
        for name, version in case.versions.items():
            if self.versions.get(name) != version:
                return f"with {name} {self.versions.get(name, 'unknown')}, not {version}"
        for engine, options in case.options.items():
            one = self.engines.get(engine, {}).get(kinds[engine])
            if one is None:
                return f"without {engine} {kinds[engine]}"
            for name in OPTIONS:
                if name in options and one["options"].get(name) != options[name]:
                    return f"for {engine} with {name} {one['options'].get(name)}, not {options[name]}"
        return ""

    @property
    def key(self) -> tuple[Any, ...]:
        """What a newer record of the same replaces."""
        return self.isa, self.threads, self.model_type, self.parameters


def load(path: Path) -> list[Measured]:
    """The records of a file. Raises InputError, naming it, for what is not one."""
    try:
        data = json.loads(path.read_bytes())
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']}")
        return [Measured.of(one) for one in data["measured"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise InputError(f"{path}: not a file of measurements ({e}); make one with `llmc bench cpu`") from e


def added(path: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a file with one record more, in place of one of the same key; a file that is none is lost."""
    new = Measured.of(record)
    try:
        load(path)
        old = json.loads(path.read_bytes())["measured"]
    except InputError:
        old = []
    return {"schema": SCHEMA, "measured": [record, *(one for one in old if Measured.of(one).key != new.key)]}


def measurements(cache_dir: Path) -> list[Measured]:
    """The user's own where there are some, then those kept with the code."""
    own = cache_dir / OWN
    return [*(load(own) if own.exists() else []), *load(KEPT)]


def _checked(one: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "options": {name: one["options"][name] for name in OPTIONS},
        "decode_ms": {int(batch): float(ms) for batch, ms in one["decode_ms"].items()},
        "prefill_ms": {int(tokens): float(ms) for tokens, ms in one["prefill_ms"].items()},
        "start_s": float(one["start_s"]),
        "memory_bytes": int(one["memory_bytes"]),
    }
