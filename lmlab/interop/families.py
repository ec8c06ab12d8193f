"""Every family by model_type; and which of them an architecture can be written as, found by doing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmlab.config.amend import quoted
from lmlab.config.meaning import PARTS, differences, show_value
from lmlab.errors import ConfigError, listed
from lmlab.interop.family import Family, Words
from lmlab.interop.gpts import GPTS
from lmlab.interop.keys import Keys, Refused, transformers_module
from lmlab.interop.llamas import LLAMAS
from lmlab.model.spec import Arch, Decoder
from lmlab.registry import OPTIONS

FAMILIES: dict[str, Family] = {family.model_type: family for family in (*LLAMAS, *GPTS)}


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
    """An architecture as one family writes it; `lost` is what that does not say."""

    family: Family
    config: dict[str, Any]
    lost: list[str]


def written(arch: Arch, family: Family, vocab: int, longest: int) -> Written:
    """config.json's keys, read back to see what they say."""
    transformers = transformers_module()
    config = family.config(arch, vocab, longest)
    said = {k: v for k, v in config.items() if v is not None or k in ("sliding_window", "q_lora_rank", "rope_scaling")}
    try:
        read = transformers.AutoConfig.for_model(family.model_type, **_copied(said))
        found = arch_of(family.words(Keys(read, said)))
    except Refused as error:
        return Written(family, said, [error.said])
    except Exception as error:  # transformers' own validation
        return Written(family, said, [f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"])
    return Written(family, said, [f"`{k}={show_value(v)}`" for k, v, _ in differences(arch, found)])


def _copied(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers changes dicts that it is given."""
    return {k: dict(v) if isinstance(v, dict) else v for k, v in config.items()}


def choose(arch: Arch, vocab: int, longest: int, wanted: str | None = None) -> Written:
    """The first family that says all of it, or the one that is wanted. Raises ConfigError naming what is lost."""
    if wanted is not None and wanted not in FAMILIES:
        raise ConfigError(f"`--family` is {wanted}", f"use one of {', '.join(FAMILIES)}")
    tried = [written(arch, f, vocab, longest) for f in _asked(wanted)]
    whole = next((w for w in tried if not w.lost), None)
    if whole is not None:
        return whole
    nearest = min(tried, key=lambda w: len(w.lost))
    of = f"`--family {wanted}`" if wanted else f"the nearest family, {nearest.family.model_type},"
    message = f"{of} can't express {listed(nearest.lost, 12)}"
    hint = "leave --family out: another one may fit" if wanted else "transformers has no class for it that lmlab knows"
    raise ConfigError(message, hint)


def _asked(wanted: str | None) -> Sequence[Family]:
    return list(FAMILIES.values()) if wanted is None else [FAMILIES[wanted]]
