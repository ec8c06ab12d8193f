"""`lmlab generate`: continue prompts with a run's model, token by token, over a cache of keys and values.

stdout carries the text (streamed for one prompt) or JSON; what it cost goes to stderr.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

if TYPE_CHECKING:
    from lmlab.cli.open_run import Opened
    from lmlab.cli.progress import Screen
    from lmlab.config.tree import Experiment
    from lmlab.data.tokenizer import Tokenizer
    from lmlab.generate.decode import Generated
    from lmlab.generate.sampling import Sampling
    from lmlab.model.cache import CacheKind
    from lmlab.model.transformer import Transformer

MAY_SET = ("kernels", "device", "train.precision", "paths")  # each batch has another length: never compiled
TEMPERATURE = 0.8


def register(app: typer.Typer) -> None:
    app.command("generate")(generate)


def generate(
    words: Annotated[
        Optional[list[str]],
        typer.Argument(metavar="RUN|KEY=VALUE", help="a run; keys: kernels, device, train.precision"),
    ] = None,
    prompt: Annotated[Optional[str], typer.Option(metavar="TEXT", help="what to continue")] = None,
    prompts: Annotated[
        Optional[str],
        typer.Option(metavar="FILE", help="a prompt a line, or .jsonl with the field prompt: one batch"),
    ] = None,
    max_new: Annotated[int, typer.Option(min=1, max=10_000_000, metavar="N", help="tokens at most, each prompt")] = 128,
    temperature: Annotated[Optional[float], typer.Option(help="0 is greedy; default 0.8")] = None,
    top_k: Annotated[Optional[int], typer.Option(min=1, metavar="K", help="of the K likeliest tokens")] = None,
    top_p: Annotated[Optional[float], typer.Option(metavar="P", help="of the likeliest that reach P together")] = None,
    seed: Annotated[Optional[int], typer.Option(min=0, help="of the random numbers; default 0")] = None,
    samples: Annotated[int, typer.Option(min=1, max=4096, metavar="N", help="continuations of each prompt")] = 1,
    cache: Annotated[
        str, typer.Option(metavar="KIND", help="full, int8, window:N, sink:N+N, or none: all again each time")
    ] = "full",
    allow_noncausal: Annotated[bool, typer.Option("--allow-noncausal", help="also what sees later tokens")] = False,
    config_dir: Annotated[Optional[str], typer.Option(metavar="DIR", help="a conf/ folder of your own")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a continuation on stdout")] = False,
) -> None:
    """Continue a prompt with a run's last checkpoint. Without RUN: the newest finished one."""
    from lmlab.cli.progress import Screen, say
    from lmlab.cli.prompts import read_prompts
    from lmlab.errors import ConfigError, raise_all
    from lmlab.generate.cache_kinds import cache_kind, idle
    from lmlab.generate.text import continuation
    from lmlab.opened import IMPORTED, ends_of
    from lmlab.runs.files import to_json

    texts = read_prompts(prompt, prompts)
    sampling = _sampling(temperature, top_k, top_p, seed, samples)
    kind = None if cache == "none" else cache_kind(cache, also="none (all again each time), ")
    screen = Screen()
    opened = _opened(words or [], config_dir, screen)
    exp, tokenizer, model = opened.exp, opened.tokenizer, opened.model()
    imported, where = opened.run.state() == IMPORTED, str(opened.run.path)
    if model.noncausal() and not allow_noncausal:
        raise ConfigError(f"this model is not causal: {model.noncausal()}", "--allow-noncausal generates all the same")
    # a prompt is begun as documents are; one of an import whose tokenizer has no start token is left as it is, as
    # transformers does
    starts = [tokenizer.encode_prompt(t) if imported else [*tokenizer.opening, *tokenizer.encode(t)] for t in texts]
    if not all(starts):
        raise ConfigError("a prompt is empty, and this model knows no start of a text", 'give ids: --prompt "3 17 5"')
    batch, longest = len(texts) * samples, max(len(ids) for ids in starts)
    _refuse_too_long(model, exp, longest + max_new, max_new, batch, kind, screen)
    if kind is not None:
        n = longest + max_new - 1  # the last one is never computed with
        raise_all(idle(kind, exp.arch, n, f"prompt and --max-new give it at most {n:,} tokens"))
    if said := _unlike(model, kind):
        screen.note(said)
    streamed = batch == 1 and not as_json
    how = {"max_new": max_new, "samples": samples, "kind": kind, "end": ends_of(opened.run, tokenizer)}
    found = _run(model, tokenizer, texts[0], starts, sampling, streamed=streamed, **how)
    for n, ids in enumerate([] if streamed else found.tokens):
        text, new = texts[n // samples], continuation(tokenizer, starts[n // samples], ids)
        if as_json:
            ending = "end of text" if found.ended[n] else "length"
            own = {"prompt": text, "text": new, "tokens": len(ids), "ended": ending}
            say(to_json({"run": where, "sample": n % samples, **own, **_costs(found, cache)}))
        else:
            say(("" if n == 0 else "\n") + f"[{n + 1}] {text}{new}")
    screen.note(_cost_line(found, cache))


def _sampling(
    temperature: float | None, top_k: int | None, top_p: float | None, seed: int | None, samples: int
) -> Sampling:
    from lmlab.errors import ConfigError
    from lmlab.generate.sampling import Sampling

    value = TEMPERATURE if temperature is None else temperature
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"`--temperature` is {value:g}", "use 0 (greedy) or more")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"`--top-p` is {top_p:g}", "use more than 0 and at most 1")
    only_drawing = {"--top-k": top_k, "--top-p": top_p, "--seed": seed}
    unused = [name for name, given in only_drawing.items() if given is not None]
    if value == 0 and unused:
        raise ConfigError(f"`{unused[0]}` has nothing to act on at --temperature 0", f"leave {unused[0]} out")
    if value == 0 and samples > 1:
        raise ConfigError(f"`--samples` is {samples} at --temperature 0, where all are the same", "leave --samples out")
    return Sampling(value, top_k, top_p, seed or 0)


def _opened(words: list[str], config_dir: str | None, screen: Screen) -> Opened:
    """The one run that is named or the newest; fp32 on a CPU unless train.precision is typed: a batch is then its rows
    alone, token by token, and bf16 is not faster there."""
    from lmlab.cli.open_run import open_run, refuse_keys
    from lmlab.errors import ConfigError
    from lmlab.opened import runs_root
    from lmlab.runs import find

    names, keys = [w for w in words if "=" not in w], [w for w in words if "=" in w]
    refuse_keys(keys, MAY_SET, "generation")
    if len(names) > 1:
        raise ConfigError(f"two runs are named: {names[0]} and {names[1]}", "name one")
    found = find.resolve(names[0] if names else None, runs_root(keys))
    if not names:
        screen.note(f"newest {found.run.state()} run: {found.run.path}")
    return open_run(found, keys, config_dir, screen, cpu_precision="fp32")


def _refuse_too_long(
    model: Transformer, exp: Experiment, n: int, max_new: int, batch: int, kind: CacheKind | None, screen: Screen
) -> None:
    """Raises ConfigError where positions or memory end; notes what lies past the trained length."""
    from lmlab.cost.cache import cache_bytes
    from lmlab.errors import ConfigError
    from lmlab.runs.machine import gib
    from lmlab.train.memory import free_bytes

    rows = getattr(exp.pos, "max_len", None) or exp.model.seq_len
    if exp.pos.name == "learned" and n > rows:
        raise ConfigError(
            f"prompt and --max-new are {n:,} tokens, `pos=learned` has {rows:,} positions",
            f"use --max-new {max_new - (n - rows)}" if n - rows < max_new else "use a shorter prompt",
        )
    if n > exp.model.seq_len:
        screen.note(f"up to {n:,} tokens: the model was trained on rows of {exp.model.seq_len:,}")
    weight: Any = model.embed.weight
    needed = 0 if kind is None else cache_bytes(exp.arch, batch, n, weight.element_size(), kind)
    if needed > (free := free_bytes(weight.device)):
        raise ConfigError(
            f"the cache of {batch:,} × {n:,} tokens takes {gib(needed)}, {gib(free)} are free",
            "use a smaller --max-new or --samples, fewer prompts, or --cache int8 or window:N",
        )


def _unlike(model: Transformer, kind: CacheKind | None) -> str | None:
    """What other ways to compute the text may change in it; None where they change nothing."""
    from lmlab.cli.decoding import unlike_whole_rows

    other = "a cache" if kind is None else "--cache none"
    return unlike_whole_rows(model, f"with {other} the text may be another", ", and so with other prompts beside it")


def _run(
    model: Transformer,
    tokenizer: Tokenizer,
    text: str,
    starts: list[list[int]],
    sampling: Sampling,
    *,
    streamed: bool,
    **how: Any,
) -> Generated:
    """Generate; `streamed`: write the one row to stdout as it grows."""
    from lmlab.generate.decode import generate as decode
    from lmlab.generate.sample import unwritable
    from lmlab.generate.text import TextStream

    stream = TextStream(tokenizer, starts[0])

    def write(ids: list[int]) -> None:
        if ids[0] >= 0:
            print(stream.feed(ids[0]), end="", flush=True)

    if streamed:
        print(text, end="", flush=True)
    found = decode(
        model,
        starts,
        sampling=sampling,
        forbidden_V=unwritable(model, tokenizer),
        on_tokens=write if streamed else None,
        **how,
    )
    if streamed:
        print(stream.end(), flush=True)
    return found


def _costs(found: Generated, cache: str) -> dict[str, Any]:
    return {
        "cache": cache,
        "cache_bytes": found.cache_bytes,
        "decode_path": found.decode_path,
        "prefill_tokens_per_s": found.prefill_tokens_per_s,
        "decode_tokens_per_s": found.decode_tokens_per_s if found.decode_tokens else None,
    }


def _cost_line(found: Generated, cache: str) -> str:
    from lmlab.runs.machine import gib

    parts = [f"prefill {found.prefill_tokens:,} tokens, {found.prefill_tokens_per_s:,.0f} tokens/s"]
    if found.decode_tokens:
        parts.append(
            f"decode {found.decode_tokens:,} tokens, {found.decode_tokens_per_s:,.0f} tokens/s, {found.decode_path}"
        )
    parts.append(f"cache {cache}" + (f", {gib(found.cache_bytes)}" if found.cache_bytes else ""))
    return " · ".join(parts)
