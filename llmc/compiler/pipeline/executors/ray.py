"""Compile executables as tasks on a Ray cluster (docs/deploying.md).

Every task takes one CPU, and fetches the lowered program from a store that all nodes reach: LLMC_REMOTE_CACHE, or
otherwise the driver's own folder. Ray retries a task whose worker or node died. A task that takes much longer than the
others also starts elsewhere, and the first result counts. A node that refuses is reported and gets no more tasks.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from llmc.artifacts.digest import Blob, digest_file
from llmc.artifacts.log import logger
from llmc.cluster import AUTO, connected
from llmc.compiler.pipeline.executors.base import BuiltExecutable, CompileExecutor, CompileWork, Done
from llmc.compiler.pipeline.executors.ray_worker import CPU_LABEL, DEVICE_LABEL, NodeResult, Task, features
from llmc.errors import ArtifactError, CompileError, DeviceError, LlmcError
from llmc.version import __version__

if TYPE_CHECKING:
    from llmc.compiler.options import CompileOptions
    from llmc.compiler.targets.base import Shape

RETRIES = 2
"""Retries of a task whose worker or node died."""
SLOW, SLOW_S = 3.0, 30.0
"""Multiple of the median time, and least seconds, after which a task also starts elsewhere."""
AHEAD = 1
"""Tasks queued in the cluster, which keep workers from waiting for the driver."""
_TICK_S = 0.5


def open_executor(options: CompileOptions) -> RayExecutor:
    """Open the executor for the cluster of `options.address`, of RAY_ADDRESS, or the one on this host."""
    return RayExecutor(options.address, options.worker_memory)


class RayExecutor(CompileExecutor):
    """Compiles on a Ray cluster. `memory`: bytes that one executable takes, None for no bound."""

    def __init__(self, address: str | None, memory: int | None = None, slow_s: float = SLOW_S) -> None:
        self._address, self._memory, self._slow_s = address, memory, slow_s

    def compile(self, work: CompileWork, shapes: Sequence[Shape], done: Done) -> list[BuiltExecutable]:
        """Compile the shapes. Raises DeviceError where the cluster is not reachable, or all its nodes refuse."""
        built: dict[Shape, BuiltExecutable] = {}
        for shape in shapes:
            began = time.perf_counter()
            if (entry := work.store.obtain(work.key(shape))) is not None:
                built[shape] = BuiltExecutable(entry, True, time.perf_counter() - began)
                done(shape, built[shape])
        if lacking := [shape for shape in shapes if shape not in built]:
            with connected(self._address or work.settings.ray_address or AUTO) as ray:
                for shape, one in _Farm(ray, work, self._memory, self._slow_s).run(lacking):
                    built[shape] = one
                    done(shape, one)
        return [built[shape] for shape in shapes]


@dataclass(frozen=True)
class _Attempt:
    task: Task
    since: float = field(default_factory=time.monotonic)


class _Farm:
    def __init__(self, ray: Any, work: CompileWork, memory: int | None, slow_s: float) -> None:
        self._ray, self._work, self._memory, self._slow_s = ray, work, memory, slow_s
        self._refused: dict[str, str] = {}
        """Refusal reason by node id."""
        self._running: dict[Any, _Attempt] = {}
        self._seconds: list[float] = []
        calls = {"max_calls": 1} if work.target.description.fresh_process else {}
        resources = {"memory": memory} if memory else {}
        self._function = ray.remote(num_cpus=1, max_retries=RETRIES, **calls, **resources)(_on_node())

    def run(self, shapes: Sequence[Shape]) -> Iterator[tuple[Shape, BuiltExecutable]]:
        """Each shape as it is finished. Leaving the generator cancels the remaining tasks."""
        waiting = deque(self._tasks(shapes))
        try:
            while waiting or self._running:
                slots, apart = self._nodes()
                while waiting and len(self._running) < slots + AHEAD:
                    self._submit(waiting.popleft(), apart)
                if not waiting and len(self._running) < slots:
                    self._try_again(apart)
                ready, _ = self._ray.wait(list(self._running), timeout=_TICK_S)
                for ref in ready:
                    if (attempt := self._running.pop(ref, None)) is None:
                        continue  # another attempt was faster
                    reported = self._reported(ref, attempt)
                    if reported is None:
                        continue
                    if reported.refused:
                        self._refuse(reported)
                        waiting.appendleft(attempt.task)
                        continue
                    self._seconds.append(reported.seconds)
                    self._cancel(attempt.task)
                    yield attempt.task.shape, self._built(attempt.task, reported)
        finally:
            for ref in self._running:
                self._ray.cancel(ref, force=True)

    def _tasks(self, shapes: Sequence[Shape]) -> Iterator[Task]:
        work, lowered = self._work, self._work.lowered
        inputs = {name: Blob(digest_file(path), path.stat().st_size) for name, path in lowered.inputs.items()}
        needed = sorted(set(lowered.files.values())) if work.target.description.reads_files else []
        files = tuple(Blob(digest, work.store.path(digest).stat().st_size) for digest in needed)
        remote = work.settings.remote_cache
        if remote:
            self._push(remote, {*inputs.values(), *files})
        apart = replace(lowered, inputs={}, forms={})
        for shape in shapes:
            yield Task(
                work.key(shape), shape, apart, work.options, inputs, files, remote or str(work.store.root), bool(remote)
            )

    def _push(self, url: str, blobs: set[Blob]) -> None:
        from llmc.artifacts.remotes import open_remote
        from llmc.artifacts.remotes.base import blob_name

        remote = open_remote(url)
        for blob in sorted(blobs):
            if remote.size(name := blob_name(blob.digest)) != blob.size:
                remote.upload(name, self._work.store.path(blob), lambda _: None)

    def _nodes(self) -> tuple[int, list[str]]:
        """Number of concurrent tasks, and the ids of nodes that get none. Raises DeviceError where no node is left."""
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        unfit = {node["NodeID"]: why for node in alive if (why := self._unfit(node, alive))}
        fit = [node for node in alive if node["NodeID"] not in unfit]
        slots = sum(int(node["Resources"].get("CPU", 0)) for node in fit)
        if not slots:
            reasons = "; ".join(f"{_named(node)}: {unfit[node['NodeID']]}" for node in alive if node["NodeID"] in unfit)
            raise DeviceError(f"no node of the Ray cluster can compile this: {reasons or 'it has none'}")
        return slots, sorted(unfit)

    def _unfit(self, node: Mapping[str, Any], alive: Sequence[Mapping[str, Any]]) -> str:
        """Why a node gets no task, by its refusal, labels or resources; "" if it may."""
        if why := self._refused.get(node["NodeID"]):
            return why
        device = self._work.options.device.partition(":")[0]
        mine = node["Labels"].get(DEVICE_LABEL)
        if mine != device and (mine or any(other["Labels"].get(DEVICE_LABEL) == device for other in alive)):
            return (
                f"its label reserves it for device {mine}" if mine else f"others are labelled {DEVICE_LABEL}={device}"
            )
        reported = features(node["Labels"])
        if reported and (lacking := sorted(set(self._work.target.isa()) - reported)):
            return f"its label {CPU_LABEL} has no {', '.join(lacking)}"
        if not node["Resources"].get("CPU"):
            return "it has no CPU for Ray tasks"
        if node["Resources"].get("memory", 0) < (self._memory or 0):
            return f"it has less than {self._memory} bytes of memory for tasks"
        return ""

    def _submit(self, task: Task, apart: Sequence[str]) -> None:
        where = {"label_selector": {"ray.io/node-id": f"!in({','.join(apart)})"}} if apart else {}
        sent = self._function.options(**where).remote(__version__, [self._ray.put(task)])
        self._running[sent] = _Attempt(task)

    def _try_again(self, apart: Sequence[str]) -> None:
        tried = {attempt.task.key for attempt in self._running.values() if attempt.task.again}
        first = [a for a in self._running.values() if a.task.key not in tried]
        slowest = min(first, key=lambda a: a.since, default=None)
        if slowest is None or not self._seconds:
            return
        bound = max(self._slow_s, SLOW * statistics.median(self._seconds))
        if (seconds := time.monotonic() - slowest.since) > bound:
            logger().warning("%s is slow (%.0f s so far): another worker tries it too", slowest.task.shape, seconds)
            self._submit(replace(slowest.task, again=True), apart)

    def _reported(self, ref: Any, attempt: _Attempt) -> NodeResult | None:
        """A task's result; None for one that failed while another attempt of it runs. Raises the errors of
        `compile`."""
        from ray import exceptions

        shape = attempt.task.shape
        try:
            return NodeResult(*self._ray.get(ref))
        except exceptions.RayTaskError as e:
            if isinstance(e.cause, LlmcError):
                raise e.cause from None
            raise CompileError(f"{shape}: a worker of the Ray cluster failed: {e.cause!r}") from e
        except exceptions.RayError as e:
            if any(other.task.key == attempt.task.key for other in self._running.values()):
                return None
            raise CompileError(
                f"{shape}: its worker died {RETRIES + 1} times, perhaps out of memory ({type(e).__name__}); finished "
                "executables are kept: try again with a larger --worker-memory"
            ) from e

    def _refuse(self, reported: NodeResult) -> None:
        if reported.node not in self._refused:
            self._refused[reported.node] = reported.refused
            named = next((_named(node) for node in self._ray.nodes() if node["NodeID"] == reported.node), reported.node)
            logger().warning("%s is not used: %s", named, reported.refused)

    def _cancel(self, task: Task) -> None:
        for ref in [ref for ref, attempt in self._running.items() if attempt.task.key == task.key]:
            self._ray.cancel(ref, force=True)
            del self._running[ref]

    def _built(self, task: Task, reported: NodeResult) -> BuiltExecutable:
        entry = self._work.store.obtain(task.key)
        if entry is None:
            raise ArtifactError(
                f"{task.shape}: a worker published it to {task.location}, and it cannot be fetched from there; set "
                "LLMC_SIGNING_KEY on the workers, or LLMC_ALLOW_UNSIGNED=1 here"
            )
        return BuiltExecutable(entry, False, reported.seconds)


def _on_node() -> Callable[[str, list[Any]], tuple[str, float, str]]:
    """The function that runs in a worker: it takes a task, by a reference that Ray does not resolve itself, for this
    llmc version, and returns the members of `NodeResult`.

    Ray sends a nested function by value, which lets a node without llmc report that.
    """

    def run(version: str, task: list[Any]) -> tuple[str, float, str]:
        import ray

        context = ray.get_runtime_context()
        node = context.get_node_id()
        try:
            from llmc.version import __version__ as mine

            if mine != version:
                return node, 0.0, f"its llmc is {mine}, and this compile needs {version}"
            from llmc.compiler.pipeline.executors.ray_worker import compile_task

            read = ray.get(task[0])
        except (ImportError, AttributeError, ray.exceptions.RaySystemError) as e:
            return node, 0.0, f"it does not have llmc {version}: {e}"
        reported = compile_task(read, node, context.get_node_labels())
        return reported.node, reported.seconds, reported.refused

    return run


def _named(node: Mapping[str, Any]) -> str:
    return f"node {node['NodeID'][:12]} ({node['NodeName']})"
