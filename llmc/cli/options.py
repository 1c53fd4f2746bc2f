"""Commands as classes: fields are arguments and options, the docstring is the help text, `run` does the work.

    @dataclass(frozen=True, kw_only=True)
    class VerifyCommand(Command):
        \"\"\"Check a bundle.\"\"\"

        bundle: str = bundle_argument()
        reference: str | None = flag(None, "MODEL", "The checkpoint.")
        every: bool = switch("--all", "Every bucket, not a sample of them.")

        def run(self) -> None: ...

An option that several commands share is a function here or a field of a shared base class. Help lists inherited options
after the command's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, dataclass, field, fields, make_dataclass
from functools import partial
from importlib import import_module
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_type_hints

import typer

from llmc.cli.grouped_help import ALL, CommandOfOptions, panel_of, show_all
from llmc.cli.quantities import size
from llmc.compiler.options import DTYPES, EXECUTORS, LOCAL, QUANTISATIONS
from llmc.compiler.targets import declared, offered, require_device
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.compiler.options import OptionValue
    from llmc.runtime.engine.speculation import SpeculativeConfig

ENGINE = "Engine"
SPECULATION = "Speculation by prompt lookup"
_CHOICES = re.compile(r"[a-z0-9_]+(\|[a-z0-9_]+)+")
_INFO = "typer"


class Command:
    """Base class of commands: a frozen dataclass without fields."""

    brief: ClassVar[bool] = False
    """If true, --help only names the options in panels and --help-all explains them."""

    def values(self, *names: str) -> dict[str, Any]:
        """The values of those options of `names` that were given."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def run(self) -> None:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(Command):
    """A command that also takes the devices' own options, one flag each (`declared`)."""

    @property
    def own(self) -> dict[str, OptionValue]:
        """The given device options by name. Raises InputError for a size that does not parse."""
        found = {name: getattr(self, name) for name in declared()}
        read = {n: size(one.option.flag, found[n]) if one.option.is_size else found[n] for n, one in declared().items()}
        return {name: value for name, value in read.items() if value is not None}


def add_named(app: typer.Typer, name: str, location: str) -> None:
    """Register the command, or group of commands, at `location` ("module:name") in `app`."""
    module, _, attribute = location.partition(":")
    found = getattr(import_module(module), attribute)
    if isinstance(found, typer.Typer):
        app.add_typer(found, name=name)
    else:
        add(app, name, found)


def add(app: typer.Typer, name: str, command: type[Command], **more: Any) -> None:
    """Register a command in `app` under `name`. `more` is passed to `typer.Typer.command`."""
    last: list[tuple[str, Any, Any]] = []
    if issubclass(command, DeviceOptions):
        last += [_of_device(one) for one in declared().values()]
    if command.brief:
        shown = switch(ALL, "Explain every option.", is_eager=True, callback=show_all)
        last.append(("help_all", bool, shown))
    built = make_dataclass(
        command.__name__, last, bases=(command,), namespace={"__doc__": command.__doc__}, frozen=True, kw_only=True
    )
    hints = get_type_hints(built)
    own = sorted(
        fields(built), key=lambda one: (one.name not in command.__annotations__, one.name in built.__annotations__)
    )
    built.__signature__ = Signature([_parameter(one, hints[one.name]) for one in own])  # type: ignore[attr-defined]
    app.command(name, cls=CommandOfOptions, **more)(built)


def _parameter(one: Field[Any], kind: Any) -> Parameter:
    default = Parameter.empty if one.default is MISSING else one.default
    annotation = Annotated[kind, one.metadata[_INFO]]
    return Parameter(one.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _of_device(one: Any) -> tuple[str, Any, Any]:
    option = one.option
    kind: Any = str if option.is_size else option.kind
    name = f"{option.flag}/--no-{option.flag[2:]}" if option.kind is bool else option.flag
    info = typer.Option(name, metavar=option.metavar or None, help=option.help, rich_help_panel=panel_of(one.devices))
    return option.name, kind | None, field(default=None, metadata={_INFO: info})


def one_of(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Complete a value with those of `names` that start with the typed text."""

    def going_on(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return going_on


def option(names: str, metavar: str, text: str, **more: Any) -> Any:
    """A `typer.Option` with a value, for `Annotated`. `names` are separated by spaces; "" uses the parameter's name.

    `metavar` stands for the value in the help line `text`. A metavar like "a|b|c" is also used for shell completion.
    `more` is passed to `typer.Option`.
    """
    if _CHOICES.fullmatch(metavar):
        more = {"autocompletion": one_of(lambda: metavar.split("|")), **more}
    return typer.Option(*names.split(), metavar=metavar, help=text, **more)


def flag(default: Any, metavar: str, text: str, panel: str | None = None, names: str = "", **more: Any) -> Any:
    """A dataclass field for an `option`. With the default `MISSING` the option is required."""
    return field(default=default, metadata={_INFO: option(names, metavar, text, rich_help_panel=panel, **more)})


def switch(names: str, text: str, panel: str | None = None, default: bool | None = False, **more: Any) -> Any:
    """A dataclass field for an option without a value; name it "--on/--off" if it can be turned off."""
    return field(default=default, metadata={_INFO: typer.Option(names, help=text, rich_help_panel=panel, **more)})


def argument(metavar: str, text: str, default: Any = MISSING, **more: Any) -> Any:
    """A dataclass field for a positional argument."""
    info = typer.Argument(metavar=metavar, help=text, show_default=False, **more)
    return field(default=default, metadata={_INFO: info})


def device_flag(default: str | None, text: str, metavar: str = "D", **more: Any) -> Any:
    """A dataclass field for a device option. An unknown device is refused before anything else runs."""
    return flag(default, metavar, text, callback=_known, autocompletion=one_of(offered), **more)


def _known(device: str | None) -> str | None:
    if device is not None:
        require_device(device)
    return device


BUNDLE = "A bundle folder, archive, store:KEY or oci://…."

traffic_format_flag = partial(flag, None, "NAME", "Format of --traffic. Default: detected from its first lines.")
fields_flag = partial(flag, None, "prompt=A,output=B[,time=C]", "Field names in the lines of --traffic.")
bundle_argument = partial(argument, "BUNDLE", BUNDLE)
bundle_or_model_argument = partial(
    argument, "BUNDLE|MODEL",
    "A bundle folder, archive, store:KEY or oci://…; or a checkpoint, which is compiled on first use.",
)  # fmt: skip
store_flag = partial(
    flag, None, "DIR", "Artifact store. Default: LLMC_CACHE_DIR, else the user's cache.", names="--cache-dir"
)
threads_flag = partial(flag, None, "N", "Threads. Default: LLMC_THREADS, else all CPUs.", min=1)
quantize_flag = partial(flag, None, "|".join(QUANTISATIONS))
DTYPE_CHOICES = "|".join(DTYPES)
executor_flag = partial(flag, LOCAL, "|".join(EXECUTORS))
address_flag = partial(
    flag, None, "HOST:PORT", "Address of the Ray cluster. Default: RAY_ADDRESS, else the one on this host."
)
rate_flag = partial(flag, None, "R", "Replay rate in requests per second, or inf. Default: as recorded.")
clip_flag = partial(switch, "--clip", "Clip requests that exceed the limits instead of skipping them.")
plan_flag = partial(flag, None, "PLAN", "A plan file written by llmc plan -o.")
weights_flag = partial(
    flag, None, "MODEL", "The checkpoint with the weights, for a bundle compiled with --config.", ENGINE
)
task_flag = partial(
    flag, None, "generate|embed|score", "The model's task. Default: read from the checkpoint's files.",
    "Model and graphs",
)  # fmt: skip
prefill_flag = partial(
    flag, None, "[process:]BUNDLE|ADDRESS",
    "Run prefill elsewhere: with another bundle (process:BUNDLE starts it in its own process), or on llmc prefill at "
    "tcp://HOST:PORT or unix:PATH.",
    ENGINE,
)  # fmt: skip
eager_flag = partial(
    switch, "--enforce-eager",
    "Run without compiled or captured graphs if the device can. Default: LLMC_ENFORCE_EAGER.", ENGINE,
)  # fmt: skip
speculate_flag = partial(
    flag,
    None,
    "K",
    "Draft up to K tokens a step from the sequence's own text. The output does not change.",
    SPECULATION,
)
prompt_lookup_max_flag = partial(flag, None, "N", "Longest n-gram to look up. Default: 4.", SPECULATION)
prompt_lookup_min_flag = partial(flag, None, "M", "Shortest n-gram to look up. Default: 2.", SPECULATION)
order_flag = partial(flag, None, "FILE", "Recorded requests; the buckets that they use most are warmed up first.")

BundleArgument = Annotated[str, typer.Argument(metavar="BUNDLE", help=BUNDLE, show_default=False)]
ThreadsFlag = Annotated[int | None, option("--threads", "N", "Threads. Default: LLMC_THREADS, else all CPUs.", min=1)]
RoundsFlag = Annotated[int | None, option("--rounds", "N", "Measured rounds. Default: 5.", min=1)]
QuickFlag = Annotated[bool, typer.Option("--quick", help="Fewer rounds, for a first impression.")]


def speculation(
    tokens: int | None, lookup_max: int | None, lookup_min: int | None, config: str | None = None
) -> SpeculativeConfig | None:
    """The speculation that these options request, or None. Raises InputError for options that conflict."""
    lengths = {"--prompt-lookup-max": lookup_max, "--prompt-lookup-min": lookup_min}
    given = [name for name, value in lengths.items() if value is not None]
    if config is None and tokens is None:
        if given:
            raise InputError(f"{given[0]} has no effect without speculation; add --speculate K")
        return None
    from llmc.runtime.engine.speculation import SpeculativeConfig

    if config is not None:
        if tokens is not None or given:
            named = given[0] if tokens is None else "--speculate"
            raise InputError(f"--speculative-config replaces {named}; leave it out, or set it in --speculative-config")
        return SpeculativeConfig.parse(config)
    return SpeculativeConfig(tokens or 0, lookup_max, lookup_min)
