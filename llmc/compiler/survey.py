"""What this host can compile for and run on, found without importing any toolchain."""

from __future__ import annotations

from importlib.util import find_spec

from llmc.compiler.targets import devices, open_target

HIDDEN = ("fake",)
_COMPILE_NEEDS = ("torch", "transformers", "safetensors", "gguf", "onnx")
_RUN_NEEDS = {"onnxruntime": ("onnxruntime", "onnxruntime"), "torch": ("torch", "'llmc[compile]'")}


def survey() -> list[dict[str, str]]:
    """A row for each device: compiles, runs ("yes" or what is missing), state of its executables here, and a note."""
    rows = []
    for name in devices():
        if name in HIDDEN:
            continue
        target = open_target(name)
        missing = [m for m in _COMPILE_NEEDS if find_spec(m) is None]
        package, install = _RUN_NEEDS[target.executor]
        runs = find_spec(package) is not None
        on_cpu = "yes" if target.state == "native" else "on CPU, portable"
        rows.append(
            {
                "device": name,
                "compiles": "yes" if not missing else f"no: pip install 'llmc[compile]' (missing {', '.join(missing)})",
                "runs": on_cpu if runs else f"no: pip install {install}",
                "state": target.state,
                "note": target.remaining() or "",
            }
        )
    return rows
