"""Layouts undo themselves, the pairing of rotated channels does not change the function, names are whole."""

from __future__ import annotations

import pytest
import torch

from lmlab.interop import names
from lmlab.interop.families import FAMILIES
from lmlab.interop.names import Row, pairs
from lmlab.interop.rotary import repaired
from lmlab.interop.tensors import plan
from tests.composed import arch, close, model, peaked, rows

LAYOUTS = {
    "same": (names.SAME, 1, 24),
    "turned": (names.TURNED, 1, 24),
    "thirds turned": (names.THIRDS_TURNED, 3, 24),
    "by head": (names.by_head(4), 3, 24),
    "keys then values": (names.keys_then_values(4, 6, 2), 2, 24),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", LAYOUTS)
def test_a_layout_is_undone(case, bias):
    layout, n, width = LAYOUTS[case]
    heights = [24, 8] if case == "keys then values" else [width] * n
    ours = [torch.randn(h) if bias else torch.randn(h, 10) for h in heights]
    joined = layout.join(ours)
    shape = (sum(heights),) if bias else (sum(heights), 10)
    assert joined.shape == (shape[::-1] if "turned" in case else shape)
    assert all(torch.equal(a, b) for a, b in zip(layout.split(joined), ours, strict=True))


def test_packed_rows_are_head_by_head():
    """(head, 3, channel): the first two rows are head 0 of q, then head 0 of k."""
    q, k, v = (torch.arange(4.0) + 10 * j for j in range(3))
    packed = names.by_head(2).join([q, k, v])
    assert packed.tolist() == [0, 1, 10, 11, 20, 21, 2, 3, 12, 13, 22, 23]


def test_a_table_that_misses_a_parameter_is_no_table():
    with pytest.raises(AssertionError, match=r"misses or repeats .*norm\.weight"):
        pairs([Row("wte", ("embed",))], {"embed.weight": 0, "norm.weight": 0}, 1)


@pytest.mark.parametrize("n_experts", [1, 3])
def test_a_stack_is_one_module_of_theirs_per_expert(n_experts):
    table = [Row("h.{}.experts.{expert}.w1", ("blocks.{}.ffn.experts.ffn.gate",))]
    shapes = {f"blocks.1.ffn.experts.ffn.gate.{kind}": torch.Size((n_experts, 5, 4)) for kind in ("weight", "bias")}
    weight, bias = pairs(table, shapes, 2)
    assert weight.theirs == tuple(f"h.1.experts.{e}.w1.weight" for e in range(n_experts))
    assert bias.theirs == tuple(f"h.1.experts.{e}.w1.bias" for e in range(n_experts))
    stack = torch.randn(n_experts, 5, 4)
    theirs = weight.to_theirs([stack])
    assert [tuple(t.shape) for t in theirs] == [(5, 4)] * n_experts
    assert torch.equal(theirs[-1], stack[-1])
    assert torch.equal(weight.to_ours(theirs)[0], stack)


def test_a_kind_of_ours_may_have_another_name_there():
    row = Row("gate", ("router",), names.SAME, (("weight", "weight"), ("e_score_correction_bias", "bias")))
    found = pairs([row], {"router.weight": 0, "router.bias": 0}, 1)
    assert [(p.theirs, p.ours) for p in found] == [
        (("gate.weight",), ("router.weight",)),
        (("gate.e_score_correction_bias",), ("router.bias",)),
    ]


ATTENTIONS = {
    "mha with biases": dict(attn=("mha", {"bias_qkv": True})),
    "gqa, norms of heads": dict(attn=("gqa", {"qk_norm": "head", "head_dim": 24})),
    "norms over all heads": dict(attn=("gqa", {"qk_norm": "full", "bias_qkv": True})),
    "mla": dict(attn="mla"),
    "mla with a latent of q": dict(attn=("mla", {"q_rank": 24, "rope_dim": 12})),
}


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("case", ATTENTIONS)
def test_either_pairing_is_the_same_function_and_the_way_back_is_exact(case, fraction):
    nets = {
        pairing: model(pos=("rope", {"pairing": pairing, "fraction": fraction}), **ATTENTIONS[case])
        for pairing in ("half", "interleaved")
    }
    half, other = nets["half"], nets["interleaved"]
    with torch.no_grad():
        for name, p in half.named_parameters():
            p.uniform_(-0.5, 1.5) if "_norm" in name or name.endswith("bias") else None
    peaked(half)
    state = half.state_dict()
    turned = repaired(state, half.arch, wanted="interleaved", given="half")
    assert not all(torch.equal(turned[n], state[n]) for n in state)
    other.load_state_dict(turned)
    tokens = rows()
    close(other(*tokens).logits_BTV, half(*tokens).logits_BTV)
    back = repaired(turned, other.arch, wanted="half", given="interleaved")
    assert all(torch.equal(back[n], state[n]) for n in state)


FITTING = {
    "gpt2": dict(norm="layernorm", pos="learned", attn=("mha", {"bias_qkv": True, "bias_o": True})),
    "llama": dict(attn="gqa"),
    "olmo2": dict(block="reordered", attn=("mha", {"qk_norm": "full"})),
    "deepseek_v3": dict(attn=("mla", {"q_rank": 24})),
    "mixtral": dict(attn="gqa", moe=("topk", {"n_experts": 3})),
    "qwen3_moe": dict(attn=("gqa", {"qk_norm": "head"}), moe=("topk", {"first_dense_layers": 1})),
    "deepseek_v3 of experts": dict(attn="mla", moe=("topk", {"n_shared": 2, "d_expert": 24, "balance": "aux_free"})),
}


@pytest.mark.parametrize("family", FITTING)
def test_a_plan_knows_their_shapes_without_memory(family):
    ffn = {"ffn": ("gelu_tanh", {"bias": True})} if family == "gpt2" else {}
    found = plan(arch(**FITTING[family], **ffn), FAMILIES[family.split()[0]], 97).expected()
    assert all("{}" not in name for name in found)
    if family == "gpt2":
        assert found["transformer.h.1.attn.c_attn.weight"] == (64, 192)
        assert found["transformer.h.1.attn.c_attn.bias"] == (192,)
        assert found["transformer.wpe.weight"] == (16, 64)
    if family == "mixtral":
        assert found["model.layers.1.block_sparse_moe.experts.2.w1.weight"] == (176, 64)
        assert found["model.layers.1.block_sparse_moe.experts.2.w2.weight"] == (64, 176)
        assert found["model.layers.1.block_sparse_moe.gate.weight"] == (3, 64)
        assert not any("experts.3" in name or "mlp" in name for name in found)
    if family == "qwen3_moe":
        assert found["model.layers.0.mlp.gate_proj.weight"] == (176, 64)
        assert found["model.layers.1.mlp.experts.7.gate_proj.weight"] == (176, 64)
    if family == "deepseek_v3 of experts":
        assert found["model.layers.0.mlp.shared_experts.up_proj.weight"] == (48, 64)
        assert found["model.layers.0.mlp.gate.e_score_correction_bias"] == (8,)
    if family == "deepseek_v3":
        assert found["model.layers.0.self_attn.kv_b_proj.weight"] == (4 * (16 + 16), 16)
