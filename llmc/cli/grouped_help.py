"""Help whose flags stand in groups, those of a device only where --device names it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand

_OWN = "Options of {}"
_DEVICES = "devices: "
_PLAIN = {"argument": "Arguments", "option": "Options"}


def panel_of(devices: Sequence[str]) -> str:
    """The panel of a flag that these devices take."""
    return _DEVICES + ",".join(devices)


class GroupedCommand(TyperCommand):
    """A command whose flags are listed by their panels, in the order in which these come.

    A flag of a panel of devices is listed for the device that the arguments name (the context's object), and else by
    name alone.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """What stands below the text of the help."""
        device = device_in(ctx.find_root().obj or ())
        groups: dict[str, list[tuple[str, str]]] = {}
        flags: dict[str, list[str]] = {}
        for param in self.get_params(ctx):
            title = getattr(param, "rich_help_panel", None) or _PLAIN[param.param_type_name]
            _, own, listed = title.partition(_DEVICES)
            devices = listed.split(",") if own else []
            for name in devices:
                flags.setdefault(name, []).append(param.opts[0])
            record = param.get_help_record(ctx)
            if record is not None and (not own or device in devices):
                groups.setdefault(_OWN.format(device) if own else title, []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)
        if flags and device not in flags:
            with formatter.section(f"{_OWN.format('a device')}; {ctx.command_path} --device D --help explains them"):
                formatter.write_dl([(name, ", ".join(found)) for name, found in sorted(flags.items())])


def device_in(arguments: Sequence[str]) -> str | None:
    """The name of the device that --device has among `arguments`, without what stands behind its colon."""
    for at, argument in enumerate(arguments):
        flag, given, value = argument.partition("=")
        if flag == "--device":
            found = value if given else next(iter(arguments[at + 1 : at + 2]), "")
            return found.partition(":")[0]
    return None
