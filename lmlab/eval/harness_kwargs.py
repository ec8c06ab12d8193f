"""What a task of lm_eval asks of generation (`generation_kwargs`), in our words; what we can't do is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lmlab.errors import ConfigError
from lmlab.generate.sampling import Sampling

MAX_NEW = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # lm_eval's order
KNOWN = ("until", *MAX_NEW, "do_sample", "temperature", "top_k", "top_p")
DEFAULT_MAX_NEW = 256  # lm_eval's own
COPY_BITS = 32


@dataclass(frozen=True)
class Asked:
    """Stop strings, tokens at most, and how the next token is chosen."""

    until: tuple[str, ...]
    max_new: int
    sampling: Sampling

    def seeded(self, seed: int, copy: int) -> Sampling:
        """`copy`: how often the same request stood before; each has random numbers of its own."""
        return replace(self.sampling, seed=seed + (copy << COPY_BITS))


def asked(kwargs: Mapping[str, Any], max_length: int) -> Asked:
    """generation_kwargs read. Raises ConfigError for one that is unknown, has no effect here or does not fit."""
    for name in kwargs:
        if name not in KNOWN:
            raise _wrong(name, kwargs, "lmlab's generation has no such setting", f"it has {', '.join(KNOWN)}")
    until = kwargs.get("until") or []
    until = [until] if isinstance(until, str) else until
    if not isinstance(until, (list, tuple)) or not all(isinstance(stop, str) for stop in until):
        raise _wrong("until", kwargs, "it is no list of texts", "write until: ['…']")
    return Asked(tuple(stop for stop in until if stop), _max_new(kwargs, max_length), _sampling(kwargs))


def cut(text: str, until: Sequence[str]) -> str:
    """The text before the first stop string in it."""
    return text[: min((text.find(stop) for stop in until if stop in text), default=len(text))]


def _max_new(kwargs: Mapping[str, Any], max_length: int) -> int:
    names = [name for name in MAX_NEW if kwargs.get(name) is not None]
    if len({kwargs[name] for name in names}) > 1:
        said = ", ".join(f"{name} {kwargs[name]}" for name in names)
        raise ConfigError(f"generation_kwargs say {said}", "leave one of them")
    name = names[0] if names else MAX_NEW[0]
    n = kwargs[name] if names else DEFAULT_MAX_NEW
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise _wrong(name, kwargs, "it is no number of tokens", "use 1 or more")
    if n >= max_length:
        raise ConfigError(
            f"generation_kwargs.{name} is {n:,}{'' if names else ' by default'}, "
            f"the model's rows have {max_length:,} tokens",
            "set a smaller max_gen_toks in a task file of your own: --tasks lm_eval:my_task.yaml",
        )
    return n


def _sampling(kwargs: Mapping[str, Any]) -> Sampling:
    """As lm_eval has it: do_sample false is greedy, whatever the temperature; unsaid, the temperature decides."""
    do_sample = kwargs.get("do_sample")
    if do_sample not in (None, True, False):
        raise _wrong("do_sample", kwargs, "it is neither true nor false", "use true or false")
    temperature, top_p = _number("temperature", kwargs, 0.0), _number("top_p", kwargs, 1.0)
    top_k = kwargs.get("top_k")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise _wrong("temperature", kwargs, "it is below 0", "use 0 (greedy) or more")
    if not 0 < top_p <= 1:
        raise _wrong("top_p", kwargs, "it is no share", "use more than 0 and at most 1")
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 0):
        raise _wrong("top_k", kwargs, "it is no number of tokens", "use 1 or more, or 0 for all")
    if do_sample and temperature == 0:
        raise ConfigError(
            "generation_kwargs say do_sample true at temperature 0", "set temperature, or do_sample: false"
        )
    if do_sample is False or temperature == 0:
        return Sampling()
    return Sampling(temperature, top_k or None, None if top_p == 1 else top_p)


def _number(name: str, kwargs: Mapping[str, Any], default: float) -> float:
    value = kwargs.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong(name, kwargs, "it is no number", "use a number")
    return float(value)


def _wrong(name: str, kwargs: Mapping[str, Any], why: str, hint: str) -> ConfigError:
    return ConfigError(f"generation_kwargs.{name} is {kwargs[name]!r}: {why}", hint)
