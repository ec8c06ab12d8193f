"""The rows on healthy code: every option and every preset passes; the small model keeps parts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lmlab.check import everything, gate, kernels
from lmlab.check.all_rows import IMPLIED, QUESTIONS, QUICK, ROWS, Ask, asked
from lmlab.check.composed import Composed
from lmlab.check.everything import BRIEF, GROUPS, OF_ATTENTION, PAIR, Task, answer, compositions, refusal
from lmlab.check.flags import dead_flags
from lmlab.check.rows import Row, distance, gradient_distance, judged, known
from lmlab.check.small import T, small
from lmlab.cli import check as command
from lmlab.cli.check_plan import planned
from lmlab.config.catalogue import entries
from lmlab.errors import LmlabError
from tests.check.conftest import composed, row_of

OPTIONS = [(group, label) for group in GROUPS for label in sorted(entries(group))]


# What an option declares of itself, and shows.
PACKED = ["packed = alone", "packed = alone in training"]
KNOWN = {
    "batchnorm": ["causality in training", "packed = alone in training"],
    "switch": [*PACKED, "cached = full"],
    "expert_choice": ["causality", "causality in training", *PACKED, "cached = full"],
}


@pytest.mark.slow  # the covering array has every option too
@pytest.mark.parametrize(("group", "label"), OPTIONS, ids=[f"{g}={label}" for g, label in OPTIONS])
def test_every_option_passes_the_quick_rows(group: str, label: str) -> None:
    part: dict[str, Any] = {group: entries(group)[label].make()}
    rows = asked(dataclasses.replace(composed(), **part), QUICK)
    assert [row.name for row in rows] == list(QUICK)
    assert [row.name for row in rows if row.state not in ("pass", "known")] == ["dropout"]  # nobody asked for any
    assert [row.name for row in rows if row.state == "known"] == KNOWN.get(label, [])


@pytest.mark.parametrize("preset", sorted(entries("preset")))
def test_every_preset_passes(preset: str) -> None:
    few = {name: ROWS[name] for name in (*QUICK, "shift", "initial values", "parameters and FLOPs")}
    rows = asked(composed(f"preset={preset}"), few)
    assert [row for row in rows if row.state == "fail"] == []


@pytest.mark.parametrize("line", ["attn=gqa attn.weights=shaped", "preset=qwen3 model=nano attn.weights=shaped"])
def test_shaped_attention_of_few_kv_heads_passes(line: str) -> None:
    assert [row for row in asked(composed(f"{line} tokenizer=byte")) if row.state == "fail"] == []


@pytest.mark.parametrize("scaling", sorted(set(entries("rope_scaling")) - {"none"}))
@pytest.mark.parametrize("attn", ["mha", "mla"])
def test_a_factor_of_1_is_plain_for_the_oracle_too(scaling: str, attn: str) -> None:
    words = ["model=nano", "tokenizer=byte", f"attn={attn}", f"rope_scaling={scaling}", "rope_scaling.factor=1"]
    row = row_of(" ".join(words), "oracle")
    assert row.state == "pass", row


def test_a_known_failure_shows_the_edit_that_proves_it() -> None:
    row = row_of("norm=batchnorm", "causality in training")
    assert row.state == "known"
    assert row.figure.startswith("token 12 edited, position ")
    assert "later ones too" in row.reason
    assert row_of("norm=batchnorm", "causality").state == "pass"
    assert row_of("norm=batchnorm", "batched = alone").state == "pass"


def test_what_does_not_apply_says_why() -> None:
    assert row_of("pos=learned", "shift") == Row(
        "shift", "n/a", "", "pos=learned adds something of each position to the embeddings"
    )


@pytest.mark.parametrize("line", ["attn.window=64 pos=alibi", "attn=mla rope_scaling=dynamic_ntk", "block=simplified"])
def test_cached_is_full(line: str) -> None:
    assert row_of(line, "cached = full").state == "pass"


def test_a_cap_that_keeps_attention_flat_is_said() -> None:
    assert "the cap on the scores is reached" in row_of("attn.softcap=0.05", "oracle").figure


def test_the_loss_at_step_0_is_judged_by_ln_v() -> None:
    assert row_of("model=nano", "loss at step 0").state == "pass"
    by_hand = row_of("model=nano model.logit_scale=30", "loss at step 0")
    assert (by_hand.state, by_hand.reason) == ("known", "model.logit_scale is set by hand")


def test_a_wrong_initial_value_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from lmlab.model import block, init

    monkeypatch.setattr(block, "xavier", lambda shape, gain: init.Rule(0.0, gain * 0.02))
    row = row_of("block=deepnorm", "initial values")
    assert (row.state, "by the rules" in row.reason) == ("fail", True)


@pytest.mark.parametrize(
    "line",
    [
        "attn.window=128 attn.pattern=SSSSSL model=small",
        "attn=gqa model.n_heads=32 model.d_model=1024 attn.n_kv_heads=8",
        "attn=mla model=small pos.fraction=0.5",
        "attn.head_dim=96 model.n_heads=12 model.d_model=768 ffn.d_ff=3000",
        "pos=alibi model.n_heads=12 model.d_model=768",
        "model.n_layers=1 model.seq_len=1 train.batch_tokens=1 train.eval_tokens=1",
        "pos=learned pos.max_len=300",
    ],
)
def test_small_keeps_parts_and_proportions(line: str) -> None:
    arch = composed(line).arch
    found = small(arch)
    assert [type(getattr(found, f.name)) for f in dataclasses.fields(found)] == [
        type(getattr(arch, f.name)) for f in dataclasses.fields(arch)
    ]
    m, H = arch.model, found.model.n_heads
    assert found.model.d_model <= 128
    assert found.model.seq_len == T
    assert found.model.n_layers >= min(m.n_layers, len(arch.attn.pattern or "  "))
    assert (H & (H - 1) == 0) == (m.n_heads & (m.n_heads - 1) == 0)
    assert H // found.attn.kv_heads(H) == m.n_heads // arch.attn.kv_heads(m.n_heads)
    net = Composed(composed(line)).build()
    assert sum(p.numel() for p in net.parameters()) < 1_000_000


def test_what_is_small_already_stays() -> None:
    line = "model.d_model=32 model.n_heads=2 model.n_layers=2 model.seq_len=16 attn.window=4 attn.head_dim=6"
    arch = composed(line).arch
    assert small(arch) == arch


def test_distances() -> None:
    a = torch.tensor([100.0, 0.0])
    assert distance(a + 1, a) == pytest.approx(0.01)
    assert judged("x", float("nan")).state == "fail"
    none = {"w": torch.ones(3), "b": torch.full((3,), 1e-18)}
    assert gradient_distance({"w": torch.ones(3), "b": torch.zeros(3)}, none)[0] < 1e-14
    assert gradient_distance({"w": torch.zeros(3), "b": torch.zeros(3)}, none) == (1.0, "w")
    failure = Row("causality in training", "fail", "moved", "leak")
    assert known(failure, {"causality": "why"}) == Row("causality in training", "known", "moved", "why")
    assert known(failure, {"packed": "why"}) == failure


def test_the_gate_asks_once_per_parts_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = gate.verdict(composed(), tmp_path, {})
    assert [row.name for row in first] == [name for name in QUICK if name not in IMPLIED]
    monkeypatch.setattr(gate, "quick", lambda experiment: pytest.fail("asked again"))
    assert gate.verdict(composed("lr=1e-4 train.max_steps=7"), tmp_path, {}) == first
    keys = {gate.key(composed(line), {}) for line in ("", "norm.eps=1e-4", "kernels=reference", "attn.window=8")}
    assert len({*keys, gate.key(composed(), {"mine.py": "x = 1"})}) == 5


def test_the_gate_refuses_what_fails_and_asks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Row("causality", "fail", "token 12 edited, position 3 moved by 1", "a token sees a later one")
    monkeypatch.setattr(gate, "quick", lambda experiment: [bad])
    for _ in range(2):
        with pytest.raises(LmlabError, match="causality: token 12 edited, position 3 moved by 1") as caught:
            gate.ensure(composed(), tmp_path, {})
    assert caught.value.exit_code == 2
    monkeypatch.undo()
    assert gate.ensure(composed(), tmp_path, {}) == []
    known_rows = gate.ensure(composed("norm=batchnorm"), tmp_path, {})
    assert [row.name for row in known_rows] == ["causality in training", "packed = alone in training"]


def test_every_row_answers_or_is_one_of_its_own() -> None:
    assert len(QUESTIONS) == 7
    assert {name for _, names in QUESTIONS for name in names} <= {*ROWS, "dead flags"}


def test_all_is_every_option_and_every_pair() -> None:
    found = list(compositions(composed(), ()))
    alone = [what for what, words, _, rows in found if words is not None and len(rows) == len(ROWS)]
    counts = {g: len(entries(g)) - 1 for g in GROUPS}
    pairs = sum(counts[a] * counts[b] for n, a in enumerate(GROUPS) for b in GROUPS[n + 1 :])
    together = [what for what, words, _, rows in found if words is None and len(rows) > len(BRIEF)]
    assert (len(alone), len(together)) == (1 + sum(counts.values()), pairs)
    by_name = {what: experiment for what, _, experiment, _ in found}
    assert refusal(by_name["pos=alibi rope_scaling=yarn"]) != ""
    assert refusal(by_name["norm=dyt attn=mla"]) == ""
    rows_of = {what: rows for what, _, _, rows in found}
    assert (
        rows_of["pos=t5 attn=mla"]
        == PAIR
        == tuple(n for n in ROWS if n not in ("loss at step 0", "parameters and FLOPs"))
    )
    assert rows_of["norm=batchnorm attn=mla"] == tuple(name for name in PAIR if name not in OF_ATTENTION)
    assert rows_of["pos=t5 attn.bias_o=true"] == BRIEF
    outcome = answer(Task("x", None, by_name["norm=batchnorm attn=mla"], None, planned, PAIR))
    assert (outcome.failed, [row.name for row in outcome.known]) == (
        (),
        ["causality in training", "packed = alone in training", "micro-batches = whole"],
    )
    assert command.line(outcome).startswith("x: known causality in training (token ")


def test_all_puts_every_choice_of_a_field_beside_every_option() -> None:
    found = {what: (experiment, rows) for what, _, experiment, rows in compositions(composed(), ())}
    for name in ("mha", "mqa", "gqa"):
        experiment, rows = found[f"attn={name} attn.weights=shaped"]
        assert (experiment.attn.name, experiment.attn.weights, rows) == (name, "shaped", BRIEF)
    assert found["pos=t5 norm.offset=1"][1] == tuple(name for name in BRIEF if name not in OF_ATTENTION)
    assert "attn=mla attn.weights=shaped" not in found
    chosen = {
        f"{g}={label}" for g in GROUPS for label in entries(g) if entries(g)[label].make() != getattr(composed(), g)
    }
    for choice in ("attn.v_proj=none", "attn.form=absorbed", "norm.offset=1", "model.embed_norm=true", "ffn.bias=true"):
        beside = {o for o in chosen if f"{o} {choice}" in found}
        assert beside >= {o for o in chosen if not o.startswith(choice.split(".")[0])}, choice
    e = found["pos=alibi attn.v_proj=none"][0]
    assert (e.pos.name, e.attn.v_proj, e.attn.weights) == ("alibi", "none", "shaped")
    assert found["norm=dyt attn.form=absorbed"][0].attn.name == "mla"


@pytest.mark.parametrize("state", ["pass", "fail", "n/a"])
def test_rows_that_formulas_imply_are_left_out_where_these_are_met(state: str) -> None:
    def told(name: str) -> Ask:
        return lambda c: Row(name, state if name == "oracle" else "pass")

    found = asked(composed(), {name: told(name) for name in PAIR}, IMPLIED)
    assert [row.name for row in found] == [name for name in PAIR if state != "pass" or name not in IMPLIED]


@pytest.mark.parametrize(
    ("line", "experts", "k", "room"),
    [
        ("moe=topk moe.n_experts=64 moe.capacity_factor=10 moe.priority=probability", 16, 2, 2.5),  # of 32, of 8
        ("moe=topk moe.n_experts=64 moe.top_k=32 moe.capacity_factor=1.5", 16, 8, 1.5),
        ("moe=topk moe.n_experts=64 moe.top_k=64", 16, 16, None),
        ("moe=topk moe.n_experts=6 moe.capacity_factor=0.7", 6, 2, 0.7),
        ("moe=expert_choice moe.n_experts=64 moe.capacity_factor=32", 16, 1, 8.0),
        ("moe=topk moe.n_experts=32 moe.top_k=3 moe.n_expert_groups=16 moe.n_limited_groups=2", 16, 3, None),
    ],
)
def test_fewer_experts_leave_out_as_large_a_share(line: str, experts: int, k: int, room: float | None) -> None:
    moe = small(composed(line).arch).moe
    assert (moe.n_experts, getattr(moe, "top_k", 1), moe.capacity_factor) == (experts, k, room)


def test_a_capacity_that_seldom_binds_is_seen_to_look_ahead() -> None:
    line = "moe=topk moe.n_experts=64 moe.capacity_factor=4 moe.priority=probability"
    assert row_of(line, "causality").state == "known"


@pytest.mark.slow
def test_all_asks_in_processes_and_counts_what_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {composition[0]: composition for composition in compositions(composed(), ())}
    few = [found[what] for what in ("norm=batchnorm block=sandwich", "pos=none ffn=relu", "pos=alibi rope_scaling=pi")]
    monkeypatch.setattr(everything, "compositions", lambda *_: few)
    assert command._everything([], None, False) is False
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("norm=batchnorm block=sandwich: known causality in training (token 1")
    assert last.startswith("2 compositions: 1 pass, 1 with known failures, 0 fail; 1 refused (")


def test_the_command_prints_rows_questions_and_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lmlab.cli.app import run

    rows = [Row("oracle", "pass", "off by at most 1e-15"), Row("shift", "fail", "off by at most 0.3", "allowed 1e-10")]
    monkeypatch.setattr(command, "all_rows", lambda words, config_dir: rows)
    assert run(["check", "pos=rope"]) == 1
    out = capsys.readouterr().out
    assert "shift   fail   off by at most 0.3" in out
    assert "does RoPE turn q and k only, and by distance alone?       shift fail, oracle pass" in out
    monkeypatch.setattr(command, "all_rows", lambda words, config_dir: rows[:1])
    assert run(["check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["figure"] == "off by at most 1e-15"
    monkeypatch.undo()
    assert run(["check", "pos=ropy"]) == 2


@pytest.mark.parametrize(
    "line",
    [
        "",
        "attn.head_dim=8",
        "attn.head_dim=6 pos=alibi",
        "pos.fraction=0.004",
        "attn=mla attn.rope_dim=8",
        "attn=mla attn.rope_dim=64 pos.fraction=0.0625",
        "rope_scaling=yarn attn.head_dim=8 pos.theta=100",
    ],
)
def test_a_very_wide_model_is_checked_small(line: str) -> None:
    arch = small(composed(f"model.d_model=1000000 model.n_heads=1000 {line}").arch)
    assert arch.model.d_model <= 128 * arch.model.n_heads
    assert arch.head_dim() <= 256
    assert sum(p.numel() for p in Composed(composed()).build(arch).parameters()) < 2_000_000
    if hasattr(arch.pos, "width"):
        turned = arch.pos.width(arch.attn.rotary_size(arch.model.d_model, arch.model.n_heads))
        assert turned >= 4
        assert turned % 2 == 0


def test_no_layer_is_counted_one_by_one() -> None:
    from lmlab.check.flags import shapes

    assert len(shapes(composed("model.n_layers=5000"))) < 200
    assert shapes(composed("model.n_layers=5000")) != shapes(composed("model.n_layers=12"))


@pytest.mark.slow
@pytest.mark.parametrize("preset", sorted(entries("preset")))
def test_every_preset_shrunk_to_one_layer_passes_every_row(preset: str) -> None:
    words = [f"preset={preset}", "model.n_layers=1", "model.d_model=64"]
    if preset == "deepseek":
        words[1] = "model.n_layers=4"  # three dense ones come first
    if preset in ("gpt2", "nanogpt", "neox", "olmo2", "mixtral", "deepseek"):  # too many heads for 64 channels
        words.append("model.n_heads=4")
    experiment = composed(" ".join(words))
    assert [row for row in asked(experiment) if row.state == "fail"] == []
    row = dead_flags(words, experiment, planned)
    assert row.state == "pass", row


def test_a_gradient_that_hangs_on_a_rounding_is_not_taken_for_the_kernels() -> None:
    """In the first rows asked, an input of a ReLU is so near 0 that float32 makes its gradient 0 or not."""
    c = Composed(composed("ffn=relu moe=olmoe"))
    assert not torch.equal(kernels.steady(c).tokens_BT, c.rows().tokens_BT)
    assert row_of("ffn=relu moe=olmoe", "kernels = reference").state == "pass"
