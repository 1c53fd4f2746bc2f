"""Values of environment variables, one kind each. settings.py says which variables there are.

Each takes the environment and the name of a variable, and raises InputError, which names it, for a value that is none.
"""

from __future__ import annotations

from collections.abc import Mapping

from llmc.errors import InputError

Environment = Mapping[str, str]

_SWITCHES = {
    "": False, "0": False, "false": False, "no": False, "off": False, "1": True, "true": True, "yes": True, "on": True,
}  # fmt: skip


def switch(environ: Environment, variable: str) -> bool:
    """Whether a variable says true, 1 …; raises InputError for what is neither that nor false."""
    text = environ.get(variable, "").strip().lower()
    if text not in _SWITCHES:
        raise InputError(f"{variable}={text!r} is not true or false; set 1, or unset it")
    return _SWITCHES[text]


def optional_switch(environ: Environment, variable: str) -> bool | None:
    """As `switch`; None where it is not set."""
    return switch(environ, variable) if environ.get(variable, "").strip() else None


def integer(environ: Environment, variable: str) -> int | None:
    """A whole number; None where it is not set. Raises InputError."""
    text = environ.get(variable, "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{variable}={text!r} is not an integer; set a whole number or unset it") from None


def count(environ: Environment, variable: str) -> int:
    """A whole number from 0, 0 where it is not set. Raises InputError."""
    value = integer(environ, variable) or 0
    if value < 0:
        raise InputError(f"{variable}={value} must not be negative; unset it for none")
    return value


def at_least_one(environ: Environment, variable: str, remedy: str) -> int | None:
    """A whole number from 1; None where it is not set. Raises InputError, which ends in `remedy`."""
    number = integer(environ, variable)
    if number is not None and number < 1:
        raise InputError(f"{variable}={number} must be at least 1; {remedy}")
    return number


def gibibytes(environ: Environment, variable: str) -> float | None:
    """A size in GiB; None for 0, which asks for the default."""
    text = environ.get(variable, "").strip()
    try:
        space = float(text or 0)
    except ValueError:
        space = -1.0
    if not 0 <= space < float("inf"):
        raise InputError(f"{variable}={text!r} is not a size in GiB; set a number such as 4, or unset it")
    return space or None


def seconds(environ: Environment, variable: str, default: float) -> float:
    """Seconds above 0. Raises InputError."""
    text = environ.get(variable, "").strip()
    try:
        found = float(text or default)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise InputError(f"{variable}={text!r} is not a number of seconds above 0; set one, or unset it")
    return found


def share(environ: Environment, variable: str) -> float | None:
    """A number from 0 to 1; None where it is not set. Raises InputError."""
    text = environ.get(variable, "").strip()
    try:
        found = float(text) if text else None
    except ValueError:
        found = -1.0
    if found is not None and not 0 <= found <= 1:
        raise InputError(f"{variable}={text!r} is not a share within 0 … 1; set one such as 0.3, or unset it")
    return found
