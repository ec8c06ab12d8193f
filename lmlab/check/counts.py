"""What can be worked out before training: initial values, the loss at step 0, parameters and FLOPs, once more by hand.

The formulas here start from the configuration as a plain dict, like the oracle's; the model is only measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Optional

import torch

from lmlab.check.composed import Composed, as_dict
from lmlab.check.oracle_moe import room_for, routes
from lmlab.check.rows import Row, not_asked
from lmlab.check.small import given
from lmlab.cost.flops import flops_per_token
from lmlab.kernels.resolve import on_cpu, resolve
from lmlab.model.init import table
from lmlab.model.spec import Arch
from lmlab.model.transformer import Transformer, build

Config = Mapping[str, Any]
OWN = {  # the parts whose parameters are counted here
    "norm": ("layernorm", "rmsnorm", "batchnorm", "dyt", "none"),
    "block": ("prenorm", "postnorm", "deepnorm", "sandwich", "reordered", "parallel", "simplified"),
    "pos": ("none", "sinusoidal", "learned", "rope", "alibi", "t5"),
    "attn": ("mha", "mqa", "gqa", "mla"),
    "ffn": ("relu", "relu2", "gelu", "gelu_tanh", "silu", "glu", "bilinear", "reglu", "geglu", "swiglu"),
    "moe": ("none", "topk", "switch", "expert_choice"),
}
GATED = ("glu", "bilinear", "reglu", "geglu", "swiglu")
MOST = 30_000_000  # parameters of a model that is built at its full size to measure its loss


def strange(config: Config) -> Optional[str]:
    """The first part that is not lmlab's own."""
    odd = (f"{g}={config[g]['name']}" for g, names in OWN.items() if config[g]["name"] not in names)
    return next(odd, None)


# ---------------------------------------------------------------- parameters and FLOPs


def counts(c: Composed) -> Row:
    """Parameters and FLOPs per token of the composition at its full size, by the model and by formula."""
    arch, vocab = c.experiment.arch, vocabulary(c)
    config = as_dict(arch)
    if odd := strange(config):
        return not_asked("parameters and FLOPs", f"{odd} is not one of lmlab's own: no formula")
    with torch.device("meta"):
        net = Transformer(arch, vocab, resolve(on_cpu(c.experiment.kernels), "cpu", torch.float32))
    matrices, others = parameters(config, vocab)
    n, expected = sum(p.numel() for p in net.parameters()), sum(matrices.values()) + sum(others.values())
    flops, worked_out = flops_per_token(net, arch), 6 * in_products(config, matrices) + attention_flops(config)
    figure = f"{n:,} parameters, {flops:,.0f} FLOP/token"
    if n != expected:
        return Row("parameters and FLOPs", "fail", figure, f"by formula {expected:,} parameters")
    if abs(flops - worked_out) > 1e-9 * worked_out:
        return Row("parameters and FLOPs", "fail", figure, f"by formula {worked_out:,.0f} FLOP/token")
    return Row("parameters and FLOPs", "pass", figure)


def vocabulary(c: Composed) -> int:
    return int(getattr(c.experiment.tokenizer, "vocab_size", 4096))


def parameters(config: Config, vocab: int) -> tuple[dict[str, int], dict[str, int]]:
    """(in matrices, in all else) by role, of the whole model."""
    m, D, L = config["model"], config["model"]["d_model"], config["model"]["n_layers"]
    vocab = math.ceil(vocab / m["vocab_multiple"]) * m["vocab_multiple"]
    attn, attn_rest = attention_parameters(config)
    routed = sum(routes(config, layer) for layer in range(L))
    ffn, ffn_rest = feed_forward_parameters(config, ffn_width(config))
    matrices = {"embed": vocab * D, "attn": L * attn, "ffn": (L - routed) * ffn}
    if not m["tie_embeddings"]:
        matrices["head"] = vocab * D
    pos = config["pos"]
    matrices["pos"] = {
        "learned": (pos.get("max_len") or m["seq_len"]) * D,
        "t5": m["n_heads"] * pos.get("n_buckets", 0),
    }.get(pos["name"], 0)
    others = {"attn": L * attn_rest, "norms": norms(config) * norm_parameters(config)}
    others["ffn"] = (L - routed) * ffn_rest
    if routed:
        moe, F = config["moe"], config["moe"]["d_expert"] or ffn_width(config)
        one, one_rest = feed_forward_parameters(config, F)
        both = feed_forward_parameters(config, moe["n_shared"] * F) if moe["n_shared"] else (0, 0)
        matrices |= {"router": routed * moe["n_experts"] * D, "shared": routed * both[0]}
        matrices["experts"] = routed * moe["n_experts"] * one
        others |= {"experts": routed * moe["n_experts"] * one_rest, "shared": routed * both[1]}
    others["head"] = vocab if m["head_bias"] else 0
    others["block"] = 2 * L if config["block"]["name"] == "simplified" else 0
    return matrices, others


def feed_forward_parameters(config: Config, width: int) -> tuple[int, int]:
    """(in matrices, in biases) of one ffn."""
    D, maps = config["model"]["d_model"], 2 if config["ffn"]["name"] in GATED else 1
    return (maps + 1) * D * width, (maps * width + D) if config["ffn"]["bias"] else 0


def norm_parameters(config: Config) -> int:
    D, norm = config["model"]["d_model"], config["norm"]
    own = {"none": 0, "dyt": D + 1}.get(norm["name"], D)
    return own + (D if norm.get("bias") else 0)


def norms(config: Config) -> int:
    """How many norms the whole model has."""
    block, m = config["block"], config["model"]
    each = {"sandwich": 4, "simplified": 1, "parallel": block.get("n_norms")}.get(block["name"], 2)
    final = block["name"] not in ("postnorm", "deepnorm")
    return int(m["n_layers"] * each + final + m["embed_norm"])


def attention_parameters(config: Config) -> tuple[int, int]:
    """(in matrices, in all else) of one layer."""
    a, D, H = config["attn"], config["model"]["d_model"], config["model"]["n_heads"]
    bias_o = D if a["bias_o"] else 0
    if a["name"] == "mla":
        nope, rope, v, rank = latent_sizes(config)
        wide, low = H * (nope + rope), a["q_rank"]
        q = D * wide if low is None else low * (D + wide)
        return q + D * (rank + rope) + rank * H * (nope + v) + H * v * D, rank + (low or 0) + bias_o
    C, K = a["head_dim"] or D // H, kv_heads(config)
    has_v, has_o = a["v_proj"] == "linear", a["o_proj"] == "linear"
    matrices = D * C * (H + K * (2 if has_v else 1)) + (H * C * D if has_o else 0)
    rest = (bias_o if has_o else 0) + (3 * H if a["weights"] == "shaped" else 0)
    rest += C * (H + K * (2 if has_v else 1)) if a["bias_qkv"] else 0
    rest += {"none": 0, "head": 2 * C, "full": (H + K) * C}[a["qk_norm"]]
    return matrices, rest


def kv_heads(config: Config) -> int:
    a, H = config["attn"], config["model"]["n_heads"]
    return int({"mha": H, "mqa": 1}.get(a["name"]) or a["n_kv_heads"] or max(1, H // (a.get("queries_per_kv") or 2)))


def latent_sizes(config: Config) -> tuple[int, int, int, int]:
    """MLA's (nope, rope, v, rank)."""
    a, D, H = config["attn"], config["model"]["d_model"], config["model"]["n_heads"]
    rope = a["rope_dim"] or 2 * max(1, D // H // 4)
    return a["nope_dim"] or D // H, rope, a["v_dim"] or D // H, a["kv_rank"] or max(1, D // 4)


def ffn_width(config: Config) -> int:
    f, D = config["ffn"], config["model"]["d_model"]
    if f["d_ff"] is not None:
        return int(f["d_ff"])
    raw = (f["mult"] or 4) * D * (2 / 3 if f["name"] in GATED else 1)
    step = f["multiple_of"] or 8
    return int(step * math.ceil(raw / step - 1e-9))


def in_products(config: Config, matrices: Mapping[str, int]) -> float:
    """Parameters that multiply activations: all matrices, positions apart, the embedding only as the head."""
    untied = not config["model"]["tie_embeddings"]
    counted = {role: n for role, n in matrices.items() if role != "pos" and not (role == "embed" and untied)}
    if "experts" in counted:
        counted["experts"] = counted["experts"] * experts_per_token(config) / config["moe"]["n_experts"]
    return sum(counted.values())


def experts_per_token(config: Config) -> float:
    """Experts that a token goes through, where capacity leaves some out no more than it has room for."""
    moe = config["moe"]
    k, T = moe.get("top_k", 1), config["model"]["seq_len"]
    if moe["capacity_factor"] is None:
        return float(k)
    places = room_for(moe, k, T) * moe["n_experts"] / T
    return places if moe["name"] == "expert_choice" else min(k, places)


def attention_flops(config: Config) -> float:
    """6 · H · (C of q·k + C of p·v) per attended key, half a key less per query as the causal half has it."""
    a, m = config["attn"], config["model"]
    H, T = m["n_heads"], m["seq_len"]
    C = a.get("head_dim") or m["d_model"] // H
    both = 2 * C * (2 if a.get("weights") == "shaped" else 1)  # shaped attention attends twice
    if a["name"] == "mla":
        nope, rope, v, rank = latent_sizes(config)
        both = nope + rope + v if a["form"] == "naive" else rank + rope + rank
    total = 0.0
    for layer in range(m["n_layers"]):
        letter = a["pattern"][layer % len(a["pattern"])] if a.get("pattern") else "S"
        window = T if a["window"] is None or letter == "L" else min(a["window"], T)
        keys = sum(min(i + 1, window) for i in range(T)) / T
        total += 6 * H * both * (keys - 0.5)
    return total


# ---------------------------------------------------------------- initial values


def initial_values(c: Composed) -> Row:
    """Mean and standard deviation of each parameter as drawn, against the table, and the table against the rules."""
    net = c.build(dtype=torch.float32)
    rules, config, worst, named = table(net), as_dict(c.arch), 0.0, ""
    for name, p in net.named_parameters():
        (mean, std), n, values = rules[name], p.numel(), p.detach().double()
        off = float((values - mean).mean().abs() / std * n**0.5 if std else (values - mean).abs().max() * 1e6)
        off_std = abs(float(values.std()) / std - 1) * (2 * n) ** 0.5 if std and n > 1 else 0.0
        if max(off, off_std) > worst:
            worst, named = max(off, off_std), name
    figure = f"{len(rules)} parameters, {worst:.1f} standard errors off at most ({named})"
    if worst > 5.5:
        return Row("initial values", "fail", figure, f"the table has {rules[named].mean:g} ± {rules[named].std:.4g}")
    if strange(config) is None:
        for name, p in net.named_parameters():
            expected = rule(config, name, tuple(p.shape))
            if any(abs(a - b) > 1e-9 for a, b in zip(rules[name], expected, strict=True)):
                told = f"{name}: {rules[name].mean:g} ± {rules[name].std:.4g}"
                return Row("initial values", "fail", told, f"by the rules {expected[0]:g} ± {expected[1]:.4g}")
    return Row("initial values", "pass", figure)


def rule(config: Config, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """(mean, std) that a parameter should start from."""
    m, norm, block = config["model"], config["norm"], config["block"]
    a, leaf = config["attn"], name.rpartition(".")[2]
    shaped = a.get("weights") == "shaped"
    in_layer = fnmatchcase(name, "blocks.*.attn.*") or fnmatchcase(name, "blocks.*.ffn.*")
    if (
        leaf == "bias"
        or (shaped and name.endswith("attn.q.weight"))
        or (name, config["pos"]["name"])
        == (
            "pos.weight",
            "t5",
        )
    ):
        return 0.0, 0.0
    if len(shape) == 1 and in_layer:
        return 1.0, 0.0
    if leaf in ("beta_attn", "beta_ffn"):
        return float(block[leaf]), 0.0
    if len(shape) == 1:
        return (float(norm["alpha"]) if leaf == "alpha" else 1.0 - norm.get("offset", 0)), 0.0
    if block["name"] == "deepnorm" and in_layer:
        beta = block["beta"] if block["beta"] is not None else (8 * m["n_layers"]) ** -0.25
        gain = 1.0 if name.split(".attn.")[-1][0] in "qk" and ".attn." in name else beta
        return (0.0, 0.02) if name.endswith("router.weight") else (0.0, float(gain * math.sqrt(2 / sum(shape[-2:]))))
    if name.endswith("attn.o.weight") or (".ffn." in name and name.endswith("down.weight")):
        return 0.0, 0.02 / math.sqrt(2 * m["n_layers"])
    return 0.0, min(0.02, 0.5 / math.sqrt(m["d_model"])) if name == "head.weight" else 0.02


def first_loss(c: Composed) -> Row:
    """The loss of random tokens before the first step, against ln V; at full size when that is not too large."""
    arch, vocab = c.experiment.arch, vocabulary(c)
    ops = resolve(on_cpu(c.experiment.kernels), "cpu", torch.float32)
    with torch.device("meta"):
        n = sum(p.numel() for p in Transformer(arch, vocab, ops).parameters())
    arch = runnable(arch) if n <= MOST else c.arch
    net = build(arch, vocab, ops, seed=c.experiment.seeds()["init"], device="cpu").eval()
    T = min(arch.model.seq_len, 128)
    B = -(-256 // T)
    drawn = torch.randint(vocab, (B, T + 1), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out = net(drawn[:, :-1], torch.arange(T).expand(B, T), targets_BT=drawn[:, 1:])
    measured, expected = float(out.loss) / (B * T), math.log(vocab)
    tol = 0.3 if arch.model.tie_embeddings and arch.block.final_norm() else 0.15
    where = "" if n <= MOST else f" at d_model {arch.model.d_model}"
    figure = f"{measured:.3f} nats/token, ln V = {expected:.3f}{where}"
    if abs(measured - expected) <= tol:
        return Row("loss at step 0", "pass", figure)
    if arch.model.logit_scale is not None:
        return Row("loss at step 0", "known", figure, "model.logit_scale is set by hand")
    return Row("loss at step 0", "fail", figure, f"allowed {tol:g} off")


def runnable(arch: Arch) -> Arch:
    """On the backend the device chooses: flex has no CPU."""
    return given(arch, attn=given(arch.attn, backend="auto")) if getattr(arch.attn, "backend", "") == "flex" else arch
