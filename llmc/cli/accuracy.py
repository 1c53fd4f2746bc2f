"""A bundle's accuracy in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def accuracy_line(verification: Mapping[str, Any]) -> str:
    """One line about a verification's accuracy over the text, with the limit that it kept."""
    found, limits = verification["accuracy"], verification["limits"]
    return (
        f"accuracy over {found['tokens']} tokens of text: mean KL {found['mean_kl']:.2g} nats (limit "
        f"{limits['mean_kl']:.2g} for {limits['quality']}), p99 {found['p99_kl']:.2g}, equal tokens {found['top1']:.1%}"
    )
