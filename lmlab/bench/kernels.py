"""How near the operations that move memory come to a copy, and how the loss stands to a matrix product.

Every choice of `kernels`, and torch.compile of the plain formulas, takes its turn beside a copy that fits no cache. A
figure is the least bytes that an operation must move a second (bench/cases.py), over what the copy of that turn moves.
Forward is timed with gradients on, as in training; backward is torch.autograd.grad on a graph that is kept.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmlab.bench import cases, memory
from lmlab.bench.cases import Case, Sizes
from lmlab.bench.contender import device_of, replaced
from lmlab.bench.limits import Yardstick, copying, measure, multiplying
from lmlab.bench.result import Bar, Result
from lmlab.bench.rivals import AUTO, COMPILED, Own, Rivals
from lmlab.bench.timing import ROUNDS, Spread, in_turns, ratio
from lmlab.config.load import load
from lmlab.config.tree import Experiment
from lmlab.runs.machine import gib
from lmlab.train.device import be_deterministic, resolve_precision, tune_malloc

WIDTHS = (256, 1024, 4096, 16384)
# On the CPU 30 MiB of fp32: near the cache, yet below 32 MiB, from where glibc takes every buffer anew from the kernel.
ELEMENTS = {"cpu": 480 * 16384, "cuda": 4096 * 16384}
LOSS_WIDTHS = {"cpu": (256, 1024), "cuda": (1024, 4096)}
SHAPE = {"cpu": (), "cuda": ("tokenizer.vocab_size=50304", "train.batch_tokens=16384")}
LEAST_S = 0.03
YARDSTICK = "its limit"
BOTH = "forward + backward"


@dataclass(frozen=True)
class Bench:
    """Who takes turns where."""

    rivals: Rivals
    device: torch.device
    dtype: torch.dtype
    rounds: int

    def compared(
        self, calls: dict[str, Callable[[], object]], own: Own, limit: Yardstick, work: float
    ) -> dict[str, Any]:
        """Shares of the limit, and what auto is faster than the others by, of functions that do `work` a call."""
        times = in_turns({YARDSTICK: limit.call, **calls}, self.device, rounds=self.rounds, least_s=LEAST_S)
        rate = [limit.work / s for s in times[YARDSTICK]]
        shares = {
            name: Spread.of([work / s / most for s, most in zip(times[name], rate, strict=True)]) for name in calls
        }
        others = [name for name in own.same if own.same[name] != own.same[AUTO]]
        return {
            "same": dict(own.same),
            "share": {name: share.as_dict() for name, share in shares.items()},
            "seconds": {name: Spread.of(times[name]).as_dict() for name in calls},
            "auto_over": {name: ratio(times[own.same[name]], times[own.same[AUTO]]).as_dict() for name in others},
        }

    def case(self, case: Case, limit: Yardstick) -> Iterator[dict[str, Any]]:
        """A record of forward and one of backward."""
        own = self.rivals.of(case.pick)
        forward = {name: _forward(f, case) for name, f in own.functions.items()}
        backward, took = {}, {}
        for name, call in forward.items():
            begun = time.perf_counter()
            backward[name] = _backward(call(), case.wants)
            backward[name]()
            took[name] = time.perf_counter() - begun
        least = {"forward": case.forward_bytes, "backward": case.backward_bytes}
        for way, calls in (("forward", forward), ("backward", backward)):
            told: dict[str, Any] = {"role": case.role, "operation": case.name, "D": case.D, "pass": way}
            told |= {"bytes": least[way], "first_calls_s": took}
            yield {**told, **self.compared(calls, own, limit, least[way])}

    def loss(self, N: int, V: int, D: int, limit: Yardstick) -> dict[str, Any]:
        """Linear + cross-entropy, both ways in one: the chunked form makes the gradients in its forward."""
        own = self.rivals.of(lambda ops: ops.linear_cross_entropy)
        sizes = Sizes(N * D, V, self.dtype, self.device)
        hidden_ND, head_VD = sizes.normal(N, D), (sizes.normal(V, D, grad=False) * D**-0.5).requires_grad_()
        targets_N = torch.randint(V, (N,), device=self.device)
        weights_N = torch.ones(N, device=self.device)

        def both(f: Callable[..., Tensor]) -> Callable[[], object]:
            return lambda: torch.autograd.grad(f(hidden_ND, head_VD, targets_N, weights_N, 1.0), (hidden_ND, head_VD))

        calls = {name: both(f) for name, f in own.functions.items()}
        extra, took = {}, {}
        for name, call in calls.items():
            begun = time.perf_counter()
            call()
            took[name] = time.perf_counter() - begun
            extra[name] = memory.extra(call, self.device)
        told: dict[str, Any] = {
            "role": "linear_cross_entropy",
            "operation": f"loss V={V}",
            "D": D,
            "pass": BOTH,
            "first_calls_s": took,
        }
        flops = 6 * N * V * D  # logits, and a product of the same size for each gradient
        return {**told, "flops": flops, "extra_bytes": extra, **self.compared(calls, own, limit, flops)}


def _forward(f: Callable[..., Any], case: Case) -> Callable[[], Any]:
    return lambda: f(*case.given, *case.then)


def _backward(out: Any, wants: list[Tensor]) -> Callable[[], object]:
    outs = out if isinstance(out, tuple) else (out,)
    grads = [torch.randn_like(x) for x in outs]
    return lambda: torch.autograd.grad(outs, wants, grads, retain_graph=True)


def run(words: Sequence[str], *, rounds: int = ROUNDS, said: Callable[[str], None] = lambda text: None) -> Result:
    """Every operation at every width, or at the `model.d_model` that is typed."""
    tune_malloc()
    device = device_of(words)
    exp = load(replaced((*SHAPE[device.type], "pos=none", "model.n_heads=1"), words)).experiment
    be_deterministic(device)
    torch.manual_seed(0)
    dtype = resolve_precision(exp.train.precision, device)
    limits = measure(device, dtype)
    said(limits.said())
    told: list[str] = []
    bench = Bench(Rivals.here(device, dtype, told), device, dtype, rounds)
    with torch._functorch.config.patch(donated_buffer=False):  # else compiled code takes no kept graph
        records = list(_records(bench, exp, words, said))
    told = [*_told(bench, exp, records), *told, *_slow(records)]
    facts = {"overrides": list(words), "rounds": rounds}
    bars = [
        Bar(f"{_name(one)} {one['pass']}", Spread(**one["auto_over"][COMPILED]))
        for one in records
        if COMPILED in one["auto_over"]
    ]
    names = bench.rivals.names
    head = ("operation", "D", "pass", *names, *(f"auto over {name}" for name in names if name != AUTO))
    table = [cells(one, names) for one in records]
    return Result(
        "kernels", limits, facts, head, table, records, told, bars, "speed of kernels=auto over compiled code"
    )


def widths(words: Sequence[str], exp: Experiment, standard: Sequence[int]) -> Sequence[int]:
    """The standard ones, or what is typed."""
    return (exp.model.d_model,) if any(word.startswith("model.d_model=") for word in words) else standard


def _records(
    bench: Bench, exp: Experiment, words: Sequence[str], said: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    device, V = bench.device, _vocab_size(exp)
    sizes = Sizes(ELEMENTS[device.type], V, bench.dtype, device)
    copy, product = copying(device), multiplying(device, bench.dtype)
    for D in widths(words, exp, WIDTHS):
        for case in cases.of_width(D, sizes):
            said(case.said())
            yield from bench.case(case, copy)
        gc.collect()
    for case in cases.elementwise(sizes):
        said(case.said())
        yield from bench.case(case, copy)
    for D in widths(words, exp, LOSS_WIDTHS[device.type]):
        said(f"loss D={D}")
        yield bench.loss(exp.train.batch_tokens, V, D, product)


def _vocab_size(exp: Experiment) -> int:
    tokenizer: Any = exp.tokenizer
    return int(tokenizer.vocab_size)


def _told(bench: Bench, exp: Experiment, records: list[dict[str, Any]]) -> list[str]:
    """What the figures are of, and what they are not of."""
    elements = ELEMENTS[bench.device.type]
    apart: dict[str, list[str]] = {}
    for role, why in cases.ELSEWHERE.items():
        apart.setdefault(why, []).append(role)
    told = [
        f"{elements / 1e6:.3g} M elements of {str(bench.dtype).removeprefix('torch.')} in whole rows; figures: least "
        "bytes a second over those of a copy in the same turn, of the loss FLOP/s over those of a matrix product",
        "forward with gradients on; backward by torch.autograd.grad on a graph that is kept",
        "ffn options see no width: they are measured once",
    ]
    if bench.rivals.compiles:
        took = sum(one["first_calls_s"].get(COMPILED, 0.0) for one in records if one["pass"] != "backward")
        told.append(f"first calls of compiled code, outside the figures: {took:.0f} s in all")
    told.append("not here: " + "; ".join(f"{', '.join(roles)}: {why}" for why, roles in apart.items()))
    for one in records:
        if "extra_bytes" in one:
            extra = ", ".join(f"{name} {gib(n)}" for name, n in one["extra_bytes"].items())
            told.append(f"{_name(one)}, {exp.train.batch_tokens} tokens: peak memory beside the inputs: {extra}")
    return told


def _slow(records: list[dict[str, Any]]) -> list[str]:
    """Where auto loses to compiled code in every round."""
    beside = [one for one in records if COMPILED in one["auto_over"]]
    if not beside:
        return []
    slow: dict[str, list[str]] = {}
    for one in beside:
        over = Spread(**one["auto_over"][COMPILED])
        if over.high < 1:
            at = "" if one["D"] is None else f"D={one['D']} "
            slow.setdefault(f"{one['operation']} {one['pass']}", []).append(f"{at}{over.said(unit='×')}")
    listed = "; ".join(f"{name} {', '.join(figures)}" for name, figures in slow.items())
    return [f"auto is slower than compiled code in every round: {listed or 'nowhere'}"]


def _name(one: dict[str, Any]) -> str:
    return one["operation"] if one["D"] is None else f"{one['operation']} D={one['D']}"


def cells(one: dict[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    shares, over, same = one["share"], one["auto_over"], one["same"]
    row = [one["operation"], "" if one["D"] is None else str(one["D"]), one["pass"]]
    for name in names:
        own = same.get(name)
        row.append("" if own is None else f"{shares[own]['median']:.0%}" if own == name else f"= {own}")
    row += [Spread(**over[name]).said(unit="×") if name in over else "" for name in names if name != AUTO]
    return tuple(row)
