"""Imported by the server from which a sweep's processes are forked: what each of them would import anyway."""

import importlib

# Named here and not imported: this package may not import cli. None of them starts a thread.
for _name in ("torch", "hydra", "omegaconf", "numpy", "tokenizers", "lmlab.cli.training", "lmlab.cli.sweep_task"):
    importlib.import_module(_name)
