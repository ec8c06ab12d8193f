"""How fast does a cache decode, against computing the whole row again and against transformers' own generate?

The same weights on both sides: a model of the default's size is exported and read by transformers. Greedy decoding of
256 tokens behind a prompt of 16, one row, in turns; the medians of 7 rounds. Needs the extra `hf`.

    python experiments/decode_speed/run.py [fp32|bf16]
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as lmlab's command line sets it, for all of them

import torch

from lmlab.config.load import load
from lmlab.cost.cache import cache_bytes
from lmlab.data.spec import Byte
from lmlab.data.tokenizer import byte_tokenizer
from lmlab.generate.decode import generate
from lmlab.interop.exporting import Model, export
from lmlab.kernels.resolve import resolve
from lmlab.model.cache import CacheKind
from lmlab.model.transformer import build

VOCAB, PROMPT, NEW, ROUNDS = 4096, 16, 256, 7


def main(dtype: torch.dtype) -> None:
    import transformers

    exp = load(["preset=llama", "model=tiny", "model.seq_len=512"]).experiment
    ops = resolve(exp.kernels, "cpu", torch.float32)
    net = build(exp.arch, VOCAB, ops, seed=0, device="cpu").eval()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(4.0 if p.ndim > 1 else 1.0)  # far from ties, so that both sides pick the same tokens
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / "exported"
        export(Model(exp.arch, net.state_dict(), byte_tokenizer(Byte()), 512), to)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(to, dtype=dtype).eval()
    net = net.to(dtype)
    prompt = torch.randint(VOCAB, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    ids = prompt[0].tolist()

    def ours(kind: CacheKind | None) -> list[int]:
        return generate(net, [ids], max_new=NEW, kind=kind).tokens[0]

    @torch.no_grad()
    def transformers_generate() -> list[int]:
        out = theirs.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
            use_cache=True, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        return out[0, PROMPT:].tolist()

    who = {
        "cached": lambda: ours(CacheKind()),
        "int8": lambda: ours(CacheKind("int8")),
        "whole row again": lambda: ours(None),
        "transformers": transformers_generate,
    }
    seconds: dict[str, list[float]] = {name: [] for name in who}
    tokens: dict[str, list[int]] = {}
    for turn in range(ROUNDS + 1):
        for name, run in who.items():
            begun = time.perf_counter()
            tokens[name] = run()
            if turn:
                seconds[name].append(time.perf_counter() - begun)
    n = sum(p.numel() for p in net.parameters())
    print(f"{n / 1e6:.1f}M parameters, {dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"transformers {transformers.__version__}; {PROMPT} + {NEW} tokens, one row, prefill included")
    cached = statistics.median(seconds["cached"])
    for name, own in seconds.items():
        median = statistics.median(own)
        same = sum(a == b for a, b in zip(tokens[name], tokens["cached"], strict=True))
        spread = f"{NEW / max(own):,.0f} to {NEW / min(own):,.0f}"
        rate = f"{NEW / median:8,.0f} tokens/s ({spread})"
        print(f"{name:16} {rate}  {median / cached:5.2f}× the time of cached  {same} tokens the same")
    size = {s: cache_bytes(exp.arch, 1, PROMPT + NEW, 2, CacheKind(s)) for s in ("full", "int8")}
    print(f"cache in bf16 {size['full']:,} bytes, int8 {size['int8']:,}: {size['int8'] / size['full']:.3f}")


if __name__ == "__main__":
    main({"fp32": torch.float32, "bf16": torch.bfloat16}[(sys.argv[1:] or ["fp32"])[0]])
