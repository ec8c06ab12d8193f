"""`lmlab eval`: loss, perplexity and bits per byte of a run's checkpoint, on its own or on other data.

With --probe also what goes on inside the model, layer by layer; with --cache what each kind of cache costs. With
--long-context: at lengths past the trained one; with --tasks: tasks of lm_eval instead.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from lmlab.cli.eval_long import LongFlags
from lmlab.cli.eval_tasks import TaskFlags, evaluate_tasks

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from lmlab.cli.open_run import Opened
    from lmlab.cli.progress import Screen
    from lmlab.config.tree import Experiment
    from lmlab.data.source import Source, Split
    from lmlab.data.tasks.source import TaskSource, TaskSplit
    from lmlab.model.transformer import Transformer
    from lmlab.runs.find import Found
    from lmlab.runs.rundir import RunDir

MAY_SET = ("data", "kernels", "compile", "device", "train.precision", "paths")
OF_TASKS = ("kernels", "device", "train.precision", "paths")  # their own data; rows of every length: never compiled
SPLITS = ("val", "test")


def register(app: typer.Typer) -> None:
    app.command("eval")(evaluate)


def evaluate(
    words: Annotated[
        Optional[list[str]],
        typer.Argument(
            metavar="RUN|SWEEP|KEY=VALUE", help="runs; keys: data, kernels, compile, device, train.precision"
        ),
    ] = None,
    split: Annotated[
        Optional[str], typer.Option(metavar="val|test", help="which split (val); every look at test is counted")
    ] = None,
    tasks: Annotated[
        Optional[str],
        typer.Option(metavar="NAMES", help="lm_eval:NAME or FILE.yaml instead; with --long-context: passkey, vt, …"),
    ] = None,
    limit: Annotated[Optional[int], typer.Option(min=1, metavar="N", help="documents of each task at most")] = None,
    batch_size: Annotated[Optional[int], typer.Option(min=1, metavar="N", help="requests of tasks at once")] = None,
    bos: Annotated[
        Optional[str],
        typer.Option(metavar="always|empty", help="a start token (or end-of-text) before each context (always)"),
    ] = None,
    config_dir: Annotated[Optional[str], typer.Option(metavar="DIR", help="a conf/ folder of your own")] = None,
    probe: Annotated[bool, typer.Option("--probe", help="look inside as well, layer by layer")] = False,
    cache: Annotated[
        Optional[str],
        typer.Option(metavar="KINDS", help="what caches cost: full,int8,window:N,sink:N+M with commas between"),
    ] = None,
    long_context: Annotated[
        bool, typer.Option("--long-context", help="at lengths below and past the trained one, instead")
    ] = False,
    lengths: Annotated[
        Optional[str], typer.Option(metavar="N,…", help="tokens of a window (0.5 to 16 times the trained length)")
    ] = None,
    rope_scaling: Annotated[
        Optional[str],
        typer.Option("--rope-scaling", metavar="NAMES", help="own,none,pi,ntk,dynamic_ntk,yarn,llama3, some of them"),
    ] = None,
    factors: Annotated[
        Optional[str], typer.Option(metavar="S,…", help="of the scalings (length / trained length)")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a run on stdout")] = False,
) -> None:
    """Evaluate runs: the last checkpoint of each, on all of a split. Without RUN: the newest that is done."""
    from lmlab.cli.eval_cache import print_caches
    from lmlab.cli.eval_routing import print_routing
    from lmlab.cli.open_run import open_run, refuse_keys
    from lmlab.cli.progress import Screen, say
    from lmlab.cli.run_one import not_causal
    from lmlab.errors import ConfigError, LmlabError, raise_all
    from lmlab.opened import runs_root
    from lmlab.runs import find
    from lmlab.runs.files import to_json
    from lmlab.runs.routing_names import parse

    words = words or []
    names = [w for w in words if "=" not in w]
    keys = [w for w in words if "=" in w]
    if split not in (None, *SPLITS):
        raise ConfigError(f"`--split` is {split}", "use val or test")
    others = {"--limit": limit is not None, "--batch-size": batch_size is not None, "--bos": bos is not None}
    others |= {"--probe": probe, "--cache": cache is not None}
    typed = dict(lengths=lengths, scalings=rope_scaling, factors=factors, tasks=tasks)
    long = LongFlags.of(long_context, others=others, **typed)
    of_tasks: dict[str, Any] = dict(limit=limit, batch_size=batch_size, bos=bos, split=split, probe=probe, cache=cache)
    flags = None if long_context else TaskFlags.of(tasks, **of_tasks)
    may_set = MAY_SET if flags is None else OF_TASKS
    refuse_keys(keys, may_set, "evaluation")
    root = runs_root(keys)
    screen = Screen()
    found = [one for name in names for one in _named(name, root, screen)] or [find.resolve(None, root)]
    if not names:
        screen.note(f"newest {found[0].run.state()} run: {found[0].run.path}")
    loaded = {} if flags is None else flags.load()
    errors: list[LmlabError] = []
    for one in found:
        try:
            if flags is not None:
                opened = open_run(one, keys, config_dir, screen, precision="fp32")
                evaluate_tasks(one.run, opened, flags, loaded, screen, as_json=as_json)
                continue
            if long is not None:
                report = _evaluate_long(one, keys, split or SPLITS[0], config_dir, screen, long, say_it=not as_json)
                if as_json:
                    say(to_json(report))
                continue
            report = _evaluate_one(one, keys, split or SPLITS[0], config_dir, screen, probe=probe, cache=cache)
        except LmlabError as error:
            errors.append(error)
            continue
        if as_json:
            say(to_json(report))
            continue
        say(_line(report))
        for task in report.get("tasks", ()):
            say(_task_line(task))
        if report["noncausal"]:
            say(not_causal(report["noncausal"]))
        if any(parse(key) for key in report):
            print_routing(report)
        if probe:
            _print_probes(report)
        if cache is not None:
            print_caches(report)
    raise_all(errors)


def _named(name: str, root: Path, screen: Screen) -> list[Found]:
    """The run of this name, or those of the sweep that are done. Raises RunError."""
    from lmlab.cli.upload import members, sweep_folder
    from lmlab.errors import RunError
    from lmlab.runs.find import DONE, Found, resolve

    folder = sweep_folder(name, root)
    if folder is None:
        return [resolve(name, root)]
    runs = [member.run for member in members(folder)]
    done = [Found(run) for run in runs if run.state() in DONE]
    if not done:
        raise RunError(
            f"no run of the sweep {folder.name} is finished", "the same `lmlab sweep` trains what is missing"
        )
    if len(done) < len(runs):
        screen.note(f"{folder.name}: {len(runs) - len(done)} of {len(runs)} runs are not finished, and left out")
    return done


def _evaluate_one(
    found: Found,
    keys: list[str],
    split: str,
    config_dir: str | None,
    screen: Screen,
    *,
    probe: bool,
    cache: str | None,
) -> dict[str, Any]:
    import functools

    import torch

    from lmlab.cli.eval_cache import compare, decoded, read_kinds
    from lmlab.cli.eval_routing import stable
    from lmlab.cli.open_run import open_run
    from lmlab.runs.evals import record
    from lmlab.train.routing import Routing
    from lmlab.train.setup import evaluate_file

    run = found.run
    own_run = open_run(found, keys, config_dir, screen)
    exp, tokenizer = own_run.exp, own_run.tokenizer
    kinds = [] if cache is None else read_kinds(cache, exp)
    prepared, own = _prepared(own_run, keys, screen)
    model, tokens = own_run.model(), getattr(prepared, split)
    token_bytes = torch.from_numpy(tokenizer.token_bytes)
    how: dict[str, Any] = {"start": tokenizer.start, "token_bytes": token_bytes, "rows": own_run.rows}
    loss_by = functools.partial(evaluate_file, model, tokens, exp, **how)
    routing = Routing()
    loss = loss_by(routing=routing)
    report = {
        "run": str(run.path),
        **own_run.told(),
        "data": exp.data.name,
        "packing": exp.data.packing,
        "fingerprint": prepared.fingerprint,
        "own_data": own,
        "split": split,
        "tokens": loss.tokens,
        "bytes": loss.bytes,
        "loss": loss.nats_per_token,
        "perplexity": loss.perplexity,
        "bits_per_byte": loss.bits_per_byte if prepared.lossless else None,
        "noncausal": model.noncausal() or None,
    }
    if prepared.tasks:
        report["tasks"] = [_answers(model, name, task, split) for name, task in prepared.tasks.items()]
    if model.routed:
        report |= routing.evaluated(split) | stable(own_run, model, tokens, split)
    if probe:
        report |= _probed(model, tokens, exp, start=tokenizer.start, device=own_run.device)
    if kinds:
        caches = compare(kinds, model, tokens, exp, lambda kind: loss_by(kind=kind), start=tokenizer.start)
        report |= {"seq_len": exp.model.seq_len, "caches": caches}
        report |= decoded(model, tokens, exp, start=tokenizer.start, token_bytes=token_bytes)
    if not prepared.lossless:
        screen.warn(f"bits per byte can't be told: {prepared.lossy_why}")
    _count_look(run, report, screen)
    record(run, report)
    return report


def _answers(model: Transformer, name: str, task: TaskSource, split: str) -> dict[str, Any]:
    """Of one task of the split: its examples and answers, those that were right with their 95 % intervals, and what
    guessing scores."""
    from lmlab.eval.task_scores import score

    asked: TaskSplit = getattr(task, split)
    chance = {"chance_exact": asked.chance.exact, "chance_token": asked.chance.token}
    return {"task": name or task.spec.name, **score(model, asked.examples).figures(), **chance}


def _evaluate_long(
    found: Found,
    keys: list[str],
    split: str,
    config_dir: str | None,
    screen: Screen,
    flags: LongFlags,
    *,
    say_it: bool,
) -> dict[str, Any]:
    from lmlab.cli.eval_long import evaluate_long
    from lmlab.cli.eval_long_tables import draw_long, print_long
    from lmlab.cli.open_run import open_run
    from lmlab.cli.progress import say
    from lmlab.cli.run_one import not_causal
    from lmlab.runs.evals import record, refuse_unwritable

    own_run = open_run(found, keys, config_dir, screen)
    refuse_unwritable(found.run)
    prepared, own = _prepared(own_run, keys, screen)
    report = {
        "run": str(found.run.path),
        **own_run.told(),
        "data": own_run.exp.data.name,
        "fingerprint": prepared.fingerprint,
        "own_data": own,
        "split": split,
        **evaluate_long(found, own_run, prepared, split, flags, screen),
    }
    _count_look(found.run, report, screen)
    path = record(found.run, report, of="long-context")
    draw_long(report, path.with_suffix(".svg"))
    if say_it:
        print_long(report)
        if report["noncausal"]:
            say(not_causal(report["noncausal"]))
        screen.note(f"wrote {path} and the figure beside it")
    return report


def _prepared(opened: Opened, keys: list[str], screen: Screen) -> tuple[Source, bool]:
    """(the data, whether it is what the run was trained on). Other data may be typed, and an imported run has none of
    its own; else it must be what it was."""
    from lmlab.opened import IMPORTED, own_tokenizer, refuse_other_data
    from lmlab.opened import prepared as prepared_by

    run, exp, manifest = opened.run, opened.exp, opened.run.manifest()
    foreign = manifest.get("state") == IMPORTED or any(k.startswith("data") for k in keys)
    with screen.preparing() as progress:
        prepared = prepared_by(exp, run.tokenizer_path if foreign else own_tokenizer(run, exp), progress)
    if not foreign:
        refuse_other_data(run, prepared)
    return prepared, prepared.fingerprint == manifest.get("fingerprint")


def _count_look(run: RunDir, report: dict[str, Any], screen: Screen) -> None:
    """Every look at the run's own test split is counted."""
    if report["split"] == "test" and report["own_data"]:
        report["test_evaluations"] = run.manifest().get("test_evaluations", 0) + 1
        screen.note(f"test looked at {report['test_evaluations']} times")


def _probed(model: Transformer, tokens: Split, exp: Experiment, *, start: int, device: torch.device) -> dict[str, Any]:
    """Probes of the first rows of the split, whole ones where it has any, and how many tokens they are."""
    from lmlab.eval.probes import activations, as_row, probe_rows

    seq_len = exp.model.seq_len
    rows = min(probe_rows(seq_len), max(1, tokens.n_targets // seq_len))
    batch = next(iter(tokens.batches(rows=rows, seq_len=seq_len, packing=exp.data.packing, start=start)))
    return {"probe_tokens": rows * seq_len} | as_row(activations(model, batch.to(device)))


def _print_probes(report: dict[str, Any]) -> None:
    """A row per layer, then what is measured elsewhere."""
    from lmlab.cli.progress import say
    from lmlab.cli.tables import print_table
    from lmlab.runs.probe_names import ELSEWHERE, LAYER, PREFIX, name, parse

    places = [found for key in report if (found := parse(key))]
    layers = sorted({place for place, _ in places if isinstance(place, int)})
    figures = [figure for figure in LAYER if any(figure == found for _, found in places)]
    rows = [[str(layer), *(figure_text(report.get(name(layer, figure))) for figure in figures)] for layer in layers]
    print_table(["layer", *figures], rows)
    other = [f"{key} {figure_text(report[PREFIX + key])}" for key in ELSEWHERE if PREFIX + key in report]
    say(f"{' · '.join(other)} · of {report['probe_tokens']:,} tokens")


def figure_text(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.4g}"


def _line(report: dict[str, Any]) -> str:
    figures = [f"loss {report['loss']:.4f} nats/token", f"perplexity {report['perplexity']:.2f}"]
    if report["bits_per_byte"] is not None:
        figures.append(f"{report['bits_per_byte']:.4f} bits/byte")
    where = f"{report['data']} {report['split']}, {report['tokens']:,} tokens, {report['precision']}"
    return f"{report['run']}  step {report['step']}  {where}:  " + " · ".join(figures)


def _task_line(task: dict[str, Any]) -> str:
    """`  mqar: exact 93.0 % of 1,000 (91.2–94.4, chance 0.001) · token …`"""
    words = []
    for what, own in (("exact", "exact"), ("token", "token_accuracy")):
        n = task["n" if what == "exact" else "token_n"]
        share, low, high = task[own], task[f"{what}_low"], task[f"{what}_high"]
        words.append(f"{what} {share:.1%} of {n:,} ({low:.1%} to {high:.1%}; chance {task[f'chance_{what}']:.2g})")
    return f"  {task['task']}: " + " · ".join(words)
