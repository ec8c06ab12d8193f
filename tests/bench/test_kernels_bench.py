"""`lmlab bench kernels`: the bytes that figures are taken over, who takes turns, and that no operation is forgotten."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lmlab.bench import cases, kernels, memory
from lmlab.bench.cases import Case, Sizes
from lmlab.bench.limits import Yardstick
from lmlab.bench.rivals import Rivals
from lmlab.cli.app import run
from lmlab.kernels.ops import Ops
from lmlab.registry import OPTIONS

CPU = torch.device("cpu")
SMALL = Sizes(64, 4, torch.float32, CPU)
MIB = 2**20
# fields that say something
NO_OPERATION = {"Mapping[str, str]", "str", "Optional[str]", "torch.device", "torch.dtype", "Optional[torch.dtype]"}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bench of seconds: little is moved, and `compiled` is the plain formula once more."""
    monkeypatch.setattr("lmlab.bench.cases.FFN_WIDTH", 16)
    monkeypatch.setattr("lmlab.bench.kernels.ELEMENTS", {"cpu": 1024})
    monkeypatch.setattr("lmlab.bench.kernels.WIDTHS", (32, 64))
    monkeypatch.setattr("lmlab.bench.kernels.LOSS_WIDTHS", {"cpu": (32,)})
    monkeypatch.setattr("lmlab.bench.kernels.LEAST_S", 1e-4)
    monkeypatch.setattr("lmlab.bench.limits.COPIED_BYTES", {"cpu": MIB})
    monkeypatch.setattr("lmlab.bench.limits.matmul_size", lambda device, dtype: 64)
    monkeypatch.setattr(torch, "compile", lambda f, **how: f)


@pytest.fixture
def rivals(monkeypatch: pytest.MonkeyPatch) -> Rivals:
    """Without a compiler."""

    def compile(f: Any, **how: Any) -> Any:
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(torch, "compile", compile)
    told: list[str] = []
    found = Rivals.here(CPU, torch.float32, told)
    assert "compiled" not in found.names
    assert told[-1] == "compiled code is not measured: RuntimeError: no compiler"
    return found


def every_case(D: int) -> Iterator[Case]:
    yield from cases.of_width(D, SMALL)
    yield from cases.elementwise(SMALL)


@pytest.mark.parametrize(
    ("D", "name", "forward", "backward"),
    [  # 64 elements of fp32 are 256 bytes, a weight of 16 is 64
        (16, "rms_norm", 2 * 256 + 64, 3 * 256 + 2 * 64),
        (16, "layer_norm", 2 * 256 + 2 * 64, 3 * 256 + 3 * 64),
        (16, "add_rms_norm", 4 * 256 + 64, 4 * 256 + 2 * 64),
        (16, "add_layer_norm", 4 * 256 + 2 * 64, 4 * 256 + 3 * 64),
        (16, "rope half", 2 * 256 + 2 * 4 * 8 * 4, 2 * 256 + 2 * 4 * 8 * 4),  # cos and sin of 4 tokens and 8 pairs
        (16, "rope interleaved", 768, 768),
        (16, "embedding", 4 * 8 + 256 + 256, 4 * 8 + 256 + 256),  # 4 ids, each row once
        (8, "embedding", 8 * 8 + 128 + 256, 8 * 8 + 256 + 128),  # 8 ids of 4 rows, the gradient of 4
        (16, "relu", 2 * 256, 3 * 256),
        (16, "swiglu", 3 * 256, 5 * 256),
    ],
)
def test_least_bytes(monkeypatch: pytest.MonkeyPatch, D: int, name: str, forward: int, backward: int) -> None:
    monkeypatch.setattr("lmlab.bench.cases.FFN_WIDTH", 16)
    (case,) = [one for one in every_case(D) if one.name == name]
    assert (case.forward_bytes, case.backward_bytes) == (forward, backward)


def test_least_bytes_are_those_of_what_goes_in_and_comes_out(rivals: Rivals) -> None:
    """Of every operation but the embedding, which reads the rows that are looked up."""
    for case in every_case(16):
        out = rivals.of(case.pick).functions["reference"](*case.given, *case.then)
        outs = out if isinstance(out, tuple) else (out,)
        if case.role != "embedding":
            assert case.forward_bytes == cases.n_bytes(*case.given, *outs), case.said()
        made = torch.autograd.grad(outs, case.wants, [torch.ones_like(x) for x in outs])
        distinct = made[1:] if case.role.startswith("add_") else made  # residual and branch have one gradient
        assert case.backward_bytes >= cases.n_bytes(*outs, *distinct), case.said()


def test_every_operation_is_measured_or_said_to_be_elsewhere() -> None:
    roles = {field.name for field in dataclasses.fields(Ops) if field.type not in NO_OPERATION}
    measured = {case.role for case in every_case(16)}
    assert measured | {"linear_cross_entropy"} | set(cases.ELSEWHERE) == roles
    assert not measured & set(cases.ELSEWHERE)
    assert {case.name for case in cases.elementwise(SMALL)} == set(OPTIONS["ffn"])
    assert {case.name for case in every_case(16) if case.role == "rope"} == {"rope half", "rope interleaved"}


def test_a_function_takes_one_turn(rivals: Rivals) -> None:
    same = {case.name: rivals.of(case.pick) for case in every_case(16)}
    assert same["embedding"].same["auto"] == "reference"
    assert list(same["embedding"].functions) == ["reference"]
    assert same["rms_norm"].same["auto"] == same["add_rms_norm"].same["auto"] == "auto"
    assert len(same["add_rms_norm"].functions) == 2


def test_a_share_is_of_the_limit_in_the_same_turn(rivals: Rivals, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy moves 8 bytes in 1, 10, 2 s; who moves 4 in the same time has half of it, however slow the machine."""
    times = {"its limit": [1.0, 10.0, 2.0], "reference": [1.0, 10.0, 2.0], "auto": [0.5, 5.0, 1.0]}
    monkeypatch.setattr("lmlab.bench.kernels.in_turns", lambda calls, device, **how: {n: times[n] for n in calls})
    case = next(cases.of_width(16, SMALL))
    own = rivals.of(case.pick)
    bench = kernels.Bench(rivals, CPU, torch.float32, 3)
    found = bench.compared(dict.fromkeys(own.functions, lambda: None), own, Yardstick(lambda: None, 8), 4)
    assert found["share"]["reference"] == {"median": 0.5, "low": 0.5, "high": 0.5}
    assert found["share"]["auto"]["median"] == 1
    assert found["auto_over"] == {"reference": {"median": 2.0, "low": 2.0, "high": 2.0}}


def test_slower_than_compiled_code_is_said_where_no_round_denies_it() -> None:
    def record(name: str, high: float) -> dict[str, Any]:
        over = {"median": 0.8, "low": 0.7, "high": high}
        return {"operation": name, "D": 8, "pass": "forward", "auto_over": {"compiled": over}}

    (line,) = kernels._slow([record("rms_norm", 0.9), record("layer_norm", 1.1)])
    assert line.endswith("in every round: rms_norm forward D=8 0.80× (0.70–0.90)")
    assert kernels._slow([{**record("rms_norm", 0.9), "auto_over": {}}]) == []


def test_memory_beside_what_is_held() -> None:
    memory.extra(lambda: torch.ones(64 * MIB, dtype=torch.uint8), CPU)  # what is kept from here on is no news
    assert 60 * MIB < memory.extra(lambda: torch.ones(64 * MIB, dtype=torch.uint8), CPU) < 80 * MIB


@pytest.mark.usefixtures("small")
def test_as_it_is_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "kernels", "tokenizer.vocab_size=300", "train.batch_tokens=256", "train.precision=fp32"]
    assert run([*words, "device=cpu", "--rounds", "3", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "kernels.json").read_text())
    rows = {(one["operation"], one["D"], one["pass"]): one for one in found["rows"]}
    assert len(rows) == len(found["rows"]) == 2 * (2 * 7 + len(OPTIONS["ffn"])) + 1
    assert set(rows["rms_norm", 32, "forward"]["share"]) == {"reference", "auto", "compiled"}
    assert rows["rms_norm", 64, "backward"]["same"] == {
        "reference": "reference",
        "auto": "auto",
        "compiled": "compiled",
    }
    assert set(rows["swiglu", None, "forward"]["auto_over"]) == {"compiled"}  # auto is the reference
    loss = rows["loss V=300", 32, "forward + backward"]
    assert loss["flops"] == 6 * 256 * 300 * 32
    assert set(loss["extra_bytes"]) == {"reference", "auto", "compiled"}
    assert "= reference" in out
    assert "first calls of compiled code" in out
    assert "auto is slower than compiled code in every round:" in out
    assert (tmp_path / "kernels.svg").exists()


@pytest.mark.usefixtures("small")
def test_a_typed_width_is_the_only_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "kernels", "model.d_model=128", "train.batch_tokens=256", "train.precision=fp32", "device=cpu"]
    assert run([*words, "--rounds", "3", "--out", str(tmp_path), "--json"]) == 0
    assert {one["D"] for one in json.loads(capsys.readouterr().out)["rows"]} == {128, None}


@pytest.mark.slow
def test_compiled_code_keeps_its_graph() -> None:
    """What torch.compile makes can be asked for its gradients more than once, and they are right."""
    case = next(cases.of_width(16, SMALL))
    own = Rivals.here(CPU, torch.float32, []).of(case.pick)
    with torch._functorch.config.patch(donated_buffer=False):
        compiled, plain = (own.functions[name](*case.given, *case.then) for name in ("compiled", "reference"))
        for _ in range(2):
            got = torch.autograd.grad(compiled, case.wants, torch.ones_like(compiled), retain_graph=True)
    want = torch.autograd.grad(plain, case.wants, torch.ones_like(plain))
    assert own.functions["compiled"] is not own.functions["reference"]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
