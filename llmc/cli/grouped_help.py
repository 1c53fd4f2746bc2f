"""Help that fits on one screen: options in groups, some of them only named until --help-all asks for more.

A device's own flags are explained when --device names the device.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from llmc.cli.output import echo
from llmc.compiler.targets import offered

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
