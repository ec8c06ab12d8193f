"""`lmlab eval --cache full,int8,window:64`: what each cache costs in bits per byte, memory and decoding speed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from lmlab.config.tree import Experiment
    from lmlab.data.source import Split
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
    tokens: Split,
    exp: Experiment,
    loss_with: Callable[[CacheKind], LossSum],
    *,
    start: int,
) -> list[dict[str, Any]]:
    """For each kind its loss, the bytes that a row of model.seq_len tokens keeps, and the rate of decoding the second
    half of such a row."""
    from lmlab.eval.caches import decode_rates

    T = min(exp.model.seq_len, tokens.n_targets + 1)
    half = max(1, T // 2)
    first = next(iter(tokens.batches(rows=1, seq_len=exp.model.seq_len, packing=exp.data.packing, start=start)))
    prompt = first.tokens_BT[0, :half].tolist()
    rates = decode_rates(model, prompt, max(2, T - half), kinds)
    found = []
    for kind, (rate, n_bytes) in zip(kinds, rates, strict=True):
        loss = loss_with(kind)
        bits = loss.bits_per_byte
        own = {"loss": loss.nats_per_token, "bits_per_byte": bits, "bytes_per_row": n_bytes}
        found.append({"cache": str(kind), **own, "decode_tokens_per_s": rate})
    return found


def decoded(
    model: Transformer, tokens: Split, exp: Experiment, *, start: int, token_bytes: torch.Tensor
) -> dict[str, Any]:
    """Of a model that says that decoding is not the same as the whole row: how much the first rows' loss differs when
    their tokens go in one by one, by a cache that drops nothing, whatever else each kind costs. Empty for others."""
    from lmlab.eval.caches import DECODED_TOKENS, token_by_token
    from lmlab.eval.loss import evaluate, total
    from lmlab.generate.cache_kinds import cache_kind

    why = model.known_failures().get("cached = full")
    if why is None:
        return {}
    T = exp.model.seq_len
    rows = max(1, min(DECODED_TOKENS, tokens.n_targets) // T)
    cut = dict(rows=rows, seq_len=T, packing=exp.data.packing, start=start, max_tokens=rows * T)
    batches = list(tokens.batches(**cut))  # type: ignore[arg-type]
    whole = total(evaluate(model, batches, token_bytes))
    one_by_one = token_by_token(model, batches, token_bytes, kind=cache_kind("full"))
    told = {"tokens": whole.tokens, "why": why}
    for name, found in (("whole", whole), ("token_by_token", one_by_one)):
        told[name] = {"loss": found.nats_per_token, "bits_per_byte": found.bits_per_byte}
    return {"decoded": told}


def print_caches(report: dict[str, Any]) -> None:
    """A row a kind; differences are to the evaluation without a cache above. Rows go in whole, which is said where
    decoding differs from it."""
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
    fed = ""
    if told := report.get("decoded"):
        fed = ", fed whole"
        whole, alone = told["whole"][key], told["token_by_token"][key]
        delta = f"{alone:.4f} {unit} token by token, {whole:.4f} whole ({alone - whole:+.4f})"
        say(f"decoding is not the whole row: {delta}, on the first {told['tokens']:,} tokens: {told['why']}")
    say(f"of rows of {report['seq_len']:,} tokens{fed}; decode: one row, {report['precision']} on {report['device']}")
