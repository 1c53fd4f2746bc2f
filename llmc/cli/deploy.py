"""`llmc deploy`: files that deploy a bundle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmc.cli.options import StoreFlag, device_option, option
from llmc.cli.output import echo
from llmc.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

_NODES = "How nodes run it"
_CI = "CI"
_SERVERS = "Other servers"


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("deploy")(deploy)


def _kinds() -> str:
    from llmc.deploy import KINDS

    return "|".join(KINDS.names())


def deploy(
    kind: Annotated[str, typer.Argument(metavar=_kinds(), show_default=False, help="What to write.")],
    *,
    bundle: Annotated[
        str | None, option("--bundle", "BUNDLE", "What is deployed: a folder, archive, store:KEY or oci://….")
    ] = None,
    output: Annotated[Path | None, option("--output -o", "DIR", "Folder that the files are written to.")] = None,
    show: Annotated[bool, typer.Option("--print", help="Print the files, and write none.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
    name: Annotated[str | None, option("--name", "NAME", "What it is called. Default: of the model's name.")] = None,
    port: Annotated[int | None, option("--port", "P", "Port of the server. Default: 8000.", min=1, max=65535)] = None,
    cpus: Annotated[int | None, option("--cpus", "N", "Processors of a server. Default: 4.", min=1)] = None,
    image: Annotated[str | None, option("--image", "IMAGE", "Container image with llmc (llmc deploy docker).")] = None,
    base_image: Annotated[
        str | None, option("--base-image", "IMAGE", "What that is built on. Default: Python's slim one.")
    ] = None,
    bundle_image: Annotated[
        str | None,
        option("--bundle-image", "oci://…", "Where nodes get the bundle (llmc cache push).", rich_help_panel=_NODES),
    ] = None,
    bundle_volume: Annotated[
        str | None,
        option("--bundle-volume", "image|pull", "Mount that image, or pull it first.", rich_help_panel=_NODES),
    ] = None,
    namespace: Annotated[
        str | None, option("--namespace", "NS", "Kubernetes' namespace.", rich_help_panel=_NODES)
    ] = None,
    replicas: Annotated[
        int | None, option("--replicas", "N", "Servers at the least. Default: 1.", min=1, rich_help_panel=_NODES)
    ] = None,
    max_replicas: Annotated[
        int | None, option("--max-replicas", "N", "Servers at the most. Default: 4.", min=1, rich_help_panel=_NODES)
    ] = None,
    allow_from: Annotated[
        list[str] | None,
        option(
            "--allow-from", "NS", "A namespace whose pods may connect, too. Again for each.", rich_help_panel=_NODES
        ),
    ] = None,
    trusted_keys: Annotated[
        str | None,
        option(
            "--trusted-keys", "CONFIGMAP", "Public keys; what none of them signed is refused.", rich_help_panel=_NODES
        ),
    ] = None,
    api_key_secret: Annotated[
        str | None,
        option("--api-key-secret", "SECRET", "Its key api-key is asked of requests.", rich_help_panel=_NODES),
    ] = None,
    program: Annotated[
        str | None,
        option("--program", "PATH", "llmc on that host. Default: /opt/llmc/bin/llmc.", rich_help_panel=_NODES),
    ] = None,
    model: Annotated[
        str | None,
        option("--model", "MODEL", "The checkpoint that CI compiles, or a server loads.", rich_help_panel=_CI),
    ] = None,
    traffic: Annotated[
        str | None,
        option("--traffic", "FILE", "Recorded requests in the repository, to plan for.", rich_help_panel=_CI),
    ] = None,
    max_waste: Annotated[
        str | None, option("--max-waste", "F", "Padding on it above which CI fails.", rich_help_panel=_CI)
    ] = None,
    runner: Annotated[
        str | None, option("--runner", "LABEL", "What CI's job runs on, the device in it.", rich_help_panel=_CI)
    ] = None,
    server: Annotated[
        str | None, option("--server", "NAME", "Which server of llmc plan export.", rich_help_panel=_SERVERS)
    ] = None,
    device: Annotated[
        str | None, device_option("--device", "What it runs on, as llmc compile names it.", rich_help_panel=_SERVERS)
    ] = None,
    configuration: Annotated[
        Path | None,
        option(
            "--configuration", "CONFIG", "Its plan: a folder, file or plan (llmc plan tune).", rich_help_panel=_SERVERS
        ),
    ] = None,
    cache_image: Annotated[
        str | None,
        option("--cache-image", "oci://…", "Its packed compile cache (llmc cache pack).", rich_help_panel=_SERVERS),
    ] = None,
    tool_image: Annotated[
        str | None, option("--tool-image", "IMAGE", "An image with llmc, which unpacks it.", rich_help_panel=_SERVERS)
    ] = None,
    cache_dir: StoreFlag = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print paths and digests as JSON.")] = False,
) -> None:
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
    from llmc.deploy import create
    from llmc.deploy.request import options_for, write

    chosen = create(kind)
    if (output is None) != show:
        raise InputError("name the folder to write to with -o DIR, or print the files with --print: one of the two")
    if bundle_volume not in (None, "image", "pull"):
        raise InputError(f"--bundle-volume {bundle_volume!r} is not one of image, pull")
    given = {
        "name": name, "port": port, "cpus": cpus, "image": image, "base_image": base_image, "program": program,
        "bundle_image": bundle_image, "namespace": namespace, "replicas": replicas, "max_replicas": max_replicas,
        "allow_from": tuple(allow_from or ()), "trusted_keys": trusted_keys, "api_key_secret": api_key_secret,
        "model": model, "traffic": traffic, "max_waste": max_waste, "runner": runner, "server": server,
        "device": device, "configuration": configuration, "cache_image": cache_image, "tool_image": tool_image,
        "pull": None if bundle_volume is None else bundle_volume == "pull", **_bundle(bundle, cache_dir),
    }  # fmt: skip
    files = chosen.files(options_for(chosen, given))
    if output is not None:
        write(output, files, force=force)
    if as_json:
        echo(json.dumps({"kind": kind, "files": [_told(output, path, text) for path, text in files.items()]}))
    elif show:
        echo("\n".join(f"# {path}\n{text}" for path, text in files.items()), nl=False)
    else:
        echo(f"wrote {', '.join(files)} to {output}", err=True)


def _bundle(bundle: str | None, cache_dir: Path | None) -> Mapping[str, Any]:
    if bundle is None:
        return {}
    from llmc.artifacts.local.opening import open_store
    from llmc.artifacts.local.references import resolve
    from llmc.deploy.facts import BundleFacts
    from llmc.runtime.bundle import Bundle
    from llmc.settings import Settings

    settings = Settings.from_environment()
    folder = resolve(bundle, settings, open_store(cache_dir, settings))
    return {"bundle": BundleFacts.of(Bundle.open(folder, settings)), "bundle_path": bundle}


def _told(output: Path | None, path: str, text: str) -> dict[str, str]:
    from llmc.artifacts.digest import digest_bytes

    shown = path if output is None else str(output / path)
    return {"path": shown, "digest": digest_bytes(text.encode()), **({"text": text} if output is None else {})}
