"""The command line: one file per command, errors as two lines, exit statuses. Imports no torch and no Hydra."""

from __future__ import annotations

import errno
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from lmlab import __version__
from lmlab.cli.commands import MODULES, module
from lmlab.errors import EXIT_DONE, EXIT_FAILED, EXIT_SIGINT, EXIT_USAGE, LmlabError, nearest

LOST = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # stdout can't be written
EXIT_PIPE = 141  # whoever read our output is gone, as after SIGPIPE
# Set before torch starts its threads: how long a thread that waits for the others spins before it sleeps. When another
# program takes a core, spinning keeps the thread that is waited for off the other one. Measured on 2 cores beside one
# busy process: 1,000 tokens/s with libgomp's own value, 2,700 with this one; alone, no difference above the noise.
SPINS = "20000"
EPILOG = (
    "key=value acts on the experiment, a flag on this invocation. `lmlab options` lists every key. --debug: tracebacks."
)


def make_app() -> typer.Typer:
    """The typer app with every command."""
    app = typer.Typer(
        name="lmlab",
        help="A lab for Transformer ablations: compose, train and compare decoder-only language models.",
        epilog=EPILOG,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback(invoke_without_command=True)(_top)
    for name in MODULES:
        importlib.import_module(f"lmlab.cli.{module(name)}").register(app)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        print(f"lmlab {__version__}")
        raise typer.Exit


def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print it")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks (anywhere on the line)")] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def run(words: Sequence[str]) -> int:
    """Run one command line; returns the exit status. Errors go to stderr as two lines, tracebacks with --debug."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    debug = "--debug" in words
    words = [w for w in words if w != "--debug"]
    try:
        if words[:1] == ["sweep"]:
            from lmlab.sweep.question import expanded

            words = expanded(words)
        status = make_app()(args=words, standalone_mode=False, prog_name="lmlab")
        sys.stdout.flush()
        return status if isinstance(status, int) else EXIT_DONE
    except BrokenPipeError:
        return _unread()
    except SystemExit as asked:
        if isinstance(asked.__context__, BrokenPipeError):  # typer turns one that a command met into exit(1)
            return _unread()
        raise
    except KeyboardInterrupt:
        return EXIT_SIGINT
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the help is printed already
            return EXIT_USAGE
        if _is_lost_output(error):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python tries once more at its end
        if debug:
            traceback.print_exc()
        told = explained(error, words)
        tell(told)
        return told.exit_code


def _unread() -> int:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python tries once more at its end
    return EXIT_PIPE


def _is_lost_output(error: Exception) -> bool:
    """Whether what was printed could not be written. Those of files name the file, and are told where they occur."""
    return isinstance(error, OSError) and error.filename is None and error.errno in LOST


def explained(error: Exception, words: Sequence[str]) -> LmlabError:
    """Any exception as an LmlabError: ours as it is, typer's in our words, the rest as unexpected."""
    if isinstance(error, LmlabError):
        return error
    if type(error).__name__ == "Abort":
        return _with_exit(LmlabError("stopped"), EXIT_SIGINT)
    if hasattr(error, "format_message"):
        return _usage(error, words)
    if _is_lost_output(error):
        message = f"can't write the output: {os.strerror(getattr(error, 'errno', 0))}"
        return _with_exit(LmlabError(message, "see where stdout is sent"), EXIT_FAILED)
    text = str(error).strip().split("\n")[0]
    message = f"unexpected {type(error).__name__}" + (f": {text}" if text else "")
    return _with_exit(LmlabError(message, "this is a bug; the same command with --debug shows where"), EXIT_FAILED)


def _with_exit(error: LmlabError, status: int) -> LmlabError:
    error.exit_code = status
    return error


def _usage(error: Any, words: Sequence[str]) -> LmlabError:
    """Typer's usage errors: an unknown flag or command, a missing argument, a bad value."""
    context = getattr(error, "ctx", None)
    named = next((f"lmlab {w}" for w in words[:1] if w in MODULES), "lmlab")
    where = context.command_path if context is not None else named
    text = error.format_message().rstrip(".")
    flag = getattr(error, "option_name", None)
    if flag and "No such option" in text:
        return _unknown_flag(flag, context, words, where)
    if "No such command" in text:
        return _unknown_command(text.split("'")[1], context, where)
    return LmlabError(text[:1].lower() + text[1:], f"`{where} --help` shows how it is used")


def _unknown_flag(flag: str, context: Any, words: Sequence[str], where: str) -> LmlabError:
    from lmlab.cli.flag_hint import flag_hint
    from lmlab.config.parse import flag_error

    word = next((w for w in words if w.split("=")[0] == flag), flag)
    error = flag_error(word)
    written = error.hint if "without dashes" in error.hint else ""
    hint = flag_hint(word, context, written)
    if hint and hint == written:
        return error
    return type(error)(
        f"`{word}` is not a flag of `{where}`", hint or f"`{where} --help` lists the flags; settings are key=value"
    )


def _unknown_command(name: str, context: Any, where: str) -> LmlabError:
    known = list(context.command.list_commands(context)) if context is not None else list(MODULES)
    guess = nearest(name, known)
    if "=" in name and where == "lmlab":
        hint = f"did you mean `lmlab train {name}`?"
    elif guess:
        hint = f"did you mean `{where} {guess}`?"
    else:
        hint = f"commands: {', '.join(known)}"
    return LmlabError(f"`{name}` is not a command of {where}", hint)


def tell(error: LmlabError) -> None:
    """The error on stderr; its two words in colour on a terminal, unless NO_COLOR is set."""
    text = str(error)
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        marks = {"error:": "\033[1;31merror:\033[0m", "hint:": "\033[36mhint:\033[0m"}
        lines = text.split("\n")
        text = "\n".join(next((c + ln[len(m) :] for m, c in marks.items() if ln.startswith(m)), ln) for ln in lines)
    print(text, file=sys.stderr)
