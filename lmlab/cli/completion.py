"""`lmlab completion bash|zsh|fish`: the script that teaches a shell to complete lmlab's command line.

bash splits words at `=` and `:`, so `lmlab _complete bash` prints only what stands behind the last of them; zsh and
fish take whole words.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Optional

import typer

SCRIPTS = {
    "bash": """\
_lmlab() {
  local IFS=$'\\n'
  COMPREPLY=($(COMP_LINE="$COMP_LINE" COMP_POINT="$COMP_POINT" lmlab _complete bash 2>/dev/null))
  [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=./[] ]] && compopt -o nospace; true
}
complete -o default -F _lmlab lmlab
""",
    "zsh": """\
#compdef lmlab
_lmlab() {
  local -a all open closed
  all=(${(f)"$(COMP_LINE="${(j: :)words[1,CURRENT-1]} ${PREFIX}" lmlab _complete zsh 2>/dev/null)"})
  open=(${(M)all:#*[=./\\[]}) closed=(${all:#*[=./\\[]})
  (( $#open )) && compadd -Q -S '' -a open
  (( $#closed )) && compadd -Q -a closed
  (( $#all )) || _files
}
(( $+functions[compdef] )) && compdef _lmlab lmlab
""",
    "fish": """\
complete -c lmlab -e
complete -c lmlab -f -a '(env COMP_LINE=(commandline -cp | string collect) lmlab _complete fish 2>/dev/null)'
""",
}
INSTALL = {
    "bash": "echo 'eval \"$(lmlab completion bash)\"' >> ~/.bashrc",
    "zsh": "echo 'eval \"$(lmlab completion zsh)\"' >> ~/.zshrc  (after compinit)",
    "fish": "lmlab completion fish > ~/.config/fish/completions/lmlab.fish",
}


def register(app: typer.Typer) -> None:
    app.command("completion")(completion)


def completion(
    shell: Annotated[
        Optional[str], typer.Argument(metavar="bash|zsh|fish", help="left out = the one of $SHELL")
    ] = None,
) -> None:
    """Print the script that completes commands, groups, options and fields: `eval "$(lmlab completion bash)"`."""
    import sys

    from lmlab.errors import LmlabError, listed

    shell = shell or Path(os.environ.get("SHELL", "bash")).name
    if shell not in SCRIPTS:
        raise LmlabError(f"there is no completion for {shell}", f"use one of {listed(SCRIPTS)}")
    print(SCRIPTS[shell], end="")
    if sys.stdout.isatty():
        print(f"to install it: {INSTALL[shell]}", file=sys.stderr)
