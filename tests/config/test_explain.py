"""Wrong overrides: every one is told, with the full key, the value, what is allowed, and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmlab.config.load import load
from lmlab.errors import Errors, LmlabError

# command line -> (message, hint)
WRONG = {
    "norm=rmsnrm": (
        "`norm=rmsnrm` is not known; choices: batchnorm, dyt, gemma, layernorm, mixtral, nanogpt, none, rmsnorm",
        "did you mean norm=rmsnorm?",
    ),
    "norm=": ("`norm` is empty, which is not the name of an option", "write norm=NAME"),
    "norm=null": ("`norm` is null, which is not the name of an option", "write norm=NAME"),
    "norm={name:rmsnorm}": ("`norm` is {name:rmsnorm}, which is not", "write norm=NAME"),
    "pos=gqa": ("`pos=gqa` is not known", "did you mean attn=gqa?"),
    "data=tinystory": ("`data=tinystory` is not known; choices:", "did you mean data=tinystories?"),
    "norm=a,b": ("`norm` is given several values: a,b", "lmlab sweep norm=a,b"),
    "optim.lr=1e-3,1e-4": ("`optim.lr` is given several values", "lmlab sweep"),
    "seed=1,2": ("`seed.all` is given several values", "lmlab sweep seed=1,2"),
    "norm.name=layernorm": ("`norm.name` can't be set", "write norm=layernorm"),
    "n_layers=3": ("`n_layers` is not known", "did you mean model.n_layers=3?"),
    "heads=3": ("`heads` is not known", "did you mean model.n_heads=3?"),
    "dropout=0.1": ("`dropout` is not known", "did you mean attn.dropout=0.1 or model.dropout=0.1?"),
    "nrom=rmsnorm": ("`nrom` is not known", "did you mean norm=rmsnorm?"),
    "modell.n_layers=3": ("`modell.n_layers` is not known", "did you mean model.n_layers=3?"),
    "zzz=1": ("`zzz` is not known", "lmlab options"),
    "attn.n_kv_heads=2": ("`attn.n_kv_heads` is not a field of attn=mha", "use attn=gqa"),
    "norm.bias=false": ("`norm.bias` is not a field of norm=rmsnorm", "use norm=layernorm"),
    "attn.nope_layers=[1]": (
        "`attn.nope_layers` is not a field of attn=mha",
        "did you mean attn.nope_every_n_layers, which takes a whole number ≥ 1 or null?",
    ),
    "window=[3]": ("`window` is not known", "did you mean attn.window, which takes a whole number ≥ 1 or null?"),
    "attn.windw=3": ("`attn.windw` is not a field of attn=mha", "did you mean attn.window=3?"),
    "attn.seq_len=3": ("`attn.seq_len` is not a field of attn=mha", "did you mean model.seq_len=3?"),
    "block.eps=3": ("`block.eps` is not a field of block=prenorm", "norm.eps=3"),
    "norm.eps.x=3": ("`norm.eps.x` is not a field", "norm.eps"),
    "train=5": ("`train` is a group of settings, not a value", "train.batch_tokens"),
    "train.max_step=3": ("`train.max_step` is not a setting of train", "did you mean train.max_steps?"),
    "wandb.zzz=3": ("`wandb.zzz` is not a setting of wandb", "mode, project"),
    "model.n_layers=abc": ("`model.n_layers` is abc, which is not a whole number ≥ 1", "blocks"),
    "model.n_layers=2.5": ("`model.n_layers` is 2.5, which is not a whole number ≥ 1", "blocks"),
    "model.n_layers=0": ("`model.n_layers` is 0, which is not a whole number ≥ 1", "the default is 6"),
    "model.n_layers=true": ("`model.n_layers` is true, which is not a whole number", ""),
    "model.n_layers=null": ("`model.n_layers` is null; it takes a whole number ≥ 1", ""),
    "model.n_layers=": ("`model.n_layers` is empty, which is not", ""),
    "model.n_layers=[1]": ("`model.n_layers` is [1], which is not", ""),
    "optim.lr=nan": ("`optim.lr` is nan, which is not a number > 0", ""),
    "optim.lr=inf": ("`optim.lr` is inf, which is not a number > 0", ""),
    "optim.lr=-1": ("`optim.lr` is -1, which is not a number > 0", ""),
    "lr=0": ("`optim.lr` is 0, which is not a number > 0", ""),
    "attn.dropout=1": ("`attn.dropout` is 1, which is not a number ≥ 0 and < 1", ""),
    "optim.betas=0.9": ("`optim.betas` is 0.9, which is not a list", "write optim.betas=[0.9,0.95]"),
    "ffn.mult=1e308": ("`ffn.mult` is 1e+308, which is not a number > 0 and ≤ 1000 or null", "hidden width"),
    "attn.head_dim=1e9": ("`attn.head_dim` is 1000000000, which is not a whole number ≥ 1 and ≤ 65536 or null", ""),
    "train.max_minutes=1e308": ("`train.max_minutes` is 1e+308, which is not a number > 0 and ≤ 1e+09 or null", ""),
    "optim.betas=[0.9,1]": ("`optim.betas` is [0.9,1], which is not a list like [a,b], each a number ≥ 0 and < 1", ""),
    "wandb.tags=foo": ("`wandb.tags` is foo, which is not a list", "write wandb.tags=[foo]"),
    "plugins=my.py": ("`plugins` is my.py, which is not a list", "write plugins=[my.py]"),
    "norm=layernorm norm.bias=2": ("`norm.bias` is 2, which is not true or false", ""),
    "norm=layernorm norm.bias=yes": ("`norm.bias` is yes, which is not true or false", ""),
    "compile=fast": ("`compile` is fast, which is not auto, true or false", ""),
    "train.precision=fp8": ("`train.precision` is fp8, which is not auto, fp32, bf16 or fp16", ""),
    "pos.pairing=halv": ("`pos.pairing` is halv, which is not half or interleaved", "did you mean pos.pairing=half?"),
    "train.micro_batch=few": ("`train.micro_batch` is few, which is not auto or a whole number ≥ 1", ""),
    "name=": ("`name` is empty", ""),
    "name=a=b": ("`name=a=b` can't be read", """'name="a=b"'"""),
    "data=text data.files=[a=b.txt]": ("`data.files=[a=b.txt]` can't be read", """'data.files=["a=b.txt"]'"""),
    "name=${nowhere}": ("can't be composed", ""),
    "+foo=1": ("`+foo=1`: keys are set, not added or removed with +", "no key is called foo"),
    "+n_layers=3": ("`+n_layers=3`: keys are set", "write model.n_layers=3"),
    "+norm=dyt": ("`+norm=dyt`: keys are set", "write norm=dyt"),
    "+lr=1": ("`+lr=1`: keys are set", "write lr=1"),
    "++norm.eps=1": ("keys are set, not added or removed with +", "write norm.eps=1"),
    "~norm": ("keys are set, not added or removed with ~", ""),
    "norm@other=rmsnorm": ("`norm@other`: a part can't be put elsewhere", "write norm=rmsnorm"),
    "hydra/launcher=joblib": ("`hydra/launcher` is not a key of an experiment", "`lmlab sweep hydra/launcher=joblib`"),
    "experiment=first": ("`experiment` is not a key of an experiment", "`lmlab sweep experiment=first`"),
    "init.source=abc": ("`init.source` is given as abc; lmlab fills it in", "leave it out"),
    "hydra.run.dir=x": ("`hydra.run.dir` is not a key of an experiment", "paths.runs"),
    "norm=rmsnorm norm=layernorm": ("`norm` is given twice: norm=rmsnorm and norm=layernorm", "leave one out"),
    "lr=1 optim.lr=2": ("`optim.lr` is given twice: lr=1 and optim.lr=2", "leave one out"),
    "seed=1 seed.all=2": ("`seed.all` is given twice", ""),
    "rmsnorm": ("`rmsnorm` is not key=value", "write norm=rmsnorm"),
    "llama": ("`llama` is not key=value", "preset=llama"),
    "norm": ("`norm` is not key=value", "write norm=NAME; NAME is one of batchnorm"),
    "n_layers": ("`n_layers` is not key=value", "write model.n_layers=VALUE"),
    "zzz": ("`zzz` is not key=value", "lmlab options"),
    "=3": ("is not key=value", "norm=rmsnorm"),
    "--norm=rmsnorm": ("`--norm=rmsnorm` is not a flag", "write norm=rmsnorm, without dashes"),
    "--n-layers=3": ("`--n-layers=3` is not a flag", "write model.n_layers=3, without dashes"),
    "--model.n_layers=3": ("is not a flag", "write model.n_layers=3, without dashes"),
    "--lr=3": ("is not a flag", "write lr=3, without dashes"),
    "attn.n_kv_heads=3 attn=gqa model.n_heads=8": (
        "`attn.n_kv_heads` is 3, which does not divide `model.n_heads` 8",
        "use one of 1, 2, 4, 8",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("line", "message", "hint"), [(k, *v) for k, v in WRONG.items()], ids=list(WRONG))
def test_what_is_wrong_is_told(line: str, message: str, hint: str) -> None:
    with pytest.raises(LmlabError) as caught:
        load(line.split(" "))
    error = caught.value
    assert not isinstance(error, Errors), f"one mistake, one error: {error}"
    assert message in error.message
    assert hint in error.hint
    assert "\n" not in error.message + error.hint
    assert error.exit_code == 2


def test_all_errors_at_once() -> None:
    line = "norm=bla model.n_layers=x foo=1 +bar=2 train.batch_tokens=1000 attn=gqa attn.n_kv_heads=3 model.n_heads=4"
    with pytest.raises(Errors) as caught:
        load(line.split())
    found = [e.message for e in caught.value.errors]
    assert len(found) == 6
    for part in ("`+bar=2`", "`norm=bla`", "`model.n_layers` is x", "`foo`", "`attn.n_kv_heads` is 3", "is 1000"):
        assert any(part in message for message in found), part


def test_fields_of_an_unknown_option_are_not_blamed() -> None:
    with pytest.raises(LmlabError) as caught:
        load(["attn=nothing", "attn.depth=3"])
    assert "`attn=nothing` is not known" in caught.value.message


def test_a_forgotten_plugin_is_pointed_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts.py").write_text("@option('attn', 'my_attn')\nclass A: pass\n")
    with pytest.raises(LmlabError) as caught:
        load(["attn=my_attn"])
    assert caught.value.hint == "parts.py is here: add plugins=[parts.py]"
