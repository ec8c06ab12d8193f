"""How a loss of tokens that saw later ones is told from others: the same words beside the figure everywhere."""

from __future__ import annotations

from typing import Any

NOT_CAUSAL = "not causal"


def recorded(manifest: dict[str, Any]) -> str | None:
    """Why tokens of the run's model see later ones, as it was recorded; None for a causal one."""
    why = manifest.get("noncausal")
    return why if isinstance(why, str) and why else None


def labelled(figure: str, why: str | None) -> str:
    """`val 4.0280 (not causal)`; a figure of a causal model (no `why`) as it is."""
    return f"{figure} ({NOT_CAUSAL})" if why else figure
