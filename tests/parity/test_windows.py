"""Windows of imported models: one that no row of the run reaches stays in the model, where longer texts meet it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lmlab.cli import app
from lmlab.config.load import load
from lmlab.errors import ConfigError
from lmlab.generate.decode import generate
from lmlab.opened import experiment_of
from lmlab.runs.rundir import RunDir
from tests.composed import close
from tests.parity.folders import MOST, ROWS, SIZES, logits, model_of, ours, rope, run_of, saved

transformers = pytest.importorskip("transformers", reason="transformers is in the `hf` extra")
MISTRAL = SIZES | rope() | dict(num_key_value_heads=2)


@pytest.mark.parametrize("window", [1, 2, MOST, 100])
def test_a_window_is_theirs_on_rows_of_any_length(window, tmp_path):
    wide, narrow = model_of("MistralForCausalLM", MISTRAL | dict(sliding_window=window))
    folder = saved(tmp_path / "hf", narrow)
    for words in ([], [f"model.seq_len={MOST}"], ["model.seq_len=2"]):
        run = run_of(folder, tmp_path / "runs", *words)
        exp = experiment_of(run)
        assert exp.arch.attn.window == window
        assert exp.model.seq_len == (2 if words == ["model.seq_len=2"] else MOST)
        tokens = torch.randint(ROWS, (1, 130), generator=torch.Generator().manual_seed(1))
        close(logits(ours(run), tokens), logits(wide, tokens), 1e-9)


def test_generation_goes_past_the_window_as_theirs_does(tmp_path):
    _, narrow = model_of("MistralForCausalLM", MISTRAL | dict(sliding_window=20))
    net = ours(run_of(saved(tmp_path / "hf", narrow), tmp_path / "runs", "model.seq_len=16"), torch.float32)
    prompt = [7, 8, 9, 200]
    how = dict(max_new_tokens=50, min_new_tokens=50, do_sample=False, eos_token_id=None, pad_token_id=0)
    out = narrow.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, 4, dtype=torch.long), **how)
    assert generate(net, [prompt], max_new=50).tokens[0] == out[0, 4:].tolist()


def test_what_is_done_with_it_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    saved(Path("theirs"), model_of("MistralForCausalLM", MISTRAL | dict(sliding_window=100))[1])
    Path("data.txt").write_text("Fellow citizens, the union is strong.\n" * 200)

    def said(line: str) -> str:
        assert app.run(line.split()) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    told = json.loads(said("import theirs data=text data.files=[data.txt] model.seq_len=32 --json"))
    assert "attn.window 100 is the folder's: it acts on longer texts than the rows of 32 tokens" in told["notes"]
    run = RunDir(told["run"])
    assert json.loads(said(f"eval {run.name} train.precision=fp32 compile=false --json"))["bits_per_byte"] > 0
    assert json.loads(said(f"generate {run.name} --prompt Fellow --max-new 9 --temperature 0 --json"))["tokens"] > 0
    said(f"export {run.name} --to again")
    assert json.loads(Path("again/config.json").read_text())["sliding_window"] == 100


def test_other_errors_bring_none_of_the_window(tmp_path):
    folder = saved(tmp_path / "hf", model_of("MistralForCausalLM", MISTRAL | dict(sliding_window=1))[1])
    with pytest.raises(ConfigError, match=r"^error: `model\.seq_len` is 0, which is not a whole number"):
        run_of(folder, tmp_path / "runs", "model.seq_len=0")


def test_a_window_that_is_typed_still_has_to_leave_something_out():
    with pytest.raises(ConfigError, match=r"`attn\.window` is 256, and `model\.seq_len` is 256"):
        load(["attn.window=256"])


def test_rows_that_a_table_of_positions_does_not_reach(tmp_path):
    folder = saved(
        tmp_path / "hf", model_of("GPT2LMHead", dict(n_positions=8, vocab_size=ROWS, n_embd=64, n_layer=1, n_head=4))[1]
    )
    assert experiment_of(run_of(folder, tmp_path / "runs")).model.seq_len == 8
    with pytest.raises(
        ConfigError, match=r"`model\.seq_len` is 9, and the folder's table of positions has 8"
    ) as caught:
        run_of(folder, tmp_path / "runs", "model.seq_len=9")
    assert caught.value.hint == "use model.seq_len=8 or less"
