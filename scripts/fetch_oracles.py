"""Unpack the sources that tests/oracles/ compares llmc's rules with.

    python scripts/fetch_oracles.py FOLDER [--newest]
    python scripts/fetch_oracles.py --compared      note in releases.txt that all were compared today

Packages come by name through pip, at the releases of tests/oracles/releases.txt. They are unpacked, never installed.
Nothing of them is imported, except llama.cpp's converters in a process of their own. Wheels are taken, except for vLLM,
which has large ones, and llama-cpp-python, for its chat templates, converters and vocabularies. pip reads the metadata
of source archives only where torch and the packages that build them are installed (`make oracles`). OpenVINO GenAI,
whose rules are compiled code, is installed with what it needs into a folder of its own. With --newest, also the newest
release of each package.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

RELEASES = Path(__file__).resolve().parent.parent / "tests/oracles/releases.txt"
SOURCES = ("vllm", "llama-cpp-python")
"""Packages whose source archive is taken, and not the wheel."""
KEPT = (".py", ".jinja", ".gguf", ".gguf.inp", ".gguf.out")
"""What is unpacked: code, chat templates, and vocabularies with token ids that are expected of them."""
COMPILED = ("openvino-genai",)
"""Packages whose rules only run."""


def fetch(requirement: str, folder: Path) -> Path:
    """Download and unpack `requirement`, as "vllm==0.33.0", unless it is there; return its folder."""
    name, _, version = requirement.partition("==")
    location = folder / f"{name}-{version}"
    if location.is_dir():
        return location
    with tempfile.TemporaryDirectory(dir=folder) as work:
        if name in COMPILED:
            unpacked = Path(work) / "unpacked"
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(unpacked), requirement]
            subprocess.run(install, check=True)
            return unpacked.rename(location)
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work, requirement]
        kind = ["--no-binary", name, "--no-build-isolation"] if name in SOURCES else ["--only-binary", ":all:"]
        settings = {**os.environ, "VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version}
        subprocess.run([*download, *kind], check=True, env=settings)
        (archive,) = Path(work).glob("*.[wt]*")
        unpacked = Path(work) / "unpacked"
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(unpacked, [one for one in wheel.namelist() if one.endswith(KEPT)])  # noqa: S202
            unpacked.rename(location)
        else:
            with tarfile.open(archive) as source:
                source.extractall(unpacked, [one for one in source if one.name.endswith(KEPT)], filter="data")
            next(unpacked.iterdir()).rename(location)
    return location


def main() -> int:
    """Fetch every release of the list into the folder that is named, or note the comparison."""
    lines = RELEASES.read_text(encoding="utf-8").splitlines()
    if "--compared" in sys.argv[1:]:
        today = datetime.date.today().isoformat()
        stated = [f"{line.split()[0]}  # {today}" if "==" in line else line for line in lines]
        RELEASES.write_text("\n".join(stated) + "\n", encoding="utf-8")
        return 0
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    requirements = [requirement for line in lines if (requirement := line.partition("#")[0].strip())]
    if "--newest" in sys.argv[2:]:
        names = dict.fromkeys(requirement.partition("==")[0] for requirement in requirements)
        requirements += [f"{name}=={newest(name)}" for name in names]
    for requirement in dict.fromkeys(requirements):
        print(fetch(requirement, folder))
    return 0


def newest(name: str) -> str:
    """Return the newest release of a package, by pip."""
    command = [sys.executable, "-m", "pip", "index", "versions", "--disable-pip-version-check", name]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return said.partition("(")[2].partition(")")[0]


if __name__ == "__main__":
    sys.exit(main())
