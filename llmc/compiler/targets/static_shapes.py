"""Targets of fixed shapes: a part of the contract that several share."""

from __future__ import annotations

from typing import ClassVar

from llmc.compiler.options import CompileOptions
from llmc.compiler.targets.base import Target
from llmc.errors import InputError


class StaticTarget(Target):
    """A target whose executables have one shape each, and nothing else is possible."""

    why_static: ClassVar[str]
    """The reason, for a request for dynamic shapes."""

    def configure(self, options: CompileOptions) -> CompileOptions:
        """Refuses dynamic shapes."""
        if options.specialise is False:
            raise InputError(
                f"--no-specialise is not offered for device {self.name}: {self.why_static}; leave the flag out"
            )
        return super().configure(options)

    @property
    def specialises_by_default(self) -> bool:
        """True."""
        return True

    def static_dims(self, options: CompileOptions) -> tuple[str, ...]:
        """Batch, query and context."""
        return ("batch", "query", "context")
