"""`llmc deploy`: files that deploy a bundle."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.cli.options import Command, argument, device_flag, flag, store_flag, switch
from llmc.cli.output import echo
from llmc.errors import InputError
from llmc.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

_NODES = "How nodes run it"
_CI = "CI"
_SERVERS = "Other servers"
_PLAIN = (
    "name", "port", "cpus", "image", "base_image", "program", "bundle_image", "namespace", "replicas", "max_replicas",
    "trusted_keys", "api_key_secret", "model", "traffic", "max_padding", "runner", "server", "device", "configuration",
    "cache_image", "tool_image",
)  # fmt: skip
"""Options that are handed on as they are."""


def _kinds() -> str:
    from llmc.deploy import KINDS

    return "|".join(KINDS.names())


@dataclass(frozen=True, kw_only=True)
class DeployCommand(Command):
    """Write files that deploy a bundle: images, pods, units, CI. docs/deploying.md says what is in each.

    Memory, times of probes, device plug-ins and node labels follow from the bundle's manifest. Nothing is started, and
    no file that is there is replaced without --force.

    \b
    Example:
      llmc deploy docker --bundle bundle -o image
      llmc deploy kubernetes --bundle bundle --image registry.example.com/llmc:0.1.0 \\
          --bundle-image oci://registry.example.com/models/smollm2:i8 -o base
      llmc deploy systemd --bundle bundle --print
      llmc deploy github-actions --bundle bundle --model org/model --bundle-image oci://ghcr.io/org/model:cpu -o .
    """

    kind: str = argument(_kinds(), "What to write.")
    bundle: str | None = flag(None, "BUNDLE", "What is deployed: a folder, archive, store:KEY or oci://….")
    output: Path | None = flag(None, "DIR", "Folder that the files are written to.", names="--output -o")
    show: bool = switch("--print", "Print the files, and write none.")
    force: bool = switch("--force", "Replace files that are there.")
    name: str | None = flag(None, "NAME", "What it is called. Default: of the model's name.")
    port: int | None = flag(None, "P", "Port of the server. Default: 8000.", min=1, max=65535)
    cpus: int | None = flag(None, "N", "Processors of a server. Default: 4.", min=1)
    image: str | None = flag(None, "IMAGE", "Container image with llmc (llmc deploy docker).")
    base_image: str | None = flag(None, "IMAGE", "What that is built on. Default: Python's slim one.")
    bundle_image: str | None = flag(None, "oci://…", "Where nodes get the bundle (llmc cache push).", _NODES)
    bundle_volume: str | None = flag(None, "image|pull", "Mount that image, or pull it first.", _NODES)
    namespace: str | None = flag(None, "NS", "Kubernetes' namespace.", _NODES)
    replicas: int | None = flag(None, "N", "Servers at the least. Default: 1.", _NODES, min=1)
    max_replicas: int | None = flag(None, "N", "Servers at the most. Default: 4.", _NODES, min=1)
    allow_from: list[str] | None = flag(None, "NS", "A namespace whose pods may connect, too. Again for each.", _NODES)
    trusted_keys: str | None = flag(None, "CONFIGMAP", "Public keys; what none of them signed is refused.", _NODES)
    api_key_secret: str | None = flag(None, "SECRET", "Its key api-key is asked of requests.", _NODES)
    program: str | None = flag(None, "PATH", "llmc on that host. Default: /opt/llmc/bin/llmc.", _NODES)
    model: str | None = flag(None, "MODEL", "The checkpoint that CI compiles, or a server loads.", _CI)
    traffic: str | None = flag(None, "FILE", "Recorded requests in the repository, to plan for.", _CI)
    max_padding: str | None = flag(None, "F", "Padding on it above which CI fails.", _CI)
    runner: str | None = flag(None, "LABEL", "What CI's job runs on, the device in it.", _CI)
    server: str | None = flag(None, "NAME", "Which server of llmc plan export.", _SERVERS)
    device: str | None = device_flag(None, "What it runs on, as llmc compile names it.", panel=_SERVERS)
    configuration: Path | None = flag(None, "CONFIG", "Its plan: a folder, file or plan (llmc plan tune).", _SERVERS)
    cache_image: str | None = flag(None, "oci://…", "Its packed compile cache (llmc cache pack).", _SERVERS)
    tool_image: str | None = flag(None, "IMAGE", "An image with llmc, which unpacks it.", _SERVERS)
    cache_dir: Path | None = store_flag()
    as_json: bool = switch("--json", "Print paths and digests as JSON.")

    def run(self) -> None:
        from llmc.deploy import create
        from llmc.deploy.request import options_for, write

        chosen = create(self.kind)
        if (self.output is None) != self.show:
            raise InputError("name the folder to write to with -o DIR, or print the files with --print: one of the two")
        if self.bundle_volume not in (None, "image", "pull"):
            raise InputError(f"--bundle-volume {self.bundle_volume!r} is not one of image, pull")
        pull = None if self.bundle_volume is None else self.bundle_volume == "pull"
        given = {**self.values(*_PLAIN), "allow_from": tuple(self.allow_from or ()), "pull": pull}
        files = chosen.files(options_for(chosen, {**given, **_bundle(self.bundle, self.cache_dir)}))
        if self.output is not None:
            write(self.output, files, force=self.force)
        if self.as_json:
            reported = [_reported(self.output, path, text) for path, text in files.items()]
            echo(json.dumps({"kind": self.kind, "files": reported}))
        elif self.show:
            echo("\n".join(f"# {path}\n{text}" for path, text in files.items()), nl=False)
        else:
            echo(f"wrote {', '.join(files)} to {self.output}", err=True)


def _bundle(bundle: str | None, cache_dir: Path | None) -> Mapping[str, Any]:
    if bundle is None:
        return {}
    from llmc.artifacts.local.opening import open_store
    from llmc.artifacts.local.references import resolve
    from llmc.deploy.facts import BundleFacts
    from llmc.runtime.bundle import Bundle

    settings = Settings.from_environment()
    folder = resolve(bundle, settings, open_store(cache_dir, settings))
    return {"bundle": BundleFacts.of(Bundle.open(folder, settings)), "bundle_path": bundle}


def _reported(output: Path | None, path: str, text: str) -> dict[str, str]:
    from llmc.artifacts.digest import digest_bytes

    shown = path if output is None else str(output / path)
    return {"path": shown, "digest": digest_bytes(text.encode()), **({"text": text} if output is None else {})}
