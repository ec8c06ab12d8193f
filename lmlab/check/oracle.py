"""The formulas of every built-in part again, in float64, with plain loops over rows, layers, heads and queries.

Nothing is shared with the model: no import of lmlab, only the configuration as a plain dict and the tensors by their
canonical names. What the configuration leaves null (kv heads, head size, factors) is worked out here once more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Optional

import torch
from torch import Tensor

from lmlab.check.oracle_moe import mixture, routes
from lmlab.check.oracle_parts import (
    RMS_EPS,
    NoOracle,
    added_positions,
    capped,
    feed_forward,
    frequencies,
    linear,
    norm,
    rms,
    rotated,
    score_bias,
)

Config = Mapping[str, Any]


def logits(
    config: Config,
    state: Mapping[str, Tensor],
    tokens: Tensor,
    positions: Tensor,
    documents: Optional[Tensor] = None,
    valid: Optional[Tensor] = None,
) -> Tensor:
    """(B, T, V) float64 of a model in eval mode. config: parts under their short names, as a run's configuration has
    them; documents, valid: (B, T) ids and booleans, or None. Raises NoOracle."""
    w = {name: tensor.detach().double().cpu() for name, tensor in state.items()}
    rows = [
        row_logits(
            config,
            w,
            tokens[b],
            Row(
                positions[b].tolist(),
                [0] * tokens.shape[1] if documents is None else documents[b].tolist(),
                [True] * tokens.shape[1] if valid is None else valid[b].tolist(),
            ),
        )
        for b in range(len(tokens))
    ]
    return torch.stack(rows)


def row_logits(config: Config, w: Mapping[str, Tensor], tokens: Tensor, row: Row) -> Tensor:
    """(T, V) of one row."""
    model, D = config["model"], config["model"]["d_model"]
    root = math.sqrt(D)
    scale = root if model.get("embed_scale") == "sqrt_d_model" else 1.0
    x = w["embed.weight"][tokens] * scale
    if model.get("embed_norm"):
        x = norm(config["norm"], w, "embed_norm", x)
    x = x + added_positions(config["pos"], w, row.positions, D)
    for layer in range(model["n_layers"]):
        x = block(config, w, layer, x, row)
    ends_normed = config["block"]["name"] not in ("postnorm", "deepnorm")
    if ends_normed:
        x = norm(config["norm"], w, "norm", x)
    tied = model["tie_embeddings"]
    out = x @ (w["embed.weight"] if tied else w["head.weight"]).T
    if model.get("head_bias"):
        out = out + w["head.bias"]
    factor = model.get("logit_scale")
    if factor is None:
        loud = scale > 1 or bool(model.get("embed_norm")) or not ends_normed
        factor = 1 / root if tied and loud else 1.0
    return capped(out * factor, model.get("logit_softcap"))


def block(config: Config, w: Mapping[str, Tensor], layer: int, x: Tensor, row: Row) -> Tensor:
    at, kind, name = f"blocks.{layer}", config["block"], config["block"]["name"]

    def n(which: str, y: Tensor) -> Tensor:
        return norm(config["norm"], w, f"{at}.{which}", y)

    def attn(y: Tensor) -> Tensor:
        return attention(config, w, layer, y, row)

    def ffn(y: Tensor) -> Tensor:
        if routes(config, layer):
            return mixture(config, w, f"{at}.ffn", y, row.valid)
        return feed_forward(config["ffn"], w, f"{at}.ffn", y)

    if name == "prenorm":
        x = x + attn(n("norm1", x))
        return x + ffn(n("norm2", x))
    if name in ("postnorm", "deepnorm"):
        own, depth = kind.get("alpha"), config["model"]["n_layers"]
        alpha = 1.0 if name == "postnorm" else own if own is not None else (2 * depth) ** 0.25
        x = n("norm1", alpha * x + attn(x))
        return n("norm2", alpha * x + ffn(x))
    if name == "sandwich":
        x = x + n("norm1_out", attn(n("norm1", x)))
        return x + n("norm2_out", ffn(n("norm2", x)))
    if name == "reordered":
        x = x + n("norm1", attn(x))
        return x + n("norm2", ffn(x))
    if name == "parallel":
        return x + attn(n("norm1", x)) + ffn(n("norm1" if kind["n_norms"] == 1 else "norm2", x))
    if name == "simplified":
        y = n("norm1", x)
        return w[f"{at}.beta_attn"] * attn(y) + w[f"{at}.beta_ffn"] * ffn(y)
    raise NoOracle("block", name)


# ---------------------------------------------------------------- attention


class Row:
    """What attention needs to know of a row: positions, documents, valid tokens, and the length of each document."""

    def __init__(self, positions: list[int], documents: list[int], valid: list[bool]) -> None:
        self.positions, self.documents, self.valid = positions, documents, valid
        self.T = len(positions)
        pairs = list(zip(documents, valid, strict=True))
        self.lengths = [sum(d == own and v for d, v in pairs) for own in documents]

    def keys(self, i: int, window: Optional[int]) -> list[int]:
        """The keys query i sees: not later, of its document, no padding, at most `window` back, itself counted."""
        first = 0 if window is None else max(0, i - window + 1)
        return [j for j in range(first, i + 1) if self.documents[j] == self.documents[i] and self.valid[j]]


def attention(config: Config, w: Mapping[str, Tensor], layer: int, x: Tensor, row: Row) -> Tensor:
    """(T, D): per head the scores of each query, what is hidden left out, softmax, the values' mean."""
    spec, at, H = config["attn"], f"blocks.{layer}.attn", config["model"]["n_heads"]
    every = spec.get("nope_every_n_layers")
    placed = every is None or (layer + 1) % every != 0
    if spec["name"] == "mla":
        q, k, v, scale = latent_heads(config, w, at, x, row, placed)
    elif spec["name"] in ("mha", "mqa", "gqa"):
        q, k, v, scale = plain_heads(config, w, at, x, row, placed)
    else:
        raise NoOracle("attn", spec["name"])
    outs = []
    for h in range(H):
        soft = attended(config, w, layer, h, q[h] * scale, k[h], v[h], row, placed)
        if spec.get("weights", "softmax") == "shaped":
            flat = attended(config, w, layer, h, q[h] * 0, k[h], v[h], row, placed)
            a, b, c = w[f"{at}.mix"][h::H]
            soft = a * v[h] + b * soft - c * flat
        outs.append(soft)
    out = torch.cat(outs, -1)
    return out if spec.get("o_proj", "linear") == "none" else linear(w, f"{at}.o", out)


def attended(
    config: Config, w: Mapping[str, Tensor], layer: int, h: int, q: Tensor, k: Tensor, v: Tensor, row: Row, placed: bool
) -> Tensor:
    """One head: q is already scaled. A query that sees nothing gives 0."""
    spec, H = config["attn"], config["model"]["n_heads"]
    pattern = spec.get("pattern")
    full = pattern is not None and pattern[layer % len(pattern)] == "L"
    out = torch.zeros(row.T, v.shape[1], dtype=torch.float64)
    for i in range(row.T):
        keys = row.keys(i, None if full else spec.get("window"))
        if not keys:
            continue
        scores = capped(k[keys] @ q[i], spec.get("softcap"))
        if placed and config["pos"]["name"] in ("alibi", "t5"):
            far = [row.positions[i] - row.positions[j] for j in keys]
            scores = scores + torch.tensor([score_bias(config["pos"], w, h, H, d) for d in far], dtype=torch.float64)
        weights = torch.exp(scores - scores.max())
        out[i] = weights @ v[keys] / weights.sum()
    return out


def turning(config: Config, row: Row, channels: int) -> tuple[Optional[Tensor], float]:
    """(angles (T, pairs), YaRN's factor) of heads whose first `channels` may turn; None without rotation."""
    pos, scaling = config["pos"], config.get("rope_scaling") or {"name": "none"}
    if pos["name"] != "rope":
        return None, 1.0
    d, factor, angles = round(channels * pos["fraction"]), 1.0, []
    for p, n in zip(row.positions, row.lengths, strict=True):
        freqs, factor = frequencies(pos["theta"], d, scaling, config["model"]["seq_len"], n)
        angles.append([p * f for f in freqs])
    return torch.tensor(angles, dtype=torch.float64), factor


Heads = tuple[list[Tensor], list[Tensor], list[Tensor], float]


def plain_heads(config: Config, w: Mapping[str, Tensor], at: str, x: Tensor, row: Row, placed: bool) -> Heads:
    """Per query head its (T, C) query, key and value, and 1/√C."""
    spec, H, D = config["attn"], config["model"]["n_heads"], config["model"]["d_model"]
    C = spec.get("head_dim") or D // H
    shared = spec.get("queries_per_kv") or 2
    K = {"mha": H, "mqa": 1}.get(spec["name"]) or spec.get("n_kv_heads") or max(1, H // shared)
    eps = spec.get("qk_norm_eps", RMS_EPS)
    q, k = linear(w, f"{at}.q", x), linear(w, f"{at}.k", x)
    if spec.get("qk_norm") == "full":
        q, k = rms(q, w[f"{at}.q_norm.weight"], eps), rms(k, w[f"{at}.k_norm.weight"], eps)
    qs, ks = list(q.split(C, -1)), list(k.split(C, -1))
    if spec.get("qk_norm") == "head":
        qs = [rms(part, w[f"{at}.q_norm.weight"], eps) for part in qs]
        ks = [rms(part, w[f"{at}.k_norm.weight"], eps) for part in ks]
    angles, factor = turning(config, row, C)
    if angles is not None and placed:
        qs = [rotated(part, angles, config["pos"]["pairing"], factor) for part in qs]
        ks = [rotated(part, angles, config["pos"]["pairing"], factor) for part in ks]
    whole = spec.get("v_proj") == "none"
    vs = list(x.split(D // H, -1)) if whole else list(linear(w, f"{at}.v", x).split(C, -1))
    group = H // K
    values = vs if whole else [vs[h // group] for h in range(H)]
    return qs, [ks[h // group] for h in range(H)], values, spec.get("scale") or 1 / math.sqrt(C)


def latent_heads(config: Config, w: Mapping[str, Tensor], at: str, x: Tensor, row: Row, placed: bool) -> Heads:
    """MLA: keys and values made from a normed latent, one rotated key for all heads. YaRN scales the scores."""
    spec, H, D = config["attn"], config["model"]["n_heads"], config["model"]["d_model"]
    nope, v_dim = spec.get("nope_dim") or D // H, spec.get("v_dim") or D // H
    turned = spec.get("rope_dim") or 2 * max(1, D // H // 4)
    rank = spec.get("kv_rank") or max(1, D // 4)
    low = rms(linear(w, f"{at}.q_down", x), w[f"{at}.q_norm.weight"]) if spec.get("q_rank") else x
    q = linear(w, f"{at}.{'q_up' if spec.get('q_rank') else 'q'}", low)
    down = linear(w, f"{at}.kv_down", x)
    latent, shared = rms(down[:, :rank], w[f"{at}.kv_norm.weight"]), down[:, rank:]
    angles, factor = turning(config, row, turned)

    def turn(part: Tensor) -> Tensor:
        return rotated(part, angles, config["pos"]["pairing"], 1.0) if angles is not None and placed else part

    qs = [torch.cat([part[:, :nope], turn(part[:, nope:])], -1) for part in q.split(nope + turned, -1)]
    k_up = linear(w, f"{at}.k_up", latent).split(nope, -1)
    ks = [torch.cat([part, turn(shared)], -1) for part in k_up]
    vs = list(linear(w, f"{at}.v_up", latent).split(v_dim, -1))
    scale = spec.get("scale") or 1 / math.sqrt(nope + turned)
    return qs, ks, vs, scale * (factor**2 if placed else 1)
