"""ONE table of what goes with what: errors, documentation and tests read it. Torch-free.

A row says what goes wrong, finds it in an experiment, and carries a command line that shows it. A combination that
would crash later or be ignored without a word is a row here; the type and bounds of a single value are not.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from lmlab.compat import model as parts
from lmlab.compat import moe, pos
from lmlab.compat.pos import Wrong
from lmlab.config import mixing
from lmlab.data.spec import HubDataset, HubTokenizer, Ids, SplitSpec, TaskSpec, TextFiles
from lmlab.errors import ConfigError, listed
from lmlab.model.spec import AttnSpec, BlockSpec, FfnSpec, MoESpec, ScalingSpec
from lmlab.registry import OPTIONS, Spec
from lmlab.train.spec import DEFAULT_STEPS, WSD, ScheduleSpec, warmup_steps

if TYPE_CHECKING:
    from lmlab.config.tree import Experiment


@dataclass(frozen=True)
class Rule:
    """One row: `why` it is refused, `find` (message and hint, or None), an `example` command line that is refused."""

    id: str
    why: str
    find: Callable[[Experiment], Wrong | None]
    example: str


# A window that no row of these reaches: of a model that is there already it still acts where more tokens are generated.
OF_TRAINING = frozenset({"window"})


def check(experiment: Experiment, *, imported: bool = False) -> list[ConfigError]:
    """Every row that the experiment breaks. A part that lacks what its group needs is told alone. imported: a model as
    others made it, where the rows of OF_TRAINING hold for nobody."""
    incomplete = [ConfigError(*wrong) for wrong in _incomplete(experiment)]
    return incomplete or [
        ConfigError(*wrong)
        for rule in RULES
        if not (imported and rule.id in OF_TRAINING) and (wrong := rule.find(experiment))
    ]


def steps(experiment: Experiment) -> int | None:
    """Optimizer steps, as far as the keys alone tell; None when FLOPs or minutes may end the run earlier."""
    t = experiment.train
    if t.max_flops is not None or t.max_minutes is not None:
        return None
    known = [t.max_steps, None if t.max_tokens is None else max(1, t.max_tokens // t.batch_tokens)]
    return min((n for n in known if n is not None), default=DEFAULT_STEPS)


# ---------------------------------------------------------------- parts of your own

BASES = {"attn": AttnSpec, "ffn": FfnSpec, "block": BlockSpec, "moe": MoESpec}
BUILT = ("norm", "block", "pos", "rope_scaling", "attn", "ffn", "moe", "data", "tokenizer", "optim", "schedule")


def _incomplete(e: Experiment) -> Iterator[Wrong]:
    for group in BUILT:
        part = getattr(e, group)
        if not part.build and (group, part.name) not in (("rope_scaling", "none"), ("moe", "none")):
            yield f"`{group}={part.name}` does not say what builds it", 'write @option(…, build="module:Class")'
        if group in BASES and not isinstance(part, BASES[group]):
            base = BASES[group].__name__
            yield f"`{group}={part.name}` is no {base}", f"derive its spec from lmlab.model.spec.{base}"
        if group == "rope_scaling" and part.name != "none" and not isinstance(part, ScalingSpec):
            yield f"`rope_scaling={part.name}` is no ScalingSpec", "derive its spec from lmlab.model.spec.ScalingSpec"
        if group == "data" and not hasattr(part, "packing"):
            yield f"`data={part.name}` has no packing", "derive it from lmlab.data.spec.DataSpec"
        if group == "schedule" and not isinstance(part, ScheduleSpec):
            yield f"`schedule={part.name}` has no warmup_steps", "derive it from lmlab.train.spec.ScheduleSpec"


# ---------------------------------------------------------------- data


def _text_files(e: Experiment) -> Wrong | None:
    if not isinstance(e.data, TextFiles) or e.data.files:
        return None
    return "`data=text` needs `data.files`, which is empty", "write data=text data.files=[book.txt,notes/*.txt]"


def _text_field(e: Experiment) -> Wrong | None:
    d = e.data
    if not isinstance(d, TextFiles) or not d.files or d.field == "text":
        return None
    if any(PurePath(f).suffix != ".txt" for f in d.files):
        return None
    return f"`data.field` is {d.field}, but .txt files have no fields ({listed(d.files, 3)})", "leave data.field out"


def _splits(e: Experiment) -> Wrong | None:
    d = e.data
    if not isinstance(d, SplitSpec) or d.val_frac + d.test_frac < 1:
        return None
    message = f"`data.val_frac` {d.val_frac:g} and `data.test_frac` {d.test_frac:g} leave nothing to train on"
    return message, "let them add to less than 1, for example 0.05 each"


def _hub_repo(e: Experiment) -> Wrong | None:
    if not isinstance(e.data, HubDataset) or e.data.repo is not None:
        return None
    return (
        "`data=hf` needs `data.repo`, which is null",
        "write data=hf data.repo=roneneldan/TinyStories, or data=tinystories",
    )


def _tokenizer_path(e: Experiment) -> Wrong | None:
    if not isinstance(e.tokenizer, HubTokenizer) or e.tokenizer.path is not None:
        return None
    hint = "write tokenizer=hf tokenizer.path=FOLDER_OR_NAME, or tokenizer=gpt2"
    return "`tokenizer=hf` needs `tokenizer.path`, which is null", hint


def _mix_parts(e: Experiment) -> Wrong | None:
    try:
        mixing.parts(e.data)
    except ConfigError as error:
        return error.message, error.hint
    return None


def _task_ids(e: Experiment) -> Wrong | None:
    d, ids = e.data, isinstance(e.tokenizer, Ids)
    if isinstance(d, TaskSpec) and not d.text and not ids:
        message = f"`data={d.name}` has ids of its own, which `tokenizer={e.tokenizer.name}` does not write"
        return message, "leave tokenizer= out, or write tokenizer=ids"
    if ids and not (isinstance(d, TaskSpec) and not d.text):
        tasks = (name for name, spec in OPTIONS["data"].items() if issubclass(spec, TaskSpec) and not spec.text)
        message = f"`tokenizer=ids` writes no text, and `data={d.name}` is text"
        return message, f"leave tokenizer= out, or use a task with ids of its own: data={listed(tasks)}"
    return None


# ---------------------------------------------------------------- training


def _betas(e: Experiment) -> Wrong | None:
    betas = getattr(e.optim, "betas", None)
    if betas is None or len(betas) == 2:
        return None
    return f"`optim.betas` has {len(betas)} numbers; it takes two", "write optim.betas=[0.9,0.95]"


def _batch_rows(e: Experiment) -> Wrong | None:
    tokens, length = e.train.batch_tokens, e.model.seq_len
    if tokens % length == 0:
        return None
    below = tokens // length * length
    fits = f"{below} or {below + length}" if below else f"{length}"
    message = f"`train.batch_tokens` is {tokens}, which is not a multiple of `model.seq_len` {length}"
    return message, f"use {fits}, or another length of a row (model.seq_len)"


def _micro_batch(e: Experiment) -> Wrong | None:
    micro, rows = e.train.micro_batch, e.train.batch_tokens // e.model.seq_len
    if not isinstance(micro, int) or rows < 1 or micro <= rows:
        return None
    how = f"batch_tokens {e.train.batch_tokens} / seq_len {e.model.seq_len}"
    message = f"`train.micro_batch` is {micro}, but a step has {rows} rows ({how})"
    return message, f"use at most {rows}, or a larger train.batch_tokens"


def _residual(e: Experiment) -> Wrong | None:
    if e.train.residual_dtype == "compute" or e.block.keeps_sum():  # type: ignore[attr-defined]
        return None
    message = f"`train.residual_dtype` is fp32, and `block={e.block.name}` has no sum that goes through the layers"
    return message, "use train.residual_dtype=compute, or block=prenorm"


def _eval_tokens(e: Experiment) -> Wrong | None:
    tokens, length = e.train.eval_tokens, e.model.seq_len
    if tokens is None or tokens >= length:
        return None
    return (
        f"`train.eval_tokens` is {tokens}, less than one row of `model.seq_len` {length}",
        f"use at least {length}, or null",
    )


def _warmup(e: Experiment) -> Wrong | None:
    warmup, total = e.schedule.warmup_steps, steps(e)
    if warmup is None or total is None or warmup < total:
        return None
    message = f"`schedule.warmup_steps` is {warmup}, and the run has {total} steps: nothing is left after the warm-up"
    longer = {"max_steps": 10 * warmup, "max_tokens": 10 * warmup * e.train.batch_tokens}
    shorter = [f"train.{key}={n}" for key, n in longer.items() if getattr(e.train, key) is not None]
    return message, f"use fewer than {total}, or {' '.join(shorter) or f'train.max_steps={10 * warmup}'}"


def _decay(e: Experiment) -> Wrong | None:
    s, total = e.schedule, steps(e)
    if not isinstance(s, WSD) or total is None or (s.warmup_steps is not None and s.warmup_steps >= total):
        return None
    warmup, decay = warmup_steps(s.warmup_steps, total), max(1, round(s.decay_frac * total))
    if warmup + decay <= max(total, 2):
        return None
    both = f"`schedule.warmup_steps` {warmup} and a decay of {decay} (`schedule.decay_frac` {s.decay_frac:g})"
    message = f"{both} are more than the run's {total} steps"
    return message, f"use at most {total - decay} warm-up steps, or a smaller decay_frac"


def _has_dropout(e: Experiment) -> bool:
    """Whether anything draws from seed.dropout. A part from a plug-in may, whatever its fields are called."""
    parts = [getattr(e, f.name) for f in dataclasses.fields(e) if isinstance(getattr(e, f.name), Spec)]
    own = any(not type(p).__module__.startswith("lmlab.") for p in parts)
    return own or any(getattr(p, name, 0) > 0 for p in parts for name in ("dropout", "jitter"))


def _seed_dropout(e: Experiment) -> Wrong | None:
    if e.seed.dropout is None or _has_dropout(e):
        return None
    hint = "leave it out, or set model.dropout or attn.dropout"
    return f"`seed.dropout` is {e.seed.dropout}, but all dropout is 0: it would do nothing", hint


def _seed_all(e: Experiment) -> Wrong | None:
    s = e.seed
    used = [s.init, s.data] + ([s.dropout] if _has_dropout(e) else [])
    if s.all == 0 or any(value is None for value in used):
        return None
    return (
        f"`seed.all` is {s.all}, but every seed is set by itself: it would do nothing",
        "leave seed= out, or one of the others",
    )


# ---------------------------------------------------------------- the invocation


def _device(e: Experiment) -> Wrong | None:
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", e.device):
        return None
    number = f"did you mean device=cuda:{e.device}?" if e.device.isdigit() else "use one of auto, cpu, cuda, cuda:0"
    return f"`device` is {e.device}; it takes auto, cpu, cuda or cuda:N", number


def _name(e: Experiment) -> Wrong | None:
    if e.name is None or re.fullmatch(r"[^\W_][^/\\\x00-\x1f]{0,79}", e.name):
        return None
    hint = "begin with a letter or digit; no slash; up to 80 characters (the folder for all runs is paths.runs)"
    return f"`name` is {e.name}, which can't name a directory", hint


RULES: tuple[Rule, ...] = (
    Rule("heads-split-width", "d_model is cut into n_heads equal heads", pos.heads_split_width, "model.n_heads=3"),
    Rule(
        "kv-heads-split-heads",
        "each kv head serves equally many query heads",
        pos.kv_heads_split_heads,
        "attn=gqa attn.n_kv_heads=3",
    ),
    Rule("rotary-width", "rotary channels turn in pairs", pos.rotary_width, "pos=rope attn.head_dim=33"),
    Rule(
        "sinusoidal-width",
        "a sine and a cosine per pair of channels",
        pos.sinusoidal_width,
        "pos=sinusoidal model.d_model=255 model.n_heads=5",
    ),
    Rule("learned-table", "a learned table needs a row per position", pos.learned_table, "pos=learned pos.max_len=100"),
    Rule("t5-buckets", "no bucket of distances stays empty", pos.t5_buckets, "pos=t5 pos.max_distance=16"),
    Rule("norm-none", "where no norm is, it can't stand anywhere", parts.norm_none, "norm=none block=postnorm"),
    Rule(
        "embed-scale",
        "a norm undoes a factor before it",
        parts.embed_scale,
        "model.embed_scale=sqrt_d_model model.embed_norm=true",
    ),
    Rule("scaling-needs-rope", "only rotations are scaled", pos.scaling_needs_rope, "rope_scaling=yarn pos=alibi"),
    Rule(
        "scaling-acts",
        "a scaling changes the slowest pair first, or nothing",
        pos.scaling_acts,
        "rope_scaling=ntk attn.head_dim=2",
    ),
    Rule(
        "scaling-bounds",
        "pairs are kept above one bound and slowed below another",
        pos.scaling_bounds,
        "rope_scaling=yarn rope_scaling.beta_fast=1",
    ),
    Rule(
        "yarn-slow",
        "YaRN needs a pair that makes beta_slow rotations",
        pos.yarn_slow,
        "rope_scaling=yarn rope_scaling.original_len=6",
    ),
    Rule(
        "yarn-factor",
        "at factor 1 nothing is scaled",
        pos.yarn_factor,
        "rope_scaling=yarn rope_scaling.factor=1 rope_scaling.attention_factor=1.3",
    ),
    Rule(
        "nope-layers",
        "layers go without positions that they would have",
        pos.nope_layers,
        "pos=learned attn.nope_every_n_layers=4",
    ),
    Rule("window", "a window longer than a row does nothing", parts.window, "attn.window=1000"),
    Rule("pattern", "S layers have the window, L layers see all", parts.pattern, "attn.pattern=SSSL"),
    Rule("backend", "a backend must be able to do what is asked", parts.backend, "attn.softcap=30 attn.backend=sdpa"),
    Rule(
        "kv-heads-once",
        "the number of kv heads is given once",
        parts.kv_heads_once,
        "attn=gqa attn.n_kv_heads=1 attn.queries_per_kv=2",
    ),
    Rule("qk-norm-eps", "an eps needs a norm", parts.qk_norm_eps, "attn.qk_norm_eps=1e-5"),
    Rule("left-out", "projections are left out of shaped attention only", parts.left_out, "attn.v_proj=none"),
    Rule("ffn-width", "d_ff is the width; mult and multiple_of make one", parts.ffn_width, "ffn.d_ff=512 ffn.mult=2"),
    Rule("routed-layers", "some layer has experts", moe.routed_layers, "moe=topk moe.every_n_layers=100"),
    Rule("one-expert", "one expert is no choice", moe.one_expert, "moe=switch moe.n_experts=1"),
    Rule("top-k", "a token uses no more experts than there are", moe.top_k, "moe=topk moe.top_k=9"),
    Rule("norm-topk", "a weight that is always 1 teaches nothing", moe.norm_topk, "moe=topk moe.top_k=1"),
    Rule(
        "all-experts", "what chooses needs experts to leave out", moe.all_experts, "moe=topk moe.top_k=8 moe.aux_coef=1"
    ),
    Rule(
        "expert-groups",
        "a token is limited to some of several groups",
        moe.expert_groups,
        "moe=topk moe.n_expert_groups=3 moe.n_limited_groups=1",
    ),
    Rule(
        "dead-routing", "a factor or an order needs what it acts on", moe.dead_settings, "moe=topk moe.overflow=reroute"
    ),
    Rule(
        "room-for-all",
        "a capacity has to leave someone out",
        moe.room_for_all,
        "moe=switch moe.capacity_factor=8",
    ),
    Rule(
        "unused-width",
        "a width needs a layer that has it",
        moe.unused_width,
        "moe=topk moe.d_expert=64 ffn.d_ff=512",
    ),
    Rule("group-of-batch", "a batch that is split is no group", moe.group_of_batch, "moe=topk moe.group=batch"),
    Rule("head-bias", "a tied head has no bias", parts.head_bias, "model.head_bias=true"),
    Rule("text-files", "data=text needs files", _text_files, "data=text"),
    Rule("text-field", ".txt files have no fields", _text_field, "data=text data.files=[a.txt] data.field=body"),
    Rule(
        "splits",
        "something must be left to train on",
        _splits,
        "data=hf data.repo=a/b data.val_frac=0.5 data.test_frac=0.5",
    ),
    Rule("hub-repo", "data=hf needs a repository", _hub_repo, "data=hf"),
    Rule("tokenizer-path", "tokenizer=hf needs a path", _tokenizer_path, "tokenizer=hf"),
    Rule(
        "mix-parts",
        "a mixture has parts that fit together, and shares that sum to 1",
        _mix_parts,
        "data=mix data.mix=[sotu:0.5,passkey:0.1]",
    ),
    Rule(
        "task-ids", "a task with ids of its own is no text, and a text has none", _task_ids, "data=mqar tokenizer=byte"
    ),
    Rule("betas", "Adam has two betas", _betas, "optim.betas=[0.9]"),
    Rule("batch-rows", "a step is whole rows", _batch_rows, "train.batch_tokens=1000"),
    Rule("micro-batch", "a micro-batch is part of a step", _micro_batch, "train.micro_batch=64"),
    Rule(
        "residual",
        "a wider residual needs one that is kept",
        _residual,
        "train.residual_dtype=fp32 block=postnorm",
    ),
    Rule("eval-tokens", "an evaluation is at least one row", _eval_tokens, "train.eval_tokens=100"),
    Rule("warmup", "the warm-up ends before the run", _warmup, "schedule.warmup_steps=300"),
    Rule(
        "decay",
        "warm-up and decay fit into the run",
        _decay,
        "schedule=wsd schedule.warmup_steps=90 schedule.decay_frac=0.2 train.max_steps=100",
    ),
    Rule("seed-dropout", "a seed of dropout needs dropout", _seed_dropout, "seed.dropout=1"),
    Rule("seed-all", "seed.all fills the seeds that are not set", _seed_all, "seed=1 seed.init=2 seed.data=3"),
    Rule("device", "auto, cpu, cuda or cuda:N", _device, "device=gpu"),
    Rule("name", "the name becomes a directory", _name, "name=a/b"),
)
