"""Make a golden store: what this version of llmc writes, kept in tests so that every later version can read it.

    python scripts/make_golden.py tests/data/golden/v1

    <folder>/store/v1/        a store with five entries: weights, tokenizer, two executables, and their bundle
    <folder>/bundle/          the same bundle as a folder
    <folder>/bundle.tar       the same bundle as an archive
    <folder>/image/           the same bundle as an OCI image layout, tag v1
    <folder>/expected.json    {"store": layout schema, "manifest": manifest schema, "llmc": version,
                               "entries": [{"key": digest, "kind": str, "components": {…}, "outputs": {name: digest}}],
                               "bundle": digest of the manifest,
                               "answers": [{"prompt": [token, …], "tokens": [token, …]}]}

All comes from the toy model (tests/toy.py) and the fake device, with fixed times. Run it once for each schema that is
released, into a new folder; what lies there already is never made again, since it stands for what users have.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import llmc
from llmc.artifacts.bundle.manifest import SCHEMA as MANIFEST_SCHEMA
from llmc.artifacts.bundle.manifest import read_manifest
from llmc.artifacts.bundle.reader import BundleFiles
from llmc.artifacts.bundle.stored import add_bundle
from llmc.artifacts.oci import push_image
from llmc.artifacts.oci.archive import export_images
from llmc.artifacts.store.layout import SCHEMA as STORE_SCHEMA
from llmc.artifacts.store.store import Store
from llmc.buckets.limits import Limits
from llmc.runtime.engine.sampling.params import SamplingParams
from llmc.runtime.llm import BundleLLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.toy import Toy, greedy, toy_plan

BUILT = 1_750_000_000.0
"""The time of everything, in seconds since 1970."""

KEPT = ("weights", "tokenizer", "executable", "bundle")
PROMPTS = ([72, 105], [1, 2, 3, 4, 5], [200])
ANSWER = 6


def main() -> None:
    """Write a golden store into a folder that does not exist."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where to write; must not exist")
    folder: Path = parser.parse_args().folder
    if folder.exists():
        parser.error(f"{folder} exists: a golden store is made once")
    with tempfile.TemporaryDirectory() as name, patch.object(time, "time", lambda: BUILT):
        toy = Toy.make(Path(name))
        with patch.object(time, "perf_counter", lambda: 0.0):
            toy.compile(toy_plan([(1, 15, 0)], [(1, 15)], Limits(16, 1, 16, 8)))
        write(toy, folder)


def write(toy: Toy, folder: Path) -> None:
    """Copy what is kept of a compile, and note what readers must find in it."""
    entries = [entry for entry in Store(toy.store.root).entries() if entry.key.kind in KEPT]
    layout = toy.store.layout
    wanted = {layout.entry(entry.key.kind, entry.key.hex) for entry in entries}
    wanted |= {layout.blob(blob.digest) for entry in entries for blob in entry.outputs.values()}
    for path in wanted:
        target = folder / "store" / path.relative_to(toy.store.root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    shutil.copytree(toy.bundle, folder / "bundle", ignore=shutil.ignore_patterns(".stamps.json"))
    with BundleFiles.open(toy.bundle) as files:
        entry = add_bundle(toy.store, files)
    export_images(toy.store, [entry], folder / "bundle.tar")
    push_image(toy.store, entry, f"oci-layout:{folder / 'image'}:v1")
    text = json.dumps(expected(toy, entries), indent=1, sort_keys=True)
    (folder / "expected.json").write_text(text + "\n")


def expected(toy: Toy, entries: list[Any]) -> dict[str, Any]:
    """What readers must find; the answers are checked against the reference model here."""
    with BundleLLM(toy.bundle) as model:
        built = model.generate(list(PROMPTS), SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True))
    answers = [output.outputs[0].token_ids for output in built]
    if answers != greedy(toy.model, PROMPTS, ANSWER):
        raise SystemExit("the bundle does not answer as the reference model does")
    return {
        "store": STORE_SCHEMA,
        "manifest": MANIFEST_SCHEMA,
        "llmc": llmc.__version__,
        "entries": [
            {
                "key": entry.key.digest,
                "kind": entry.key.kind,
                "components": dict(entry.key.components),
                "outputs": {name: blob.digest for name, blob in entry.outputs.items()},
            }
            for entry in entries
        ],
        "bundle": read_manifest(toy.bundle).digest,
        "answers": [
            {"prompt": list(prompt), "tokens": tokens} for prompt, tokens in zip(PROMPTS, answers, strict=True)
        ],
    }


if __name__ == "__main__":
    main()
