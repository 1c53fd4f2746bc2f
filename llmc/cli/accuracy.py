"""A bundle's verification and accuracy, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmc.artifacts.bundle.reader import BundleFiles
    from llmc.artifacts.store.store import Store


SHOWN = 5
"""Buckets that a line names."""


def verified_line(verification: Mapping[str, Any], executables: int) -> str:
    """One line: what was run against the reference, of how many executables, and the result."""
    v = verification
    if v.get("by") == "tokens":
        return (
            f"against {v['reference']} by tokens alone, since the device gives no logits: {v['rows']} greedy tokens, "
            f"{v['top1']:.1%} equal, texts equal {v['greedy_equal']}/{v['greedy_sequences']}, of up to {v['longest']} "
            "tokens"
        )
    if "cosine" in v:
        of = "" if v["buckets"] == v["planned"] else f" of {v['planned']}"
        return (
            f"against {v['reference']}, a text at a time: {v['buckets']}{of} buckets, each twice with other padding, "
            f"{v['rows']} rows: cosine at least {v['cosine']:.6f}, padding leak {v['leak']:.2g}"
        )
    ran, buckets, left_out = v["executables"], v["buckets"], v["left_out"]
    run = f"{'all ' * (ran > 1)}{ran}" if ran == executables else f"{ran} of {executables}"
    of = "" if buckets == v["planned"] else f" of {v['planned']}"
    poisons = f"{v['twice']} under two poisons"
    if left_out:
        poisons += f", {len(left_out)} sampled ones under one to keep within the budget: {', '.join(left_out)}"
    if not_run := v.get("not_run"):  # bundles of earlier versions do not say
        poisons += f", {len(not_run)} not run to keep within it, others run their executables: {', '.join(not_run)}"
    far = v.get("unreached", [])
    more = f" and {len(far) - SHOWN} more" if len(far) > SHOWN else ""
    shorter = [f"{a['tokens']} of {a['of']} tokens of {name}" for name, a in v.get("shortened", {}).items()]
    cut = f"; to keep within the budget {' and '.join(shorter)}" if shorter else ""
    instead = f"; {', '.join(v['stand_ins'])} ran in place of its own, for other hosts" if v.get("stand_ins") else ""
    beyond = f"; not run to the longest sequences that they take: {', '.join(far[:SHOWN])}{more}" if far else ""
    return (
        f"against {v['reference']}: {run} executable{'s' * (executables > 1)} run, {buckets}{of} buckets ({poisons}), "
        f"{v['rows']} rows of up to {v['longest']} tokens: mean KL {v['mean_kl']:.2g} (limit "
        f"{v['limits']['mean_kl']:.2g}), equal tokens {v['top1']:.1%}, greedy texts equal "
        f"{v['greedy_equal']}/{v['greedy_sequences']}, padding leak {v['leak']:.2g}{cut}{beyond}{instead}"
    )


def accuracy_line(verification: Mapping[str, Any]) -> str | None:
    """One line about a verification's accuracy over the text, with the limit that it kept; None where none was taken
    (a device that gives tokens alone)."""
    if "accuracy" not in verification:
        return None
    found, limits = verification["accuracy"], verification["limits"]
    perplexity = ""
    if found.get("perplexity") is not None:  # bundles of earlier versions have none
        perplexity = f", perplexity {found['perplexity']:,.2f} (reference {found['reference_perplexity']:,.2f})"
    return (
        f"accuracy over {found['tokens']} tokens of text: mean KL {found['mean_kl']:.2g} nats (limit "
        f"{limits['mean_kl']:.2g} for {limits['quality']}), p99 {found['p99_kl']:.2g}, equal tokens {found['top1']:.1%}"
        f"{perplexity}"
    )


def origin_line(bundle: str, files: BundleFiles, store: Store | None = None) -> str:
    """One line about where the outcome that a bundle records comes from; `store` is the environment's by default."""
    from llmc.artifacts.local.origins import origin_words, verification_origin
    from llmc.settings import Settings

    origin = verification_origin(files, store, Settings.from_environment())
    again = f"; `llmc verify {bundle}` does it again here" if origin.name == "unsigned" else ""
    return f"verification: {origin_words(origin, files.manifest.verification)}{again}"


def elsewhere_line(verification: Mapping[str, Any]) -> str | None:
    """One line about outcomes that a compile took from elsewhere instead of running it; None if there are none."""
    from llmc.artifacts.local.origins import ELSEWHERE
    from llmc.artifacts.signing.keys import short_id

    if (taken := verification.get(ELSEWHERE)) is None:
        return None
    signed = f"; others signed by {', '.join(map(short_id, taken['signers']))}" if taken["signers"] else ""
    return f"from elsewhere: {taken['unsigned']} of {taken['outcomes']} outcomes unsigned{signed}"
