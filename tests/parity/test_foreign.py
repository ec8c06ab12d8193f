"""Folders that are damaged, of another kind, or say what our parts can't: refused in two lines, and nothing is left
behind, nothing of theirs run."""

from __future__ import annotations

import contextlib
import itertools
import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmlab.cli import app
from lmlab.config.meaning import FREE, PARTS
from lmlab.errors import ConfigError, Errors, LmlabError
from lmlab.interop.importing import composed, describe, import_folder
from lmlab.interop.keys import Keys
from lmlab.interop.source import Source
from tests.composed import close
from tests.interop.made import tokenizer_folder
from tests.parity.folders import CASES, LLAMA3, edited, logits, model_of, ours, run_of, saved

transformers = pytest.importorskip("transformers", reason="transformers is in the `hf` extra")
WHOLE = "model.safetensors"
WORD = re.compile(r"([a-z_]+(?:\.\w+)?)=[^\s;:]+")
ORIGINAL = {"original_max_position_embeddings": 16}
MIXTRAL_MORE = "model.layers.0.block_sparse_moe.experts.5.w1.weight"
QWEN_UP = "model.layers.2.mlp.experts.5.up_proj.weight"
SOUND = ("llama", "gpt2", "deepseek", "deepseek with experts", "neox", "mixtral", "qwen3_moe", "olmoe")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One sound folder of each kind that is damaged here."""
    root = tmp_path_factory.mktemp("sound")
    nets = {name: model_of(*CASES[name])[1] for name in SOUND}
    found = {name: saved(root / name, net) for name, net in nets.items()}
    found["shards"] = saved(root / "shards", nets["llama"], max_shard_size="100KB")
    return found


def retensored(folder: Path, change: Any) -> None:
    tensors = load_file(folder / WHOLE)
    change(tensors)
    save_file(tensors, folder / WHOLE, {"format": "pt"})


def raw_edit(folder: Path, key: str, value: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))


def cut(file: Path, share: float) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])


class Evil:
    """A pickle that leaves a trace when it is opened."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return (Path.touch, (self.trace,))


def pickled(folder: Path) -> None:
    (folder / WHOLE).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(folder / "it ran")))


def shard_elsewhere(folder: Path) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = "../gpt2/model.safetensors"
    file.write_text(json.dumps(index))


def last_shard(folder: Path) -> Path:
    return max(folder.glob("model-*.safetensors"))


def odd_shape(t: dict[str, torch.Tensor]) -> None:
    t["model.layers.1.mlp.up_proj.weight"] = torch.zeros(89, 64)


def integers(t: dict[str, torch.Tensor]) -> None:
    t["model.norm.weight"] = torch.ones(64, dtype=torch.int8)


def stacked_experts(t: dict[str, torch.Tensor]) -> None:
    """Layer 0 as transformers has it in memory."""
    names = sorted(name for name in t if name.startswith("model.layers.0.mlp.experts."))
    parts = {kind: torch.stack([t[n] for n in names if f".{kind}_proj" in n]) for kind in ("gate", "up", "down")}
    for name in names:
        del t[name]
    t["model.layers.0.mlp.experts.gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), 1)
    t["model.layers.0.mlp.experts.down_proj"] = parts["down"]


def filled(value: float) -> Any:
    """One element of a weight."""
    return lambda f: retensored(f, lambda t: t["model.layers.1.mlp.down_proj.weight"].view(-1)[7:8].fill_(value))


def retyped(dtype: torch.dtype) -> Any:
    name = "model.layers.1.mlp.down_proj.weight"
    return lambda f: retensored(f, lambda t: t.update({name: t[name].to(dtype)}))


def two_heads(t: dict[str, torch.Tensor]) -> None:
    t["lm_head.weight" if "embed_out.weight" in t else "embed_out.weight"] = torch.zeros(272, 64)


def in_two_shards(folder: Path) -> None:
    """The first tensor of the first shard, with other numbers, in the last one as well."""
    first, last = min(folder.glob("model-*.safetensors")), last_shard(folder)
    name, tensor = min(load_file(first).items())
    save_file(load_file(last) | {name: tensor + 1}, last, {"format": "pt"})


def of_no_shard(folder: Path) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.layers.0.mlp.extra.weight"] = last_shard(folder).name
    file.write_text(json.dumps(index))


def scaled(kind: str, **more: Any) -> Any:
    return lambda f: edited(f, rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 4.0} | more)


DAMAGED: dict[str, tuple[str, Any, str, str]] = {
    "a shard is missing": ("shards", lambda f: last_shard(f).unlink(), "lacks model-", "bring the file back"),
    "a shard is truncated": ("shards", lambda f: cut(last_shard(f), 0.7), "is damaged", "bring the file back"),
    "a shard lies elsewhere": ("shards", shard_elsewhere, "names ../gpt2/model.safetensors, which is no file", "bring"),
    "safetensors is truncated": ("llama", lambda f: cut(f / WHOLE, 0.5), "is damaged", "bring the file back"),
    "safetensors is cut in its header": ("llama", lambda f: cut(f / WHOLE, 0.001), "is damaged", "bring the file back"),
    "a wrong shape": (
        "llama",
        lambda f: retensored(f, odd_shape),
        "`model.layers.1.mlp.up_proj.weight` is [89, 64], and config.json makes it [88, 64]",
        "config.json belongs to another model",
    ),
    "another width": (
        "gpt2",
        lambda f: edited(f, vocab_size=300),
        "`transformer.wte.weight` is [272, 64], and config.json makes it [300, 64]",
        "config.json belongs to another model",
    ),
    "a missing tensor": (
        "llama",
        lambda f: retensored(f, lambda t: t.pop("model.layers.2.self_attn.k_proj.weight")),
        "lacks the tensor `model.layers.2.self_attn.k_proj.weight`",
        "damaged",
    ),
    "an unexpected tensor": (
        "llama",
        lambda f: retensored(f, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})),
        "has the tensor `model.layers.0.self_attn.q_proj.bias`, which config.json does not speak of",
        "damaged",
    ),
    "quantised weights": ("llama", lambda f: retensored(f, integers), "is int8: quantised weights", "was quantised"),
    "an untied head said to be tied": (
        "llama",
        lambda f: edited(f, tie_word_embeddings=True),
        "`lm_head.weight` differs from `model.embed_tokens.weight`",
        "tie_word_embeddings to false",
    ),
    "a weight that is no number": (
        "llama",
        filled(float("nan")),
        "`model.layers.1.mlp.down_proj.weight` in ",
        "bring the file back",
    ),
    "an infinite weight": ("llama", filled(float("inf")), "that are NaN or infinite", "bring the file back"),
    "a weight that float32 can't hold": (
        "llama",
        lambda f: (retyped(torch.float64)(f), filled(1e300)(f)),
        "that are NaN or infinite",
        "bring the file back",
    ),
    "float8 without its scales": (
        "llama",
        retyped(torch.float8_e4m3fn),
        "is float8_e4m3fn: quantised",
        "was quantised",
    ),
    "a head by two names": ("neox", lambda f: retensored(f, two_heads), "which are one tensor of GPTNeoX", "take the"),
    "a tensor in two shards": ("shards", in_two_shards, "` is in model-00001", "bring the file back"),
    "a tensor of the index alone": (
        "shards",
        of_no_shard,
        "says that `model.layers.0.mlp.extra.weight` is in model-",
        "bring the file back",
    ),
    "not causal": ("llama", lambda f: edited(f, is_causal=False), "`is_causal` of config.json is false", "lmlab's"),
    "causal by nothing": (
        "llama",
        lambda f: raw_edit(f, "is_causal", None),
        "`is_causal` of config.json is null",
        "lmlab's",
    ),
    "llama3 by another length beside": (
        "llama",
        lambda f: edited(
            scaled("llama3", **LLAMA3 | {"original_max_position_embeddings": 20})(f),
            original_max_position_embeddings=16,
        ),
        "`original_max_position_embeddings` of config.json is 16",
        "lmlab's parts",
    ),
    "yarn by a length beside": (
        "llama",
        lambda f: edited(scaled("yarn")(f), original_max_position_embeddings=16),
        "`original_max_position_embeddings` of config.json is 16",
        "lmlab's parts",
    ),
    "pickle alone": ("llama", pickled, "pytorch_model.bin only: such files can run code", "save_pretrained"),
    "no weights": ("llama", lambda f: (f / WHOLE).unlink(), f"has no {WHOLE}", "save_pretrained"),
    "another tokenizer": (
        "llama",
        lambda f: tokenizer_folder(f, more=40),
        "ids, and the embedding 272 rows: another one",
        "tokenizer.path=FOLDER",
    ),
    "no tokenizer": ("llama", lambda f: (f / "tokenizer.json").unlink(), "no tokenizer.json", "tokenizer.path=FOLDER"),
    "an unknown rotation": ("llama", scaled("spiral"), '`rope_type` of config.json is "spiral"', "lmlab's parts"),
    "longrope": ("llama", scaled("longrope"), '`rope_type` of config.json is "longrope"', "lmlab's parts"),
    "a rotation's unknown field": (
        "llama",
        scaled("linear", alpha=2.0),
        "`rope_parameters.alpha` of config.json is 2.0",
        "lmlab's parts",
    ),
    "yarn without truncation": (
        "llama",
        scaled("yarn", original_max_position_embeddings=16, truncate=False),
        "`rope_parameters.truncate` of config.json is false",
        "lmlab's parts",
    ),
    "two bases": (
        "llama",
        lambda f: edited(f, rope_theta=7.0),
        "`rope_theta` of config.json is 7.0",
        "lmlab's parts",
    ),
    "yarn of one part of a latent score": (
        "deepseek",
        scaled("yarn", original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=0.5),
        "`rope_parameters.mscale` of config.json is 1.0",
        "lmlab's parts",
    ),
    "a share that is not turned": (
        "llama",
        lambda f: edited(f, partial_rotary_factor=0.5),
        "`partial_rotary_factor` of config.json is 0.5",
        "lmlab's parts",
    ),
    "an expert is missing": (
        "mixtral",
        lambda f: retensored(f, lambda t: t.pop("model.layers.1.block_sparse_moe.experts.3.w2.weight")),
        "lacks the tensor `model.layers.1.block_sparse_moe.experts.3.w2.weight`",
        "damaged",
    ),
    "an expert more": (
        "mixtral",
        lambda f: retensored(f, lambda t: t.update({MIXTRAL_MORE: torch.zeros(88, 64)})),
        "has the tensor `model.layers.0.block_sparse_moe.experts.5.w1.weight`, which config.json does not speak of",
        "damaged",
    ),
    "an expert of another shape": (
        "qwen3_moe",
        lambda f: retensored(f, lambda t: t.update({QWEN_UP: torch.zeros(21, 64)})),
        "`model.layers.2.mlp.experts.5.up_proj.weight` is [21, 64], and config.json makes it [20, 64]",
        "config.json belongs to another model",
    ),
    "no bias of the choice": (
        "deepseek with experts",
        lambda f: retensored(f, lambda t: t.pop("model.layers.2.mlp.gate.e_score_correction_bias")),
        "lacks the tensor `model.layers.2.mlp.gate.e_score_correction_bias`",
        "damaged",
    ),
    "one expert of one": ("mixtral", lambda f: edited(f, num_experts_per_tok=1), "is 1, which can't be", "lmlab's"),
    "more than there are": ("olmoe", lambda f: edited(f, num_experts_per_tok=7), "(only up to 6, the", "lmlab's"),
    "a coefficient below 0": (
        "mixtral",
        lambda f: edited(f, router_aux_loss_coef=-0.1),
        "`router_aux_loss_coef` of config.json is -0.1",
        "lmlab's parts",
    ),
    "clipped projections": ("olmoe", lambda f: edited(f, clip_qkv=8.0), "`clip_qkv` of config.json is 8.0", "lmlab's"),
    "heads that do not fill the width": (
        "olmoe",
        lambda f: edited(f, head_dim=24),
        "`head_dim` of config.json is 24",
        "lmlab's parts",
    ),
    "layers without experts here and there": (
        "qwen3_moe",
        lambda f: edited(f, mlp_only_layers=[1]),
        "`mlp_only_layers` of config.json is [1]",
        "lmlab's parts",
    ),
    "another score of experts": (
        "deepseek with experts",
        lambda f: edited(f, scoring_func="softmax"),
        '`scoring_func` of config.json is "softmax"',
        "lmlab's parts",
    ),
    "another choice of experts": (
        "deepseek with experts",
        lambda f: edited(f, topk_method="greedy"),
        '`topk_method` of config.json is "greedy"',
        "lmlab's parts",
    ),
    "every other layer": (
        "deepseek with experts",
        lambda f: edited(f, moe_layer_freq=2),
        "`moe_layer_freq` of config.json is 2",
        "lmlab's parts",
    ),
    "no shared expert": (
        "deepseek with experts",
        lambda f: edited(f, n_shared_experts=0),
        "`n_shared_experts` of config.json is 0",
        "lmlab's parts",
    ),
    "groups that differ": (
        "deepseek with experts",
        lambda f: edited(f, n_group=3),
        "`n_group` of config.json is 3",
        "lmlab's parts",
    ),
    "more groups than there are": (
        "deepseek with experts",
        lambda f: edited(f, topk_group=5),
        "`topk_group` of config.json is 5",
        "lmlab's parts",
    ),
    "another score": (
        "gpt2",
        lambda f: edited(f, scale_attn_by_inverse_layer_idx=True),
        "`scale_attn_by_inverse_layer_idx` of config.json is true",
        "lmlab's parts",
    ),
    "an unknown activation": (
        "gpt2",
        lambda f: edited(f, activation_function="quick_gelu"),
        '`activation_function` of config.json is "quick_gelu"',
        "lmlab's parts",
    ),
    "a key nobody knows": (
        "llama",
        lambda f: edited(f, residual_multiplier=0.22),
        "`residual_multiplier` of config.json is 0.22",
        "lmlab's parts",
    ),
    "quantised by config.json": (
        "llama",
        lambda f: edited(f, quantization_config={"bits": 4}),
        '`quantization_config` of config.json is {"bits": 4}',
        "lmlab's parts",
    ),
    "another head": (
        "llama",
        lambda f: edited(f, architectures=["LlamaForSequenceClassification"]),
        '`architectures` of config.json is "LlamaForSequenceClassification"',
        "lmlab's parts",
    ),
    "an unknown architecture": (
        "llama",
        lambda f: edited(f, model_type="mamba2"),
        "`model_type` of config.json is mamba2, which lmlab has no table for",
        "bloom, deepseek_v3, gemma, gpt2",
    ),
    "config.json is no JSON": ("llama", lambda f: cut(f / "config.json", 0.5), "config.json can't be read", "bring it"),
    "no config.json": ("llama", lambda f: (f / "config.json").unlink(), "has no config.json", "save_pretrained"),
    "an embedding without rows": (
        "llama",
        lambda f: raw_edit(f, "vocab_size", 0),
        "`vocab_size` of config.json is 0",
        "",
    ),
    "a size that is no number": (
        "llama",
        lambda f: edited(f, hidden_size="wide"),
        "config.json can't be read by transformers",
        "bring it back",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_it_is_refused(case, sound, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    kind, damage, message, hint = DAMAGED[case]
    folder = tmp_path / kind
    shutil.copytree(sound[kind], folder)
    damage(folder)
    assert app.run(["import", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 2, err
    first, second = err.splitlines()
    assert message in first.removeprefix("error: ")
    assert hint in second.removeprefix("hint: ")
    assert not (tmp_path / "runs").exists()
    assert not (folder / "it ran").exists()


def proposed(hint: str) -> list[str]:
    """Keys of the model that a hint names with a value, or with a default."""
    found = [key for key in WORD.findall(hint) if key.partition(".")[0] in PARTS and key not in FREE]
    return found + ["the default is"] * ("the default is" in hint)


RULES_BROKEN = {
    "a share of channels that are no pairs": (
        "neox",
        {
            "hidden_size": 80,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        },
        "the rotary width is 5 (`pos.fraction` 0.25 of the head size 20)",
        "`rope_parameters.partial_rotary_factor` 0.25",
    ),
    "llama3 with its ends exchanged": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                **LLAMA3,
                "high_freq_factor": 0.5,
            }
        },
        "`rope_scaling.high_freq_factor` is 0.5",
        "`rope_parameters.high_freq_factor` 0.5 and `rope_parameters.low_freq_factor` 1",
    ),
    "yarn without a pair as slow as beta_slow": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_slow": 20.0, **ORIGINAL}},
        "`rope_scaling.beta_slow` 20",
        "`rope_parameters.original_max_position_embeddings` 16 and `rope_parameters.beta_slow` 20",
    ),
    "eps 0": ("llama", {"rms_norm_eps": 0.0}, "`norm.eps` is 0", "`rms_norm_eps` 0"),
    "eps 0 of gpt2": ("gpt2", {"layer_norm_epsilon": 0.0}, "`norm.eps` is 0", "`layer_norm_epsilon` 0"),
    "a factor below 1": (
        "llama",
        {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 0.5}},
        "`rope_scaling.factor` is 0.5",
        "`rope_scaling.factor` 0.5",
    ),
}


@pytest.mark.parametrize("case", RULES_BROKEN)
def test_a_rule_that_the_folder_breaks_is_told_by_its_own_keys(case, sound, tmp_path):
    kind, changes, message, key = RULES_BROKEN[case]
    shutil.copy(sound[kind] / "config.json", tmp_path)
    edited(tmp_path, **changes)
    with pytest.raises(LmlabError) as caught:
        composed(describe(Source("there", tmp_path)), [])
    assert message in caught.value.message
    said = caught.value.hint
    assert (
        said == f"its config.json says {key}; lmlab can't be told otherwise, so this model can't be imported as it is"
    )


def test_what_is_typed_and_can_not_be_is_left_out(sound):
    with pytest.raises(LmlabError) as caught:
        composed(describe(Source("there", sound["neox"])), ["attn.head_dim=20"])
    assert caught.value.hint == "leave attn.head_dim out: the folder says what the model is"
    with pytest.raises(LmlabError) as caught:
        composed(describe(Source("there", sound["llama"])), ["train.batch_tokens=1000"])
    assert caught.value.hint == "use 960 or 1024, or another length of a row (model.seq_len)"


def test_experts_as_transformers_has_them_in_memory_are_no_file_of_its(sound, tmp_path):
    """It writes each by name, whatever it reads."""
    folder = tmp_path / "olmoe"
    shutil.copytree(sound["olmoe"], folder)
    retensored(folder, stacked_experts)
    with pytest.raises(Errors) as caught:
        run_of(folder, tmp_path / "runs")
    missing, odd = (error.message for error in caught.value.errors)
    assert "lacks 18 tensors `model.layers.0.mlp.experts.0.down_proj.weight`, " in missing
    assert "has 2 tensors `model.layers.0.mlp.experts.down_proj`, `model.layers.0.mlp.experts.gate_up_proj`" in odd


def test_jitter_that_is_not_ours_is_told(sound, tmp_path):
    folder = tmp_path / "mixtral"
    shutil.copytree(sound["mixtral"], folder)
    edited(folder, router_jitter_noise=0.1)
    made = import_folder(str(folder), [f"paths.runs={tmp_path / 'runs'}"], ["lmlab", "import"])
    assert any("router_jitter_noise 0.1 is left out" in note for note in made.notes)
    assert made.loaded.experiment.moe.jitter == 0


@pytest.mark.parametrize("kind", ["llama", "gpt2", *SOUND[3:4], *SOUND[5:]])
def test_no_value_of_any_key_ends_in_a_traceback(kind, sound, tmp_path):
    """Each key with what does not belong there: understood, harmless, or told in our words, never with a remedy that
    import would refuse next."""
    raw = json.loads((sound[kind] / "config.json").read_text())
    told: list[tuple[LmlabError, Any]] = []
    places = [(key, None) for key in raw] + [("rope_parameters", key) for key in raw.get("rope_parameters", {})]
    for (key, inner), value in itertools.product(places, ("x", -1, {}, 0.0)):
        changed = {key: value if inner is None else raw[key] | {inner: value}}
        (tmp_path / "config.json").write_text(json.dumps(raw | changed))
        try:
            composed(describe(Source("there", tmp_path)), [])
        except LmlabError as error:
            told += [(e, changed) for e in (error.errors if isinstance(error, Errors) else (error,))]
    assert told
    assert not [(str(e), changed) for e, changed in told if not e.hint or proposed(e.hint)]


@pytest.mark.parametrize("depth", [400, 900, 960, 980, 990, 1000, 5000, 200_000])
def test_config_json_that_nests_deep_is_told(depth, sound, tmp_path):
    text = (sound["llama"] / "config.json").read_text()
    (tmp_path / "config.json").write_text(f'{{"odd": {"[" * depth}{"]" * depth}, {text.strip().removeprefix("{")}')
    with pytest.raises(LmlabError):
        describe(Source("there", tmp_path))


def test_code_in_the_folder_is_not_run(sound, tmp_path):
    folder = tmp_path / "llama"
    shutil.copytree(sound["llama"], folder)
    (folder / "theirs.py").write_text(f"open({str(tmp_path / 'it ran')!r}, 'w')\nclass Config: pass\n")
    edited(folder, auto_map={"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"})
    assert run_of(folder, tmp_path / "runs").state() == "imported"
    assert not (tmp_path / "it ran").exists()


def test_buffers_of_old_versions_are_passed_over(sound, tmp_path):
    folder = tmp_path / "gpt2"
    shutil.copytree(sound["gpt2"], folder)
    mask = {f"transformer.h.{n}.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.uint8) for n in range(3)}
    retensored(folder, lambda t: t.update(mask | {"transformer.h.0.attn.masked_bias": torch.tensor(-1e4)}))
    state, other = (ours(run_of(f, tmp_path / "runs")).state_dict() for f in (folder, sound["gpt2"]))
    assert all(torch.equal(state[name], other[name]) for name in state)


def test_of_a_whole_file_and_an_index_the_file_is_the_model(sound, tmp_path):
    """transformers reads it first; the shards are what an older save left."""
    folder = tmp_path / "both"
    shutil.copytree(sound["shards"], folder)
    retensors = {name: tensor + 1 for name, tensor in load_file(sound["llama"] / WHOLE).items()}
    save_file(retensors, folder / WHOLE, {"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = torch.arange(20)[None]
    close(logits(ours(run_of(folder, tmp_path / "runs"), torch.float32), tokens), logits(theirs, tokens), 1e-4)


def test_the_same_length_beside_the_rotation_says_nothing_else(sound, tmp_path):
    folder = tmp_path / "llama"
    shutil.copytree(sound["llama"], folder)
    edited(scaled("llama3", factor=8.0, **LLAMA3)(folder), original_max_position_embeddings=16)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = torch.arange(48)[None]
    close(logits(ours(run_of(folder, tmp_path / "runs"), torch.float32), tokens), logits(theirs, tokens), 1e-4)


def test_a_false_of_the_class_is_no_news_and_another_is():
    """False is taken as nothing only where the class means nothing by leaving it out."""
    for value, default, refused in ((False, True, True), (False, None, False), (None, 3, True), (False, False, False)):
        config = type("C", (), {"to_dict": lambda self, d=default: {"odd": d}})()
        keys = Keys(config, {"odd": value})
        with pytest.raises(ConfigError) if refused else contextlib.nullcontext():
            keys.refuse_unknown()
    for value in (True, False):
        keys = Keys(config, {"is_causal": value})
        with contextlib.nullcontext() if value else pytest.raises(ConfigError, match="is_causal"):
            keys.refuse_unknown()


def test_both_ways_of_storing_a_tied_head_and_bare_names(sound, tmp_path):
    """The hub's own gpt2 has no prefix, and some files hold the head once more."""
    folders = [tmp_path / "bare", tmp_path / "twice"]
    for folder in folders:
        shutil.copytree(sound["gpt2"], folder)
    bare = {k.removeprefix("transformer."): v for k, v in load_file(folders[0] / WHOLE).items()}
    save_file(bare, folders[0] / WHOLE)
    edited(folders[0], architectures=["GPT2Model"])
    retensored(folders[1], lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"].clone()}))
    states = [ours(run_of(f, tmp_path / "runs")).state_dict() for f in (sound["gpt2"], *folders)]
    assert all(torch.equal(s[name], states[0][name]) for s in states[1:] for name in states[0])


def test_another_tokenizers_folder_can_be_named(sound, tmp_path):
    folder = tmp_path / "llama"
    shutil.copytree(sound["llama"], folder)
    (folder / "tokenizer.json").unlink()
    run = run_of(folder, tmp_path / "runs", f"tokenizer.path={sound['gpt2']}")
    assert run.config()["tokenizer"]["path"] == str(sound["gpt2"])
