"""What of a preset's part is lost when another part is typed in its place."""

from __future__ import annotations

import re

import pytest

from lmlab.config.catalogue import entries
from lmlab.config.load import load

LINES = {
    "preset=bloom model=nano": ["model.embed_norm=true model.logit_scale=1"],
    "preset=gemma model=nano": ["model.embed_scale=sqrt_d_model"],
    "preset=bloom model=nano model.embed_norm=true model.logit_scale=1": [],
    "preset=bloom model=nano model.logit_scale=2": ["model.embed_norm=true"],
    "preset=bloom attn=gqa": ["attn.bias_qkv=true attn.bias_o=true"],
    "preset=bloom model=bloom": [],
    "preset=bloom model.n_layers=2": [],
    "preset=bloom data=pycode tokenizer=byte": [],
    "model=nano": [],
    "preset=null model=nano": [],
}


@pytest.mark.parametrize("line", LINES)
def test_what_is_not_taken_is_said_with_the_keys_that_add_it(line):
    found = load(line.split()).notes
    assert len(found) == len(LINES[line])
    for said, keys in zip(found, LINES[line], strict=True):
        assert all(key in said for key in keys.split()), said
        assert "n_layers" not in said
        assert f"of preset={line.split()[0].partition('=')[2]}," in said


@pytest.mark.parametrize("preset", [label for label in entries("preset") if label != "null"])
def test_what_is_said_can_be_typed_and_ends_it(preset):
    line = [f"preset={preset}", "model=nano"]
    for note in load(line).notes:
        assert not load([*line, *re.findall(r"\S+=\S+", note.partition("to add it: ")[2])]).notes
