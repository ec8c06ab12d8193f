"""`lmlab export` against transformers: what it loads has our logits, speaks our ids, and comes back bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lmlab.cli.export import model_of
from lmlab.cli.progress import Screen
from lmlab.config.identity import to_dict
from lmlab.config.load import load
from lmlab.data.spec import BPE, Byte
from lmlab.data.tokenizer import Tokenizer, byte_tokenizer, train_bpe
from lmlab.errors import ConfigError
from lmlab.generate.decode import generate
from lmlab.interop.exporting import export
from lmlab.interop.families import choose
from lmlab.kernels.resolve import resolve
from lmlab.kernels.spec import Auto
from lmlab.model.transformer import build
from lmlab.runs import checkpoint
from lmlab.runs.find import Found
from lmlab.runs.rundir import RunDir
from tests.composed import close, rows
from tests.interop.made import TEXTS
from tests.parity.folders import CASES, ROWS, SCALED, SIZES, logits, ours, run_of, saved
from tests.parity.folders import model_of as net_of

transformers = pytest.importorskip("transformers", reason="transformers is in the `hf` extra")
SMALL = "model.n_layers=2 model.d_model=64 model.n_heads=4 model.seq_len=32"
TRAINED = {  # what is composed here, and the family that can say it
    "": "llama",
    "attn=gqa norm.eps=1e-5 attn.window=8 model.tie_embeddings=false": "mistral",
    "attn=gqa attn.bias_qkv=true ffn.d_ff=96": "qwen2",
    "attn=gqa attn.qk_norm=head attn.window=8 attn.pattern=SL attn.head_dim=24": "qwen3",
    "preset=gpt2": "gpt2",
    "preset=gpt2 ffn=gelu ffn.bias=true ffn.mult=2 model.tie_embeddings=false": "gpt2",
    "preset=gemma attn.head_dim=24 ffn.d_ff=96": "gemma",
    "preset=bloom": "bloom",
    "preset=neox": "gpt_neox",
    "preset=neox block=prenorm": "gpt_neox",
    "preset=olmo2": "olmo2",
    "norm=layernorm block=parallel attn.bias_qkv=true attn.bias_o=true ffn=gelu_tanh ffn.bias=true "
    "pos.fraction=0.5 model.tie_embeddings=false model.head_bias=true": "phi",
    "attn=mla": "deepseek_v3",
    "attn=mla attn.q_rank=24 attn.form=absorbed pos.pairing=interleaved": "deepseek_v3",
    "pos.pairing=interleaved attn.bias_qkv=true attn.bias_o=true": "llama",
    "rope_scaling=pi rope_scaling.factor=4": "llama",
    "rope_scaling=dynamic_ntk rope_scaling.original_len=16": "llama",
    "rope_scaling=llama3 rope_scaling.original_len=16 pos.theta=5e5": "llama",
    "rope_scaling=yarn rope_scaling.original_len=16 rope_scaling.factor=4": "llama",
    "rope_scaling=yarn rope_scaling.original_len=16 rope_scaling.attention_factor=1.5": "llama",
    "attn=mla rope_scaling=yarn rope_scaling.original_len=16 rope_scaling.attention_factor=1.2": "deepseek_v3",
    "attn=mla rope_scaling=yarn rope_scaling.original_len=16 rope_scaling.attention_factor=1": "deepseek_v3",
    "attn.qk_norm=full block=reordered norm.eps=1e-5 attn.qk_norm_eps=1e-5": "olmo2",
    "moe=topk moe.n_experts=4 moe.z_coef=0.1 moe.jitter=0.1": "mixtral",
    "moe=topk attn.window=8 moe.d_expert=20 model.tie_embeddings=false moe.balance=none": "mixtral",
    "moe=topk attn=gqa attn.qk_norm=head moe.d_expert=24": "qwen3_moe",
    "moe=topk attn.qk_norm=head moe.first_dense_layers=1 moe.norm_topk=false moe.top_k=1": "qwen3_moe",
    "moe=topk attn.qk_norm=head moe.every_n_layers=2 attn.window=8": "qwen3_moe",
    "moe=topk attn.qk_norm=full moe.norm_topk=false norm.eps=1e-5 attn.qk_norm_eps=1e-5": "olmoe",
    "attn=mla moe=topk moe.score=sigmoid moe.balance=aux_free moe.n_shared=2 moe.d_expert=24": "deepseek_v3",
    "attn=mla moe=topk moe.score=sigmoid moe.balance=aux_free moe.n_shared=1 moe.first_dense_layers=1 moe.n_experts=8 "
    "moe.n_expert_groups=4 moe.n_limited_groups=2 moe.weight_scale=2.5 pos.pairing=interleaved": "deepseek_v3",
}
ROUTED = [line for line in TRAINED if "moe=topk" in line]


def trained(path: Path, line: str, tokenizer: Tokenizer) -> RunDir:
    """A run with random weights, large ones, in place of trained ones."""
    exp = load([*SMALL.split(), *line.split()]).experiment
    net = build(exp.arch, tokenizer.vocab_size, resolve(Auto(), "cpu", torch.float32), seed=0, device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in net.parameters():
            p.normal_(std=0.3, generator=generator) if p.ndim > 1 else p.uniform_(-0.5, 1.5, generator=generator)
        for name, b in net.named_buffers():
            b.uniform_(-0.5, 0.5, generator=generator) if name.endswith("router.bias") else None
    run = RunDir.create(path, to_dict(exp))
    run.save_tokenizer(tokenizer)
    checkpoint.save(path, 1, net.state_dict(), {}, config=to_dict(exp), keep_last=1)
    run.update_manifest(state="finished")
    return run


def exported(run: RunDir, to: Path, **how):
    return export(model_of(Found(run), Screen()), to, **how)


def theirs(folder: Path, dtype=torch.float32):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype).eval()


def hash_of(run: RunDir) -> str:
    return checkpoint.load(run.checkpoints()[-1].path).content_hash


def greedy(net, ids: list[int], n: int) -> list[int]:
    """By full forwards."""
    for _ in range(n):
        ids = [*ids, int(logits(net, torch.tensor([ids]))[0, -1].argmax())]
    return ids


@pytest.mark.parametrize("line", TRAINED)
def test_what_was_trained_here(line, tmp_path):
    run = trained(tmp_path / "runs" / "mine", line, train_bpe(BPE(vocab_size=280), TEXTS))
    done = exported(run, tmp_path / "hf")
    assert done.family == TRAINED[line]
    net, other = ours(run, torch.float32), theirs(tmp_path / "hf")
    tokens, _ = rows(2, 30, vocab=net.dims.vocab_size)
    close(logits(net, tokens), logits(other, tokens), 1e-4)
    pairing = [w for w in line.split() if w.startswith("pos.pairing") and "mla" not in line]
    back = run_of(tmp_path / "hf", tmp_path / "runs", *pairing)
    assert hash_of(back) == hash_of(run)
    close(logits(ours(back, torch.float32), tokens), logits(net, tokens), 2e-5)


@pytest.mark.parametrize("tied", ["true", "false"])
def test_rows_that_only_fill_up_stay_here(tied, tmp_path):
    tokenizer = byte_tokenizer(Byte())
    run = trained(tmp_path / "mine", f"model.vocab_multiple=64 model.tie_embeddings={tied}", tokenizer)
    done = exported(run, tmp_path / "hf")
    net, other = ours(run, torch.float32), theirs(tmp_path / "hf")
    assert len(net.embed.weight) == 320
    assert net.dims.vocab_size == other.config.vocab_size == len(other.get_input_embeddings().weight) == 257
    assert done.parameters == sum(p.numel() for p in other.parameters())
    tokens, _ = rows(2, 30, vocab=257)
    close(logits(net, tokens), logits(other, tokens), 1e-4)


@pytest.mark.parametrize("line", ["", "preset=gpt2", "preset=bloom", "attn=mla", *ROUTED])
def test_greedy_tokens_are_ours(line, tmp_path):
    run = trained(tmp_path / "mine", line, byte_tokenizer(Byte()))
    exported(run, tmp_path / "hf")
    prompt = [256, *b"Fellow"]
    other = theirs(tmp_path / "hf")
    assert other.generation_config.eos_token_id == 256
    found = other.generate(
        torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    net = ours(run, torch.float32)
    assert found[0].tolist() == greedy(net, prompt, 20)
    assert found[0, len(prompt) :].tolist() == generate(net, [prompt], max_new=20).tokens[0]


@pytest.mark.parametrize("case", CASES)
def test_import_export_import_is_the_same_to_the_last_bit(case, tmp_path):
    _, narrow = net_of(*CASES[case])
    run = run_of(saved(tmp_path / "a", narrow), tmp_path / "runs")
    done = exported(run, tmp_path / "b")
    assert done.family in (case.split()[0], "gpt_neox", "deepseek_v3", "llama")
    assert hash_of(run_of(tmp_path / "b", tmp_path / "runs")) == hash_of(run)
    tokens, _ = rows(2, 24, vocab=ROWS)
    close(logits(theirs(tmp_path / "b"), tokens), logits(narrow, tokens), 1e-4)


@pytest.mark.parametrize("kind", SCALED)
def test_rope_fields_new_and_old(kind, tmp_path):
    """Either set of keys alone says the same: transformers 4 reads the old ones."""
    _, narrow = net_of("LlamaForCausalLM", SIZES | SCALED[kind] | dict(num_key_value_heads=2))
    run = run_of(saved(tmp_path / "a", narrow), tmp_path / "runs")
    exported(run, tmp_path / "b")
    whole = json.loads((tmp_path / "b" / "config.json").read_text())
    tokens, _ = rows(2, 48, vocab=ROWS)
    for gone in (("rope_parameters",), ("rope_scaling", "rope_theta", "partial_rotary_factor")):
        said = {k: v for k, v in whole.items() if k not in gone}
        (tmp_path / "b" / "config.json").write_text(json.dumps(said))
        close(logits(theirs(tmp_path / "b"), tokens), logits(narrow, tokens), 1e-4)
        back = run_of(tmp_path / "b", tmp_path / "runs", f"name={len(gone)}")
        close(logits(ours(back, torch.float32), tokens), logits(narrow, tokens), 1e-4)


@pytest.mark.parametrize("make", [lambda: byte_tokenizer(Byte()), lambda: train_bpe(BPE(vocab_size=290), TEXTS)])
@pytest.mark.parametrize("line", ["", "preset=gpt2", "attn=gqa attn.bias_qkv=true"])
def test_ids_are_ours(line, make, tmp_path):
    tokenizer = make()
    exported(trained(tmp_path / "mine", line, tokenizer), tmp_path / "hf")
    other = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in (*TEXTS, "  two  spaces\n\tand é 漢字 🙂", "a <|endoftext|> b", "", "it's 1234567"):
        assert other(text)["input_ids"] == tokenizer.encode(text)
        assert other.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert other.eos_token_id == other.bos_token_id == tokenizer.eot
    assert len(other) == tokenizer.vocab_size


def test_bfloat16_halves_the_file(tmp_path):
    run = trained(tmp_path / "mine", "", byte_tokenizer(Byte()))
    exported(run, tmp_path / "a")
    exported(run, tmp_path / "b", dtype="bfloat16")
    sizes = [(tmp_path / n / "model.safetensors").stat().st_size for n in "ab"]
    assert sizes[1] < 0.55 * sizes[0]
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype="auto")
    assert other.dtype == torch.bfloat16


def test_a_bias_of_the_choice_keeps_its_width(tmp_path):
    line = "attn=mla moe=topk moe.score=sigmoid moe.balance=aux_free moe.n_shared=1"
    exported(trained(tmp_path / "mine", line, byte_tokenizer(Byte())), tmp_path / "a", dtype="bfloat16")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    wide = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    assert wide == {f"model.layers.{n}.mlp.gate.e_score_correction_bias" for n in range(2)}


LOST = {
    "norm=dyt": "`norm=dyt`",
    "attn.softcap=30": "`attn.softcap=30`",
    "model.logit_softcap=20": "`model.logit_softcap=20`",
    "block=sandwich": "`block=sandwich`",
    "pos=t5": "`pos=t5`",
    "rope_scaling=ntk": "`rope_scaling=ntk`",
    "ffn=relu2": "`ffn=relu2`",
    "attn.scale=0.3": "`attn.scale=0.3`",
    "pos.fraction=0.5": "partial_rotary_factor: 0.5 of its config.json (only 1)",
    "attn=gqa attn.qk_norm=head norm.eps=1e-5": "`attn.qk_norm_eps=1e-06`",
    "moe=switch": "`moe=switch`",
    "moe=expert_choice": "`moe=expert_choice`",
    "moe=topk moe.capacity_factor=1.5": "`moe.capacity_factor=1.5`",
    "moe=topk moe.n_shared=1": "`moe.n_shared=1`",
    "moe=topk moe.balance=aux_free": "`moe.balance=aux_free`",
    "moe=topk moe.weight_scale=2": "`moe.weight_scale=2`",
    "moe=topk moe.score=sigmoid": "`moe.score=sigmoid`",
    "moe=topk ffn.bias=true": "`ffn.bias=true`",
    "moe=topk attn=mla moe.score=sigmoid moe.balance=none moe.n_shared=1": "`moe.balance=none`",
    "moe=topk attn=mla moe.score=sigmoid moe.balance=aux_free": "n_shared_experts: 0 of its config.json",
    "moe=topk moe.top_k=1 moe.norm_topk=false": "`attn.qk_norm=none`",
}


@pytest.mark.parametrize("line", LOST)
def test_what_no_family_can_say_is_named(line, tmp_path):
    run = trained(tmp_path / "mine", line, byte_tokenizer(Byte()))
    with pytest.raises(ConfigError) as caught:
        exported(run, tmp_path / "hf")
    assert LOST[line] in caught.value.message
    assert caught.value.hint
    assert not (tmp_path / "hf").exists()


NEAREST = {  # what is composed, the family with the fewest losses, the losses
    "preset=bloom model.embed_norm=false": ("bloom", "`model.embed_norm=false`"),
    "preset=gemma model.embed_scale=none": ("gemma", "`model.embed_scale=none`"),
    "norm=layernorm ffn=gelu": ("gpt_neox", "`ffn.bias=false`"),
    "preset=gpt2 pos=t5": ("gpt2", "`pos=t5`"),
    "preset=neox attn.softcap=3": ("gpt_neox", "`attn.softcap=3`"),
    "preset=olmo2 norm.eps=1e-5 attn.softcap=3": (
        "olmo2",
        "`attn.softcap=3`, `attn.qk_norm_eps=1e-06`",
    ),
    "pos.fraction=0.5 attn.bias_o=true": (
        "llama",
        "partial_rotary_factor: 0.5 of its config.json (only 1), `attn.bias_o=true`",
    ),
    # a part that is another one counts with all that was set in it
    "attn.softcap=3 attn.scale=2": ("llama", "`attn.softcap=3`, `attn.scale=2`"),
    "attn=mla attn.softcap=3 attn.scale=2": ("deepseek_v3", "`attn.softcap=3`, `attn.scale=2`"),
    "preset=gpt2 norm=dyt norm.alpha=0.7": ("gpt2", "`norm=dyt`, `norm.alpha=0.7`"),
    "attn=mla attn.q_rank=24 pos=alibi attn.window=8": ("deepseek_v3", "`pos=alibi`, `attn.window=8`"),
    "block=sandwich attn.softcap=3 attn.scale=2 model.logit_softcap=9 ffn=relu2 ffn.bias=true": (
        "llama",
        "`model.logit_softcap=9`, `block=sandwich`, `attn.softcap=3`, `attn.scale=2`, `ffn=relu2`",
    ),
}


@pytest.mark.parametrize("line", NEAREST)
def test_the_nearest_family_is_the_one_that_loses_least(line):
    arch = load([*SMALL.split(), *line.split()]).experiment.arch
    family, lost = NEAREST[line]
    with pytest.raises(ConfigError) as caught:
        choose(arch, 100, 32)
    assert caught.value.message == f"the nearest family, {family}, can't express {lost}"
    with pytest.raises(ConfigError) as asked:
        choose(arch, 100, 32, family)
    assert asked.value.message == f"`--family {family}` can't express {lost}"
    assert "this one is the nearest" in asked.value.hint
    with pytest.raises(ConfigError) as other:
        choose(arch, 100, 32, "phi" if family == "deepseek_v3" else "deepseek_v3")
    assert f"the nearest, {family}, can't express {lost}" in other.value.hint


def test_what_is_proposed_for_another_family_can_be_done():
    arch = load(SMALL.split()).experiment.arch
    with pytest.raises(ConfigError) as caught:
        choose(arch, 100, 32, "gpt2")
    assert caught.value.hint == "use --family llama, which says all of it"
    assert not choose(arch, 100, 32, "llama").lost


def test_a_family_that_is_asked_for(tmp_path):
    run = trained(tmp_path / "mine", "", byte_tokenizer(Byte()))
    assert exported(run, tmp_path / "a", family="mistral").family == "mistral"
    with pytest.raises(ConfigError, match=r"`--family gpt2` can't express .*`norm=rmsnorm`"):
        exported(run, tmp_path / "b", family="gpt2")
