"""What bounds decoding: floors against counts by hand, and the command on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmlab.bench.contender import Setting
from lmlab.bench.decode import NEW, bound_by, floors_s, prompt_len
from lmlab.bench.limits import Limits
from lmlab.cli.app import run

SIZES = ["model=nano", "model.n_layers=2", "model.d_model=64", "model.seq_len=160", "train.batch_tokens=160"]
WORDS = [*SIZES, "train.precision=fp32", "device=cpu"]
LIMITS = Limits("here", 1, "float32", flops=1e9, copy_bytes=1e6)


def test_floors_are_bytes_and_flops_over_the_rates() -> None:
    setting = Setting.of([*WORDS, "attn=gqa", "attn.n_kv_heads=2", "ffn.d_ff=128"])
    D, L, V, H, K, C, F = 64, 2, setting.vocab_size, 4, 2, 16, 128
    n = V * D + L * (2 * D * H * C + 2 * D * K * C + 3 * D * F + 2 * D) + D
    columns, rows = prompt_len(setting) + NEW // 2, 3
    assert columns == 80 + 32
    found = floors_s(setting, rows, LIMITS)
    assert found["bandwidth"] == pytest.approx(4 * (n + rows * L * 2 * K * C * columns) / 1e6)
    assert found["compute"] == pytest.approx(rows * (2 * n + L * 4 * H * C * (columns - 1)) / 1e9, rel=0.01)


@pytest.mark.parametrize(("step_s", "expected"), [(0.31, "launch"), (0.29, "bandwidth"), (0.05, "bandwidth")])
def test_a_step_far_above_its_floors_is_launch_bound(step_s: float, expected: str) -> None:
    assert bound_by(step_s, {"bandwidth": 0.1, "compute": 0.02}) == expected
    assert bound_by(step_s, {"bandwidth": 0.02, "compute": 0.1}) == expected.replace("bandwidth", "compute")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "decode", *WORDS, "attn=mla", "--rounds", "3", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "decode.json").read_text())
    assert [(one["rows"], one["how"]) for one in found["rows"]] == [
        (1, "plain"), (1, "fused"), (8, "plain"), (8, "fused"),
    ]  # fmt: skip
    assert all(one["path"] == "eager" and one["cache_bytes"] > 0 for one in found["rows"])
    assert found["rows"][0]["over_plain"] == {"median": 1, "low": 1, "high": 1}
    assert "its floor" in capsys.readouterr().out
