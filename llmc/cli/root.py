"""The commands by name; the module of a command is imported when it is asked for."""

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
    "compile": ("llmc.cli.compile:CompileCommand", "Compile a checkpoint into a bundle of precompiled graphs."),
    "run": ("llmc.cli.run:RunCommand", "Ask a model, for a first try: compiled where it was not yet."),
    "chat": ("llmc.cli.run:ChatCommand", "Talk to a model, for a first try."),
    "verify": ("llmc.cli.verify:VerifyCommand", "Check a bundle against its reference model."),
    "generate": ("llmc.cli.generate:GenerateCommand", "Answer prompts with a bundle, or a model, compiled first."),
    "embed": ("llmc.cli.pooling:EmbedCommand", "Vectors of texts with a bundle of an embedding model."),
    "score": ("llmc.cli.pooling:ScoreCommand", "Scores of documents with a bundle of a reranker."),
    "serve": ("llmc.cli.serve:ServeCommand", "Serve a bundle with OpenAI's API."),
    "prefill": ("llmc.cli.prefill:PrefillCommand", "Compute prompts for bundles that decode elsewhere."),
    "tune": ("llmc.cli.tune:TuneCommand", "Time kernels on a card, for compiles on hosts without it."),
    "warmup": ("llmc.cli.warmup:WarmupCommand", "Run every graph of a bundle twice; name those that fail."),
    "bench": ("llmc.cli.bench:app", "Time every bucket of a bundle, or the engines of --device cpu."),
    "devices": ("llmc.cli.devices:DevicesCommand", "Show what this host can compile for and run on."),
    "deploy": ("llmc.cli.deploy:DeployCommand", "Write files that deploy a bundle: images, pods, units, CI."),
    "report": ("llmc.cli.report:ReportCommand", "Tell of a bundle in Markdown, for a CI job's summary."),
    "traffic": ("llmc.cli.traffic:app", "Look at recorded traffic; merge, sample and anonymise it."),
    "loop": ("llmc.cli.loop:LoopCommand", "Plan for a server's traffic, compile and swap, on a schedule."),
    "cache": ("llmc.cli.cache:app", "Look into the artifact store and into bundles."),
    "completion": ("llmc.cli.completion:CompletionCommand", "Print what lets a shell complete llmc's command lines."),
}
OTHER_NAMES = {
    "ask": "run", "infer": "run", "inference": "run", "prompt": "run", "predict": "run", "build": "compile",
    "convert": "compile", "export": "compile", "quantize": "compile", "start": "serve", "server": "serve",
    "complete": "generate", "check": "verify", "benchmark": "bench", "info": "devices", "store": "cache",
}  # fmt: skip
"""What commands of that kind are called elsewhere; an error names ours."""

WIDEST = 100
"""Columns of a help, where the terminal has as many."""


class _Commands(TyperGroup):
    """A group that lists commands by their summaries, and imports the one that a command line names."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Raises UnknownNameError for a command that there is not."""
        if args[0] in COMMANDS:
            from llmc.cli.options import add_named

            own = typer.Typer(rich_markup_mode=None)
            add_named(own, args[0], COMMANDS[args[0]][0])
            self.commands.update(get_group(own).commands)
        elif not ctx.resilient_parsing:
            raise UnknownNameError("command", args[0], COMMANDS, OTHER_NAMES)
        return super().resolve_command(ctx, args)


def app() -> typer.Typer:
    """The command line; it completes one where the environment asks for that, as `llmc completion` has shells do."""
    completion_init()
    built = typer.Typer(
        cls=_Commands,
        name="llmc",
        add_completion=False,
        no_args_is_help=True,
        context_settings={"max_content_width": WIDEST},
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        epilog="Every command: --help with an example, --json where it reports, -v for more and -q for less on stderr.",
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
    """Ahead-of-time compilation of LLM graphs: plan, compile before deployment, replay without compiling."""


def _listed() -> None:
    """Stands for a command in the list of commands."""
