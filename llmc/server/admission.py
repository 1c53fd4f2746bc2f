"""Decide whether a bundle may replace the served one: same model, not older, and enough memory for both at once.

A bundle is older if an older llmc wrote it, or if this process served it before and has replaced it since: a link or
tag moved back. Manifests hold no time, so that equal compiles give equal bytes.

The model is the same if the digests of the checkpoint and of tokenizer.json, the task and the chat template are equal.
Buckets, weight precision and device may differ.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from llmc.buckets.render.text import size_text
from llmc.compiler.targets import open_target
from llmc.errors import LlmcError
from llmc.runtime.host import available_memory
from llmc.server.errors import ApiError

if TYPE_CHECKING:
    from llmc.runtime.bundle import Bundle

WORK_BYTES = 256 << 20
"""Memory of a second engine in addition to weights and cache: activations, tables, confined children."""
_FILES = ("tokenizer.json", "chat_template.jinja")


def refused(message: str, code: str, status: int = 422) -> ApiError:
    """Return the error for a refused bundle; the served one stays."""
    return ApiError(status, message, code=code)


def check_model(new: Bundle, running: Bundle) -> None:
    """Raise ApiError other_model if `new` is of another model."""
    changed = [name for name, before, after in _identity(running, new) if before != after]
    if changed:
        raise refused(
            f"{new.path}: of another model than the served one: {', '.join(changed)} differ; to accept it, start the "
            "server with --allow-model-change",
            "other_model",
        )


def check_age(new: Bundle, running: Bundle, replaced: Collection[str]) -> None:
    """Raise ApiError older_bundle if `new` is older; `replaced`: digests that this process served before."""
    ours, theirs = running.manifest.llmc, new.manifest.llmc
    why = None
    if _release(theirs) < _release(ours):
        why = f"llmc {theirs} wrote it, and {ours} the running one"
    elif new.manifest.digest in replaced:
        why = "this server served it before, and replaced it"
    if why is not None:
        raise refused(
            f'{new.path}: older than the running bundle: {why}; to go back to it, send {{"allow_older": true}} to POST '
            "/admin/bundle, or start the server with it",
            "older_bundle",
        )


def check_room(new: Bundle) -> None:
    """Raise ApiError no_memory if the host has no room for a second bundle next to the running one.

    Counts its blobs, its full cache if the device uses host memory, and WORK_BYTES. An executor checks the memory of
    its own device when it opens.
    """
    available = available_memory()
    size, cache = new.manifest.size, new.cache_bytes if _in_host(new) else 0
    needed = size + cache + WORK_BYTES
    if available is not None and needed > available:
        raise refused(
            f"{new.path}: no room for two bundles at once: it needs {size_text(needed)} (files {size_text(size)}, "
            f"cache {size_text(cache)}, work {size_text(WORK_BYTES)}), and {size_text(available)} are available; free "
            f"{size_text(needed - available)}, or restart the server with it",
            "no_memory", 507,
        )  # fmt: skip


def _identity(before: Bundle, after: Bundle) -> list[tuple[str, object, object]]:
    pairs = [(name, before.manifest.files.get(name), after.manifest.files.get(name)) for name in _FILES]
    checkpoints = before.manifest.provenance.get("checkpoint"), after.manifest.provenance.get("checkpoint")
    return [("task", before.task, after.task), ("checkpoint", *checkpoints), *pairs]


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))


def _in_host(bundle: Bundle) -> bool:
    try:
        return open_target(bundle.manifest.target, bundle.settings).hosting(bundle.manifest.options).host_memory
    except LlmcError:  # the target's package is missing; its executor may still be installed
        return True
