"""What happens around the command line: the end of the interpreter."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import atexit, os, signal, sys
from lmlab.__main__ import main
atexit.register(os.kill, os.getpid(), signal.SIGINT)
sys.argv = ["lmlab", "options", "norm"]
sys.exit(main())
"""


def test_ctrl_c_while_the_interpreter_ends_is_no_traceback():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert "rmsnorm" in done.stdout
    assert (done.returncode, done.stderr) == (-2, "")
