"""Any text survives the way through Hydra and OmegaConf."""

from __future__ import annotations

import random

import pytest

from lmlab.config.amend import quoted
from lmlab.config.load import load

SIGNS = ["\\", "'", "${", "}", "$", "{", "a", '"', "/", "oc.env:HOME", "=", ",", "é", " ", "[", "]", "~", "#"]
TEXTS = [
    "${oc.env:HOME}",
    "a\\back",
    "back\\",
    "\\\\",
    "\\'",
    "'\\",
    "\\${x}",
    "\\\\${x}",
    "${",
    "a${\\",
    "'${x}\\\\'\\",
]


def drawn(seed: int) -> str:
    generator = random.Random(seed)
    return "/" + "".join(generator.choices(SIGNS, k=generator.randint(1, 7)))


@pytest.mark.parametrize("text", [*TEXTS, *map(drawn, range(30))])
def test_it_is_read_back(text):
    found = load(["tokenizer=hf", f"tokenizer.path={quoted(text)}"]).experiment
    assert found.tokenizer.path == text
