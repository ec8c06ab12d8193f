"""Losses of a real model: the same for any batch, one target once, nothing carried over between scalings or lengths."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from lmlab.config.load import load
from lmlab.data.spec import Byte
from lmlab.data.tokenizer import byte_tokenizer
from lmlab.errors import ConfigError, DataError
from lmlab.eval.long.nats import hidden, square, token_nats
from lmlab.eval.long.recall import Needle, copies, needles
from lmlab.eval.long.scaled import NAMES, OWN, Choice, scaled
from lmlab.eval.long.suite import Asked, default_lengths
from lmlab.eval.long.text import context_gain, text_loss
from lmlab.eval.long.windows import DOCUMENTS, TokenSet, Unit
from lmlab.kernels.resolve import resolve
from lmlab.model.transformer import Transformer, build

SMALL = ("model=nano", "model.n_layers=2", "model.d_model=64", "model.n_heads=4", "model.seq_len=32")


def made(*words: str, dtype: torch.dtype = torch.float64, seed: int = 0, sharp: float = 4.0) -> Transformer:
    """A small model whose attention is peaked, so that positions matter."""
    exp = load([*SMALL, *words]).experiment
    device = torch.device("cpu")
    model = build(exp.arch, 60, resolve(exp.kernels, device, dtype), seed=seed, device=device, dtype=dtype)
    with torch.no_grad():
        for p in model.parameters():
            p *= sharp if p.ndim == 2 else 1.0
    return model.eval()


def texts(lengths: tuple[int, ...] = (129, 129, 65), seed: int = 0) -> TokenSet:
    rng = np.random.default_rng(seed)
    return TokenSet(DOCUMENTS, [Unit(i, rng.integers(1, 60, n)) for i, n in enumerate(lengths)])


def nothing(found: TokenSet) -> list[np.ndarray]:
    return [np.zeros(u.n_targets, dtype=bool) for u in found.units]


# ---------------------------------------------------------------- nats of tokens


def test_nats_are_those_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = made(), torch.randint(60, (2, 41))
    logits = model(ids[:, :-1], torch.arange(40).expand(2, 40)).logits_BTV
    wanted = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    monkeypatch.setattr("lmlab.eval.long.nats.LOGITS", 700)  # 11 tokens at a time
    nats, hits = token_nats(model, ids[:, :-1], ids[:, 1:])
    torch.testing.assert_close(nats, wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(hits, logits.argmax(-1) == ids[:, 1:])
    loss = model(ids[:, :-1], torch.arange(40).expand(2, 40), targets_BT=ids[:, 1:]).loss.detach()
    assert float(nats.sum()) == pytest.approx(float(loss), rel=1e-10)


@pytest.mark.parametrize("pos", ["rope", "alibi", "t5", "rope rope_scaling=dynamic_ntk rope_scaling.original_len=8"])
def test_chunks_by_a_cache_equal_the_whole_row(pos: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = made(*f"pos={pos}".split(), "attn.backend=dense"), torch.randint(60, (2, 50))
    whole = model.hidden(ids, torch.arange(50).expand(2, 50))[0]
    monkeypatch.setattr("lmlab.eval.long.nats.DENSE_MOST", 16)
    monkeypatch.setattr("lmlab.eval.long.nats.CHUNK", 7)
    assert square(model, 50)
    torch.testing.assert_close(hidden(model, ids), whole, rtol=1e-10, atol=1e-10)


def test_no_square_where_the_backend_needs_none() -> None:
    assert not square(made(dtype=torch.float32), 4096)
    assert not square(made("pos=alibi", dtype=torch.float32), 4096)


# ---------------------------------------------------------------- losses


def test_any_batch_gives_the_same_figures() -> None:
    model, found = made(), texts()
    how: dict[str, Any] = dict(length=32, stride=16, trained=16)
    runs = [text_loss(model, found, nothing(found), batch_tokens=b, **how) for b in (1, 100, 10**6)]
    for run in runs[1:]:
        assert run.apart.mean == pytest.approx(runs[0].apart.mean, rel=1e-12)
        assert run.sliding.nats_U == pytest.approx(runs[0].sliding.nats_U, rel=1e-12)
        assert run.apart.tokens == run.sliding.tokens == found.n_targets


def test_a_stride_of_the_window_is_no_sliding() -> None:
    model, found = made(), texts((100,))
    loss = text_loss(model, found, nothing(found), length=32, stride=32, trained=16)
    assert loss.sliding.nats_U == pytest.approx(loss.apart.nats_U, rel=1e-12)


@pytest.mark.parametrize("stride", [1, 8, 31, 32])
def test_sliding_against_one_window_per_target(stride: int) -> None:
    """Every target by itself, from the window that the stride gives it."""
    model, found = made(), texts((100,))
    ids = torch.from_numpy(found.units[0].ids)
    wanted = 0.0
    for t in range(99):
        k = 0 if t < 32 else math.ceil((t - 31) / stride)
        begin = k * stride
        logits = model(ids[None, begin : t + 1], torch.arange(t + 1 - begin)[None], last=1).logits_BTV[0, 0]
        wanted += float(-logits.log_softmax(-1)[ids[t + 1]])
    loss = text_loss(model, found, nothing(found), length=32, stride=stride, trained=16)
    assert loss.sliding.tokens == 99
    assert float(loss.sliding.nats_U.sum()) == pytest.approx(wanted, rel=1e-9)


def test_buckets_sum_to_the_loss() -> None:
    model, found = made(), texts()
    loss = text_loss(model, found, nothing(found), length=64, stride=32, trained=16)
    assert sum(b["nats"] for b in loss.positions.buckets()) == pytest.approx(loss.apart.nats_U.sum(), rel=1e-12)
    assert sum(b["tokens"] for b in loss.positions.buckets()) == loss.apart.tokens


def test_key_tokens_are_scored_sliding() -> None:
    model, found = made(), texts((65,))
    chosen = [np.arange(64) % 3 == 0]
    part = text_loss(model, found, chosen, length=16, stride=4, trained=16).keys
    rest = text_loss(model, found, [~chosen[0]], length=16, stride=4, trained=16)
    assert part.tokens == 22
    assert part.nats_U + rest.keys.nats_U == pytest.approx(rest.sliding.nats_U, rel=1e-12)


def test_context_gain_is_paired_by_document() -> None:
    model, found = made(), texts()
    short, long = (text_loss(model, found, nothing(found), length=n, stride=n, trained=16).sliding for n in (8, 32))
    gain, se = context_gain(short, long)
    assert gain == pytest.approx(short.mean - long.mean)
    assert se is not None
    assert se < math.hypot(short.se or 0, long.se or 0)
    assert context_gain(short, short) == (0.0, 0.0)


# ---------------------------------------------------------------- scalings of one checkpoint


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_factor_of_one_changes_no_bit(name: str) -> None:
    model, found = made(dtype=torch.float32), texts()
    how: dict[str, Any] = dict(length=64, stride=32, trained=32)
    plain = text_loss(model, found, nothing(found), **how)
    with scaled(model, Choice(name, 1.0), 32):
        same = text_loss(model, found, nothing(found), **how)
    assert same.apart.nats_U.tolist() == plain.apart.nats_U.tolist()
    assert same.sliding.nats_U.tolist() == plain.sliding.nats_U.tolist()


def test_dynamic_ntk_is_plain_up_to_the_original_length() -> None:
    model, found = made(dtype=torch.float32), texts()
    for length in (16, 32):
        plain = text_loss(model, found, nothing(found), length=length, stride=8, trained=32)
        with scaled(model, Choice("dynamic_ntk", 4.0), 32):
            same = text_loss(model, found, nothing(found), length=length, stride=8, trained=32)
        assert same.apart.nats_U.tolist() == plain.apart.nats_U.tolist()
        assert same.sliding.nats_U.tolist() == plain.sliding.nats_U.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_carried_over(name: str) -> None:
    """Longest first or shortest first, and after any other scaling: the same bits as a model made anew."""
    found = texts()

    def loss(model: Transformer, length: int) -> list[float]:
        with scaled(model, Choice(name, None if name == "none" else 4.0), 32):
            made = text_loss(model, found, nothing(found), length=length, stride=length, trained=32)
        return [float(x) for x in made.apart.nats_U]

    up, down, fresh = made(), made(), made()
    first = {length: loss(up, length) for length in (16, 64)}
    second = {length: loss(down, length) for length in (64, 16)}
    assert first == second
    with scaled(fresh, Choice("yarn", 8.0), 32):
        pass
    assert loss(fresh, 64) == first[64]


def test_scalings_equal_models_that_are_configured_so() -> None:
    for name in ("pi", "ntk", "dynamic_ntk", "yarn"):
        own = made(f"rope_scaling={name}", "rope_scaling.factor=4")
        ids = torch.randint(60, (1, 64))
        wanted = hidden(own, ids)
        with scaled(made(), Choice(name, 4.0), 32) as model:
            assert torch.equal(hidden(model, ids), wanted)


def test_each_scaling_acts_past_the_trained_length() -> None:
    model, ids, seen = made(), torch.randint(60, (1, 64)), []
    for name in NAMES:
        with scaled(model, Choice(name, None if name == "none" else 2.0), 32):
            seen.append(hidden(model, ids))
    for i, one in enumerate(seen):
        for other in seen[:i]:
            assert not torch.allclose(one, other)


def test_a_model_without_rotations_is_refused() -> None:
    with pytest.raises(ConfigError, match="no rotations"), scaled(made("pos=alibi"), Choice("pi", 2.0), 32):
        pass
    for name in (OWN, "none"):
        with scaled(made("pos=alibi"), Choice(name), 32):
            pass


@torch.no_grad()
def test_cached_equals_full_past_the_original_length() -> None:
    from lmlab.model.cache import FULL, Cache

    for name in NAMES:
        with scaled(made(), Choice(name, None if name == "none" else 4.0), 32) as model:
            ids, T = torch.randint(60, (1, 100)), 100
            whole = model.logits(hidden(model, ids))
            cache, length, got = Cache(model, FULL), torch.full((1, 1), T), []
            for t in range(T):
                at = slice(t, t + 1)
                got.append(model(ids[:, at], torch.tensor([[t]]), cache=cache, length_BT=length).logits_BTV)
            torch.testing.assert_close(torch.cat(got, 1), whole, rtol=1e-10, atol=1e-10)


# ---------------------------------------------------------------- recall


class Copier:
    """Stands for a model that has seen the row once: after a token it expects what followed it before."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def nats(self, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        B, T = tokens_BT.shape
        nats, hits = torch.full((B, T), math.log(self.vocab_size)), torch.zeros(B, T, dtype=torch.bool)
        for b in range(B):
            row = tokens_BT[b].tolist()
            for t in range(T):
                before = [u for u in range(1, t) if row[u - 1 : u + 1] == row[t - 1 : t + 1] and t > 1]
                if before and row[before[-1] + 1] == int(targets_BT[b, t]):
                    nats[b, t], hits[b, t] = 0.0, True
        return nats, hits


def test_a_model_that_copies_gains_all(monkeypatch: pytest.MonkeyPatch) -> None:
    found = TokenSet(DOCUMENTS, [Unit(0, np.random.default_rng(0).permutation(5000))])
    copier = Copier(5000)
    monkeypatch.setattr("lmlab.eval.long.recall.token_nats", lambda model, *rows: copier.nats(*rows))
    told = copies(None, found, 0, 41)  # type: ignore[arg-type]
    # a copy of 20 tokens; of the 19 that are compared the first follows a pair (end, beginning) not seen before
    assert told["accuracy"] == pytest.approx(18 / 19)
    assert told["gain"] == pytest.approx(18 / 19 * math.log(5000), rel=1e-6)
    assert told["tokens"] == told["n"] * 19


def test_a_uniform_model_gains_nothing() -> None:
    model = made(sharp=0.0)
    told = copies(model, texts(), 0, 41)
    assert told["gain"] == pytest.approx(0, abs=1e-12)
    assert told["gain_se"] == pytest.approx(0, abs=1e-12)


def test_copies_are_two_equal_halves_of_exact_length(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []

    def seen(model: Any, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows.append(torch.cat((tokens_BT, targets_BT[:, -1:]), 1))
        return torch.zeros(tokens_BT.shape), torch.zeros(tokens_BT.shape, dtype=torch.bool)

    monkeypatch.setattr("lmlab.eval.long.recall.token_nats", seen)
    copies(None, texts(), 59, 40)  # type: ignore[arg-type]
    window = torch.cat(rows)
    assert window.shape[1] <= 40
    assert (window[:, 0] == 59).all()
    assert (window[:, 1:] != 59).all()
    half = (window.shape[1] - 1) // 2
    assert torch.equal(window[:, 1 : half + 1], window[:, half + 1 :])


def a_needle() -> tuple[Needle, TokenSet, int]:
    tokenizer = byte_tokenizer(Byte())
    text = np.frombuffer(b"THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG. " * 40, dtype=np.uint8).astype(np.int64)
    return Needle.of(tokenizer), TokenSet(DOCUMENTS, [Unit(0, text)]), tokenizer.start


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("length", [80, 201, 512])
def test_the_needle_stands_verbatim_at_its_depth(depth: float, length: int) -> None:
    needle, found, start = a_needle()
    window, candidates = needle.window(found, start, length, depth, np.random.default_rng(0))
    assert len(window) == length
    assert window[0] == start
    text = bytes(window[1:].astype(np.uint8))
    said = b"\nThe code word of the day is " + bytes([candidates[0]]) + b"."
    assert text.count(said) == 1
    assert text.endswith(b"\nThe code word of the day is ")
    n_text = length - needle.least + 1
    assert text.index(said) == round(depth * n_text)
    assert len(set(candidates.tolist())) == 10
    rest = text.replace(said, b"").removesuffix(b"\nThe code word of the day is ")
    assert len(rest) == n_text
    assert not any(bytes([c]) in rest for c in candidates)


def test_a_window_of_the_least_length_has_a_needle() -> None:
    needle, found, start = a_needle()
    window, _ = needle.window(found, start, needle.least, 0.5, np.random.default_rng(0))
    assert len(window) == needle.least


class Oracle:
    """Gives what followed the lead-in before it; or nothing in particular."""

    def __init__(self, needle: Needle, knows: bool) -> None:
        self.needle, self.knows = needle, knows

    def logits(self, window_BT: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
        B, found = window_BT.shape[0], torch.rand(window_BT.shape[0], 257, generator=rng, dtype=torch.float64)
        lead_in = self.needle.lead_in
        for b in range(B):
            row = window_BT[b].tolist()
            at = next(i for i in range(len(row)) if row[i : i + len(lead_in)] == lead_in)
            if self.knows:
                found[b, row[at + len(lead_in)]] = 50.0
        return found


@pytest.mark.parametrize("knows", [True, False])
def test_needles_of_an_oracle_and_of_chance(knows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    needle, found, start = a_needle()
    oracle, rng = Oracle(needle, knows), torch.Generator().manual_seed(0)

    def asked(model: Any, made: list[tuple[np.ndarray, np.ndarray]]) -> torch.Tensor:
        logits = oracle.logits(torch.from_numpy(np.stack([w for w, _ in made])), rng)
        return logits.gather(1, torch.from_numpy(np.stack([c for _, c in made])))

    monkeypatch.setattr("lmlab.eval.long.recall._asked", asked)
    monkeypatch.setattr("lmlab.eval.long.recall.MOST", 500)
    monkeypatch.setattr("lmlab.eval.long.recall.SPENT_TOKENS", 10**9)
    told = needles(None, needle, found, start, 100)  # type: ignore[arg-type]
    n, correct = sum(t["n"] for t in told), sum(t["correct"] for t in told)
    assert n == 500
    if knows:
        assert correct == n
        assert all(t["gain"] == pytest.approx(0.9 * (50 - 0.5), rel=0.02) for t in told)
    else:
        gain = sum(t["gain"] for t in told) / len(told)
        assert abs(gain) < 3 * math.sqrt(0.9 / 12 / n), "uniform logits have a variance of 1/12"
        assert abs(correct / n - 0.1) < 3 * math.sqrt(0.1 * 0.9 / n)


class NoLowerCase:
    kind, vocab_size = "hf", 100

    def decode_bytes(self, ids: list[int]) -> bytes:
        return bytes(ids).upper()

    def encode(self, text: str) -> list[int]:
        return list(text.upper().encode())


def test_a_tokenizer_that_cant_spell_the_needle_is_refused() -> None:
    with pytest.raises(DataError, match="can't spell"):
        Needle.of(NoLowerCase())  # type: ignore[arg-type]


# ---------------------------------------------------------------- what is asked


def test_default_lengths() -> None:
    assert default_lengths(256) == (128, 256, 512, 1024, 2048, 4096)
    assert default_lengths(5) == (4, 5, 10, 20, 40, 80)


def test_factors_are_length_over_original() -> None:
    asked = Asked(128, 128, (64, 512), ("own", "none", "pi"))
    assert asked.choices(512) == [Choice("own"), Choice("none"), Choice("pi", 4.0)]
    assert asked.choices(64) == [Choice("own"), Choice("none"), Choice("pi", 1.0)]
    typed = Asked(128, 128, (64, 512), ("none", "pi"), (2.0, 8.0))
    assert typed.choices(64) == [Choice("none"), Choice("pi", 2.0), Choice("pi", 8.0)]
