"""One number of a footprint, and how it is shown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """One number, in `unit` ("executables", "s" or "bytes"), and where it comes from."""

    name: str
    value: float
    unit: str
    source: str

    def to_dict(self) -> dict[str, object]:
        """The estimate as JSON holds it."""
        return {"name": self.name, "value": self.value, "unit": self.unit, "source": self.source}

    @property
    def shown(self) -> str:
        """The value for people."""
        if self.unit == "s":
            return duration(self.value)
        if self.unit == "bytes":
            return f"{self.value / 1e9:.2f} GB" if self.value >= 1e9 else f"{self.value / 1e6:.1f} MB"
        return f"{self.value:g}"


def duration(seconds: float) -> str:
    """Seconds for people."""
    return f"{seconds / 60:,.1f} min" if seconds >= 120 else f"{seconds:.1f} s"
