"""Each planted fault is caught by the row named for it, and the same row passes on the code as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lmlab.check import composed as composed_module
from lmlab.check import kernels as kernels_module
from lmlab.check.all_rows import QUICK, asked
from lmlab.check.composed import Composed
from lmlab.check.flags import GROUPS, dead_flags
from lmlab.check.rows import Row, attempted
from lmlab.cli.check_plan import planned
from lmlab.cli.new import filled
from lmlab.errors import ConfigError
from lmlab.kernels import attention
from lmlab.kernels import resolve as resolve_module
from lmlab.kernels.attention import probabilities
from lmlab.kernels.spec import Auto
from lmlab.model import attn, block, pos
from lmlab.model.attn import SoftmaxAttention, View
from lmlab.model.cache import CacheKind, LayerCache, Layout
from lmlab.model.mask import Mask
from lmlab.model.transformer import Transformer
from tests.check.conftest import composed, row_of

Plant = Callable[[pytest.MonkeyPatch], None]
Change = Callable[[SoftmaxAttention, Tensor, Tensor, Tensor, View], tuple[Tensor, Tensor, Tensor]]


def window_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attn, "window", lambda size: Mask())


def mask_after_softmax(patch: pytest.MonkeyPatch) -> None:
    def late(q: Tensor, k: Tensor, v: Tensor, scores: Any, rendered: Any, *, scale: float, dropout: float = 0.0) -> Any:
        T, S = q.shape[1], k.shape[1]
        _, probs = probabilities(q, k, scores._replace(causal=False), scale=scale)
        return torch.einsum("bhts,bshc->bthc", probs * scores.seen(range(T), range(S), T, S, q.device), v)

    patch.setattr(attention, "sdpa", late)


def positions_run_on_in_a_pack(patch: pytest.MonkeyPatch) -> None:
    forward = Transformer.forward

    def running(self: Transformer, tokens: Tensor, positions: Tensor, **more: Any) -> Any:
        if more.get("documents_BT") is not None:
            positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        return forward(self, tokens, positions, **more)

    patch.setattr(Transformer, "forward", running)


def handed_to_the_backend(patch: pytest.MonkeyPatch, change: Change) -> None:
    attend = SoftmaxAttention.attend

    def faulty(self: SoftmaxAttention, q: Tensor, k: Tensor, v: Tensor, view: View) -> Tensor:
        return attend(self, *change(self, q, k, v, view), view)

    patch.setattr(SoftmaxAttention, "attend", faulty)


def v_rotated(patch: pytest.MonkeyPatch) -> None:
    handed_to_the_backend(patch, lambda self, q, k, v, view: (q, k, self.rotate(v, view)))


def scale_squared(patch: pytest.MonkeyPatch) -> None:
    handed_to_the_backend(patch, lambda self, q, k, v, view: (q * self.scale, k, v))


def kv_tiled(patch: pytest.MonkeyPatch) -> None:
    def tiled(self: SoftmaxAttention, q: Tensor, k: Tensor, v: Tensor, view: View) -> tuple[Tensor, Tensor, Tensor]:
        times = q.shape[2] // k.shape[2]
        return q, k.repeat(1, 1, times, 1), v.repeat(1, 1, times, 1)

    handed_to_the_backend(patch, tiled)


def alpha_on_one_residual(patch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: Tensor, view: Any, valid: Any = None, cache: Any = None) -> Any:
        _, x = self.norm1.add(x, self.attn(x, view, cache), self.alpha)
        branch, stats = self.ffn(x, valid)
        return self.norm2.add(x, branch)[1], stats

    patch.setattr(block.PostNorm, "forward", forward)


def positions_in_bf16(patch: pytest.MonkeyPatch) -> None:
    angles = pos.Angles.__call__
    patch.setattr(pos.Angles, "__call__", lambda self, positions: angles(self, positions.bfloat16().long()))


def keys_in_another_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LayerCache, "append", lambda self, k, v: tuple(x.flip(1) for x in APPEND(self, k, v)))


def a_ring_too_wide(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheKind, "layout", lambda self, window: (None if window is None else window + 1, 0))


def positions_of_the_chunk_alone(patch: pytest.MonkeyPatch) -> None:
    begin = Layout.begin

    def faulty(self: Layout, positions: Tensor, valid: Any) -> None:
        begin(self, positions - positions[:, :1], valid)

    patch.setattr(Layout, "begin", faulty)


PREPARE = SoftmaxAttention.prepare


def handed_to_prepare(patch: pytest.MonkeyPatch, change: Callable[[SoftmaxAttention, Mask, int], Mask]) -> None:
    def faulty(self: SoftmaxAttention, mask: Mask, tables: Any, q: Tensor, k: Tensor, dtype: torch.dtype) -> View:
        return PREPARE(self, change(self, mask, k.shape[1]), tables, q, k, dtype)

    patch.setattr(SoftmaxAttention, "prepare", faulty)


def documents_dropped_in_training(patch: pytest.MonkeyPatch) -> None:
    handed_to_prepare(patch, lambda self, mask, S: dataclasses.replace(mask, documents=None) if self.training else mask)


def documents_dropped_in_long_rows(patch: pytest.MonkeyPatch) -> None:
    handed_to_prepare(patch, lambda self, mask, S: dataclasses.replace(mask, documents=None) if S > 24 else mask)


def a_window_too_wide(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attn, "window", lambda size: Mask(window=size + 1))


def a_window_too_narrow(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attn, "window", lambda size: Mask(window=size - 1))


def a_window_too_wide_in_training(patch: pytest.MonkeyPatch) -> None:
    init = SoftmaxAttention.__init__

    def train(self: SoftmaxAttention, mode: bool = True) -> Any:
        if self.window is not None:
            self.window = self.own_window + mode
        return torch.nn.Module.train(self, mode)

    def faulty(self: SoftmaxAttention, *given: Any) -> None:
        init(self, *given)
        self.own_window = self.window

    patch.setattr(SoftmaxAttention, "__init__", faulty)
    patch.setattr(SoftmaxAttention, "train", train)


def nothing_is_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(block.Block, "drop", lambda self, branch: branch)


def the_ffn_is_not_dropped(patch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: Tensor, view: Any, valid: Any = None, cache: Any = None) -> Any:
        x = x + self.drop(self.attn(self.norm1(x, valid), view, cache))
        branch, stats = self.ffn(self.norm2(x, valid), valid)
        return x + branch, stats

    patch.setattr(block.PreNorm, "forward", forward)


def embeddings_are_not_dropped(patch: pytest.MonkeyPatch) -> None:
    embedded = Transformer.embedded

    def faulty(self: Transformer, *given: Any) -> Tensor:
        dropout, self.dropout = self.dropout, 0.0
        x = embedded(self, *given)
        self.dropout = dropout
        return x

    patch.setattr(Transformer, "embedded", faulty)


def one_layer_drops_no_probabilities(patch: pytest.MonkeyPatch) -> None:
    attend = SoftmaxAttention.attend

    def faulty(self: SoftmaxAttention, q: Tensor, k: Tensor, v: Tensor, view: View) -> Tensor:
        if self.window is None:
            self.dropout = 0.0
        return attend(self, q, k, v, view)

    patch.setattr(SoftmaxAttention, "attend", faulty)


def a_leak_in_long_rows(patch: pytest.MonkeyPatch, *, training: bool = False) -> None:
    forward = block.PreNorm.forward

    def faulty(self: Any, x: Tensor, *more: Any) -> Any:
        leaks = x.shape[1] > 24 and (self.training or not training)
        return forward(self, x + 0.1 * x.mean(1, keepdim=True) if leaks else x, *more)

    patch.setattr(block.PreNorm, "forward", faulty)


def a_leak_in_long_rows_of_training(patch: pytest.MonkeyPatch) -> None:
    a_leak_in_long_rows(patch, training=True)


APPEND = LayerCache.append
FAULTS: list[tuple[Plant, str, str, str]] = [
    (window_ignored, "attn.window=64", "causality", "windows allow"),
    (mask_after_softmax, "", "causality", "position"),
    (mask_after_softmax, "", "causality by gradient", "gradient at later tokens"),
    (positions_run_on_in_a_pack, "pos=learned", "packed = alone", "off by"),
    (positions_run_on_in_a_pack, "pos=sinusoidal", "packed = alone", "off by"),
    (v_rotated, "", "shift", "off by"),
    (kv_tiled, "attn=gqa", "oracle", "off by"),
    (scale_squared, "", "oracle", "off by"),
    (alpha_on_one_residual, "block=deepnorm", "oracle", "off by"),
    (positions_in_bf16, "", "oracle", "(far positions)"),
    (keys_in_another_order, "", "cached = full", "(chunks of"),
    (a_ring_too_wide, "attn.window=64", "cached = full", "(chunks of"),
    (positions_of_the_chunk_alone, "pos=alibi", "cached = full", "(chunks of"),
    (documents_dropped_in_training, "", "packed = alone in training", "off by"),
    (documents_dropped_in_training, "", "causality in training by layer", "layer 0: input 0 edited, output 8 moved"),
    (documents_dropped_in_long_rows, "", "packed = alone", "off by"),
    (
        a_window_too_wide,
        "attn.window=64 attn.pattern=SL",
        "causality by layer",
        "layer 0: input 0 edited, output 6 moved",
    ),
    (a_window_too_wide, "attn.window=64 attn.pattern=SSSL", "causality by layer", "layer 0: input 0 edited"),
    (a_window_too_wide, "attn=mla attn.window=64 attn.pattern=LS", "causality by layer", "layer 1: input 0 edited"),
    (a_window_too_narrow, "attn.window=64 attn.pattern=SL", "causality by layer", "no input is seen 5 tokens later"),
    (a_window_too_wide_in_training, "attn.window=64 attn.pattern=SL", "causality in training by layer", "layer 0"),
    (nothing_is_dropped, "", "dropout", "blocks.0 (attn), model.dropout in blocks.0 (ffn)"),
    (
        nothing_is_dropped,
        "block=sandwich norm=layernorm",
        "dropout",
        "blocks.0 (attn), model.dropout in blocks.0 (ffn)",
    ),
    (nothing_is_dropped, "block=parallel", "dropout", "blocks.0 (attn), model.dropout in blocks.0 (ffn)"),
    (nothing_is_dropped, "block=deepnorm", "dropout", "blocks.0 (attn), model.dropout in blocks.0 (ffn)"),
    (
        the_ffn_is_not_dropped,
        "",
        "dropout",
        "nothing: model.dropout in blocks.0 (ffn), model.dropout in blocks.1 (ffn)",
    ),
    (embeddings_are_not_dropped, "", "dropout", "does nothing: model.dropout in the embedding"),
    (
        one_layer_drops_no_probabilities,
        "attn.window=64 attn.pattern=SL",
        "dropout",
        "nothing: attn.dropout in blocks.1",
    ),
    (a_leak_in_long_rows, "", "causality", "token 320 edited, position "),
    (a_leak_in_long_rows, "", "causality in training", "(of 640)"),
    (a_leak_in_long_rows_of_training, "model.dropout=0.9", "causality in training", "(of 640)"),
]
NAMES = [f"{plant.__name__} {line} {name}" for plant, line, name, _ in FAULTS]


@pytest.mark.parametrize(("plant", "line", "name", "told"), FAULTS, ids=NAMES)
def test_a_fault_is_caught_by_its_row(
    plant: Plant, line: str, name: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = row_of(line, name)
    assert healthy.state == "pass", healthy
    plant(monkeypatch)
    found = row_of(line, name)
    assert found.state == "fail"
    assert told in found.figure


PLUGIN = """
from typing import Optional
import torch
from lmlab.model.attn import Attention
from lmlab.model.mask import CAUSAL
from lmlab.model.spec import MHA
from lmlab.registry import option, setting

@option("attn", "{name}", build="{name}:Mine")
class Spec(MHA):
    temperature: float = setting(1.0, "divides the scores", gt=0, probe=2.0)
    {field}

class Mine(Attention):
    def __init__(self, spec, dims, ops, layer=None):
        super().__init__(spec, dims, ops, layer)
        self.scale = self.scale / spec.temperature
        {body}
"""


def plugin(folder: Path, name: str, *, field: str = "", body: str = "pass") -> str:
    (folder / f"{name}.py").write_text(PLUGIN.format(name=name, field=field or "pass", body=body))
    return f"plugins=['{folder / name}.py'] attn={name}"


def test_a_window_that_a_plugin_ignores_is_caught(tmp_path: Path) -> None:
    healthy = plugin(tmp_path, "keeps_window")
    assert row_of(f"{healthy} attn.window=64", "causality").state == "pass"
    assert row_of(healthy, "oracle").reason == "attn=keeps_window is not one of lmlab's own: no formula to compare with"
    ignoring = plugin(tmp_path, "drops_window", body="self.window = None")
    found = row_of(f"{ignoring} attn.window=64", "causality")
    assert (found.state, "token 0 reaches position 23" in found.figure) == ("fail", True)


def template(folder: Path, group: str, name: str, old: str = "", new: str = "") -> str:
    """What `lmlab new` writes, some of its text replaced: the words that choose it."""
    text = filled(f"{group}.py.txt", group, name)
    assert old in text
    (folder / f"{name}.py").write_text(text.replace(old, new) if old else text)
    return f"plugins=['{folder / name}.py'] {group}={name}"


@pytest.mark.parametrize("more", ["", " attn.window=8", " attn.window=8 attn.pattern=SL"])
def test_a_position_of_the_new_keys_alone_is_caught(more: str, tmp_path: Path) -> None:
    healthy = template(tmp_path, "pos", "falls_by_log")
    assert row_of(healthy + more, "cached = full").state == "pass"
    blind = template(tmp_path, "pos", "sees_new_keys", "n_distances(q_pos_BT, k_pos_BS)", "q_pos_BT.shape[1]")
    assert row_of(blind + more, "cached = full").state == "fail"
    assert row_of(blind + more, "causality").state == "pass"


def new_positions_alone(patch: pytest.MonkeyPatch) -> None:
    views = Transformer.cached_views

    def faulty(self: Transformer, cache: Any, positions: Tensor, *more: Any) -> Any:
        tables = self.pos.tables
        self.pos.tables = lambda q, k, length=None: tables(q, q, length)
        try:
            return views(self, cache, positions, *more)
        finally:
            self.pos.tables = tables

    patch.setattr(Transformer, "cached_views", faulty)


def test_a_cache_that_hands_on_new_positions_alone_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = template(tmp_path, "pos", "falls_by_log_too")
    new_positions_alone(monkeypatch)
    assert "(chunks of" in row_of(line, "cached = full").figure


@pytest.mark.parametrize("off", ["+ 1", "- 1"])
def test_a_window_off_by_one_in_a_plugin_with_a_pattern_is_caught(off: str, tmp_path: Path) -> None:
    name = f"window_{'wide' if off == '+ 1' else 'narrow'}"
    body = f"self.window = self.window and self.window {off}"
    line = f"{plugin(tmp_path, name, body=body)} attn.window=64 attn.pattern=SL"
    assert row_of(line, "oracle").state == "n/a"
    found = row_of(line, "causality by layer")
    assert (found.state, found.reason) == ("fail", "its window is 6, counting the token itself")


def test_a_branch_that_a_block_of_ones_own_does_not_drop_is_named(tmp_path: Path) -> None:
    healthy = template(tmp_path, "block", "drops_both")
    assert row_of(healthy, "dropout").state == "pass"
    faulty = template(tmp_path, "block", "drops_one", "self.scale2 * self.drop(branch)", "self.scale2 * branch")
    found = row_of(faulty, "dropout")
    assert found.figure == "does nothing: model.dropout in blocks.0 (ffn), model.dropout in blocks.1 (ffn)"
    assert QUICK["dropout"](Composed(composed(faulty))).state == "n/a"
    assert QUICK["dropout"](Composed(composed(f"{faulty} model.dropout=0.1"))).state == "fail"


NOISY = """
    def forward(self, x_BTD, view, cache=None):
        out = super().forward(x_BTD, view, cache)
        return out + torch.randn_like(out) if self.training else out
"""


def test_what_draws_at_random_in_training_is_not_called_a_leak(tmp_path: Path) -> None:
    line = plugin(tmp_path, "adds_noise", body=f"pass\n{NOISY}")
    rows = asked(composed(line), QUICK)
    assert [row for row in rows if row.state == "fail"] == []
    assert next(row for row in rows if row.name == "packed = alone in training").state == "n/a"


def dead(line: str, groups: Sequence[str] = GROUPS) -> Row:
    words = line.split()
    return dead_flags(words, composed(line), planned, groups=groups)


def test_a_field_nobody_reads_is_named_in_a_plugin_too(tmp_path: Path) -> None:
    unread = 'unread: int = setting(1, "nothing reads it", probe=2)'
    unprobed = 'unprobed: int = setting(1, "read, but no probe says so")'
    row = dead(plugin(tmp_path, "has_dead_field", field=f"{unread}\n    {unprobed}"), ("attn",))
    assert row.state == "fail"
    assert row.reason == "nobody reads attn.unread; no probe declared: attn.unprobed"


def test_every_field_of_the_default_is_read() -> None:
    row = dead("")
    assert (row.state, row.reason) == ("pass", ""), row
    assert int(row.figure.split()[0]) >= 50


def test_a_field_that_is_no_longer_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attn, "window", lambda size: Mask())
    assert dead("", ("attn",)).reason == "nobody reads attn.window, attn.pattern"


def test_what_is_typed_already_is_probed_all_the_same() -> None:
    row = dead("optim.lr=0.01 attn.window=64 model.n_heads=2 seed=3", ("attn", "model", "optim", "seed"))
    assert (row.state, row.reason) == ("pass", ""), row


@pytest.mark.parametrize(
    ("line", "groups"),
    [
        ("attn.window=8 attn.pattern=SL", ("attn",)),
        ("attn=mla pos=t5 attn.window=12 attn.pattern=SSL", ("attn", "pos")),
        ("pos=t5 attn.window=64", ("pos", "attn")),
        ("preset=neox", ("pos",)),
        ("preset=gpt2", ("train",)),
        ("train.batch_tokens=1024", ("train",)),
        ("rope_scaling=yarn rope_scaling.factor=1", ("rope_scaling",)),
        ("attn.head_dim=2", ("pos",)),
        ("preset=gemma", ("model",)),
        ("model.embed_norm=true", ("model",)),
        ("model.d_model=6 model.n_heads=3", ("pos",)),
        ("attn=mla model.n_heads=1 model.d_model=6", ("pos",)),
        ("model.d_model=2 model.n_heads=1", ("pos", "ffn")),
        ("norm=none block=simplified", ("optim",)),
        ("train.max_steps=300", GROUPS),
        ("train.max_steps=3", ("train", "schedule", "optim")),
        ("train.max_steps=1 schedule=wsd", ("train", "schedule")),
        ("train.max_tokens=8192", ("train", "schedule")),
        ("train.max_flops=1e12", ("train", "schedule")),
        ("train.max_minutes=1", ("train", "schedule")),
        ("train.max_minutes=1 train.max_steps=9 train.max_tokens=2e5", ("train", "schedule")),
        ("train.max_steps=2 schedule.warmup_steps=1", ("schedule",)),
    ],
)
def test_fields_that_act_are_not_called_dead_where_a_check_shrinks_them(line: str, groups: Sequence[str]) -> None:
    row = dead(line, groups)
    assert row.state == "pass", row.reason


@pytest.mark.parametrize("line", ["attn.weights=shaped attn.softcap=5", "attn.softcap=3 attn.scale=2"])
@pytest.mark.parametrize("name", ["kernels = reference", "backends agree"])
def test_a_cap_is_not_scaled_past_itself(line: str, name: str) -> None:
    assert row_of(line, name).state == "pass"


@pytest.mark.parametrize(
    "line",
    [
        "model.d_model=1 model.n_heads=1 pos=alibi",
        "attn.qk_norm=head model.d_model=4 model.n_heads=4 pos=alibi",
        "model.d_model=3 model.n_heads=1 pos.fraction=0.7",
        "attn.scale=100 model.d_model=32",
    ],
)
def test_rounding_stays_within_the_plain_tolerance(line: str) -> None:
    """Scores are bounded, and rows are left out that a narrow norm magnifies: nothing else excuses a difference."""
    for name in ("oracle", "kernels = reference", "backends agree"):
        assert row_of(line, name).state == "pass"


def cosines_off_by_1e_4(patch: pytest.MonkeyPatch) -> None:
    """Of the fastest kernels alone."""
    plain = resolve_module.resolve

    def faulty(kernels: Any, device: Any, dtype: torch.dtype) -> Any:
        ops = plain(kernels, device, dtype)
        if not isinstance(kernels, Auto):
            return ops
        turned = {name: lambda x, cos, sin, f=f: f(x, cos * (1 + 1e-4), sin) for name, f in ops.rope.items()}
        return dataclasses.replace(ops, rope=turned)

    patch.setattr(composed_module, "resolve", faulty)


@pytest.mark.parametrize("line", ["", "model.d_model=3 model.n_heads=1 pos.fraction=0.7", "attn.scale=100"])
def test_a_small_error_of_a_kernel_is_seen_on_the_rows_that_are_chosen(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels_module, "EXACT", 1.0)  # only float32 and bfloat16 are left to see it
    cosines_off_by_1e_4(monkeypatch)
    found = row_of(line, "kernels = reference")
    assert (found.state, found.figure[:7]) == ("fail", "float32")


@pytest.mark.parametrize(
    "line",
    [
        "model.dropout=0.99 attn.dropout=0.9",
        "norm=dyt norm.alpha=100",
        "norm=dyt norm.alpha=1e4 block=postnorm",
        "model.logit_softcap=1e-3",
        "model.logit_softcap=1e-5 model.tie_embeddings=false",
        "model.logit_softcap=1e-4 norm=none",
        "model.logit_softcap=1e-3 block=deepnorm norm=layernorm",
        "preset=gemma model=nano model.logit_softcap=1e-3",
        "attn.softcap=1e-5",
        "attn.scale=1e-6",
        "block=simplified block.beta_attn=1000",
    ],
)
def test_numbers_at_the_end_of_their_range_hide_nothing_and_fail_nothing(line: str) -> None:
    assert [row for row in asked(composed(line)) if row.state == "fail"] == []


def test_a_leak_is_seen_under_a_cap_that_would_flatten_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mask_after_softmax(monkeypatch)
    assert row_of("model.logit_softcap=1e-3", "causality").state == "fail"
    assert row_of("norm=dyt norm.alpha=1000", "causality").state == "fail"
    assert row_of("model.dropout=0.99", "causality in training").state == "fail"


OWN_TABLE = """
from lmlab.model.pos import Learned
from lmlab.model.spec import Learned as LearnedSpec
from lmlab.registry import option
{more}

@option("pos", "{name}", build="{name}:Mine")
class Spec(LearnedSpec):
    pass

class Mine(Learned):
    {body}
"""


def own_table(folder: Path, name: str, *, more: str = "", body: str = "pass") -> str:
    (folder / f"{name}.py").write_text(OWN_TABLE.format(name=name, more=more, body=body))
    return f"plugins=['{folder / name}.py'] pos={name}"


def test_positions_of_ones_own_that_serve_no_layer_are_refused_what_needs_them(tmp_path: Path) -> None:
    line = own_table(tmp_path, "own_table")
    row = dead(line, ("attn", "pos"))
    assert row.state == "pass"
    assert "attn.nope_every_n_layers (pos=own_table gives the layers nothing)" in row.reason
    with pytest.raises(ConfigError, match="`pos=own_table` gives the layers nothing that they could go without"):
        composed(f"{line} attn.nope_every_n_layers=2")
    with pytest.raises(ConfigError, match="`rope_scaling=yarn` scales rotations, and `pos=own_table` has none") as told:
        composed(f"{line} rope_scaling=yarn rope_scaling.factor=4")
    assert told.value.hint == "use pos=rope, or rope_scaling=none without rope_scaling.factor"


def test_tables_that_are_empty_serve_no_layer_either(tmp_path: Path) -> None:
    tables = "def tables(self, *given):\n        return PosTables()"
    line = own_table(tmp_path, "empty_tables", more="from lmlab.model.pos import PosTables", body=tables)
    row = dead(line, ("attn",))
    assert (row.state, "gives the layers nothing" in row.reason) == ("pass", True)


def test_positions_of_ones_own_that_serve_layers_may_be_left_out_of_some(tmp_path: Path) -> None:
    line = template(tmp_path, "pos", "serves_layers")
    assert "nope" not in dead(line, ("attn",)).reason
    assert composed(f"{line} attn.nope_every_n_layers=2").attn.nope_every_n_layers == 2


@pytest.mark.parametrize("line", ["preset=gemma", "model.seq_len=4096", "train.batch_tokens=256"])
def test_one_row_a_step_leaves_no_micro_batch_to_choose(line: str) -> None:
    row = dead(line, ("train",))
    assert (row.state, row.reason.startswith("refused here: ")) == ("pass", True)
    assert "train.micro_batch (a step is one row)" in row.reason


def test_a_part_that_raises_is_told_in_one_line() -> None:
    def raises() -> Row:
        raise ConfigError("this can't be", "use that")

    assert attempted("x", raises) == Row("x", "fail", "this can't be", "the model raised")
