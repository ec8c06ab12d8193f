"""A pairwise covering array: few compositions such that every two choices that may stand together do so somewhere."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from typing import Any

from lmlab.check.choices import Choice, choices
from lmlab.compat import rules
from lmlab.config.load import load
from lmlab.config.tree import Experiment
from lmlab.registry import OPTIONS

SIZES = ["model.n_layers=2", "model.d_model=32", "model.n_heads=4", "model.seq_len=16", "train.batch_tokens=64"]
Pick = tuple[str, str]  # factor, its value's name
Changes = dict[str, dict[str, Any]]  # group → fields


def options(group: str) -> dict[str, Any]:
    """Each option of a group, as what makes the part."""
    return {
        name: OPTIONS[group][name] for name in OPTIONS[group] if OPTIONS[group][name].__module__.startswith("lmlab.")
    }


PARTS: dict[str, dict[str, Any]] = {
    group: options(group) for group in ("norm", "block", "pos", "rope_scaling", "ffn", "moe")
}
PARTS["attn"] = {
    **options("attn"),
    "two latents": functools.partial(OPTIONS["attn"]["mla"], q_rank=8),
}
# Settings on top of the parts, beside every choice of a field.
FIELDS: dict[str, dict[str, Changes]] = {
    "window": {
        "none": {},
        "window": {"attn": {"window": 5}},
        "pattern": {"attn": {"window": 5, "pattern": "SL"}},
        "nope": {"attn": {"nope_every_n_layers": 2}},
    },
    "scores": {"plain": {}, "softcap": {"attn": {"softcap": 8.0}}, "scale": {"attn": {"scale": 0.5}}},
    "packing": {name: {"data": {"packing": name}} for name in ("stream", "documents")},
    "logits": {"plain": {}, "softcap": {"model": {"logit_softcap": 10.0}}},
    "dropout": {"none": {}, "residual": {"model": {"dropout": 0.1}}, "attention": {"attn": {"dropout": 0.1}}},
    "kernels": {"auto": {}, "reference": {}},
}


@functools.cache
def base() -> Experiment:
    return load(SIZES).experiment


def made(group: str) -> dict[str, Any]:
    return {name: part() for name, part in PARTS[group].items()} if group in PARTS else {"": base().model}


# The same fields as in `lmlab check --all`; what the part has anyway is no change.
CHOICES: dict[str, dict[str, Choice]] = {}
for _choice in choices({group: made(group) for group in (*PARTS, "model")}):
    CHOICES.setdefault(_choice.key, {})[str(_choice.value)] = _choice
FACTORS: dict[str, list[str]] = {name: list(values) for name, values in (PARTS | FIELDS | CHOICES).items()}


def experiment(chosen: dict[str, str]) -> Experiment:
    """What is chosen; factors left out are at their first value, groups at the default, or at the first option that has
    a field of them that is chosen."""
    picked = [CHOICES[factor][name] for factor, name in chosen.items() if factor in CHOICES]
    parts = {c.group: made(c.group)[c.holders[0]] for c in picked if not hasattr(getattr(base(), c.group), c.name)}
    parts |= {group: PARTS[group][name]() for group, name in chosen.items() if group in PARTS}
    if "kernels" in chosen:
        parts["kernels"] = OPTIONS["kernels"][chosen["kernels"]]()
    found = dataclasses.replace(base(), **parts)
    for choice in picked:
        if getattr(getattr(found, choice.group), choice.name, None) != choice.value:
            found = choice.put(found)
    for factor, name in chosen.items():
        for group, values in FIELDS.get(factor, {}).get(name, {}).items():
            found = dataclasses.replace(found, **{group: dataclasses.replace(getattr(found, group), **values)})
    return found


def legal(chosen: dict[str, str]) -> bool:
    """Whether every field that is chosen has its value, and no row refuses the composition."""
    found = experiment(chosen)
    picked = [CHOICES[factor][name] for factor, name in chosen.items() if factor in CHOICES]
    arrived = all(getattr(getattr(found, c.group), c.name, None) == c.value for c in picked)
    return arrived and not rules.check(found)


def pairs(chosen: dict[str, str]) -> set[tuple[Pick, Pick]]:
    return set(itertools.combinations(sorted(chosen.items()), 2))


@functools.cache
def legal_pairs() -> frozenset[tuple[Pick, Pick]]:
    """Every two choices that compose with each other and with the default for the rest."""
    picks = sorted((factor, name) for factor, names in FACTORS.items() for name in names)
    return frozenset((a, b) for a, b in itertools.combinations(picks, 2) if a[0] != b[0] and legal(dict((a, b))))


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
