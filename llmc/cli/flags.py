"""Groups of flags that a command takes as one parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from llmc.cli.grouped_help import panel_of, standing_for
from llmc.cli.quantities import size

if TYPE_CHECKING:
    from llmc.compiler.options import Value
    from llmc.compiler.targets.declared import Declared

Command = Callable[..., None]


def grouped(
    command: Command, parameter: str, flags: Sequence[inspect.Parameter], join: Callable[[dict[str, Any]], Any]
) -> Command:
    """`command`, whose `parameter` is what `join` makes of flags by name, which these take the place of."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())
    at = [p.name for p in own].index(parameter)
    taken = [*own[:at], *flags, *own[at + 1 :]]

    def wrapper(*args: Any, **kwargs: Any) -> None:
        given = {flag.name: kwargs.pop(flag.name) for flag in flags}
        command(*args, **{parameter: join(given)}, **kwargs)

    return standing_for(wrapper, command, taken)


def takes(group: type[Any], command: Command) -> Command:
    """`command`, whose parameter `flags` is a `group`, a dataclass, as a function with one flag for each field."""
    hints = get_type_hints(group, include_extras=True)
    flags = [
        inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=hints[one.name])
        for one in fields(group)
    ]
    return grouped(command, "flags", flags, lambda given: group(**given))


def takes_own_options(command: Command) -> Command:
    """`command` with a flag for each option that targets declare; its parameter `own` gets those that were given."""
    from llmc.compiler.targets.declared import declared

    known = declared()
    flags = [_flag(one) for one in known.values()]

    def join(values: dict[str, Any]) -> dict[str, Value]:
        read = {n: size(known[n].option.flag, v) if known[n].option.is_size else v for n, v in values.items()}
        return {name: value for name, value in read.items() if value is not None}

    return grouped(command, "own", flags, join)


def _flag(one: Declared) -> inspect.Parameter:
    option = one.option
    kind: Any = str if option.is_size else option.kind
    name = f"{option.flag}/--no-{option.flag[2:]}" if option.kind is bool else option.flag
    said = typer.Option(name, metavar=option.metavar or None, help=option.help, rich_help_panel=panel_of(one.devices))
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, said]
    )
