from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lmlab
from lmlab.errors import RunError
from lmlab.runs.rundir import RunDir


def make(root: Path, name: str, **result: float) -> RunDir:
    run = RunDir.create(root / name, {"version": 1, "norm": {"name": "rmsnorm", "eps": 1e-06}, "seed": {"all": 0}})
    run.update_manifest(state="finished" if result else "running", result=result)
    return run


def test_results_has_one_row_a_run(tmp_path: Path) -> None:
    make(tmp_path, "a-00000001", **{"val/loss": 2.5, "step": 10})
    make(tmp_path, "b-00000002")
    make(tmp_path, "b-00000002.old-1", **{"val/loss": 9.0})
    table = lmlab.results(tmp_path)  # type: ignore[operator]
    assert list(table["run"]) == ["a-00000001", "b-00000002"]
    assert list(table["state"]) == ["finished", "interrupted"]
    assert list(table["norm"]) == ["rmsnorm", "rmsnorm"]
    assert list(table["norm.eps"]) == [1e-06, 1e-06]
    assert table["val/loss"][0] == 2.5
    assert table["val/loss"].isna()[1]
    assert len(lmlab.results(tmp_path / "b-00000002.old-1")) == 1  # type: ignore[operator]


def test_results_imports_no_torch(tmp_path: Path) -> None:
    make(tmp_path, "a-00000001", step=1)
    code = "import sys, lmlab; lmlab.results(sys.argv[1]); print('torch' in sys.modules, 'hydra' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_results_of_no_folder(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no folder"):
        lmlab.results(tmp_path / "nowhere")  # type: ignore[operator]


def test_load_gives_the_saved_model_tokenizer_and_config(tmp_path: Path) -> None:
    import torch

    from lmlab.config.identity import to_dict
    from lmlab.config.load import load
    from lmlab.data.spec import Byte
    from lmlab.data.tokenizer import byte_tokenizer
    from lmlab.kernels.resolve import resolve
    from lmlab.model.transformer import build
    from lmlab.runs import checkpoint

    words = [
        "model=nano",
        "model.n_layers=2",
        "model.d_model=32",
        "model.n_heads=2",
        "model.seq_len=16",
        "tokenizer=byte",
    ]
    exp = load(words).experiment
    tokenizer = byte_tokenizer(Byte())
    cpu = torch.device("cpu")
    run = RunDir.create(tmp_path / "mine-0123abcd", to_dict(exp))
    run.save_tokenizer(tokenizer)
    model = build(exp.arch, tokenizer.vocab_size, resolve(exp.kernels, cpu, torch.float32), seed=0, device=cpu)
    for step in (1, 2):
        checkpoint.save(run.path, step, model.state_dict(), {}, config=to_dict(exp), keep_last=2)
        torch.nn.init.normal_(model.get_parameter("norm.weight"))
    loaded, words_of, config = lmlab.load(run.path)  # type: ignore[operator]
    tokens_BT = torch.tensor([words_of.encode("some text")])
    positions_BT = torch.arange(tokens_BT.shape[1])[None]
    state = checkpoint.load(checkpoint.checkpoint_path(run.path, 2)).model
    model.load_state_dict(state)
    with torch.no_grad():
        expected, found = (m.eval()(tokens_BT, positions_BT).logits_BTV for m in (model, loaded))
    assert torch.equal(expected, found)
    assert config == to_dict(exp)
    assert words_of.decode(words_of.encode("ü")) == "ü"
    first, _, _ = lmlab.load(run.path / "checkpoints" / "step-00000001")  # type: ignore[operator]
    assert checkpoint.content_hash(first.state_dict()) != checkpoint.content_hash(loaded.state_dict())
    again, _, _ = lmlab.load("0123", root=tmp_path)  # type: ignore[operator]
    assert checkpoint.content_hash(again.state_dict()) == checkpoint.content_hash(loaded.state_dict())
