"""The table of commands. A command's module is imported only when that command runs."""

from __future__ import annotations

from typing import Any

import typer
from typer.completion import completion_init  # type: ignore[attr-defined]
from typer.core import TyperGroup
from typer.main import get_group

from llmc.cli.output import echo
from llmc.errors import UnknownNameError
from llmc.version import __version__

COMMANDS = {
    "plan": ("llmc.cli.plan:app", "Choose the buckets to compile."),
    "compile": ("llmc.cli.compile:CompileCommand", "Compile a model into a bundle of ready-to-run graphs."),
    "run": ("llmc.cli.generate:RunCommand", "Answer one prompt; compiles the model on first use."),
    "chat": ("llmc.cli.generate:ChatCommand", "Chat with a model; compiles it on first use."),
    "verify": ("llmc.cli.verify:VerifyCommand", "Check a bundle against its reference model."),
    "generate": ("llmc.cli.generate:GenerateCommand", "Answer prompts with a bundle."),
    "embed": ("llmc.cli.pooling:EmbedCommand", "Embed texts with a bundle of an embedding model."),
    "score": ("llmc.cli.pooling:ScoreCommand", "Rank documents for a query with a bundle of a reranker."),
    "serve": ("llmc.cli.serve:ServeCommand", "Serve a bundle with the OpenAI API."),
    "prefill": ("llmc.cli.prefill:PrefillCommand", "Run prefill for bundles that decode on another device or host."),
    "tune": ("llmc.cli.tune:TuneCommand", "Time kernels on a GPU, for compiles on hosts without one."),
    "warmup": ("llmc.cli.warmup:WarmupCommand", "Run every graph twice; certify that nothing compiles."),
    "bench": ("llmc.cli.bench:app", "Time every bucket of a bundle, or compare the CPU engines."),
    "devices": ("llmc.cli.devices:DevicesCommand", "List the devices that this host can compile for and run."),
    "deploy": ("llmc.cli.deploy:DeployCommand", "Write deployment files: Docker, Kubernetes, systemd, CI."),
    "report": ("llmc.cli.report:ReportCommand", "Describe a bundle in Markdown, for a CI job's summary."),
    "traffic": ("llmc.cli.traffic:app", "Show, merge, sample or anonymise recorded traffic."),
    "loop": ("llmc.cli.loop:LoopCommand", "Re-plan for a server's traffic, compile and swap bundles."),
    "cache": ("llmc.cli.cache:app", "Inspect, trim, share and sign the artifact store and bundles."),
    "completion": ("llmc.cli.completion:CompletionCommand", "Print a completion script for bash, zsh or fish."),
}
OTHER_NAMES = {
    "ask": "run", "infer": "run", "inference": "run", "prompt": "run", "predict": "run", "build": "compile",
    "convert": "compile", "export": "compile", "quantize": "compile", "start": "serve", "server": "serve",
    "complete": "generate", "check": "verify", "benchmark": "bench", "info": "devices", "store": "cache",
}  # fmt: skip
"""Names used by other tools; the error for an unknown command suggests ours."""

WIDEST = 100
"""Maximum width of help text, in columns."""


class _Commands(TyperGroup):
    """Lists commands by their summaries; imports only the command that the command line names."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Raises UnknownNameError for an unknown command."""
        if args[0] in COMMANDS:
            from llmc.cli.options import add_named

            own = typer.Typer(rich_markup_mode=None)
            add_named(own, args[0], COMMANDS[args[0]][0])
            self.commands.update(get_group(own).commands)
        elif not ctx.resilient_parsing:
            raise UnknownNameError("command", args[0], COMMANDS, OTHER_NAMES)
        return super().resolve_command(ctx, args)


def app() -> typer.Typer:
    """Build the command line. Also answers a shell's completion requests (see `llmc completion`)."""
    completion_init()
    built = typer.Typer(
        cls=_Commands,
        name="llmc",
        add_completion=False,
        no_args_is_help=True,
        context_settings={"max_content_width": WIDEST},
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        epilog="Every command has --help with an example. Reports take --json. -v prints more on stderr, -q less.",
    )
    built.callback()(_root)
    for name, (_, summary) in COMMANDS.items():
        built.command(name, help=summary)(_listed)
    return built


def _version(value: bool) -> None:
    if value:
        echo(__version__)
        raise typer.Exit


def _root(
    show: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Ahead-of-time compilation of LLM graphs: plan and compile before deployment, then serve without compiling."""


def _listed() -> None:
    """Placeholder for a command that is not imported yet."""
