"""A sampled sentence, for a look at what the model has learned: the whole window is run again for each token."""

from __future__ import annotations

import torch

from lmlab.data.tokenizer import Tokenizer
from lmlab.model.transformer import Transformer

SAMPLE_TOKENS = 32


@torch.no_grad()
def sample(
    model: Transformer,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    n_tokens: int = SAMPLE_TOKENS,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
) -> str:
    """Up to `n_tokens` tokens from the start of a document, by top-k sampling with its own generator.

    Changes neither the default generator nor the model's mode. `seq_len`: the longest window it is run on.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    ids = [tokenizer.eot]
    while len(ids) <= n_tokens:
        window = torch.tensor([ids[-seq_len:]], device=device)
        positions = torch.arange(window.shape[1], device=device)[None]
        logits_BTV = model(window, positions).logits_BTV
        assert logits_BTV is not None
        logits_V = logits_BTV[0, -1].float().cpu()
        logits_V[tokenizer.eot] = -torch.inf
        best = torch.topk(logits_V, min(top_k, len(logits_V) - 1))
        pick = torch.multinomial(torch.softmax(best.values / temperature, -1), 1, generator=generator)
        ids.append(int(best.indices[pick]))
    model.train(was_training)
    return " ".join(tokenizer.decode(ids[1:]).split())
