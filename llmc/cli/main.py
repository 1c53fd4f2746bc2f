"""The `llmc` entry point: runs a command and turns errors into one line and an exit code."""

from __future__ import annotations

import sys
from typing import Any

from llmc.cli import output
from llmc.shown import shown, without_logins

_SEVERAL = "--lora-modules"
UNEXPECTED = 1
USAGE = 2
LONGEST_NAME = 200
INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Exit codes: 0 done, 1 failed, 2 usage, 3 device, 4 verification, 5 artifact, 130
    interrupted."""
    arguments, verbosity = _verbosity(list(sys.argv[1:] if argv is None else argv))
    _logging(verbosity)
    output.quiet, output.verbose, output.going_on = verbosity < 0, verbosity > 0, ""
    output.command = arguments
    if any("\0" in argument for argument in arguments):
        _fail("an argument contains a NUL byte", verbosity)
        return USAGE
    return _run(_spread(arguments), verbosity)


def _run(arguments: list[str], verbosity: int) -> int:
    import typer

    from llmc.cli.root import app
    from llmc.errors import LlmcError

    # typer brings click or its own copy of it; the base of its errors is reached through what it exports
    click_exception: type[Any] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
    try:
        try:
            result = app()(arguments, prog_name="llmc", standalone_mode=False, obj=arguments)
        finally:
            output.close_bars()
    except LlmcError as e:
        _fail(str(e), verbosity)
        return e.exit_code
    except typer.Exit as e:
        return e.exit_code
    except click_exception as e:
        e.show()
        return int(e.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        return _interrupted()
    except BrokenPipeError:
        sys.stderr.close()
        return UNEXPECTED
    except OSError as e:
        if e.filename is None:
            return _unexpected(e, verbosity)
        _fail(f"{_shown(e.filename)}: {e.strerror}", verbosity)
        return UNEXPECTED
    except ModuleNotFoundError as e:
        from llmc.platforms import not_installed

        if (reported := not_installed(e)) is None:
            return _unexpected(e, verbosity)
        _fail(str(reported), verbosity)
        return reported.exit_code
    except Exception as e:  # noqa: BLE001 - last resort: print one line; -v adds the traceback
        return _unexpected(e, verbosity)
    code = result if isinstance(result, int) else 0
    return _interrupted() if code == INTERRUPTED else code  # typer turns KeyboardInterrupt into this


def _interrupted() -> int:
    print(f"llmc: interrupted{output.going_on}", file=sys.stderr)
    return INTERRUPTED


def _verbosity(arguments: list[str]) -> tuple[list[str], int]:
    """Remove -v/--verbose and -q/--quiet from the arguments before a bare --; return the rest and the verbosity."""
    kept: list[str] = []
    verbosity = 0
    for i, argument in enumerate(arguments):
        if argument == "--":
            return kept + arguments[i:], verbosity
        if argument in ("-v", "--verbose"):
            verbosity += 1
        elif argument in ("-q", "--quiet"):
            verbosity -= 1
        else:
            kept.append(argument)
    return kept, verbosity


def _spread(arguments: list[str]) -> list[str]:
    """Repeat --lora-modules before each NAME=ADAPTER that follows one, because vLLM's flag takes several values."""
    built: list[str] = []
    for argument in arguments:
        behind = len(built) > 1 and built[-2] == _SEVERAL and "=" in built[-1]
        if behind and "=" in argument and not argument.startswith("-"):
            built.append(_SEVERAL)
        built.append(argument)
    return built


def _logging(verbosity: int) -> None:
    import logging

    class Shown(logging.Formatter):
        def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as logging calls it
            return output.wrapped(shown(without_logins(super().formatMessage(record))), sys.stderr)

    if logging.root.handlers:
        return
    levels = {-1: logging.ERROR, 0: logging.WARNING, 1: logging.INFO, 2: logging.DEBUG}
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Shown("llmc: %(message)s" if verbosity else "%(message)s"))
    logging.root.addHandler(handler)
    logging.root.setLevel(levels[max(-1, min(verbosity, 2))])


def _fail(message: str, verbosity: int) -> None:
    output.echo(f"llmc: error: {shown(message)}", err=True)
    if verbosity > 0:
        import traceback

        traceback.print_exc()


def _unexpected(error: Exception, verbosity: int) -> int:
    _fail(f"unexpected {type(error).__name__}: {error} (run again with -v for the traceback)", verbosity)
    return UNEXPECTED


def _shown(name: object) -> str:
    text = str(name)
    return text if len(text) <= LONGEST_NAME else f"{text[:60]}…{text[-60:]}"


def run() -> None:
    """Console script."""
    sys.exit(main())


if __name__ == "__main__":
    run()
