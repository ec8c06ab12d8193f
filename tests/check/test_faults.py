"""Each planted fault is caught by the row named for it, and the same row passes on the code as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lmlab.check.flags import GROUPS, dead_flags
from lmlab.check.rows import Row
from lmlab.cli.check_plan import planned
from lmlab.cli.new import filled
from lmlab.kernels import attention
from lmlab.kernels.attention import probabilities
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


def test_rounding_that_the_reference_has_too_is_no_difference_of_kernels() -> None:
    """A width of 1, where q has to be 10^7 to peak: in float32 the reference is further from float64."""
    line, name = "model.d_model=1 model.n_heads=1 pos=alibi", "kernels = reference"
    assert "the reference" in row_of(line, name).figure
    assert row_of(line, name).state == "pass"
