"""Commands as classes: fields are arguments and options, the docstring is the help text, `run` does the work.

    @dataclass(frozen=True, kw_only=True)
    class VerifyCommand(Command):
        \"\"\"Check a bundle.\"\"\"

        bundle: str = bundle_argument()
        reference: str | None = flag(None, "MODEL", "The checkpoint.")
        every: bool = switch("--all", "Every bucket, not a sample of them.")

        def run(self) -> None: ...

An option that several commands share is a function here or a field of a shared base class. Help lists inherited options
after the command's own. It fits on one screen: options are in groups, some of them only named until --help-all asks for
more, and a device's own flags are explained when --device names the device.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, make_dataclass
from functools import partial
from importlib import import_module
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_type_hints

import typer
from typer.core import TyperCommand

from llmc.cli.output import echo
from llmc.compiler.options import DTYPES, EXECUTORS, LOCAL, QUANTISATIONS
from llmc.compiler.targets import declared, offered, require_device
from llmc.errors import InputError

if TYPE_CHECKING:
    from llmc.compiler.options import OptionValue
    from llmc.runtime.engine.speculation import SpeculativeConfig
    from llmc.runtime.startup.capturing import CaptureChoice
    from llmc.settings import Settings


_SECONDS = {"": 1, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_BYTES = {
    "": 1, "b": 1, "k": 1000, "kb": 1000, "m": 1000**2, "mb": 1000**2, "g": 1000**3, "gb": 1000**3, "t": 1000**4,
    "tb": 1000**4, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip
_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-z%]*)\s*", re.IGNORECASE)


def fraction(flag: str, text: str | None) -> float | None:
    """ "10%" or "0.1" as 0.1; None stays None. Raises InputError, naming `flag`."""
    return _quantity(flag, text, {"": 1.0, "%": 0.01}, "a fraction such as 0.1 or 10%")


def duration(flag: str, text: str | None) -> float | None:
    """Seconds of "90", "90s", "30m", "1.5h" or "30d"; None stays None. Raises InputError, naming `flag`."""
    return _quantity(flag, text, _SECONDS, "a time such as 90s, 30m, 1.5h or 30d")


def size(flag: str, text: str | None) -> int | None:
    """Bytes of "512MiB", "8GiB" or "2e9"; None stays None. Raises InputError, naming `flag`."""
    found = _quantity(flag, text, _BYTES, "a size such as 512MiB or 8GB")
    return None if found is None else int(found)


def rate(flag: str, text: str | None) -> float | None:
    """Requests per second, or "inf" for all at once; None stays None. Raises InputError, naming `flag`."""
    if text is not None and text.strip().lower() in ("inf", "infinity"):
        return math.inf
    found = _quantity(flag, text, {"": 1.0}, "a number of requests per second above 0, or inf")
    if found == 0:
        raise InputError(f"{flag} {text!r} is not a number of requests per second above 0, or inf")
    return found


def _quantity(flag: str, text: str | None, units: dict[str, float] | dict[str, int], expected: str) -> float | None:
    if text is None:
        return None
    found = _NUMBER.fullmatch(text)
    if found is None or found[2].lower() not in units:
        raise InputError(f"{flag} {text!r} is not {expected}")
    return float(found[1]) * units[found[2].lower()]


ALL = "--help-all"
_OWN = "Options of {}"
_DEVICES = "devices: "
_PLAIN = {"argument": "Arguments", "option": "Options"}


def panel_of(devices: Sequence[str]) -> str:
    """The help panel for a flag that these devices take."""
    return _DEVICES + ",".join(devices)


class CommandOfOptions(TyperCommand):
    """A command whose callback builds an object from its options, whose `run` then does the work.

    Options are listed by panel, in panel order. An option of a device panel is listed for the device that the arguments
    name (the context's object).
    """

    def invoke(self, ctx: Any) -> Any:
        """Build the command object and run it."""
        return super().invoke(ctx).run()

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the option groups below the help text."""
        device = device_in(ctx.find_root().obj or ())
        all_of_it = ctx.meta.get(ALL) or ALL not in {name for param in self.params for name in param.opts}
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in _PLAIN.values()}
        brief: dict[str, list[str]] = {}
        flags: dict[str, list[str]] = {}
        for param in self.get_params(ctx):
            plain = _PLAIN[param.param_type_name]
            title = getattr(param, "rich_help_panel", None) or plain
            _, own, listed = title.partition(_DEVICES)
            devices = listed.split(",") if own else []
            for name in devices:
                flags.setdefault(name, []).append(param.opts[0])
            record = param.get_help_record(ctx)
            if record is None or (own and device not in devices):
                continue
            if own or title == plain or all_of_it:
                groups.setdefault(_OWN.format(device) if own else title, []).append(record)
            else:
                brief.setdefault(title, []).append(param.opts[0])
        for title, records in ((title, found) for title, found in groups.items() if found):
            with formatter.section(title):
                formatter.write_dl(records)
        if brief:
            with formatter.section(f"More options; {ctx.command_path} {ALL} explains them"):
                _name(formatter, brief)
        if flags and device in offered() and device not in flags:
            with formatter.section(_OWN.format(device)):
                formatter.write_text("none besides the options of every device")
        elif flags and device not in flags:
            with formatter.section(f"{_OWN.format('a device')}; {ctx.command_path} --device D --help explains them"):
                _name(formatter, dict(sorted(flags.items())) if all_of_it else {"": sorted(flags)})


def _name(formatter: Any, rows: Mapping[str, Sequence[str]]) -> None:
    """One line per row: its title and its names. Names are not broken at hyphens."""
    widest = max(len(title) + 2 for title in rows) if any(rows) else 0
    for title, names in rows.items():
        begin = " " * formatter.current_indent + title.ljust(widest)
        text = textwrap.fill(
            ", ".join(names), formatter.width, initial_indent=begin, subsequent_indent=" " * len(begin),
            break_on_hyphens=False,
        )  # fmt: skip
        formatter.write(f"{text}\n")


def show_all(ctx: typer.Context, value: bool) -> None:
    """Callback of ALL: print the help with every option, then exit."""
    if value and not ctx.resilient_parsing:
        ctx.meta[ALL] = True
        echo(ctx.get_help())
        raise typer.Exit


def device_in(arguments: Sequence[str]) -> str | None:
    """The device that --device names among `arguments`, without the part after its colon."""
    for at, argument in enumerate(arguments):
        flag, given, value = argument.partition("=")
        if flag == "--device":
            found = value if given else next(iter(arguments[at + 1 : at + 2]), "")
            return found.partition(":")[0]
    return None


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
    info = typer.Argument(metavar=metavar, help=text, **{"show_default": False, **more})
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
rounds_flag = partial(flag, None, "N", "Measured rounds. Default: 5.", min=1)
order_flag = partial(flag, None, "FILE", "Recorded requests; the buckets that they use most are warmed up first.")


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


UNCAPTURED_SHOWN = 5
"""Uncaptured buckets per phase that a report names; --json and -v name all."""
_SHARES = ("gpu_memory_utilization", "graph_reserved_mem", "graph_prompt_ratio")


_flag = partial(flag, panel="Memory of captured graphs")


@dataclass(frozen=True, kw_only=True)
class CaptureFlags(Command):
    """Graph capture flags; None means not given."""

    gpu_memory_utilization: str | None = _flag(
        None, "F", "Share of the memory left after the profile run to use. Default: 0.9."
    )
    graph_reserved_mem: str | None = _flag(
        None, "F", "Share of that for graphs; 0 for none. Default: VLLM_GRAPH_RESERVED_MEM or 0.1."
    )
    graph_prompt_ratio: str | None = _flag(
        None, "F", "Share of that for prefill graphs. Default: VLLM_GRAPH_PROMPT_RATIO or 0.3."
    )
    prompt_strategy: str | None = _flag(
        None, "min_tokens|max_bs", "Prefill graphs to capture first. Default: VLLM_GRAPH_PROMPT_STRATEGY or min_tokens."
    )
    decode_strategy: str | None = _flag(
        None, "min_tokens|max_bs", "Decode graphs to capture first. Default: VLLM_GRAPH_DECODE_STRATEGY or max_bs."
    )

    def choice(self, settings: Settings) -> CaptureChoice:
        """The capture settings of the flags, and of the environment for flags not given. Raises InputError."""
        from llmc.buckets.capture.options import CaptureOptions
        from llmc.runtime.startup.capturing import CaptureChoice

        typed = self.values(*(one.name for one in fields(CaptureFlags)))
        spelled = {name: f"--{name.replace('_', '-')}" for name in typed}
        given: dict[str, Any] = {
            name: fraction(spelled[name], v) if name in _SHARES else v for name, v in typed.items()
        }
        return CaptureChoice(CaptureOptions.of(settings, **given), tuple(spelled.values()))
