"""Imported by the server from which a sweep's processes are forked: what each of them would import anyway."""

import importlib
import signal

# A signal to the whole group (timeout, a scheduler) must not end the server before its children have saved.
for _number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(_number, signal.SIG_IGN)

# Named here and not imported: this package may not import cli. None of them starts a thread.
for _name in ("torch", "hydra", "omegaconf", "numpy", "tokenizers", "lmlab.cli.training", "lmlab.cli.sweep_task"):
    importlib.import_module(_name)

importlib.import_module("lmlab.config.identity").pin_code()
