"""`lmlab` and `python -m lmlab`. Completion is answered before anything heavy is imported: it runs at every TAB."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run the command line; returns the exit status."""
    words = sys.argv[1:]
    if words[:1] == ["_complete"]:
        from lmlab.cli.complete import answer

        return answer(words[1:])
    from lmlab.cli.app import run

    status = run(words)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while the interpreter ends, Ctrl-C is no traceback
    return status


if __name__ == "__main__":
    sys.exit(main())
