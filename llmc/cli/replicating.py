"""What `llmc serve --replicas` asks for: processes on this host, or replicas of a Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmc.cli.quantities import duration
from llmc.compiler.options import EXECUTORS, LOCAL
from llmc.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from llmc.server.ray_serve import Fleet


def require_executor(executor: str, cluster: dict[str, Any], alone: dict[str, Any]) -> None:
    """Raise UnknownNameError for an executor that is none, InputError for flags that mean nothing to it."""
    if executor not in EXECUTORS:
        raise UnknownNameError("executor", executor, EXECUTORS)
    unused = alone if executor != LOCAL else cluster
    if given := [flag for flag, value in unused.items() if value is not None]:
        raise InputError(f"{', '.join(given)}: not for --executor {executor}; leave it out")


def local_count(replicas: str | None) -> int:
    """Processes on this host. Raises InputError."""
    if replicas is None:
        return 1
    if not replicas.isdecimal():
        raise InputError(f"--replicas {replicas}: write it as N; of a range as load asks for with --executor ray")
    if not int(replicas):
        raise InputError("--replicas 0: nothing would serve; ask for 1 at least")
    return int(replicas)


def fleet(address: str | None, replicas: str | None, cpus: int, scaling: dict[str, Any]) -> Fleet:
    """Replicas of a cluster. Raises InputError."""
    from llmc.server.ray_serve import Fleet

    least, _, most = (replicas or "1").partition("-")
    if not (least.isdecimal() and (most or least).isdecimal()):
        raise InputError(f"--replicas {replicas}: write it as N or MIN-MAX")
    wanted = {
        "target_requests": scaling["--target-requests"],
        "up_after_s": duration("--scale-up-after", scaling["--scale-up-after"]),
        "down_after_s": duration("--scale-down-after", scaling["--scale-down-after"]),
    }
    given = {name: value for name, value in wanted.items() if value is not None}
    return Fleet(address, int(least), int(most or least), cpus, **given)
