"""`lmlab eval --long-context`: one checkpoint at lengths below and past the trained one, with other scalings.

Tables on stdout; all of it in the run's eval/*-long-context.json, with a figure beside it.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmlab.cli.open_run import Opened
    from lmlab.cli.progress import Screen
    from lmlab.data.source import Source
    from lmlab.data.tasks.base import Task
    from lmlab.data.tokens import TokenFile
    from lmlab.eval.long.suite import Asked
    from lmlab.model.transformer import Transformer
    from lmlab.runs.find import Found

USABLE_FRAC = 0.8
DECODED, ROUNDS = 16, 3  # tokens, to measure the rate of decoding; the median of so many, after one to warm up


@dataclass(frozen=True)
class LongFlags:
    """What was typed; None = the default."""

    lengths: tuple[int, ...] | None
    scalings: tuple[str, ...] | None
    factors: tuple[float, ...] | None
    tasks: tuple[str, ...] | None

    @classmethod
    def of(
        cls,
        wanted: bool,
        *,
        lengths: str | None,
        scalings: str | None,
        factors: str | None,
        tasks: str | None,
        others: dict[str, bool],
    ) -> LongFlags | None:
        """None without --long-context. Raises ConfigError for flags that would have nothing to act on, and for values
        that can't be."""
        from lmlab.errors import ConfigError

        mine = {"--lengths": lengths, "--rope-scaling": scalings, "--factors": factors}
        if not wanted:
            for flag, value in mine.items():
                if value is not None:
                    raise ConfigError(f"`{flag}` acts on --long-context, which is not given", "give --long-context")
            return None
        for flag, given in others.items():
            if given:
                raise ConfigError(f"`{flag}` and `--long-context` are two evaluations", "give them one after the other")
        return cls(_lengths(lengths), _scalings(scalings), _factors(factors), _tasks(tasks))


def _lengths(text: str | None) -> tuple[int, ...] | None:
    from lmlab.errors import ConfigError
    from lmlab.eval.long.suite import LEAST_LENGTH

    if text is None:
        return None
    found = []
    for word in text.split(","):
        if not word.strip().isdecimal() or int(word) < LEAST_LENGTH:
            hint = "whole numbers with commas between: --lengths 128,256,1024"
            raise ConfigError(
                f"`--lengths` {word.strip() or text}: not a number of tokens from {LEAST_LENGTH} on", hint
            )
        found.append(int(word))
    if len(set(found)) < len(found):
        raise ConfigError(f"`--lengths` {text} names a length twice", "name each once")
    return tuple(sorted(found))


def _scalings(text: str | None) -> tuple[str, ...] | None:
    from lmlab.errors import ConfigError
    from lmlab.eval.long.scaled import OWN
    from lmlab.registry import OPTIONS

    if text is None:
        return None
    known, found = (OWN, *OPTIONS["rope_scaling"]), [word.strip() for word in text.split(",")]
    for name in found:
        if name not in known:
            raise ConfigError(
                f"`--rope-scaling` {name or text} is none of the scalings", f"choose from {', '.join(known)}"
            )
    if len(set(found)) < len(found):
        raise ConfigError(f"`--rope-scaling` {text} names a scaling twice", "name each once")
    return tuple(found)


def _tasks(text: str | None) -> tuple[str, ...] | None:
    from lmlab.data.spec import TaskSpec
    from lmlab.errors import ConfigError
    from lmlab.registry import OPTIONS

    if text is None:
        return None
    known = [name for name, spec in OPTIONS["data"].items() if issubclass(spec, TaskSpec)]
    found = [word.strip() for word in text.split(",")]
    for name in found:
        if name.startswith("lm_eval:"):
            raise ConfigError(
                f"`--tasks` {name} and `--long-context` are two evaluations", "give them one after the other"
            )
        if name not in known:
            raise ConfigError(f"`--tasks` {name or text} is no task", f"choose from {', '.join(known)}")
    if len(set(found)) < len(found):
        raise ConfigError(f"`--tasks` {text} names a task twice", "name each once")
    return tuple(found)


def _factors(text: str | None) -> tuple[float, ...] | None:
    from lmlab.errors import ConfigError

    if text is None:
        return None
    found = []
    for word in text.split(","):
        try:
            found.append(float(word))
        except ValueError:
            raise ConfigError(f"`--factors` {word.strip() or text} is no number", "write --factors 2,4") from None
        if not 1 <= found[-1] <= 1e6:
            raise ConfigError(
                f"`--factors` {word.strip()}: a factor is at least 1", "1 = not scaled, 4 = four times as far"
            )
    if len(set(found)) < len(found):
        raise ConfigError(f"`--factors` {text} names a factor twice", "name each once")
    return tuple(found)


# ---------------------------------------------------------------- what is asked of this run


def tasks_of(flags: LongFlags, source: Source, own: Opened) -> dict[str, Task]:
    """Those that were typed, else those the run was trained on, by name. Raises ConfigError, DataError for what can't
    be asked of this run."""
    from lmlab.errors import ConfigError
    from lmlab.registry import OPTIONS, make

    trained = {name or one.spec.name: one for name, one in source.tasks.items()}
    if flags.tasks is None:
        return {name: one.task for name, one in trained.items()}
    found: dict[str, Task] = {}
    for name in flags.tasks:
        spec: Any = trained[name].spec if name in trained else OPTIONS["data"][name]()
        if name not in trained and not spec.text:
            raise ConfigError(
                f"`--tasks` {name} has ids of its own, and {own.run.name} was not trained on it",
                f"ask a run of data={name}; tasks in text can be asked of any run of text",
            )
        found[name] = make(spec, own.tokenizer)
    return found


def asked_of(found: Found, own: Opened, model: Transformer, flags: LongFlags, tokens: TokenFile | None) -> Asked:
    """Raises Errors for what was typed and can't be measured; defaults that can't are left out, with why. tokens: of
    the text, None where the run was trained on none."""
    from lmlab.errors import ConfigError, raise_all
    from lmlab.eval.long.scaled import NAMES, NONE, OWN
    from lmlab.eval.long.suite import Asked, default_lengths

    trained, original = lengths_of(found, own)
    turns = hasattr(model.pos, "scaling")
    errors = []
    if flags.scalings is not None and not turns and not set(flags.scalings) <= {OWN, NONE}:
        errors.append(
            ConfigError(
                f"`--rope-scaling` {','.join(flags.scalings)}: `pos={own.exp.pos.name}` has no rotations to scale",
                "leave --rope-scaling out: the model is evaluated as it was trained",
            )
        )
    scaled_already = own.exp.rope_scaling.name != "none"
    usual = ((OWN,) if scaled_already else ()) + NAMES if turns else (NONE,)
    scalings = flags.scalings or usual
    if flags.factors is not None and set(scalings) <= {OWN, NONE}:
        errors.append(ConfigError("`--factors` acts on scalings, and none is asked for", "name one: --rope-scaling pi"))
    wanted, left_out = flags.lengths or default_lengths(trained), []
    if trained not in wanted and max(wanted) > trained:  # a figure past it says nothing alone
        wanted = tuple(sorted({*wanted, trained}))
    for length in wanted:
        why = cant(model, own, length, tokens)
        if why and length in (flags.lengths or ()):
            errors.append(ConfigError(f"`--lengths` {length}: {why[0]}", why[1]))
        elif why:
            left_out.append({"length": length, "why": why[0]})
    gone = {one["length"] for one in left_out}
    raise_all(errors)
    lengths = tuple(length for length in wanted if length not in gone)
    if not lengths:
        raise ConfigError(f"no length can be measured: {left_out[0]['why']}", "give --lengths")
    return Asked(trained, original, lengths, scalings, flags.factors, tuple(left_out))


def lengths_of(found: Found, own: Opened) -> tuple[int, int]:
    """Tokens of the rows of training, and of those that plain rotations were trained at: fewer where a scaling that
    keeps no original length brought the longer rows near them."""
    from lmlab.inherit import trained_length
    from lmlab.model.spec import LengthScalingSpec, ScalingSpec

    original, scaling = trained_length(own.exp, found.run), own.exp.rope_scaling
    trained = original if found.run.manifest().get("state") == "imported" else own.exp.model.seq_len
    if isinstance(scaling, ScalingSpec) and not isinstance(scaling, LengthScalingSpec):
        original = max(2, round(trained / scaling.factor))
    return trained, original


def cant(model: Transformer, own: Opened, length: int, tokens: TokenFile | None) -> tuple[str, str] | None:
    """Why no window of this length can be read, and what to do about it."""
    from lmlab.cost.cache import cache_bytes
    from lmlab.eval.long.memory import window_bytes
    from lmlab.runs.machine import gib
    from lmlab.train.memory import free_bytes

    if tokens is not None and length >= tokens.n_tokens:
        most = tokens.n_tokens - 1
        return f"the split has {tokens.n_tokens:,} tokens", f"--lengths of at most {most}, or data=… with more text"
    free = USABLE_FRAC * free_bytes(own.device)
    needed = window_bytes(model, length, cache_bytes(model.arch, 1, length, model.embed.weight.element_size()))
    if needed > free:
        return f"a window needs about {gib(needed)}, and {gib(free)} may be used", "shorter --lengths, or more memory"
    return None


# ---------------------------------------------------------------- running it


def evaluate_long(
    found: Found, own: Opened, source: Source, split: str, flags: LongFlags, screen: Screen
) -> dict[str, Any]:
    """`long_context` of the report, measured, and why its losses are not causal."""
    import numpy as np

    from lmlab.eval.long.suite import Suite
    from lmlab.eval.long.textual import TextPart

    model, tasks = own.model(), tasks_of(flags, source, own)
    tokens: TokenFile | None = getattr(source.corpora[0], split) if source.corpora else None
    asked = asked_of(found, own, model, flags, tokens)
    for one in asked.left_out:
        screen.note(f"left out: {one['length']:,} tokens: {one['why']}")
    text = None
    if tokens is not None:
        text = TextPart.make(tokens, own.tokenizer, longest=max(asked.lengths), trained=asked.trained)
        if text.unspelled:
            screen.note(f"left out: {text.unspelled}")
    ids = np.zeros(1, dtype=np.int64) if text is None else text.found.units[0].ids
    with screen.preparing() as progress:
        report = Suite(model, asked, text, tasks, split).run(progress)
        report["memory"] = [memory_of(model, ids, length, progress) for length in asked.lengths]
    report["trained_scaling"] = _said(own.exp.rope_scaling)
    return {"noncausal": model.noncausal() or None, "long_context": report}


def _said(scaling: Any) -> str:
    return scaling.name if scaling.name == "none" else f"{scaling.name} {scaling.factor:g}"


def memory_of(model: Transformer, ids: Any, length: int, say: Any) -> dict[str, Any]:
    """The cache of one row by the formula and as measured, and tokens a second by it."""
    import numpy as np

    from lmlab.cost.cache import cache_bytes
    from lmlab.errors import LmlabError
    from lmlab.generate.decode import generate

    say(f"{length:,} tokens, read and written by the cache", None)
    new = min(DECODED, length // 2)
    prompt = np.resize(ids, length - new).tolist()
    try:
        found = [generate(model, [prompt], max_new=new) for _ in range(ROUNDS + 1)][1:]
    except LmlabError as error:
        return {"length": length, "not_available": error.message}
    return {
        "length": length,
        "not_available": None,
        "kv_bytes": cache_bytes(model.arch, 1, length, model.embed.weight.element_size()),
        "kv_bytes_measured": found[-1].cache_bytes,
        "prefill_tokens_per_s": statistics.median(one.prefill_tokens_per_s for one in found),
        "decode_tokens_per_s": statistics.median(one.decode_tokens_per_s for one in found),
    }
