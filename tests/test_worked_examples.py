"""Every worked number of the semantics that concerns parts which exist: the values to hold, one test each."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from lmlab.data.batches import TrainBatches
from lmlab.data.spec import Byte
from lmlab.data.tokens import TokenFile, dtype_for
from lmlab.errors import DataError
from lmlab.eval.loss import LossSum, total
from lmlab.kernels.norm import fused_layer_norm, fused_rms_norm, layer_norm, rms_norm
from lmlab.kernels.resolve import resolve
from lmlab.kernels.spec import Auto
from lmlab.model import spec as specs
from lmlab.model.dims import Dims
from lmlab.model.init import table
from lmlab.model.mask import CAUSAL, Mask, window
from lmlab.model.pos import Rope, alibi_slopes
from lmlab.registry import make
from lmlab.train.spec import Cosine
from tests.composed import arch, model

CPU = torch.device("cpu")
OPS = resolve(Auto(), CPU, torch.float64)
BACKENDS = ["dense", "sdpa", "tiled"]


@pytest.mark.parametrize(("q", "k", "counts"), [(2, 5, [4, 5]), (1, 5, [5])])
def test_causal_with_earlier_keys_is_aligned_bottom_right(q, k, counts):
    assert CAUSAL.scores().seen(range(q), range(k), q, k, CPU)[0, 0].sum(-1).tolist() == counts


def test_window_3_of_5_tokens_has_row_counts_1_2_3_3_3():
    seen = (CAUSAL & window(3)).scores().seen(range(5), range(5), 5, 5, CPU)
    assert seen[0, 0].sum(-1).tolist() == [1, 2, 3, 3, 3]


def attended(backend, q, k, v, mask):
    rendered = OPS.render[backend](mask.scores(), q.shape[1], k.shape[1], q.dtype, CPU)
    return OPS.attention[backend](q, k, v, mask.scores(), rendered, scale=1.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_1000_1001_999_do_not_overflow(backend):
    keys = torch.tensor([1000.0, 1001.0, 999.0]).view(1, 3, 1, 1)
    out = attended(backend, torch.ones(1, 1, 1, 1), keys, torch.eye(3).view(1, 3, 1, 3), Mask())
    assert out.flatten().tolist() == pytest.approx([0.244728, 0.665241, 0.090031], abs=1e-4)


def test_gqa_query_head_h_reads_kv_head_h_over_group():
    q, k = torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 2, 2)
    v = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).view(1, 1, 2, 2)
    for backend in BACKENDS:
        out = attended(backend, q, k, v, CAUSAL)
        assert out[0, 0, :, 0].tolist() == [0, 0, 1, 1]


def test_head_dim_may_make_4096_of_3072():
    spec = specs.MHA(head_dim=256)
    assert 16 * spec.head_size(3072, 16) == 4096


@pytest.mark.parametrize("angle", [0.0, 1.0, 2.5])
def test_rope_turns_1_0_to_cos_and_sin(angle):
    dims = Dims(d_model=2, n_heads=1, head_dim=2, n_layers=1, vocab_size=2, seq_len=4, rotary_dim=2)
    rope = Rope(specs.Rope(), dims, OPS)
    for position in (1, 5):
        kind, cos, sin = rope.tables(torch.tensor([[position]]), torch.tensor([[position]])).rotation(torch.float64)
        out = OPS.rope[kind](torch.tensor([1.0, 0.0]).double().view(1, 1, 1, 2), cos, sin).flatten()
        assert out.tolist() == pytest.approx([math.cos(position), math.sin(position)], abs=1e-12)
    cos, sin = (torch.tensor(f(angle), dtype=torch.float64).view(1, 1, 1, 1) for f in (math.cos, math.sin))
    out = OPS.rope["interleaved"](torch.tensor([1.0, 0.0]).double().view(1, 1, 1, 2), cos, sin).flatten()
    assert out.tolist() == pytest.approx([math.cos(angle), math.sin(angle)], abs=1e-12)


def test_rope_frequencies_are_base_to_the_minus_2i_over_d():
    dims = Dims(d_model=64, n_heads=1, head_dim=64, n_layers=1, vocab_size=2, seq_len=4, rotary_dim=64)
    cos, _ = Rope(specs.Rope(), dims, OPS).angles(torch.tensor([[1]]))
    assert cos[0, 0].acos().tolist() == pytest.approx([10000 ** (-2 * i / 64) for i in range(32)], rel=1e-6)


@pytest.mark.parametrize(
    ("n_heads", "slopes"),
    [(8, [2.0**-i for i in range(1, 9)]), (6, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125])],
)
def test_alibi_slopes(n_heads, slopes):
    assert alibi_slopes(n_heads) == slopes


@pytest.mark.parametrize("norm", [layer_norm, fused_layer_norm])
def test_layer_norm_of_9_10_11(norm):
    out = norm(torch.tensor([9.0, 10.0, 11.0]), torch.ones(3), None, 1e-5)
    assert out.tolist() == pytest.approx([-1.2247, 0.0, 1.2247], abs=1e-4)


@pytest.mark.parametrize("norm", [rms_norm, fused_rms_norm])
def test_rms_norm_of_9_10_11(norm):
    assert norm(torch.tensor([9.0, 10.0, 11.0]), torch.ones(3), 1e-6).tolist() == pytest.approx(
        [0.8970, 0.9967, 1.0964], abs=1e-4
    )


@pytest.mark.parametrize("norm", [rms_norm, fused_rms_norm])
def test_rms_norm_of_300_in_fp16_is_1(norm):
    assert norm(torch.full((64,), 300.0).half(), torch.ones(64).half(), 1e-6).tolist() == [1.0] * 64


@pytest.mark.parametrize("norm", [layer_norm, fused_layer_norm])
def test_the_mean_goes_before_squaring(norm):
    out = norm(torch.tensor([9999.0, 10000.0, 10001.0]), torch.ones(3), None, 1e-5)
    assert out.tolist() == pytest.approx([-1.2247, 0.0, 1.2247], abs=2e-3)


def test_gelu_exact_and_tanh_differ_at_1():
    one = torch.ones(1, dtype=torch.float64)
    assert OPS.activations["gelu"](one).item() == pytest.approx(0.841345, abs=1e-6)
    assert OPS.activations["gelu_tanh"](one).item() == pytest.approx(0.841192, abs=1e-6)


@pytest.mark.parametrize(("name", "minimum", "at"), [("gelu", -0.17, -0.75), ("silu", -0.278, -1.278)])
def test_activation_minima(name, minimum, at):
    x = torch.linspace(-4, 1, 50001, dtype=torch.float64)
    y = OPS.activations[name](x)
    assert y.min().item() == pytest.approx(minimum, abs=5e-4)
    assert x[y.argmin()].item() == pytest.approx(at, abs=5e-3)


def test_silu_is_x_times_sigmoid_and_swiglu_gates_with_it():
    x, up = torch.randn(2, 9).double()
    assert torch.allclose(OPS.activations["silu"](x), x * torch.sigmoid(x))
    assert torch.allclose(OPS.gates["swiglu"](x, up), F.silu(x) * up)


@pytest.mark.parametrize(("d_model", "multiple_of", "width"), [(768, None, 2048), (4096, 256, 11008)])
def test_gated_width_is_8d_over_3_rounded_up(d_model, multiple_of, width):
    assert specs.SwiGLU(multiple_of=multiple_of).width(d_model) == width


def test_init_table():
    net = model(torch.float32, model={"n_layers": 4, "tie_embeddings": False})
    rules = table(net)
    assert rules["blocks.0.attn.q.weight"].std == 0.02
    assert (
        rules["blocks.0.attn.o.weight"].std
        == rules["blocks.3.ffn.down.weight"].std
        == pytest.approx(0.0070711, abs=1e-6)
    )
    assert rules["head.weight"].std == min(0.02, 0.5 / 8)
    assert rules["norm.weight"].mean == 1


def test_a_tied_postnorm_model_scales_its_logits_by_one_over_root_d():
    assert arch(block="postnorm", model={"d_model": 256}).logit_scale() == 1 / 16
    assert arch(block="prenorm").logit_scale() == 1


def test_a_block_of_mha_and_ffn_has_12_d_squared():
    net = model(torch.float32, ffn="gelu", model={"n_layers": 1, "d_model": 128})
    assert sum(p.numel() for p in net.blocks[0].parameters() if p.ndim == 2) == 12 * 128**2


# ---------------------------------------------------------------- training, data, evaluation


def test_warmup_10_to_1e_3_is_1e_4_to_1e_3():
    rate = make(Cosine(warmup_steps=10), 1e-3, 100)
    assert [rate(step) for step in range(10)] == pytest.approx([1e-4 * n for n in range(1, 11)])


def test_cosine_midpoint_and_last_step():
    rate = make(Cosine(warmup_steps=0, min_lr_frac=0.1), 1e-3, 11)
    assert rate(5) == pytest.approx((1e-3 + 1e-4) / 2)
    assert rate(10) == 1e-3 * 0.1


def test_65536_ids_fit_uint16_and_70000_do_not():
    assert (dtype_for(65_536).itemsize, dtype_for(70_000).itemsize) == (2, 4)


@pytest.mark.parametrize(("n", "starts"), [(17, 1), (18, 2), (100, 84)])
def test_window_starts_are_n_minus_t(tmp_path, n, starts):
    """N = T + 1 gives one; over many epochs exactly the N − T starts occur."""
    batches = TrainBatches(tokens(tmp_path, n), rows=1, seq_len=16, seed=0, packing="stream", start=0)
    assert {int(s) for k in range(40 * starts) for s in batches.starts(k)} == set(range(starts))


def test_n_up_to_t_tokens_are_an_error(tmp_path):
    with pytest.raises(DataError, match=r"has 16 tokens, `model.seq_len` is 16"):
        TrainBatches(tokens(tmp_path, 16), rows=1, seq_len=16, seed=0, packing="stream", start=0)


def tokens(folder, n):
    """A token file of n tokens: end-of-text and n − 1 ids."""
    path = folder / "train.bin"
    return TokenFile.write(path, [(list(range(1, n)), n - 1)], vocab_size=256, start=0, tokenizer_hash="x")


def test_bytes_of_a_text_are_len_utf8_and_0x80_counts_one():
    tokenizer = make(Byte(), iter(()))
    text = "naïve – 漢字 \x80"
    assert int(tokenizer.token_bytes[tokenizer.encode(text)].sum()) == len(text.encode())
    assert (tokenizer.token_bytes[0x80], tokenizer.token_bytes[tokenizer.eot]) == (1, 0)


def test_uniform_byte_model_has_8_bits_per_byte():
    assert LossSum(nats=math.log(256) * 77, tokens=77, bytes=77).bits_per_byte == pytest.approx(8.0)


def test_eval_is_token_weighted():
    assert total([LossSum(2.0 * 1, 1, 1), LossSum(90.0, 9, 9)]).nats_per_token == pytest.approx(9.2)
