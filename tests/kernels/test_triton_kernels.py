"""Triton's kernels: parity in the interpreter, in a process of its own, and on a GPU where there is one."""

from __future__ import annotations

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
)


@pytest.mark.parametrize("case", PARITY)
def test_interpreted_kernels_are_the_plain_formulas_in_float64(case: str) -> None:
    run(f"from tests.kernels import on_triton; on_triton.{case}()")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: Triton's kernels are run by its interpreter alone")
@pytest.mark.parametrize("case", PARITY)
def test_kernels_on_a_gpu_are_the_plain_formulas_in_float64(case: str) -> None:
    from tests.kernels import on_triton

    getattr(on_triton, case)("cuda")
