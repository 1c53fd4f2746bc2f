"""How commands declare their flags, and the flags and arguments that several of them have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def option(names: str, metavar: str, text: str, **more: Any) -> Any:
    """A flag that takes a value, named `names`, apart by spaces; "": as the parameter that it fills.

    `metavar` stands for the value in its line of help, `text`; `more` is what else `typer.Option` takes.
    """
    return typer.Option(*names.split(), metavar=metavar, help=text, **more)


def traffic_format_option(**more: Any) -> Any:
    """--traffic-format, of a command that has --traffic."""
    return option("--traffic-format", "NAME", "What --traffic is written in. Default: as its beginning looks.", **more)


def fields_option(**more: Any) -> Any:
    """--fields, of a command that has --traffic."""
    return option("--fields", "prompt=A,output=B[,time=C]", "What the fields of --traffic's lines are called.", **more)


BundleArgument = Annotated[
    str, typer.Argument(metavar="BUNDLE", help="A bundle folder, archive, store:KEY or oci://….", show_default=False)
]
StoreFlag = Annotated[
    Path | None, option("--cache-dir", "DIR", "Artifact store. Default: LLMC_CACHE_DIR or the user's.")
]
ThreadsFlag = Annotated[int | None, option("--threads", "N", "Default: LLMC_THREADS or the CPUs.", min=1)]
WeightsFlag = Annotated[
    str | None, option("--weights", "MODEL", "The checkpoint of a bundle that was compiled with --config.")
]
TaskFlag = Annotated[
    str | None,
    option("--task", "generate|embed|score", "What the model is for. Default: as the checkpoint's own files say."),
]
PrefillFlag = Annotated[
    str | None,
    option(
        "--prefill",
        "[process:]BUNDLE|ADDRESS",
        "What computes the prompts and hands keys and values over: a bundle (process:BUNDLE: in a process of its "
        "own), or tcp://HOST:PORT or unix:PATH of llmc prefill.",
    ),
]
EagerFlag = Annotated[
    bool,
    typer.Option(
        "--enforce-eager", help="Run without compiled or captured graphs, on a device that can. LLMC_ENFORCE_EAGER."
    ),
]
RoundsFlag = Annotated[
    int | None, option("--rounds", "N", "Rounds in which engines take turns, or texts are passed. Default: 5.", min=1)
]
QuickFlag = Annotated[bool, typer.Option("--quick", help="Few rounds, for a first look.")]
