"""`llmc deploy`: write files that deploy a bundle."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.cli.options import Command, argument, device_flag, flag, store_flag, switch
from llmc.cli.output import echo
from llmc.errors import InputError
from llmc.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

_NODES = "Nodes"
_CI = "CI"
_SERVERS = "Other servers"


def _kinds() -> str:
    from llmc.deploy import KINDS

    return "|".join(KINDS.names())


@dataclass(frozen=True, kw_only=True)
class DeployCommand(Command):
    """Write files that deploy a bundle: container images, Kubernetes pods, systemd units or CI pipelines.

    Memory, probe timeouts, device plug-ins and node labels are derived from the bundle's manifest. Nothing is started,
    and existing files are replaced only with --force. docs/deploying.md describes each kind.

    \b
    Example:
      llmc deploy docker --bundle bundle -o image
      llmc deploy kubernetes --bundle bundle --image registry.example.com/llmc:0.1.0 \\
          --bundle-image oci://registry.example.com/models/smollm2:i8 -o base
      llmc deploy systemd --bundle bundle --print
      llmc deploy github-actions --bundle bundle --model org/model --bundle-image oci://ghcr.io/org/model:cpu -o .
    """

    kind: str = argument(_kinds(), "The kind of deployment.")
    bundle: str | None = flag(None, "BUNDLE", "The bundle: a folder, archive, store:KEY or oci://….")
    output: Path | None = flag(None, "DIR", "Write the files to this folder.", names="--output -o")
    show: bool = switch("--print", "Print the files instead of writing them.")
    force: bool = switch("--force", "Replace existing files.")
    name: str | None = flag(None, "NAME", "Name of the deployment. Default: from the model's name.")
    port: int | None = flag(None, "P", "Port of the server. Default: 8000.", min=1, max=65535)
    cpus: int | None = flag(None, "N", "CPUs per server. Default: 4.", min=1)
    image: str | None = flag(None, "IMAGE", "Container image with llmc (llmc deploy docker).")
    base_image: str | None = flag(None, "IMAGE", "Base image of that. Default: Python's slim image.")
    bundle_image: str | None = flag(None, "oci://…", "Registry image of the bundle (llmc cache push).", _NODES)
    bundle_volume: str | None = flag(None, "image|pull", "Mount that image as a volume, or pull it first.", _NODES)
    namespace: str | None = flag(None, "NS", "Kubernetes namespace.", _NODES)
    replicas: int | None = flag(None, "N", "Fewest servers. Default: 1.", _NODES, min=1)
    max_replicas: int | None = flag(None, "N", "Most servers. Default: 4.", _NODES, min=1)
    allow_from: list[str] | None = flag(None, "NS", "Another namespace whose pods may connect. Repeatable.", _NODES)
    trusted_keys: str | None = flag(None, "CONFIGMAP", "Public keys; anything they did not sign is refused.", _NODES)
    api_key_secret: str | None = flag(None, "SECRET", "Secret whose api-key is the server's API key.", _NODES)
    program: str | None = flag(None, "PATH", "Path of llmc there. Default: /opt/llmc/bin/llmc.", _NODES)
    model: str | None = flag(None, "MODEL", "The checkpoint that CI compiles, or a server loads.", _CI)
    traffic: str | None = flag(None, "FILE", "Recorded requests in the repository, to plan for.", _CI)
    max_padding: str | None = flag(None, "F", "CI fails if padding on that traffic exceeds this.", _CI)
    runner: str | None = flag(None, "LABEL", "Label of a CI runner that has the device.", _CI)
    server: str | None = flag(None, "NAME", "A server that llmc plan export knows.", _SERVERS)
    device: str | None = device_flag(None, "Device of that server, as in llmc compile.", panel=_SERVERS)
    configuration: Path | None = flag(None, "CONFIG", "Its plan: a folder, file or plan (llmc plan tune).", _SERVERS)
    cache_image: str | None = flag(None, "oci://…", "Its packed compile cache (llmc cache pack).", _SERVERS)
    tool_image: str | None = flag(None, "IMAGE", "An image with llmc, to unpack the cache.", _SERVERS)
    cache_dir: Path | None = store_flag()
    as_json: bool = switch("--json", "Print paths and digests as JSON.")

    def run(self) -> None:
        from llmc.deploy import create
        from llmc.deploy.base import Options, options_for, write

        chosen = create(self.kind)
        if (self.output is None) != self.show:
            raise InputError("give one of: -o DIR to write the files to a folder, or --print to print them")
        if self.bundle_volume not in (None, "image", "pull"):
            raise InputError(f"--bundle-volume {self.bundle_volume!r} is not one of image, pull")
        pull = None if self.bundle_volume is None else self.bundle_volume == "pull"
        plain = self.values(*(one.name for one in fields(Options) if hasattr(self, one.name)))
        given = {**plain, "allow_from": tuple(self.allow_from or ()), "pull": pull}
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
