"""Triton's kernels: parity in the interpreter and on a GPU where there is one, and what the compiler makes of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.kernels.interpreted import run

PARITY = (
    "norms",
    "norms_of_mixed_dtypes",
    "norms_of_views",
    "activations",
    "rotations",
    "second_derivatives_are_refused",
    "nothing_is_launched_on_meta",
)
ASK = """
import json
from tests.kernels import on_triton
found = {}
for case in %r:
    try:
        getattr(on_triton, case)()
        found[case] = ""
    except AssertionError as error:
        found[case] = str(error) or "an assertion without words"
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def wrong() -> dict[str, str]:
    """What each case is wrong about."""
    return json.loads(run(ASK % (PARITY,)))


@pytest.mark.parametrize("case", PARITY)
def test_interpreted_kernels_are_the_plain_formulas_in_float64(case: str, wrong: dict[str, str]) -> None:
    assert wrong[case] == ""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: Triton's kernels are run by its interpreter alone")
@pytest.mark.parametrize("case", PARITY)
def test_kernels_on_a_gpu_are_the_plain_formulas_in_float64(case: str) -> None:
    from tests.kernels import on_triton

    getattr(on_triton, case)("cuda")


# ---------------------------------------------------------------- the compiler, which needs no GPU

ROW = dict(x="bf16", branch="bf16", weight="bf16", bias="bf16", total="bf16", normed="bf16", mean="fp32", rstd="fp32")
GRADS = dict(d_normed="bf16", d_total="fp32", d_x="fp32", d_branch="bf16", d_weight="fp32", d_bias="fp32")
OF_ROWS = dict(ALPHA=1.0, OFFSET=0.0, WIDE="fp32", ROWS=2, BLOCK=1024)
ALONE = dict(branch=None, total=None, bias=None, mean=None)
GATED = dict(x="bf16", up="bf16", out="bf16", grad="bf16", d_x="bf16", d_up="bf16")
PAIRS = dict(SIGN=-1.0, INTERLEAVED=True, C=64, HALF=16, WIDE="fp32", ROWS=64, PAIRS=16, REST=32)
COMPILED: dict[str, tuple[str, str, dict[str, str], dict[str, Any]]] = {
    "layer norm": ("norm_passes", "forward", ROW, OF_ROWS | dict(EPS=1e-5, CENTRED=True, AFTER=False)),
    "rms norm": ("norm_passes", "forward", ROW, OF_ROWS | dict(EPS=1e-6, CENTRED=False, AFTER=True) | ALONE),
    "long rows": ("norm_passes", "forward_long", ROW, OF_ROWS | dict(EPS=1e-5, CENTRED=True, AFTER=False)),
    "layer norm back": ("norm_passes", "backward", ROW | GRADS, OF_ROWS | dict(CENTRED=True)),
    "long rows back": ("norm_passes", "backward_long", ROW | GRADS, OF_ROWS | dict(CENTRED=True)),
    "long rows weight": ("norm_passes", "backward_long_weight", ROW | GRADS, OF_ROWS | dict(CENTRED=False, mean=None)),
    "geglu": ("activation_triton", "_forward", GATED, dict(KIND="gelu_tanh", BETA=1.0, WIDE="fp32", BLOCK=1024)),
    "geglu back": ("activation_triton", "_backward", GATED, dict(KIND="gelu", BETA=1.0, WIDE="fp32", BLOCK=1024)),
    "silu in float64": (
        "activation_triton",
        "_backward",
        dict.fromkeys(GATED, "fp64"),
        dict(KIND="silu", BETA=1.0, WIDE="fp64", BLOCK=1024, up=None, d_up=None),
    ),
    "rope": ("rope_triton", "_turn", dict(x="bf16", cos="bf16", sin="bf16", out="bf16"), PAIRS),
}


@pytest.mark.parametrize("case", COMPILED)
def test_the_kernels_compile_for_cuda(case: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter forgives what the compiler does not; Triton brings its assembler."""
    triton = pytest.importorskip("triton")
    import importlib

    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    module, name, pointers, fixed = COMPILED[case]
    kernel = getattr(importlib.import_module(f"lmlab.kernels.{module}"), name)
    names = kernel.arg_names
    wide = {"fp32": tl.float32, "fp64": tl.float64}[fixed["WIDE"]]
    fixed = {k: wide if k == "WIDE" else v for k, v in fixed.items() if k in names}
    signature = {k: "constexpr" if k in fixed else f"*{pointers[k]}" if k in pointers else "i32" for k in names}
    source = ASTSource(kernel, signature, constexprs={(names.index(k),): v for k, v in fixed.items()})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert "st.global" in made.asm["ptx"]
