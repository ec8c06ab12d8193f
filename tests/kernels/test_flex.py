"""FlexAttention is dense attention: forward on the CPU, with gradients on CUDA."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from lmlab.errors import LmlabError
from lmlab.kernels.attention import dense, render_dense
from lmlab.kernels.flex import flex, render_flex
from lmlab.kernels.scores import Scores
from tests.composed import close
from tests.kernels.test_tiled import KINDS, sample, scores_of

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
CPU = torch.device("cpu")
SHARED = {"causal": True, "window": 20, "documents": ((torch.arange(300) // 70)[None],) * 2}


def both(inputs, scores, T, S):
    dtype, device = inputs[0].dtype, inputs[0].device
    want = dense(*inputs, scores, render_dense(scores, T, S, dtype, device), scale=0.4)
    return flex(*inputs, scores, render_flex(scores, T, S, dtype, device), scale=0.4), want


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("T", "S", "K"), [(150, 150, 2), (9, 150, 4)], ids=["square", "cached"])
def test_it_is_dense_attention(kind, T, S, K):
    with torch.no_grad():
        got, want = both([x.detach() for x in sample(T, S, K=K)], scores_of(kind, T, S), T, S)
    close(got, want)
    if kind == "padding":
        assert not got[1].any()  # a row of padding only


def test_what_is_not_causal_and_all_at_once():
    inputs, every = [x.detach() for x in sample(30, 30)], {}
    for kind in KINDS[1:4] + KINDS[5:]:
        every |= {n: x for n, x in scores_of(kind, 30, 30)._asdict().items() if x is not None}
    with torch.no_grad():
        close(*both(inputs, Scores(), 30, 30))
        close(*both(inputs, Scores(**every), 30, 30))


FEW = torch.stack([torch.arange(300) % 290 == 7, torch.arange(300) < 140])  # the first row leaves a block of keys empty


@pytest.mark.parametrize("fields", [SHARED, {"causal": True}, {"valid_BS": FEW}], ids=["all", "causal", "padding"])
def test_blocks_are_those_of_the_whole_mask(fields):
    scores = Scores(**fields)
    got = render_flex(scores, 300, 300, torch.float32, CPU)
    B = got.kv_num_blocks.shape[0]
    want = create_block_mask(got.mask_mod, B, None, 300, 300, device="cpu")
    seen = scores.seen(range(300), range(300), 300, 300, CPU)
    assert want.to_dense().equal(got.to_dense())
    assert want.full_kv_num_blocks.equal(got.full_kv_num_blocks)
    blocks = torch.nn.functional.pad(seen, (0, 84, 0, 84)).view(B, 3, 128, 3, 128).any(-1).any(-2)
    assert blocks.equal(got.to_dense()[:, 0].bool())


def test_a_new_rendering_is_not_compiled_again():
    from torch._dynamo.testing import CompileCounter

    inputs, counter = [x.detach() for x in sample(300, 300)], CompileCounter()
    block = torch.compile(lambda q, k, v, s, r: 2 * flex(q, k, v, s, r, scale=0.4), fullgraph=True, backend=counter)
    for _ in range(2):
        scores = Scores(**SHARED)
        block(*inputs, scores, render_flex(scores, 300, 300, torch.float64, CPU))
    assert counter.frame_count == 1


def test_gradients_on_the_cpu_are_refused():
    with pytest.raises(LmlabError, match=r"attn\.backend=flex has no backward on the CPU") as error:
        both(sample(5, 5), Scores(causal=True), 5, 5)
    assert error.value.hint == "use attn.backend=tiled or dense"


def test_dropout_is_refused():
    with pytest.raises(AssertionError, match="dropout"):
        flex(*sample(5, 5), Scores(), None, scale=0.4, dropout=0.1)


def test_it_runs_on_the_meta_device():
    q, k, v = (x.detach().to("meta").requires_grad_() for x in sample(23, 23))
    scores = Scores(causal=True)
    out = flex(q, k, v, scores, render_flex(scores, 23, 23, q.dtype, q.device), scale=0.4)
    assert out.shape == (2, 23, 4, 8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention has a backward on CUDA only")
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_on_cuda_are_those_of_dense(kind):
    inputs = [x.detach().cuda().requires_grad_() for x in sample(256, 256, C=16, Cv=16, dtype=torch.float32)]
    fields = scores_of(kind, 256, 256)._asdict()
    moved = {n: tuple(y.cuda() for y in x) if isinstance(x, tuple) else x for n, x in fields.items()}
    moved |= {
        n: x.detach().float().cuda() for n, x in fields.items() if isinstance(x, torch.Tensor) and n != "valid_BS"
    }
    moved |= {"valid_BS": None if fields["valid_BS"] is None else fields["valid_BS"].cuda()}
    scores = Scores(**moved)
    if scores.bias_HR is not None:
        inputs.append(scores.bias_HR.requires_grad_())
    got, want = both(inputs[:3], scores, 256, 256)
    for a, b in zip(*(torch.autograd.grad(out.square().sum(), inputs) for out in (got, want)), strict=True):
        assert (a - b).norm() / b.norm() < 1e-2
