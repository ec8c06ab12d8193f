"""Dead flags: every field of every part is set to its declared probe, and something must change.

The words `group.field=probe` are composed as on the command line, all in one go; then each value is put into the
composition alone, with what CONTEXT says it needs on both sides. What may change: the shapes of the parameters, their
initial values, the logits and the loss in train mode, the logits after a step in eval mode, the backend that attention
names, or what the caller works out of training (`planned`). Fields of data and tokenizer are read before there is a
model: not asked here.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from lmlab.check.composed import VOCAB, Composed, randomized
from lmlab.check.rows import Row
from lmlab.check.small import LAYERS, given
from lmlab.compat import rules
from lmlab.config import catalogue, parse, tree
from lmlab.config.amend import quoted
from lmlab.config.fields import Field, fields, problem
from lmlab.config.load import Composer
from lmlab.config.tree import Experiment
from lmlab.errors import LmlabError, raise_all
from lmlab.kernels.resolve import on_cpu, resolve
from lmlab.model.transformer import Transformer

GROUPS = (*(group for group in tree.GROUPS if group not in ("data", "tokenizer")), "train", "seed")
SHAPES_THE_MODEL = ("norm", "block", "pos", "rope_scaling", "attn", "ffn", "moe", "model")
Planned = Callable[[Experiment, str], Any]  # (experiment, group of the field) -> what becomes of it

# Nothing but the field itself, or the default number of steps, ends the run.
ENDLESS: dict[str, Any] = {f"train.max_{what}": None for what in ("steps", "tokens", "flops", "minutes")}

# More than one pair of channels turns.
PAIRS: dict[str, Any] = {"attn.head_dim": 8, "attn.rope_dim": 8, "attn.v_proj": "linear", "attn.o_proj": "linear"}

# What a field needs beside it to do anything, or to be allowed: set on both sides. A value is used unless it is the
# field's already; null takes away what would hide the field or forbid the probe.
CONTEXT: dict[str, dict[str, Any]] = {
    "attn.pattern": {"attn.window": 8},
    "attn.window": {"attn.pattern": None},
    "attn.v_proj": {"attn.weights": "shaped", "attn.head_dim": None},
    "attn.o_proj": {"attn.weights": "shaped", "attn.head_dim": None, "attn.bias_o": False},
    "attn.dropout": {"attn.backend": "auto"},
    "attn.softcap": {"attn.backend": "auto"},
    "attn.qk_norm": {"attn.qk_norm_eps": 1e-6},
    "attn.qk_norm_eps": {"attn.qk_norm": "head"},
    "attn.n_kv_heads": {"attn.queries_per_kv": None},
    "attn.queries_per_kv": {"attn.n_kv_heads": None},
    "attn.head_dim": {"attn.v_proj": "linear", "attn.o_proj": "linear"},
    "ffn.d_ff": {"ffn.mult": None, "ffn.multiple_of": None, "moe.d_expert": None},
    "ffn.mult": {"ffn.d_ff": None, "ffn.multiple_of": 1, "moe.d_expert": None},
    "ffn.multiple_of": {"ffn.d_ff": None, "moe.d_expert": None},
    "moe.every_n_layers": {"moe.first_dense_layers": 0, "moe.d_expert": None},
    "moe.first_dense_layers": {"moe.every_n_layers": 1, "moe.d_expert": None},
    "moe.d_expert": {"ffn.d_ff": None, "ffn.mult": None, "ffn.multiple_of": None},
    "moe.capacity_factor": {"moe.overflow": "drop", "moe.priority": "position"},
    "moe.overflow": {"moe.capacity_factor": 0.5},
    "moe.priority": {"moe.capacity_factor": 0.5},
    "moe.balance": {"moe.aux_coef": 0.01, "moe.bias_step": 0.001},
    "moe.aux_coef": {"moe.balance": "aux", "moe.bias_step": 0.001},
    "moe.bias_step": {"moe.balance": "aux_free", "moe.aux_coef": 0.01},
    "moe.group": {"moe.balance": "aux", "moe.aux_coef": 1.0, "moe.bias_step": 0.001},
    "moe.top_k": {"moe.n_limited_groups": None, "moe.n_expert_groups": 1, "moe.norm_topk": False},
    "moe.norm_topk": {"moe.top_k": 2, "moe.n_limited_groups": None, "moe.n_expert_groups": 1},
    "moe.n_experts": {"moe.n_limited_groups": None, "moe.n_expert_groups": 1},
    "moe.n_limited_groups": {"moe.n_expert_groups": 4, "moe.n_limited_groups": 1, "moe.top_k": 2},
    "moe.n_expert_groups": {"moe.n_expert_groups": 2, "moe.n_limited_groups": 1, "moe.top_k": 2},
    "model.n_heads": {"attn.n_kv_heads": None, "attn.queries_per_kv": None, "attn.head_dim": None},
    "model.d_model": {"attn.head_dim": None},
    "model.embed_scale": {"model.embed_norm": False},
    "model.embed_norm": {"model.embed_scale": "none"},
    "model.seq_len": {"attn.window": None, "pos.max_len": None},
    "model.head_bias": {"model.tie_embeddings": False},
    "model.tie_embeddings": {"model.head_bias": False},
    "model.logit_scale": {"model.logit_softcap": None},
    "pos.max_distance": {"attn.window": None, "attn.pattern": None},
    "pos.theta": PAIRS,
    "pos.fraction": PAIRS,
    "rope_scaling.original_len": {"rope_scaling.factor": 8.0},
    "rope_scaling.beta_fast": {"rope_scaling.factor": 8.0},
    "rope_scaling.beta_slow": {"rope_scaling.factor": 8.0},
    "rope_scaling.low_freq_factor": {"rope_scaling.factor": 8.0},
    "rope_scaling.high_freq_factor": {"rope_scaling.factor": 8.0},
    "optim.clip": {"optim.clip": None},  # steps by sign ask how norms compare: two that always clip are one
    "train.residual_dtype": {"train.precision": "fp16"},
    "seed.dropout": {"model.dropout": 0.1},
    "seed.all": {"seed.init": None, "seed.data": None, "seed.dropout": None},
    **{end: {other: None for other in ENDLESS if other != end} for end in ENDLESS},
    "schedule.warmup_steps": ENDLESS,
    "schedule.min_lr_frac": ENDLESS,
    "schedule.decay_frac": {"schedule.warmup_steps": None, **ENDLESS},
}
# The probes of fields that declare none because under the default composition they would be refused or take long.
PROBES: dict[str, Any] = {
    "attn.v_proj": "none",
    "model.head_bias": True,
    "attn.o_proj": "none",
    "seed.dropout": 1,
    "train.max_minutes": 1.0,
}


def _one_row(experiment: Experiment) -> str:
    return "a step is one row" if experiment.train.batch_tokens == experiment.model.seq_len else ""


def _nothing_for_layers(experiment: Experiment) -> str:
    """Asked of the part itself: one of one's own may have tables that are empty."""
    c = Composed(experiment)
    tables = c.net.pos.tables(c.rows().positions_BT, c.rows().positions_BT, c.rows().positions_BT[:, -1:] + 1)
    idle = tables.cos is None and not tables.biased
    return f"pos={experiment.pos.name} gives the layers nothing" if idle else ""


# Fields that have nothing to choose in some compositions, and why.
IDLE: dict[str, Callable[[Experiment], str]] = {
    "train.micro_batch": _one_row,
    "attn.nope_every_n_layers": _nothing_for_layers,
}


class Flag(NamedTuple):
    """A field of the composition, and the values that may be tried, the declared probe first."""

    group: str
    name: str
    field: Field
    values: tuple[Any, ...]

    @property
    def key(self) -> str:
        return f"{self.group}.{self.name}"


def dead_flags(
    words: Sequence[str],
    experiment: Experiment,
    planned: Planned,
    config_dir: Optional[str] = None,
    groups: Sequence[str] = GROUPS,
) -> Row:
    """words: what composed the experiment. The row fails with the fields that nobody reads."""
    flags = list(_flags(experiment, groups))
    undeclared, declared = [f.key for f in flags if not f.values], [f for f in flags if f.values]
    watch, dead, refused, alive = Watch(planned), _lost(words, declared, config_dir), [], 0
    for flag in declared:
        outcome = _tried(experiment, flag, watch)
        alive += outcome == ""
        if outcome == "dead":
            dead.append(flag.key)
        elif outcome:
            refused.append(f"{flag.key} ({outcome})")
    told = (("nobody reads", dead), ("no probe declared:", undeclared), ("refused here:", refused))
    reason = "; ".join(f"{what} {', '.join(named)}" for what, named in told if named)
    return Row("dead flags", "fail" if dead or undeclared else "pass", f"{alive} fields change something", reason)


def _flags(experiment: Experiment, groups: Sequence[str]) -> Iterator[Flag]:
    for group in groups:
        part = getattr(experiment, group)
        for name, field in fields(type(part)).items():
            if field.identity:
                probe = PROBES.get(f"{group}.{name}") if field.probe is None else field.probe
                tried = () if probe is None else (probe, *_others(field, probe))
                yield Flag(group, name, field, tuple(v for v in tried if v != getattr(part, name)))


def _others(field: Field, probe: Any) -> list[Any]:
    """Where the probe is what the composition has, is refused, or happens to change nothing (a width that is a multiple
    of it already): the default, the other choices, half as much again, 1."""
    number = isinstance(probe, (int, float)) and not isinstance(probe, bool)
    more = [type(probe)(probe * 1.5), type(probe)(1)] if number else []
    return [field.default, *field.choices, *(v for v in more if problem(v, field) is None)]


def _lost(words: Sequence[str], flags: Sequence[Flag], config_dir: Optional[str]) -> list[str]:
    """The words that, composed with all others, do not become the field's value."""
    typed = {f.key: f"{f.key}={quoted(f.values[0])}" for f in flags}
    kept = [o for o in parse.read(words)[0] if o.key not in typed]
    overrides, errors = parse.read(list(typed.values()))
    raise_all(errors)
    found = Composer(catalogue.user_conf(config_dir)).compose([*kept, *overrides])[0]
    wrong = [f.key for f in flags if getattr(getattr(found, f.group), f.name) != f.values[0]]
    return [f"{key} ({typed[key]} does not arrive)" for key in wrong]


def _tried(experiment: Experiment, flag: Flag, watch: Watch) -> str:
    """ "" when some value changes something, "dead" when none does, else why it is refused."""
    refusal, dead = "", False
    if flag.key in IDLE and (nothing := IDLE[flag.key](experiment)):
        return nothing
    for value in flag.values:
        for base in _bases(experiment, flag):
            probed = changed(base, {flag.key: value})
            if wrong := _refused(flag, watch, base, probed):
                refusal = refusal or wrong
            elif base != probed:
                if watch.differ(base, probed, flag.group):
                    return ""
                dead = True
    return "dead" if dead else refusal or "it has no other value"


def _refused(flag: Flag, watch: Watch, *experiments: Experiment) -> str:
    """What the first of them that can't be built is told."""
    for experiment in experiments:
        if wrong := rules.check(experiment):
            return wrong[0].message
        built = watch.look(shapes, experiment, flag.group) if flag.group in SHAPES_THE_MODEL else None
        if isinstance(built, str):
            return built
    return ""


def _bases(experiment: Experiment, flag: Flag) -> Iterator[Experiment]:
    """The composition with the field's context, then as it is."""
    context = {
        k: v
        for k, v in CONTEXT.get(flag.key, {}).items()
        if hasattr(getattr(experiment, k.split(".")[0]), k.split(".")[1])
    }
    if context:
        yield changed(experiment, context)
    yield experiment


def changed(experiment: Experiment, values: Mapping[str, Any]) -> Experiment:
    """The experiment with dotted keys set."""
    for key, value in values.items():
        group, _, name = key.partition(".")
        experiment = dataclasses.replace(experiment, **{group: given(getattr(experiment, group), **{name: value})})
    return experiment


# ---------------------------------------------------------------- what may change


class Watch:
    """Compares two experiments by what they do, the cheap looks first; remembers what it has seen of one."""

    def __init__(self, planned: Planned) -> None:
        self.planned = planned
        self.seen: dict[tuple[str, str, str], Any] = {}

    def differ(self, a: Experiment, b: Experiment, group: str) -> bool:
        looks = [shapes, behaviour] if group in SHAPES_THE_MODEL else []
        return any(self.look(look, a, group) != self.look(look, b, group) for look in (*looks, self.planned))

    def look(self, look: Callable[..., Any], experiment: Experiment, group: str) -> Any:
        """What `look` sees of the experiment, or the message it is refused with: that is not silence."""
        key = (look.__name__, group if look is self.planned else "", repr(experiment))
        if key not in self.seen:
            try:
                self.seen[key] = look(experiment, group)
            except LmlabError as error:
                self.seen[key] = error.message
        return self.seen[key]


def shapes(experiment: Experiment, group: str = "") -> Any:
    """Names and shapes of the parameters at full width, of so many layers that every other number is a lower one."""
    m = experiment.arch.model
    arch = dataclasses.replace(experiment.arch, model=given(m, n_layers=min(m.n_layers, LAYERS + 1)))
    with torch.device("meta"):
        net = Transformer(arch, VOCAB, resolve(on_cpu(experiment.kernels), "cpu", torch.float32))
    return [(name, tuple(p.shape)) for name, p in net.named_parameters()]


def behaviour(experiment: Experiment, group: str = "") -> Any:
    """Initial values, logits in train mode, logits in eval mode after it, and the backend, at the size of a check."""
    c = Composed(experiment)
    net = c.build()
    values = [digest(t) for t in net.state_dict().values()]
    randomized(net)
    asked = c.rows()
    far = dataclasses.replace(asked, positions_BT=asked.positions_BT * 7) if not hasattr(net.pos, "weight") else asked
    with torch.no_grad():
        torch.manual_seed(0)
        trained = asked.call(net.train()).logits_BTV
        learned = asked.call(net, targets_BT=asked.tokens_BT)
        net.after_step([getattr(found, "load_E", None) for found in learned.stats])
        evaluated = [rows.call(net.eval()).logits_BTV for rows in (asked, far)]
    return values, digest(trained), digest(learned.objective), [digest(e) for e in evaluated], net.paths()["attention"]


def digest(tensor: Tensor) -> str:
    return hashlib.blake2b(
        tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), digest_size=8
    ).hexdigest()
