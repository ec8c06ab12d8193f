"""A pairwise covering array: few compositions such that every two choices that may stand together do so somewhere."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from typing import Any

from lmlab import compat
from lmlab.config.load import load
from lmlab.config.tree import Experiment
from lmlab.registry import OPTIONS

SIZES = ["model.n_layers=2", "model.d_model=32", "model.n_heads=4", "model.seq_len=16", "train.batch_tokens=64"]
BARE = {"weights": "shaped", "v_proj": "none", "o_proj": "none"}
Choice = tuple[str, str]  # factor, its value's name
Changes = dict[str, dict[str, Any]]  # group → fields


def options(group: str) -> dict[str, Any]:
    """Each option of a group, as what makes the part."""
    return {
        name: OPTIONS[group][name] for name in OPTIONS[group] if OPTIONS[group][name].__module__.startswith("lmlab.")
    }


PARTS: dict[str, dict[str, Any]] = {group: options(group) for group in ("norm", "block", "pos", "rope_scaling", "ffn")}
PARTS["attn"] = {
    **options("attn"),
    "absorbed": functools.partial(OPTIONS["attn"]["mla"], form="absorbed", q_rank=8),
    "bare": functools.partial(OPTIONS["attn"]["mha"], **BARE),
    "normed": functools.partial(OPTIONS["attn"]["gqa"], qk_norm="full", bias_qkv=True, bias_o=True),
}
# Settings on top of the parts.
FIELDS: dict[str, dict[str, Changes]] = {
    "window": {
        "none": {},
        "window": {"attn": {"window": 5}},
        "pattern": {"attn": {"window": 5, "pattern": "SL"}},
        "nope": {"attn": {"nope_every_n_layers": 2}},
    },
    "scores": {"plain": {}, "softcap": {"attn": {"softcap": 8.0}}, "scale": {"attn": {"scale": 0.5}}},
    "backend": {name: {"attn": {"backend": name}} for name in ("auto", "sdpa", "tiled", "dense")},
    "packing": {name: {"data": {"packing": name}} for name in ("stream", "documents")},
    "embedding": {
        "tied": {},
        "untied": {"model": {"tie_embeddings": False}},
        "scaled": {"model": {"embed_scale": "sqrt_d_model"}},
        "normed": {"model": {"embed_norm": True}},
    },
    "logits": {"plain": {}, "softcap": {"model": {"logit_softcap": 10.0}}},
    "dropout": {"none": {}, "residual": {"model": {"dropout": 0.1}}, "attention": {"attn": {"dropout": 0.1}}},
    "kernels": {"auto": {}, "reference": {}},
}
FACTORS: dict[str, list[str]] = {name: list(values) for name, values in (PARTS | FIELDS).items()}


@functools.cache
def base() -> Experiment:
    return load(SIZES).experiment


def experiment(chosen: dict[str, str]) -> Experiment:
    """What the choices compose; factors left out are at their first value, groups at the default."""
    parts = {group: PARTS[group][name]() for group, name in chosen.items() if group in PARTS}
    if "kernels" in chosen:
        parts["kernels"] = OPTIONS["kernels"][chosen["kernels"]]()
    made = dataclasses.replace(base(), **parts)
    for factor, name in chosen.items():
        for group, fields in FIELDS.get(factor, {}).get(name, {}).items():
            made = dataclasses.replace(made, **{group: dataclasses.replace(getattr(made, group), **fields)})
    return made


def legal(chosen: dict[str, str]) -> bool:
    return not compat.check(experiment(chosen))


def pairs(chosen: dict[str, str]) -> set[tuple[Choice, Choice]]:
    return set(itertools.combinations(sorted(chosen.items()), 2))


@functools.cache
def legal_pairs() -> frozenset[tuple[Choice, Choice]]:
    """Every two choices that compose with each other and with the default for the rest."""
    choices = sorted((factor, name) for factor, names in FACTORS.items() for name in names)
    return frozenset((a, b) for a, b in itertools.combinations(choices, 2) if a[0] != b[0] and legal(dict((a, b))))


@functools.cache
def covering() -> tuple[dict[str, str], ...]:
    """Greedy: each composition takes a pair that is missing, then for each factor the value that adds most."""
    draw, missing, rows = random.Random(0), set(legal_pairs()), []
    while missing:
        row = dict(min(missing))
        for factor in sorted((f for f in FACTORS if f not in row), key=lambda f: -len(FACTORS[f])):
            values = draw.sample(FACTORS[factor], len(FACTORS[factor]))
            ranked = sorted(values, key=lambda v: -len(pairs(row | {factor: v}) & missing))
            found = next((v for v in ranked if legal(row | {factor: v})), None)
            if found is not None:
                row[factor] = found
        missing -= pairs(row)
        rows.append(row)
    return tuple(rows)
