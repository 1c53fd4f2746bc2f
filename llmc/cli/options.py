"""How commands declare their flags, and the flags and arguments that several of them have."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from llmc.compiler.targets.declared import offered, require_device

ENGINE = "Engine"
_CHOICES = re.compile(r"[a-z0-9_]+(\|[a-z0-9_]+)+")


def one_of(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """What `typer` asks how a value may go on: those of `names` that begin as it does."""

    def going_on(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return going_on


def option(names: str, metavar: str, text: str, **more: Any) -> Any:
    """A flag that takes a value, named `names`, apart by spaces; "": as the parameter that it fills.

    `metavar` stands for the value in its line of help, `text`; a shell completes what is written as "a|b|c". `more` is
    what else `typer.Option` takes.
    """
    if _CHOICES.fullmatch(metavar):
        more = {"autocompletion": one_of(lambda: metavar.split("|")), **more}
    return typer.Option(*names.split(), metavar=metavar, help=text, **more)


def device_option(names: str, text: str, metavar: str = "D", **more: Any) -> Any:
    """A flag that takes a device; a name that is none is refused before anything else is looked at."""
    return option(names, metavar, text, callback=_known, autocompletion=one_of(offered), **more)


def _known(device: str | None) -> str | None:
    if device is not None:
        require_device(device)
    return device


def traffic_format_option(**more: Any) -> Any:
    """--traffic-format, of a command that has --traffic."""
    return option("--traffic-format", "NAME", "What --traffic is written in. Default: as its beginning looks.", **more)


def fields_option(**more: Any) -> Any:
    """--fields, of a command that has --traffic."""
    return option("--fields", "prompt=A,output=B[,time=C]", "What the fields of --traffic's lines are called.", **more)


BundleArgument = Annotated[
    str, typer.Argument(metavar="BUNDLE", help="A bundle folder, archive, store:KEY or oci://….", show_default=False)
]
BundleOrModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="BUNDLE|MODEL",
        help="A bundle folder, archive, store:KEY or oci://…; or a checkpoint, which is compiled first.",
        show_default=False,
    ),
]
StoreFlag = Annotated[
    Path | None, option("--cache-dir", "DIR", "Artifact store. Default: LLMC_CACHE_DIR or the user's.")
]
ThreadsFlag = Annotated[int | None, option("--threads", "N", "Default: LLMC_THREADS or the CPUs.", min=1)]
WeightsFlag = Annotated[
    str | None,
    option("--weights", "MODEL", "The checkpoint of a bundle that was compiled with --config.", rich_help_panel=ENGINE),
]
TaskFlag = Annotated[
    str | None,
    option(
        "--task",
        "generate|embed|score",
        "What the model is for. Default: as the checkpoint's own files say.",
        rich_help_panel="Numbers and graphs",
    ),
]
PrefillFlag = Annotated[
    str | None,
    option(
        "--prefill",
        "[process:]BUNDLE|ADDRESS",
        "What computes the prompts and hands keys and values over: a bundle (process:BUNDLE: in a process of its "
        "own), or tcp://HOST:PORT or unix:PATH of llmc prefill.",
        rich_help_panel=ENGINE,
    ),
]
EagerFlag = Annotated[
    bool,
    typer.Option(
        "--enforce-eager",
        help="Run without compiled or captured graphs, on a device that can. LLMC_ENFORCE_EAGER.",
        rich_help_panel=ENGINE,
    ),
]
RoundsFlag = Annotated[
    int | None, option("--rounds", "N", "Rounds in which engines take turns, or texts are passed. Default: 5.", min=1)
]
QuickFlag = Annotated[bool, typer.Option("--quick", help="Few rounds, for a first look.")]
