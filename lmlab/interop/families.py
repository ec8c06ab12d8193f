"""Every family by model_type; and which of them an architecture can be written as, found by doing it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lmlab.config.amend import quoted
from lmlab.config.meaning import PARTS, differences, meaning, same, show_value
from lmlab.errors import ConfigError
from lmlab.interop.family import Family, Words
from lmlab.interop.gpts import GPTS
from lmlab.interop.keys import Keys, Refused, transformers_module
from lmlab.interop.llamas import LLAMAS
from lmlab.interop.mixtures import MIXTURES
from lmlab.model.spec import Arch, Decoder
from lmlab.registry import OPTIONS

FAMILIES: dict[str, Family] = {family.model_type: family for family in (*LLAMAS, *MIXTURES, *GPTS)}


def typed(words: Words) -> list[str]:
    """{"norm": "rmsnorm", "norm.eps": 1e-05} → ["norm=rmsnorm", "norm.eps=1e-05"]; a part before its fields."""
    parts = [f"{key}={value}" for key, value in words.items() if "." not in key]
    return parts + [f"{key}={quoted(value)}" for key, value in words.items() if "." in key]


def arch_of(words: Words) -> Arch:
    """The architecture that the words compose, without Hydra: their parts are lmlab's own options."""
    own = {part: {k.partition(".")[2]: v for k, v in words.items() if k.startswith(f"{part}.")} for part in PARTS}
    parts = {p: OPTIONS[p][words.get(p, "none")](**own[p]) for p in PARTS if p != "model"}
    return Arch(model=Decoder(**own["model"]), **parts)  # type: ignore[arg-type]


# ---------------------------------------------------------------- choosing


@dataclass(frozen=True)
class Written:
    """An architecture as one family writes it; `lost` is what that does not say.

    own: how many of these were set away from their defaults. parts: how many are a part as a whole. whole: whether
    `lost` is all of it; where transformers or the family refuses the rest unseen, it is not.
    """

    family: Family
    config: dict[str, Any]
    lost: list[str]
    own: int = 0
    parts: int = 0
    whole: bool = True

    @property
    def distance(self) -> tuple[bool, int, int, int]:
        return not self.whole, len(self.lost), self.parts, self.own


# What a family refuses whatever else there is; with these in its place the rest can be compared.
EASED: tuple[tuple[str, str, Any], ...] = (
    ("pos", "fraction", 1.0),
    ("model", "tie_embeddings", False),
    ("moe", "n_shared", 1),
    ("moe", "top_k", 2),
)


def written(arch: Arch, family: Family, vocab: int, longest: int) -> Written:
    """config.json's keys, read back to see what they say."""
    found: Arch | str | None
    config, found = _read_back(arch, family, vocab, longest)
    near, refusals = arch, list[str]()
    while isinstance(found, str):
        refusals.append(found)
        tried = ((other, _read_back(other, family, vocab, longest)[1]) for other in _eased(near))
        further = next(((other, said) for other, said in tried if said != refusals[-1]), None)
        if further is None:
            return Written(family, config, refusals, whole=False)
        near, found = further
    lost = list(_lost(near, found))
    own = len(refusals) + sum(_is_set(near, key) for key, _ in lost)
    parts = sum("." not in key for key, _ in lost)
    return Written(family, config, refusals + [f"`{k}={show_value(v)}`" for k, v in lost], own, parts)


def _lost(wanted: Arch, found: Arch) -> Iterator[tuple[str, Any]]:
    """(key, value) of all that is not said; of a part that is another one also each field that was set and would be
    lost with it, so that nobody changes the part and then hears of the next."""
    mine, theirs = meaning(wanted), meaning(found)
    for key, value, _ in differences(wanted, found):
        yield key, value
        if "." not in key:
            part = getattr(wanted, key)
            for name in (k.partition(".")[2] for k in mine if k.startswith(f"{key}.")):
                full = f"{key}.{name}"
                if _is_set(wanted, full) and not same(mine[full], theirs.get(full)):
                    yield full, getattr(part, name)


def _read_back(arch: Arch, family: Family, vocab: int, longest: int) -> tuple[dict[str, Any], Arch | str]:
    """(config.json's keys, what they say to whoever imports them, or why they can't be read)."""
    transformers = transformers_module()
    config = family.config(arch, vocab, longest)
    said = {k: v for k, v in config.items() if v is not None or k in ("sliding_window", "q_lora_rank", "rope_scaling")}
    try:
        read = transformers.AutoConfig.for_model(family.model_type, **_copied(said))
        return said, arch_of(family.words(Keys(read, said)))
    except Refused as error:
        return said, error.said
    except Exception as error:  # transformers' own validation
        return said, f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"


def _eased(arch: Arch) -> Iterator[Arch]:
    for part, name, value in EASED:
        spec = getattr(arch, part)
        if getattr(spec, name, value) != value:
            yield replace(arch, **{part: replace(spec, **{name: value})})


def _is_set(arch: Arch, key: str) -> bool:
    """Whether a value is another than the default of its part; a part as a whole always is."""
    part, _, name = key.partition(".")
    spec = getattr(arch, part)
    return not name or (hasattr(spec, name) and getattr(spec, name) != getattr(type(spec)(), name))


def _copied(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers changes dicts that it is given."""
    return {k: dict(v) if isinstance(v, dict) else v for k, v in config.items()}


def choose(arch: Arch, vocab: int, longest: int, wanted: str | None = None) -> Written:
    """The first family that says all of it, or the one that is wanted. Raises ConfigError naming what is lost."""
    if wanted is not None and wanted not in FAMILIES:
        raise ConfigError(f"`--family` is {wanted}", f"use one of {', '.join(FAMILIES)}")
    asked = written(arch, FAMILIES[wanted], vocab, longest) if wanted is not None else None
    if asked is not None and not asked.lost:
        return asked
    tried = [written(arch, family, vocab, longest) for family in FAMILIES.values()]
    fitting = [w for w in tried if not w.lost]
    if fitting and asked is None:
        return fitting[0]
    nearest = min(tried, key=lambda w: w.distance)
    told = f"{nearest.family.model_type}, can't express {_losses(nearest)}"
    if asked is None:
        raise ConfigError(f"the nearest family, {told}", "transformers has no class for it that lmlab knows")
    hint = f"no family of transformers that lmlab knows says all of it: the nearest, {told}"
    if fitting:
        hint = f"use --family {fitting[0].family.model_type}, which says all of it"
    elif nearest.family is asked.family:
        hint = "no family of transformers that lmlab knows says all of it, and this one is the nearest"
    raise ConfigError(f"`--family {wanted}` can't express {_losses(asked)}", hint)


def _losses(found: Written) -> str:
    return ", ".join(found.lost)
