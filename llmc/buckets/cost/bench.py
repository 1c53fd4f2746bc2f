"""Bench files: measured seconds per bucket on one device.

File format, JSON in UTF-8:

    bench       = { "schema": 1, "device": string [, "bundle": string], "measurements": [measurement…] [, more…] }
    measurement = { "phase": "prompt" | "decode", "batch", "query", "context": integers,
                    "seconds": number                      of one step
                    [, "compile_seconds": number]
                    [, "memory_bytes": integer]            that the compiled graph holds
                    [, "samples": integer] }               steps that "seconds" is of

Other fields next to "device" ("toolchain", "host" …) are kept unchanged. "unmeasured" lists, as text, the buckets that
an interrupted run did not measure. No bucket is measured twice.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from llmc.buckets.bucket import PHASES, Bucket, Phase
from llmc.buckets.cost.surface import Floats, Surface, leave_one_out, running_maximum
from llmc.buckets.render.text import counted
from llmc.errors import InputError
from llmc.files import read_text, write_text
from llmc.json_fields import Fields, fail

SCHEMA = 1
"""Version of the file format; a bench of any other version is refused."""

UNMEASURED = "unmeasured"
"""The extra field of an interrupted bench."""

MAX_MEASUREMENTS = 1 << 15
"""Most measurements of one bench: far beyond what can be timed, low enough to bound the work of interpolating."""

MAX_SIZE = 2**31 - 1
"""Largest batch, query or context of a measurement."""

SECONDS = (1e-9, 1e6)
"""Range of a measurement in seconds; a number outside it is in another unit."""

SHOWN = 200
"""Measurements that a notebook shows."""


@dataclass(frozen=True)
class Measurement:
    """One bucket's measurement: seconds of a step, and the time and memory to compile and keep its graph.

    Raises InputError for a number that is out of range.
    """

    bucket: Bucket
    seconds: float
    compile_seconds: float | None = None
    memory_bytes: int | None = None
    samples: int | None = None

    def __post_init__(self) -> None:
        if not SECONDS[0] <= self.seconds <= SECONDS[1]:
            raise InputError(f"{self.bucket}: seconds {self.seconds} must be {SECONDS[0]:g} to {SECONDS[1]:g}")
        if max(self.bucket.shape) > MAX_SIZE:
            raise InputError(f"{self.bucket}: batch, query and context must be at most {MAX_SIZE}")
        if self.compile_seconds is not None and not 0 <= self.compile_seconds < math.inf:
            raise InputError(f"{self.bucket}: compile_seconds {self.compile_seconds} must be a number of at least 0")
        for name, least in (("memory_bytes", 0), ("samples", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{self.bucket}: {name} {value} must be at least {least}")

    def to_dict(self) -> dict[str, object]:
        """Return the measurement as a JSON object."""
        known = {name: getattr(self, name) for name in ("seconds", "compile_seconds", "memory_bytes", "samples")}
        return asdict(self.bucket) | {name: value for name, value in known.items() if value is not None}


@dataclass(frozen=True)
class Bench:
    """Measurements of distinct buckets on one device, at least one; sorted by bucket.

    `more` holds the extra fields of the file. Raises InputError for no, too many or duplicate measurements, and for an
    extra field with the name of a standard field.
    """

    device: str
    measurements: tuple[Measurement, ...]
    bundle: str | None = None
    more: Mapping[str, object] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.measurements, key=lambda measurement: measurement.bucket))
        object.__setattr__(self, "measurements", ordered)
        if not 1 <= len(ordered) <= MAX_MEASUREMENTS:
            raise InputError(f"a bench of {len(ordered)} measurements; 1 to {MAX_MEASUREMENTS} can be used")
        for name in sorted({"schema", "device", "bundle", "measurements"} & set(self.more)):
            raise InputError(f"the bench has an extra field {name!r}, which is the name of a standard field; rename it")
        for before, after in pairwise(ordered):
            if before.bucket == after.bucket:
                raise InputError(f"the bench has {after.bucket} twice; keep one measurement of it")

    @property
    def unmeasured(self) -> list[str]:
        """Names of the buckets that an interrupted run left out; empty for a complete bench."""
        left = self.more.get(UNMEASURED)
        return [str(bucket) for bucket in left] if isinstance(left, list) else []

    def measured(self, phase: Phase) -> tuple[Measurement, ...]:
        """Return the measurements of one phase, ascending by bucket; empty if the phase was not measured."""
        return tuple(measurement for measurement in self.measurements if measurement.bucket.phase == phase)

    def seconds(self, phase: Phase, batch: ArrayLike, query: ArrayLike, context: ArrayLike) -> Floats:
        """Return the seconds of one step of each shape, measured or not; the arguments are broadcast against each
        other.

        Measured shapes have their measured seconds, others are interpolated (guarantees: surface.py). Raises InputError
        where the phase has no measurement, or a shape is smaller than any bucket.
        """
        shapes = np.stack(np.broadcast_arrays(*(np.asarray(one, np.float64) for one in (batch, query, context))), -1)
        if np.any(shapes < (1, 1, 0)):
            raise InputError(f"seconds of a {phase} step: batch and query must be at least 1, context at least 0")
        if phase not in self._surfaces:
            raise InputError(f"the bench of {self.device} has no {phase} measurement; measure at least one bucket")
        return self._surfaces[phase](shapes.reshape(-1, 3)).reshape(shapes.shape[:-1])

    def rising(self) -> Bench:
        """Return the bench with every measurement raised to the largest time of any smaller bucket of its phase.

        Noise can make a larger bucket look faster. In the result, `seconds` never falls as a shape grows (up to
        rounding), which the cost search needs. If nothing had to be raised, the result is this bench.
        """
        raised: list[Measurement] = []
        for phase in PHASES:
            known = self.measured(phase)
            if known:
                seconds = running_maximum(*_arrays(known))
                raised += [replace(one, seconds=float(new)) for one, new in zip(known, seconds, strict=True)]
        return self if tuple(raised) == self.measurements else replace(self, measurements=tuple(raised))

    def model_error(self, phase: Phase) -> float | None:
        """Return the median relative error of the affine model at measured buckets, each left out of its own fit.

        The error is a fraction (0.1 is 10%) and estimates the error at unmeasured shapes; None below two measurements.
        """
        known = self.measured(phase)
        return leave_one_out(phase, *_arrays(known)) if known else None

    def describe(self) -> str:
        """Return one line for reports and provenance: the device, and each phase's points and model error."""
        left = len(self.unmeasured)
        incomplete = f"; interrupted: {counted(left, 'bucket')} not measured" if left else ""
        return f"bench of {self.device}: {', '.join(self._describe(phase) for phase in PHASES)}{incomplete}"

    def _describe(self, phase: Phase) -> str:
        count, error = len(self.measured(phase)), self.model_error(phase)
        points = f"{count} {phase} point{'' if count == 1 else 's'}"
        return points if error is None else f"{points} (affine model off by {error:.1%} at the median)"

    def _repr_html_(self) -> str:
        from llmc.buckets.render.page import Table, columns, counts, fragment

        rows = []
        for one in self.measurements[:SHOWN]:
            b, rate = one.bucket, one.bucket.tokens / one.seconds
            rows.append((b.phase, *counts(*b.shape), f"{one.seconds * 1e3:,.2f}", f"{rate:,.0f}"))
        left = len(self.measurements) - len(rows)
        names = ("phase", "batch", "query", "context", "ms", "tokens/s")
        note = f"{left:,} more are left out." if left else ""
        return fragment("Measured steps", (self.describe(),), [Table("", columns(names, 1), rows, note)])

    @cached_property
    def _surfaces(self) -> dict[Phase, Surface]:
        known = {phase: self.measured(phase) for phase in PHASES}
        return {phase: Surface(phase, *_arrays(some)) for phase, some in known.items() if some}

    def digest(self) -> str:
        """Return the SHA-256 of `to_json` in hexadecimal; equal benches have equal digests on every host."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Return the canonical text: a line for each field and each measurement, ending in a newline."""
        lines = [f"{json.dumps(name)}: {json.dumps(value, sort_keys=True)}" for name, value in self._head().items()]
        rows = ",\n".join(json.dumps(measurement.to_dict()) for measurement in self.measurements)
        return "{\n" + ",\n".join([*lines, f'"measurements": [\n{rows}\n]']) + "\n}\n"

    def _head(self) -> dict[str, object]:
        bundle = {} if self.bundle is None else {"bundle": self.bundle}
        return {
            "schema": SCHEMA,
            "device": self.device,
            **bundle,
            **{name: self.more[name] for name in sorted(self.more)},
        }

    @classmethod
    def from_json(cls, text: str, source: str = "bench") -> Bench:
        """Parse `text` as a bench; `source` names it in messages.

        Raises InputError, naming `source` and the field, for invalid text.
        """
        fields = Fields.parse(text, source)
        schema = fields.integer("schema")
        if schema != SCHEMA:
            raise InputError(f"{source}: field 'schema' is {schema}, this version of llmc reads {SCHEMA}; measure anew")
        device, bundle = fields.text("device"), fields.optional_text("bundle")
        measurements = tuple(
            _measurement(Fields(row, source, f"measurements[{index}]"))
            for index, row in enumerate(fields.array("measurements"))
        )
        try:
            return cls(device, measurements, bundle, fields.rest())
        except InputError as error:
            raise InputError(f"{source}: field 'measurements': {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the bench to `path` atomically. Raises InputError when it cannot be written."""
        write_text(path, self.to_json(), "bench")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Bench:
        """Load the bench from file `path`. Raises InputError like `from_json`, and when the file cannot be read."""
        return cls.from_json(read_text(path, "bench"), os.fspath(path))


def _measurement(fields: Fields) -> Measurement:
    phase = fields.text("phase")
    if phase not in PHASES:
        fail(fields.document, fields.path("phase"), f"one of {', '.join(PHASES)}", phase)
    sizes = (fields.integer("batch"), fields.integer("query"), fields.integer("context"))
    numbers = (fields.number("seconds"), fields.optional_number("compile_seconds"))
    counts = (fields.optional_integer("memory_bytes"), fields.optional_integer("samples"))
    fields.finish()
    try:
        return Measurement(Bucket(phase, *sizes), *numbers, *counts)
    except InputError as error:
        raise InputError(f"{fields.document}: field {fields.path('').removesuffix('.')!r}: {error}") from None


def _arrays(measurements: tuple[Measurement, ...]) -> tuple[Floats, Floats]:
    """Points [n, 3] and seconds [n]."""
    points = [one.bucket.shape for one in measurements]
    return np.array(points, np.float64), np.array([one.seconds for one in measurements])
