"""What probes measure inside a model, by name: `probe/<place>/<figure>` in metrics.jsonl and eval/*.json.

A place is a layer's number, from 0, or one of PLACES. Writers (lmlab/eval/probes.py) and readers (lmlab/report/why.py)
take the names from here.
"""

from __future__ import annotations

PREFIX = "probe/"
PLACES = ("embed", "final", "head", "logits")
LAYER = {
    "residual_rms": "Root mean square of the block's output.",
    "act_absmax": "Largest absolute value of the block's output.",
    "act_kurtosis": "E[(x−μ)⁴]/σ⁴ of the block's output: 3 for a Gaussian, more with outliers.",
    "attn_entropy": "Entropy of the attention weights in nats, mean over heads and queries.",
    "attn_entropy_frac": "attn_entropy over ln(keys seen), of queries that see two or more: 1 is uniform, 0 one key.",
    "attn_max_logit": "Largest score of a seen key as it enters the softmax: after scale, cap and bias.",
    "ffn_zero_frac": "Share of hidden activations that are exactly zero; of experts, of the tokens that reached them.",
    "ffn_dead_frac": "Share of hidden units that are zero for every token probed; of experts that any token reached.",
    "grad_norm": "Norm of the gradient of all the layer's parameters, before clipping.",
    "update_ratio": "‖Δw‖/‖w‖ of the layer's matrices by this very step.",
}
ELSEWHERE = {
    "embed/residual_rms": "Root mean square of what the first block is handed.",
    "final/residual_rms": "Root mean square of what the head is handed.",
    "logits/absmax": "Largest absolute logit.",
    "embed/grad_norm": "Norm of the embedding's gradient, before clipping.",
    "embed/update_ratio": "‖Δw‖/‖w‖ of the embedding by this very step.",
    "head/grad_norm": "Norm of the gradient of a head of its own.",
    "head/update_ratio": "‖Δw‖/‖w‖ of a head of its own.",
}


def name(place: int | str, figure: str) -> str:
    """`probe/3/residual_rms`."""
    return f"{PREFIX}{place}/{figure}"


def parse(metric: str) -> tuple[int | str, str] | None:
    """(place, figure) of a probe's name; None of any other."""
    if not metric.startswith(PREFIX):
        return None
    place, _, figure = metric.removeprefix(PREFIX).partition("/")
    if not figure or not (place in PLACES or place.isdecimal()):
        return None
    return (int(place) if place.isdecimal() else place), figure
