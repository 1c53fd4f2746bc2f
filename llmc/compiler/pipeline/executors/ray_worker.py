"""Code that runs on a node of the cluster: compile one executable from the lowered program in the shared store.

A node that would build something else than requested refuses. An executable's key covers all that determines it
(versions, instruction set, llmc's own code): a node whose own key differs has another toolchain.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmc.artifacts.digest import Blob
from llmc.artifacts.key import Key, describe
from llmc.artifacts.remotes import open_remote
from llmc.artifacts.remotes.ingest import bring
from llmc.artifacts.remotes.transfer import push
from llmc.artifacts.store.leases import blob_name
from llmc.artifacts.store.store import Store
from llmc.artifacts.store.workspace import Area, Workspace
from llmc.compiler.pipeline.executors.base import executable_key, linked, stored
from llmc.compiler.targets import open_target
from llmc.errors import DeviceError
from llmc.runtime.host import cpu_features
from llmc.settings import Settings

if TYPE_CHECKING:
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.targets.base import Lowered, Shape

DEVICE_LABEL, CPU_LABEL = "llmc-device", "llmc-cpu"
"""Labels of nodes: the node's device, and the features of its CPU separated by dots."""


@dataclass(frozen=True)
class Task:
    """One executable to compile.

    `inputs` are the files of `lowered`, whose own paths are the driver's, and `files` those of its `folder`. `location`
    is a store's folder that all nodes have, or with `remote` a remote's URL. A task that runs `again`, perhaps while it
    runs elsewhere, takes no lock.
    """

    key: Key
    shape: Shape
    lowered: Lowered
    options: CompileOptions
    inputs: Mapping[str, Blob]
    files: tuple[Blob, ...]
    location: str
    remote: bool
    again: bool = False


@dataclass(frozen=True)
class NodeResult:
    """A node's result: its seconds, or the reason why it refused."""

    node: str
    seconds: float = 0.0
    refused: str = ""


def compile_task(task: Task, node: str, labels: Mapping[str, str]) -> NodeResult:
    """Build one executable and publish it; `labels` are the node's own. Raises CompileError and RemoteError."""
    settings = Settings.from_environment()
    if why := _refusal(task, labels, settings):
        return NodeResult(node, refused=why)
    began = time.perf_counter()
    store = Store(settings.cache_dir_for(task.options.device) if task.remote else task.location)
    if why := _fetch(task, store):
        return NodeResult(node, refused=why)
    target = open_target(task.options.device, settings)
    with ExitStack() as stack:
        lowered = replace(task.lowered, inputs={name: store.path(blob) for name, blob in task.inputs.items()})
        if task.files:
            lowered = replace(lowered, folder=stack.enter_context(linked(store, lowered)))

        def make(workspace: Workspace) -> Mapping[str, Blob]:
            at = time.perf_counter()
            built = target.compile(lowered, task.shape, task.options)
            return stored(workspace, built, time.perf_counter() - at)

        entry = store.build(task.key, make) if task.again else store.get_or_build(task.key, make)[0]
    if task.remote:
        from llmc.artifacts.signing.signer import Signer

        push(store, [entry], open_remote(task.location), signer=Signer.from_settings(settings))
    return NodeResult(node, time.perf_counter() - began)


def _refusal(task: Task, labels: Mapping[str, str], settings: Settings) -> str:
    """Why this node must not build the executable; "" if it may."""
    claimed = labels.get(DEVICE_LABEL)
    try:
        if claimed is not None and (lacks := open_target(claimed, settings).lacks()):
            return f"it is labelled {DEVICE_LABEL}={claimed}, and {lacks}"
        if missing := sorted(features(labels) - set(cpu_features())):
            return f"it is labelled {CPU_LABEL} with {', '.join(missing)}, which its CPU does not have"
        mine = executable_key(open_target(task.options.device, settings), task.lowered, task.shape, task.options)
    except DeviceError as e:
        return str(e)
    return "" if mine == task.key else f"it would build another executable: {describe(mine.explain(task.key))}"


def features(labels: Mapping[str, str]) -> set[str]:
    """CPU features in a node's labels."""
    return set(filter(None, labels.get(CPU_LABEL, "").split(".")))


def _fetch(task: Task, store: Store) -> str:
    """Fetch the inputs into `store`; returns why that is impossible, or ""."""
    wanted = {*task.inputs.values(), *task.files}
    lacking = sorted(blob for blob in wanted if not store.has(blob))
    if not task.remote:
        return f"it does not have the store {task.location}" if lacking else ""
    remote, area = open_remote(task.location), Area(store.root)
    store.hold(*(blob_name(blob.digest) for blob in wanted))
    for blob in lacking:
        bring(area, remote, blob, {}, lambda _: None)
    return ""
