"""The CPUs that the kernels run on, and the shapes that they take (source/attention.c, source/experts.c)."""

from __future__ import annotations

import platform
import sys
from collections.abc import Collection, Mapping
from typing import Any

from llmc.compiler.targets.unfit import unfit_for_kernels
from llmc.runtime.host import KERNEL_FEATURES

_LANES, _MOST_DIM, _MOST_GROUP = 16, 256, 48


def runs_on(features: Collection[str]) -> bool:
    """Whether a host with these features (runtime/host.py) runs the kernels."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and set(KERNEL_FEATURES) <= set(features)


def takes_experts(features: int) -> bool:
    """Whether the kernel takes experts of so many features (source/experts.c)."""
    return features % _LANES == 0


def require_heads(attrs: Mapping[str, Any], sinks: bool = False) -> None:
    """Raise UnfitError for a gqa node (program/fuse.py) that the kernel does not take."""
    dim, heads, kv_heads = (int(attrs[name]) for name in ("head_dim", "heads", "kv_heads"))
    wide = int(attrs.get("value_dim", dim))
    fits = dim % _LANES == 0 and dim == wide and dim <= _MOST_DIM and heads // kv_heads <= _MOST_GROUP
    slopes = bool(attrs.get("slopes"))
    if not fits or attrs["softcap"] or sinks or slopes:
        more = [f", values of {wide}"] if wide != dim else []
        more += [f", scores capped at {attrs['softcap']}"] if attrs["softcap"] else []
        more += [", sinks"] if sinks else []
        more += [", ALiBi"] if slopes else []
        raise unfit_for_kernels(
            f"attention of {heads} heads of {dim} over {kv_heads}{''.join(more)}: llmc's "
            f"kernels take heads of a multiple of {_LANES} up to {_MOST_DIM}, at most {_MOST_GROUP} to a group, not "
            "capped, without sinks and without ALiBi"
        )
