"""Which platforms packages are built for, and how to install missing ones.

The markers in pyproject.toml tell pip the same.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

from llmc.errors import DeviceError

DISTRIBUTION = "llmc-compiler"
"""llmc's distribution name. On PyPI the name llmc belongs to another project."""

HERE = (sys.platform, platform.machine())
_NAMES = {"linux": "Linux", "darwin": "macOS", "win32": "Windows"}
_WIDELY = (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"), ("win32", "AMD64"))
BUILDS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "torch": _WIDELY,
    "jax": _WIDELY,
    "openvino": _WIDELY,
    "ray": _WIDELY,
    "libtpu": (("linux", "x86_64"),),
    "ziglang": (("linux", "x86_64"),),
    **dict.fromkeys(
        ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "jax_cuda13_plugin"),
        (("linux", "x86_64"), ("linux", "aarch64")),
    ),
}
"""Packages that are not built for every platform, with the (sys.platform, machine) pairs that they are built for.

ziglang has more builds; llmc's kernels, which it compiles, are only for this one.
"""

EXTRAS: Mapping[str, str] = {
    "openvino": "openvino",
    "jax": "xla",
    "jaxlib": "xla",
    "libtpu": "tpu",
    "jax_cuda13_plugin": "cuda",
    "pynvml": "cuda",
    **dict.fromkeys(
        ("torch", "sympy", "transformers", "huggingface_hub", "safetensors", "gguf", "onnx", "ml_dtypes", "ziglang"),
        "compile",
    ),
    "matplotlib": "plot",
    "ray": "ray",
    "opentelemetry": "otel",
    "jsonschema": "fleet",
    "cryptography": "sign",
    **dict.fromkeys(("fsspec", "s3fs", "oras", "requests", "tenacity"), "remote"),
    **dict.fromkeys(("fastapi", "starlette", "uvicorn", "uvloop", "httptools"), "serve"),
    **dict.fromkeys(("pydantic", "pydantic_core", "prometheus_client", "llguidance"), "serve"),
}
"""Modules that only an extra of llmc installs, and that extra."""


def not_installed(error: ModuleNotFoundError) -> DeviceError | None:
    """The error for a failed import, naming the extra to install; None if no extra has the module."""
    module = (error.name or "").partition(".")[0]
    return missing(module) if module in EXTRAS else None


def missing(module: str) -> DeviceError:
    """The error for a module of `EXTRAS` that is not installed."""
    return DeviceError(f"{module} is not installed; " + how_to_install(module, EXTRAS[module]))


def require_names(package: str, owner: type, *names: str) -> None:
    """Raise DeviceError unless `owner`, a class of `package`, defines each of `names` or uses it in its constructor.

    Use it where code relies on undocumented names: an override that nothing calls, or an attribute that nothing reads,
    would fail silently.
    """
    known = {*dir(owner), *vars(owner)["__init__"].__code__.co_names}
    lacking = [f"{owner.__name__}.{name}" for name in names if name not in known]
    if lacking:
        from importlib import metadata

        raise DeviceError(
            f"{package} {metadata.version(package)} has no {', '.join(lacking)}, which llmc needs; "
            f"install a version of {_supported(package)} that has it"
        )


def exists_here(package: str) -> bool:
    """Whether `package` is built for this platform."""
    return package not in BUILDS or HERE in BUILDS[package]


def how_to_install(package: str, *extras: str) -> str:
    """What to do about a missing `package` of `extras`: the install command, or the platforms that it is built for."""
    if exists_here(package):
        return f"install it with: {install_line(*extras)}"
    built_for = ", ".join(_described(*known) for known in BUILDS[package])
    return f"it has no build for {_described(*HERE)}, only for {built_for}"


def install_line(*extras: str) -> str:
    """The pip command that adds `extras` to llmc from where it was installed: a folder, file, repository or index."""
    import shlex
    from pathlib import Path
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    origin, requested = _origin(), f"[{','.join(extras)}]" if extras else ""
    url = str(origin.get("url", ""))
    if url.startswith("file:"):
        path = url2pathname(urlsplit(url).path)
        if not Path(path).exists():  # a wheel that only existed while the image was built
            url = ""
        else:
            editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
            return f"pip install {editable}{shlex.quote(path + requested)}"
    elif vcs := origin.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"pip install {shlex.quote(f'{DISTRIBUTION}{requested} @ {url}' if url else DISTRIBUTION + requested)}"


@cache
def _origin() -> Mapping[str, Any]:
    """Where pip installed llmc from, if not from an index (PEP 610, direct_url.json).

    A checkout on sys.path may have its own metadata, which does not record this.
    """
    from importlib import metadata

    texts = (found.read_text("direct_url.json") for found in metadata.distributions(name=DISTRIBUTION))
    try:
        origin = json.loads(next(filter(None, texts), "{}"))
    except ValueError:
        return {}
    return origin if isinstance(origin, dict) else {}


def require_posix() -> None:
    """Raise DeviceError on systems without POSIX file locks, which the artifact store needs."""
    if find_spec("fcntl") is None:
        raise DeviceError(
            f"the artifact store needs POSIX file locks, which {_NAMES.get(HERE[0], HERE[0])} does not have; "
            "run llmc in WSL 2 or on another host"
        )


def _supported(package: str) -> str:
    """The requirement for a package in llmc's own metadata, such as "uvicorn>=0.48"."""
    from importlib import metadata

    requested = (line.partition(";")[0].strip() for line in metadata.requires(DISTRIBUTION) or ())
    return next(line for line in requested if line.startswith(package) and not line[len(package)].isalnum())


def _described(system: str, machine: str) -> str:
    return f"{_NAMES.get(system, system)} on {machine}"
