"""Whole models through Triton's kernels in the interpreter; the choice of kernels, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from lmlab.errors import ConfigError
from lmlab.kernels import resolve as resolve_module
from lmlab.kernels.resolve import ALL, IN_BLOCKS, TABLE, preferred, resolve
from lmlab.kernels.spec import Auto, Reference, Triton
from tests.kernels.interpreted import run

CODE = "from tests.kernels import through_triton as t; t.{}()"


@pytest.mark.parametrize("case", ["models", pytest.param("compiled", marks=pytest.mark.slow)])
def test_models_go_through_the_kernels_and_agree(case: str) -> None:
    run(CODE.format(case))


def test_losses_of_all_kernels_agree_step_by_step() -> None:
    losses = json.loads(run(CODE.format("steps")))
    assert losses["reference"][-1] < losses["reference"][0] - 0.1
    for name in ("auto", "triton"):
        assert losses[name] == pytest.approx(losses["reference"], abs=1e-4)


def test_a_planted_gradient_of_a_kernel_is_caught_by_the_check() -> None:
    healthy, found, figure = json.loads(run(CODE.format("planted")))
    assert (healthy, found) == ("pass", "fail")
    assert figure.startswith("float64 0.01 (")
    assert figure.endswith(".weight)")


# ---------------------------------------------------------------- the choice


@pytest.fixture
def as_if(monkeypatch: pytest.MonkeyPatch) -> Any:
    """as_if(installed=…, interpreted=…)."""

    def set_(installed: bool, interpreted: bool = False) -> None:
        monkeypatch.setattr(resolve_module, "triton_installed", lambda: installed)
        monkeypatch.setattr(resolve_module, "interpreted", lambda: interpreted)

    return set_


def test_triton_is_refused_where_it_cannot_run(as_if: Any) -> None:
    as_if(installed=False)
    with pytest.raises(ConfigError, match="the package triton is not installed") as missing:
        resolve(Triton(), "cpu", torch.float32)
    assert missing.value.hint.startswith("pip install triton")
    as_if(installed=True)
    with pytest.raises(ConfigError, match="Triton does not run on `device` cpu") as no_cpu:
        resolve(Triton(), "cpu", torch.float32)
    assert "TRITON_INTERPRET=1" in no_cpu.value.hint
    as_if(installed=True, interpreted=True)
    assert resolve_module.why_not(Triton(), "cpu") is None
    as_if(installed=False)
    assert resolve(Auto(), "cpu", torch.float32).said


def test_auto_takes_triton_in_eager_code_on_a_gpu_and_the_plain_formula_in_compiled_code() -> None:
    eager = preferred("auto", "cuda", torch.bfloat16, compiled=False)
    compiled = preferred("auto", "cuda", torch.bfloat16, compiled=True)
    assert {eager[role].path for role in IN_BLOCKS} == {"triton"}
    assert {compiled[role].path for role in IN_BLOCKS} == {"inside"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
def test_auto_never_takes_triton_on_a_cpu_or_without_it(dtype: torch.dtype, compiled: bool) -> None:
    for device in ("cpu", "cuda without Triton", "meta"):
        rows = preferred("auto", device, dtype, compiled=compiled)
        assert not [role for role, row in rows.items() if row.path == "triton"]


def test_every_row_of_the_table_is_chosen_somewhere() -> None:
    chosen = {
        row
        for kernels in ("auto", "reference", "triton")
        for device in ("cpu", "cuda", "cuda without Triton")
        for dtype in (torch.bfloat16, torch.float32)
        for compiled in (True, False)
        for row in preferred(kernels, device, dtype, compiled=compiled).values()
    }
    assert chosen == set(TABLE)


def test_compiled_code_gets_the_plain_formula_and_eager_code_the_fast_one() -> None:
    plain, fast = (lambda x: x + 1), (lambda x: x + 2)
    chosen = resolve_module._inside(plain, fast)
    assert chosen(torch.zeros(())) == 2
    assert torch.compile(chosen, backend="eager", fullgraph=True)(torch.zeros(())) == 1


def test_names_and_the_line_say_why() -> None:
    eager = resolve(Auto(), "cpu", torch.bfloat16)
    assert eager.said == "torch in few passes (Triton does not run on a CPU)"
    assert eager.names["rms_norm"] == "fused_rms_norm (Triton does not run on a CPU)"
    compiled = resolve(Auto(), "cpu", torch.float32, compiled=True)
    assert compiled.names["rms_norm"] == "rms_norm (the compiler fuses the plain formula)"
    assert compiled.said.startswith(
        "plain torch in blocks for rms_norm, layer_norm, activations, gates, rope (the comp"
    )
    assert compiled.said.endswith("torch in few passes for the rest (Triton does not run on a CPU)")
    assert resolve(Reference(), "cpu", torch.float32).said == "plain torch (asked for by name)"
    assert set(compiled.names) == set(ALL) - {"add_rms_norm", "add_layer_norm"}
