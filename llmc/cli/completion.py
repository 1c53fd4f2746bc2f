"""`llmc completion`: print a script with which a shell asks `llmc` for completions."""

from __future__ import annotations

from dataclasses import dataclass

from llmc.cli.options import Command, argument, one_of
from llmc.cli.output import echo
from llmc.errors import UnknownNameError

SCRIPTS = {
    "bash": r"""
_llmc_completion() {
    local IFS=$'\n' rest=$COMP_LINE words=() before word i
    for ((i = 0; i <= COMP_CWORD; i++)); do  # bash splits at = and : too (COMP_WORDBREAKS), with nothing between
        word=${COMP_WORDS[i]}
        before=${rest%%"$word"*}
        [[ $word ]] || before=$rest
        rest=${rest:${#before}+${#word}}
        if [[ $before || $i == 0 ]]; then words+=("$word"); else words[-1]+=$word; fi
    done
    COMPREPLY=($(env COMP_WORDS="${words[*]}" COMP_CWORD=$((${#words[@]} - 1)) _LLMC_COMPLETE=complete_bash "$1"))
    word=${words[-1]}
    if [[ $word == -*=* ]]; then
        [[ $COMP_WORDBREAKS == *=* ]] || COMPREPLY=("${COMPREPLY[@]/#/${word%%=*}=}")
        word=${word#*=}
    fi
    [[ $COMP_WORDBREAKS != *:* ]] || COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*:}"}"}")
}

complete -o default -F _llmc_completion llmc
""",
    "zsh": r"""
#compdef llmc

_llmc_completion() {
    local asked=${words[1,$CURRENT]}
    [[ $PREFIX != -*=* ]] || compset -P 1 '*='
    eval $(env _TYPER_COMPLETE_ARGS="$asked" _LLMC_COMPLETE=complete_zsh llmc)
}

compdef _llmc_completion llmc
""",
    "fish": r"""
function _llmc_completion
    env _LLMC_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=$argv _TYPER_COMPLETE_ARGS=(commandline -cp) llmc
end

function _llmc_arguments
    _llmc_completion get-args | string replace -r -- '^' (string match -r '^-[^=]*=' -- (commandline -ct); or echo '')
end

complete --command llmc --no-files --arguments '(_llmc_arguments)' --condition '_llmc_completion is-args'
""",
}
"""Scripts by shell. llmc gets the whole word `--option=value`; bash and zsh replace only the part after the =, fish the
whole word."""
SHELLS = tuple(SCRIPTS)


@dataclass(frozen=True, kw_only=True)
class CompletionCommand(Command):
    """Print a completion script for a shell: it completes commands, options, devices, values and paths.

    \b
    Example:
      llmc completion bash >> ~/.bashrc
      llmc completion zsh >> ~/.zshrc           # below compinit
      llmc completion fish > ~/.config/fish/completions/llmc.fish
    """

    shell: str = argument("|".join(SHELLS), "The shell.", autocompletion=one_of(lambda: SHELLS))

    def run(self) -> None:
        if self.shell not in SHELLS:
            raise UnknownNameError("shell", self.shell, SHELLS)
        echo(SCRIPTS[self.shell].strip(), verbatim=True)
