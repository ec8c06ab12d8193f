"""A sampled sentence, for a look at what the model has learned."""

from __future__ import annotations

import torch

from lmlab.data.tokenizer import Tokenizer
from lmlab.generate.decode import generate
from lmlab.generate.sampling import Sampling
from lmlab.model.transformer import Transformer

SAMPLE_TOKENS = 32
TEMPERATURE, TOP_K = 0.8, 40


def sample(
    model: Transformer,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    n_tokens: int = SAMPLE_TOKENS,
    seed: int = 0,
) -> str:
    """Up to `n_tokens` tokens from the start of a document, no more than a row of training has, by top-k sampling.

    Nothing by a tokenizer of bare ids, which begins no document. Changes neither the default generator nor the model's
    mode.
    """
    if not tokenizer.opening:
        return ""
    sampling = Sampling(TEMPERATURE, TOP_K, seed=seed)
    found = generate(
        model,
        [tokenizer.opening],
        max_new=max(1, min(n_tokens, seq_len - 1)),
        sampling=sampling,
        forbidden_V=unwritable(model, tokenizer, and_end=True),
    )
    return " ".join(tokenizer.decode(found.tokens[0]).split())


def unwritable(model: Transformer, tokenizer: Tokenizer, *, and_end: bool = False) -> torch.Tensor:
    """(V,) True for ids that are no token of the tokenizer (a padded vocabulary), and, if asked, for what ends a
    document or begins the next."""
    ids_V = torch.arange(model.dims.vocab_size, device=model.embed.weight.device)
    beyond = ids_V >= tokenizer.vocab_size
    return beyond | (ids_V == tokenizer.eot) | (ids_V == tokenizer.start) if and_end else beyond
