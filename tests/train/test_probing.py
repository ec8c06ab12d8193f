"""Probing while training: when, and that the training is the same to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lmlab.runs import metrics
from lmlab.runs.probe_names import parse
from lmlab.train.device import bf16_is_native
from tests.cli.conftest import run_here

SPEED = ("elapsed_s", "train/tokens_per_s")


def trained(small: list[str], folder: Path, *words: str) -> Any:
    words = (f"paths.runs={folder}", *words)
    typed = {word.partition("=")[0] for word in words}
    return run_here([*(word for word in small if word.partition("=")[0] not in typed), *words])


def rows_of(result: Any) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in metrics.read(result.path / "metrics.jsonl")}


@pytest.mark.parametrize(
    "words",
    [
        ["model.dropout=0.2", "attn.dropout=0.1", "train.micro_batch=3"],
        ["norm=batchnorm", "model.dropout=0.1", "model.tie_embeddings=false", "train.precision=bf16"],
    ],
    ids=["dropout", "batchnorm-bf16"],
)
def test_training_is_the_same_to_the_last_bit(words: list[str], small: list[str], tmp_path: Path) -> None:
    if "train.precision=bf16" in words and not bf16_is_native(torch.device("cpu")):
        pytest.skip("this CPU has no native bf16")
    plain = trained(small, tmp_path / "off", *words)
    looked = trained(small, tmp_path / "on", *words, "train.probe_every_steps=7")
    assert looked.path.name == plain.path.name  # outside a run's identity
    assert looked.figures["content_hash"] == plain.figures["content_hash"]
    with_probes, without = rows_of(looked), rows_of(plain)
    probed = {step for step, row in with_probes.items() if any(map(parse, row))}
    assert probed == {7, 14, 20}  # every 7 and the last
    assert not [key for row in without.values() for key in row if parse(key)]
    for step, row in without.items():
        assert {k: v for k, v in with_probes[step].items() if not parse(k) and k not in SPEED} == {
            k: v for k, v in row.items() if k not in SPEED
        }
    assert with_probes.keys() == without.keys() | probed


def test_layers_and_ends_together_have_the_gradient_that_is_logged(small: list[str], tmp_path: Path) -> None:
    """Without a norm at the end the layers, the embedding and the head hold every parameter."""
    words = ["block=postnorm", "model.tie_embeddings=false", "train.probe_every_steps=1", "train.log_every_steps=1"]
    for row in rows_of(trained(small, tmp_path, *words, "train.max_steps=3")).values():
        squares = sum(value**2 for key, value in row.items() if key.endswith("/grad_norm") and parse(key))
        assert squares**0.5 == pytest.approx(row["train/grad_norm"], rel=1e-5)


def test_a_step_that_diverges_is_probed_with_null_where_there_is_no_number(small: list[str], tmp_path: Path) -> None:
    words = ["optim.lr=1e30", "optim.clip=null", "train.probe_every_steps=1", "train.log_every_steps=1"]
    result = trained(small, tmp_path, *words)
    assert result.state == "diverged"
    last = list(rows_of(result).values())[-1]
    assert any(map(parse, last))
    assert None in [value for key, value in last.items() if parse(key)]
