"""`lmlab eval --cache full,int8,window:64`: what each cache costs in bits per byte, memory and decoding speed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmlab.config.tree import Experiment
    from lmlab.data.tokens import TokenFile
    from lmlab.eval.loss import LossSum
    from lmlab.model.cache import CacheKind
    from lmlab.model.transformer import Transformer


def read_kinds(text: str, exp: Experiment) -> list[CacheKind]:
    """The kinds that were typed, separated by commas. Raises Errors, with all that is wrong: unknown ones, such that
    keep all of a row, documents packed into rows."""
    from lmlab.errors import ConfigError, LmlabError, raise_all
    from lmlab.generate.cache_kinds import cache_kind, idle

    kinds, errors, T = [], list[LmlabError](), exp.model.seq_len
    for word in text.split(","):
        try:
            kinds.append(cache_kind(word.strip()))
            errors += idle(kinds[-1], exp.arch, T, f"rows of {T} tokens are evaluated")
        except LmlabError as error:
            errors.append(error)
    if exp.data.packing == "documents":
        errors.append(
            ConfigError(
                "`--cache` with data.packing=documents: a cached row has no documents", "use data.packing=stream"
            )
        )
    if len(set(kinds)) < len(kinds):
        errors.append(ConfigError(f"`--cache` {text} names a kind twice", "name each once"))
    raise_all(errors)
    return kinds


def compare(
    kinds: list[CacheKind],
    model: Transformer,
    tokens: TokenFile,
    exp: Experiment,
    loss_with: Callable[[CacheKind], LossSum],
) -> list[dict[str, Any]]:
    """For each kind its loss, the bytes that a row of model.seq_len tokens keeps, and the rate of decoding the second
    half of such a row."""
    from lmlab.eval.caches import decode_rates

    T = min(exp.model.seq_len, tokens.n_tokens)
    half = max(1, T // 2)
    prompt = tokens.tokens[:half].tolist()
    rates = decode_rates(model, prompt, max(2, T - half), kinds)
    found = []
    for kind, (rate, n_bytes) in zip(kinds, rates, strict=True):
        loss = loss_with(kind)
        bits = loss.bits_per_byte
        own = {"loss": loss.nats_per_token, "bits_per_byte": bits, "bytes_per_row": n_bytes}
        found.append({"cache": str(kind), **own, "decode_tokens_per_s": rate})
    return found


def print_caches(report: dict[str, Any]) -> None:
    """A row a kind; differences are to the row's whole evaluation above."""
    from lmlab.cli.progress import say
    from lmlab.cli.tables import print_table
    from lmlab.runs.machine import gib

    unit, key = ("bits/byte", "bits_per_byte") if report["bits_per_byte"] is not None else ("nats/token", "loss")
    rows = []
    for one in report["caches"]:
        delta = f"{one[key] - report[key]:+.4f}"
        figures = [f"{one[key]:.4f}", delta, gib(one["bytes_per_row"]), f"{one['decode_tokens_per_s']:,.0f}"]
        rows.append([one["cache"], *figures])
    print_table(["cache", unit, "Δ", "bytes a row", "decode tokens/s"], rows)
    say(f"of rows of {report['seq_len']:,} tokens; decode: one row, {report['precision']} on {report['device']}")
