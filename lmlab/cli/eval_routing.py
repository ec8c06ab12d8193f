"""`lmlab eval` of a model with experts: where its tokens went, and how many the checkpoint before sent there.

Loads, entropy and what was dropped come with the evaluation's own pass over all of the split; stability takes two
passes over its first tokens, one of them by the earlier checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmlab.cli.open_run import Opened
    from lmlab.data.source import Split
    from lmlab.model.transformer import Transformer


def stable(opened: Opened, model: Transformer, tokens: Split, split: str) -> dict[str, Any]:
    """The stability of each layer, and against which step on how many tokens; or why there is none."""
    from lmlab.errors import RunError
    from lmlab.eval.routing import choices, stability
    from lmlab.opened import computed_model
    from lmlab.runs import checkpoint
    from lmlab.runs.routing_names import STABLE_TOKENS

    exp, step = opened.exp, opened.checkpoint.step
    refs = [ref for ref in opened.run.checkpoints() if ref.step < step]
    if not refs:
        return {"stability_why": f"the run keeps no checkpoint before step {step}"}
    try:
        earlier = checkpoint.load(refs[-1].path)
    except RunError as error:
        return {"stability_why": error.message}
    cut = dict(rows=opened.rows, seq_len=exp.model.seq_len, packing=exp.data.packing)
    batches = list(tokens.batches(**cut, start=opened.tokenizer.start, max_tokens=STABLE_TOKENS))  # type: ignore[arg-type]
    now = choices(model, batches)
    theirs = computed_model(exp, earlier, opened.tokenizer, device=opened.device, dtype=opened.dtype)
    before = choices(theirs, batches)
    n_tokens = sum(int(batch.present().sum()) for batch in batches)
    return {"stability_from_step": earlier.step, "stability_tokens": n_tokens} | stability(before, now, split)


def print_routing(report: dict[str, Any]) -> None:
    """A row per layer, its loads as bars, and what the figures are of."""
    from lmlab.cli.eval import figure_text
    from lmlab.cli.progress import say
    from lmlab.cli.tables import print_table
    from lmlab.runs.routing_names import FIGURES, LOAD, bars, name, parse

    split = report["split"]
    layers = sorted({found[1] for key in report if (found := parse(key)) is not None})
    rows = [[str(i), *(figure_text(report.get(name(i, figure, split))) for figure in FIGURES)] for i in layers]
    print_table(["layer", *FIGURES], rows)
    for layer in layers:
        loads = report[name(layer, LOAD, split)]
        what = f"{min(loads):,} to {max(loads):,} choices an expert, {len(loads)} experts"
        say(f"load of layer {layer}  {bars(loads)}  {what}")
    say(f"of {report['tokens']:,} tokens; {_stability_line(report)}")


def _stability_line(report: dict[str, Any]) -> str:
    if why := report.get("stability_why"):
        return f"stability n/a: {why}"
    return f"stability against step {report['stability_from_step']} on the first {report['stability_tokens']:,}"
