"""The results of `llmc compile`, or of a dry run, in words or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.artifacts.digest import parse
from llmc.cli.accuracy import accuracy_line, elsewhere_line, verified_line
from llmc.cli.output import echo
from llmc.compiler.estimates.estimate import Estimate
from llmc.files import write_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmc.artifacts.key import Key
    from llmc.compiler.pipeline.compile import CompileResult
    from llmc.compiler.pipeline.hybrid import HybridResult


def print_estimate(found: dict[str, Any], as_json: bool) -> None:
    """What a dry run found."""
    if as_json:
        echo(json.dumps(found))
        return
    reasons = {e["why"] for e in found["executables"] if not e["cached"]}
    shared = reasons.pop() if len(reasons) == 1 else None
    for e in found["executables"]:
        sizes = " ".join(f"{k}={e[k]}" for k in ("batch", "query", "context") if e[k] is not None)
        state = "cached" if e["cached"] else "to build" if shared else f"to build: {e['why']}"
        echo(f"{e['phase']} {sizes or 'every shape'} ({e['buckets']} buckets): {state}")
    if shared:
        echo(f"why: {shared}")
    echo(found["choice"])
    seconds = found["estimated_seconds"]
    echo(
        f"{found['to_build']} executables to build, {found['cached']} cached; "
        f"{'time not measured here yet' if seconds is None else f'about {seconds:.0f} s'} "
        f"and {found['estimated_bytes'] / 1e6:,.0f} MB"
    )
    for estimate in (Estimate(**one) for one in found.get("estimates", ())):
        if estimate.name == "KV cache":
            echo(f"KV cache {estimate.shown}: {estimate.source}")
    for warning in found["warnings"]:
        echo(f"warning: {warning}")


def print_programs(programs: Sequence[tuple[str, str]], output: Path | None, as_json: bool) -> None:
    """Programs, each under its name, in the file `output` or on the terminal."""
    if as_json:
        text = json.dumps([{"name": name, "text": program} for name, program in programs])
    else:
        text = "\n".join(f"// {name}\n{program.rstrip()}" for name, program in programs)
    if output is None:
        echo(text)
    else:
        write_text(output, text + "\n", "programs")


def print_key(key: Key, as_json: bool) -> None:
    """The digest of a compile's key, or as JSON with its components."""
    echo(json.dumps({"key": key.digest, "components": dict(key.components)}) if as_json else parse(key.digest))


def print_hybrid(result: HybridResult, as_json: bool) -> None:
    """What was compiled of both halves, and how the folder is used."""
    if as_json:
        found = {role: one.to_json() for role, one in result.halves.items()}
        echo(json.dumps({"hybrid": str(result.folder), **found, "variables": dict(result.variables)}))
        return
    for role, one in result.halves.items():
        echo(f"{role}:")
        print_result(one, False)
    if result.variables:
        named = " ".join(f"{name}={value}" for name, value in result.variables.items())
        echo(f"one bundle: its device hands prompts over by itself where {named} is set when it is opened")
    else:
        echo(f"prompts on one, decode on the other: llmc generate {result.folder}, or llmc serve {result.folder}")


def print_result(result: CompileResult, as_json: bool, file: Path | None = None) -> None:
    """What was compiled and verified; also written to `file`."""
    if file is not None:
        write_text(file, json.dumps(result.to_json()) + "\n", "outcome")
    if as_json:
        echo(json.dumps(result.to_json()))
        return
    echo(f"{result.bundle}: {result.built + result.reused} executables ({result.choice})")
    echo(
        f"built {result.built}, from the store {result.reused}; native {result.native}, portable {result.portable}; "
        f"{result.bytes / 1e6:,.1f} MB, of which weights {result.weights_bytes / 1e6:,.1f} MB; {result.seconds:.1f} s"
    )
    if result.left_out:
        modules = ", ".join(f"{name} ({count} tensors)" for name, count in result.left_out.items())
        echo(f"the checkpoint's text part; left out: {modules}")
    for notice in result.notices:
        echo(notice)
    if result.sample_top_k:
        echo(f"graphs return the {result.sample_top_k} largest logits and their ids beside all logits")
    if result.analysis:
        from llmc.compiler.targets import open_target

        for line in open_target(result.device).describe(result.analysis):
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
    for line in finished_lines(result.finished):
        echo(line)
    if result.host_files:
        names = ", ".join(Path(name).name for name in result.host_files)
        echo(f"for the device's own host, in {Path(result.host_files[0]).parent}: {names}")
    if result.remaining:
        echo(f"portable: left for the device's own host: {result.remaining}")


def finished_lines(finished: Mapping[str, Any]) -> list[str]:
    """What finishing did, for people; nothing where nothing was finished."""
    if not finished:
        return []
    facts = ", ".join(f"{name} {value}" for name, value in sorted(finished["finished_for"].items()))
    lines = [f"finished for {facts}: built {finished['built']}, from the store {finished['reused']}"]
    if finished["files"]:
        lines[0] += f"; files {', '.join(finished['files'])}"
    v = finished["verification"]
    if v["mode"] == "none":
        lines.append(f"finished executables not verified: {v['why']}" if "why" in v else "not verified (--verify none)")
    else:
        lines.append(
            f"verified against {v['reference']}: {v['buckets']} of {v['planned']} buckets ({v['twice']} under two "
            f"poisons), {v['rows']} rows: mean KL {v['mean_kl']:.2g} (limit {v['limits']['mean_kl']:.2g}), equal "
            f"tokens {v['top1']:.1%}, padding leak {v['leak']:.2g}"
        )
    if finished["unsigned"]:
        lines.append("its signature was the portable bundle's and is gone: sign it again with llmc cache sign")
    return lines
