"""Results of compiles, dry runs and verifications, as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.artifacts.digest import parse
from llmc.buckets.render.text import counted
from llmc.cli.output import echo
from llmc.files import write_text
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.artifacts.bundle.reader import BundleFiles
    from llmc.artifacts.key import Key
    from llmc.artifacts.store.store import Store
    from llmc.compiler.pipeline.compilation import DisaggregatedResult
    from llmc.compiler.pipeline.compile import CompileResult


def print_estimate(found: dict[str, Any], as_json: bool) -> None:
    """Print the result of a dry run."""
    if as_json:
        echo(json.dumps(found))
        return
    from llmc.compiler.estimates.footprint import Estimate

    reasons = {e["why"] for e in found["executables"] if not e["cached"]}
    shared = reasons.pop() if len(reasons) == 1 else None
    for e in found["executables"]:
        sizes = " ".join(f"{k}={e[k]}" for k in ("batch", "query", "context") if e[k] is not None)
        state = "cached" if e["cached"] else "to build" if shared else f"to build: {e['why']}"
        echo(f"{e['phase']} {sizes or 'every shape'} ({counted(e['buckets'], 'bucket')}): {state}")
    if shared:
        echo(f"why: {shared}")
    echo(found["choice"])
    seconds = found["estimated_seconds"]
    echo(
        f"{counted(found['to_build'], 'executable')} to build, {found['cached']} cached; "
        f"{'time not measured here yet' if seconds is None else f'about {seconds:.0f} s'} "
        f"and {found['estimated_bytes'] / 1e6:,.0f} MB"
    )
    for estimate in (Estimate(**one) for one in found.get("estimates", ())):
        if estimate.name == "KV cache":
            echo(f"KV cache {estimate.shown}: {estimate.source}")
    for warning in found["warnings"]:
        echo(f"warning: {warning}")


def print_programs(programs: Sequence[tuple[str, str]], output: Path | None, as_json: bool) -> None:
    """Print programs, each under its name, or write them to `output`."""
    if as_json:
        text = json.dumps([{"name": name, "text": program} for name, program in programs])
    else:
        text = "\n".join(f"// {name}\n{program.rstrip()}" for name, program in programs)
    if output is None:
        echo(text)
    else:
        write_text(output, text + "\n", "programs")


def print_key(key: Key, as_json: bool) -> None:
    """Print the digest of a compile's key, or JSON with its components."""
    echo(json.dumps({"key": key.digest, "components": dict(key.components)}) if as_json else parse(key.digest))


def print_disaggregated(result: DisaggregatedResult, as_json: bool) -> None:
    """Print the results of a two-device compile, and how to use the folder."""
    if as_json:
        found = {role: one.to_json() for role, one in result.halves.items()}
        echo(json.dumps({"disaggregated": str(result.folder), **found, "variables": dict(result.variables)}))
        return
    for role, one in result.halves.items():
        echo(f"{role}:")
        print_result(one, False)
    if result.variables:
        named = " ".join(f"{name}={value}" for name, value in result.variables.items())
        echo(f"one bundle: its device transfers prompts by itself if {named} is set when it is opened")
    else:
        echo(
            f"prefill on one device, decode on the other: llmc generate {result.folder}, or llmc serve {result.folder}"
        )


def print_result(result: CompileResult, as_json: bool, file: Path | None = None) -> None:
    """Print what was compiled and verified; also write it to `file`."""
    if file is not None:
        write_text(file, json.dumps(result.to_json()) + "\n", "outcome")
    if as_json:
        echo(json.dumps(result.to_json()))
        return
    echo(f"{result.bundle}: {counted(result.built + result.reused, 'executable')} ({result.choice})")
    echo(
        f"built {result.built}, from the store {result.reused}; native {result.native}, portable {result.portable}; "
        f"{result.bytes / 1e6:,.1f} MB, of which weights {result.weights_bytes / 1e6:,.1f} MB; {result.seconds:.1f} s"
    )
    if result.left_out:
        modules = ", ".join(f"{name} ({count} tensors)" for name, count in result.left_out.items())
        echo(f"only the checkpoint's text model is compiled; left out: {modules}")
    for notice in result.notices:
        echo(notice)
    if result.sample_top_k:
        echo(f"graphs also return the {result.sample_top_k} largest logits with their ids")
    for line in result.described:
        echo(line)
    v = result.verification
    if v.get("mode") == "none":
        echo(f"not verified: {v['why']}" if "why" in v else "not verified (--verify none)")
    else:
        echo(f"verified {verified_line(v, result.native + result.portable)}")
        if (accuracy := accuracy_line(v)) is not None:
            echo(accuracy)
        if (taken := elsewhere_line(v)) is not None:
            echo(taken)
    for line in on_target_lines(result.on_target):
        echo(line)
    if result.host_files:
        names = ", ".join(Path(name).name for name in result.host_files)
        echo(f"for the device's own host, in {Path(result.host_files[0]).parent}: {names}")
    if result.remaining:
        echo(f"portable: left for the device's own host: {result.remaining}")


def on_target_lines(on_target: Mapping[str, Any]) -> list[str]:
    """Describe an on-target compilation; empty if there was none."""
    if not on_target:
        return []
    facts = ", ".join(f"{name} {value}" for name, value in sorted(on_target["built_for"].items()))
    lines = [f"compiled for {facts}: built {on_target['built']}, from the store {on_target['reused']}"]
    if on_target["files"]:
        lines[0] += f"; files {', '.join(on_target['files'])}"
    v = on_target["verification"]
    if v["mode"] == "none":
        lines.append(
            f"on-target executables not verified: {v['why']}" if "why" in v else "not verified (--verify none)"
        )
    else:
        lines.append(
            f"verified against {v['reference']}: {v['buckets']} of {v['planned']} buckets ({v['twice']} with two NaN "
            f"fills), {v['rows']} rows: mean KL {v['mean_kl']:.2g} (limit {v['limits']['mean_kl']:.2g}), top-1 "
            f"agreement {v['top1']:.1%}, padding leak {v['leak']:.2g}"
        )
    if on_target["unsigned"]:
        lines.append(
            "the portable bundle's signature no longer applies and was removed: sign it again with llmc cache sign"
        )
    return lines


SHOWN = 5
"""Buckets that one line names."""


def verified_line(verification: Mapping[str, Any], executables: int) -> str:
    """One line: what ran against the reference, of how many executables, and the result."""
    v = verification
    if v.get("by") == "tokens":
        return (
            f"against {v['reference']} by tokens only, because the device gives no logits: {v['rows']} greedy tokens, "
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
    fills = f"{v['twice']} with two NaN fills"
    if left_out:
        fills += f", {len(left_out)} sampled ones with one to keep within the budget: {', '.join(left_out)}"
    if not_run := v.get("not_run"):  # absent in bundles of earlier versions
        fills += f", {len(not_run)} not run to keep within it, others run their executables: {', '.join(not_run)}"
    far = v.get("unreached", [])
    more = f" and {len(far) - SHOWN} more" if len(far) > SHOWN else ""
    shorter = [f"{a['tokens']} of {a['of']} tokens of {name}" for name, a in v.get("shortened", {}).items()]
    cut = f"; to keep within the budget {' and '.join(shorter)}" if shorter else ""
    instead = f"; {', '.join(v['stand_ins'])} ran in place of its own, for other hosts" if v.get("stand_ins") else ""
    beyond = f"; not run to the longest sequences that they take: {', '.join(far[:SHOWN])}{more}" if far else ""
    return (
        f"against {v['reference']}: {run} executable{'s' * (executables > 1)} run, {buckets}{of} buckets ({fills}), "
        f"{v['rows']} rows of up to {v['longest']} tokens: mean KL {v['mean_kl']:.2g} (limit "
        f"{v['limits']['mean_kl']:.2g}), top-1 agreement {v['top1']:.1%}, greedy texts equal "
        f"{v['greedy_equal']}/{v['greedy_sequences']}, padding leak {v['leak']:.2g}{cut}{beyond}{instead}"
    )


def accuracy_line(verification: Mapping[str, Any]) -> str | None:
    """One line about accuracy over the text, with its limit; None for devices that return only tokens."""
    if "accuracy" not in verification:
        return None
    found, limits = verification["accuracy"], verification["limits"]
    perplexity = ""
    if found.get("perplexity") is not None:  # bundles of earlier versions have none
        perplexity = f", perplexity {found['perplexity']:,.2f} (reference {found['reference_perplexity']:,.2f})"
    return (
        f"accuracy over {found['tokens']} tokens of text: mean KL {found['mean_kl']:.2g} nats (limit "
        f"{limits['mean_kl']:.2g} for {limits['quality']}), p99 {found['p99_kl']:.2g}, top-1 agreement "
        f"{found['top1']:.1%}{perplexity}"
    )


def origin_line(bundle: str, files: BundleFiles, store: Store | None = None) -> str:
    """One line about the origin of the bundle's recorded verification; `store` defaults to the environment's."""
    from llmc.artifacts.local.origins import origin_words, verification_origin

    origin = verification_origin(files, store, Settings.from_environment())
    again = f"; `llmc verify {bundle}` does it again here" if origin.name == "unsigned" else ""
    return f"verification: {origin_words(origin, files.manifest.verification)}{again}"


def elsewhere_line(verification: Mapping[str, Any]) -> str | None:
    """One line about verification results that a compile took from elsewhere; None if there are none."""
    from llmc.artifacts.local.origins import ELSEWHERE
    from llmc.artifacts.signing.keys import short_id

    if (taken := verification.get(ELSEWHERE)) is None:
        return None
    signed = f"; others signed by {', '.join(map(short_id, taken['signers']))}" if taken["signers"] else ""
    return f"from elsewhere: {taken['unsigned']} of {taken['outcomes']} outcomes unsigned{signed}"
