"""Our model as lm_eval asks for one: scores against whole rows computed by hand, tasks of local files, the command."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmlab.cli import app
from lmlab.data.spec import BPE, Byte
from lmlab.data.tokenizer import byte_tokenizer, train_bpe
from lmlab.errors import ConfigError
from lmlab.generate.decode import generate
from lmlab.generate.sampling import Sampling
from lmlab.model.transformer import Transformer
from tests.cli.conftest import run_here
from tests.composed import model, peaked

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is in the `lm-eval` extra")

from lm_eval.tasks import TaskManager  # noqa: E402

from lmlab.eval import harness  # noqa: E402
from lmlab.eval.harness_model import HarnessModel  # noqa: E402

pytestmark = pytest.mark.slow

TOKENIZER = byte_tokenizer(Byte())
EOT, T = TOKENIZER.eot, 16
SIZES = (1, 3, 8)
PAIRS = [
    ("Fellow", " citizens"),
    ("a", "b"),
    ("The state of the Union is", " strong"),  # longer than a row
    ("", "We"),
    ("日本", "語"),
    ("two spaces  ", "go on"),
    (" ", "x"),
    ("no more", ""),
    ("The state of the Union is", " weak"),
]
TEXTS = ["", "x", "0123456789abcdef", "Fellow citizens of the Senate and of the House", "日本語" * 9, "a" * 17]


def drawn(dtype: torch.dtype = torch.float64, **chosen: Any) -> Transformer:
    return peaked(model(dtype, vocab=257, **chosen), T)


def request(*args: Any, task: str = "t") -> Any:
    return SimpleNamespace(args=args, task_name=task)


def by_hand(net: Transformer, given: list[int], scored: list[int]) -> tuple[float, bool]:
    """Of a row alone, without padding: ln p of `scored` after `given`, and whether each is the likeliest."""
    tokens = torch.tensor([given + scored[:-1]])
    logits = net(tokens, torch.arange(tokens.shape[1])[None]).logits_BTV[0, len(given) - 1 :]
    chosen = torch.log_softmax(logits.double(), -1)[range(len(scored)), scored]
    return float(chosen.sum()), logits.argmax(-1).tolist() == scored


def row(context: str, continuation: str, bos: list[int]) -> tuple[list[int], list[int]]:
    """The ids of a pair by lm_eval's rules, for plain bytes; what is longer than a row loses its beginning."""
    spaces = context[len(context.rstrip()) :]
    given = bos + list(context.rstrip().encode()) or [EOT]
    scored = list((spaces + continuation).encode())
    too_many = max(0, len(given) + len(scored) - 1 - T)
    return given[too_many:], scored


PARTS = {
    "rope mha": {},
    "alibi gqa": {"pos": "alibi", "attn": ("gqa", {"n_kv_heads": 2})},
    "learned layernorm": {"pos": "learned", "norm": "layernorm"},
    "t5 window": {"pos": "t5", "attn": ("mha", {"window": 5})},
    "dynamic ntk": {"rope_scaling": ("dynamic_ntk", {"factor": 4.0, "original_len": 6})},
    "mla": {"attn": "mla"},
    "little room": {"moe": ("topk", {"n_experts": 4, "capacity_factor": 0.5})},
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS.keys())
@pytest.mark.parametrize("bos", ["always", "empty"])
@torch.no_grad()
def test_scores_are_those_of_whole_rows(parts, bos):
    net = drawn(**parts)
    lm = HarnessModel(net, TOKENIZER, batch_size=4, bos=bos)
    found = lm.loglikelihood([request(*pair) for pair in PAIRS])
    for pair, (score, greedy) in zip(PAIRS, found, strict=True):
        given, scored = row(*pair, [EOT] * (bos == "always"))
        expected = by_hand(net, given, scored) if scored else (0.0, True)
        assert score == pytest.approx(expected[0], abs=1e-9), pair
        assert greedy == expected[1], pair


def test_the_likeliest_continuation_is_greedy():
    net, lengths = drawn(), (3, 5, 1)
    prompts = [[EOT, *text] for text in (b"We", b"Fellow", b"On")]
    likeliest = [generate(net, [p], max_new=n).tokens[0] for p, n in zip(prompts, lengths, strict=True)]
    lm = HarnessModel(net, TOKENIZER)
    found = lm._loglikelihood_tokens([("", *row) for row in zip(prompts, likeliest, strict=True)])
    assert [greedy for _, greedy in found] == [True] * 3
    for n, ids in enumerate(likeliest):
        other = [*ids[:-1], (ids[-1] + 1) % 257]
        found = lm._loglikelihood_tokens([("", *row) for row in zip(prompts, [*likeliest[:n], other], strict=False)])
        assert [greedy for _, greedy in found] == [True] * n + [False]


@pytest.mark.parametrize("parts", [PARTS["rope mha"], PARTS["dynamic ntk"]], ids=["rope", "dynamic ntk"])
@torch.no_grad()
def test_rolling_scores_every_token_once(parts):
    net = drawn(**parts)
    found = HarnessModel(net, TOKENIZER, batch_size=3).loglikelihood_rolling([request(t) for t in TEXTS])
    for text, score in zip(TEXTS, found, strict=True):
        ids, expected, at = list(text.encode()), 0.0, 0
        while at < len(ids):
            end = min(at + T, len(ids))
            given = [EOT, *ids[:at]] if at == 0 else ids[end - T - 1 : at]
            expected += by_hand(net, given, ids[at:end])[0]
            at = end
        assert score == pytest.approx(expected, abs=1e-9), text


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-9), (torch.float32, 1e-6)], ids=["float64", "fp32"])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS.keys())
def test_any_batch_size_gives_the_same_figures(parts, dtype, tol):
    net = drawn(dtype, **parts)
    pairs, texts = [request(*pair) for pair in PAIRS], [request(t) for t in TEXTS]
    until = [request(context, {"until": ["\n"], "max_gen_toks": 6}) for context, _ in PAIRS]
    found = []
    for size in SIZES:
        lm = HarnessModel(net, TOKENIZER, batch_size=size)
        scores, greedy = zip(*lm.loglikelihood(pairs), strict=True)
        found.append(([*scores, *lm.loglikelihood_rolling(texts)], greedy, lm.generate_until(until)))
    for other in found[1:]:
        assert other[0] == pytest.approx(found[0][0], rel=tol, abs=tol)
        assert other[1:] == found[0][1:]


def test_bos_changes_contexts_and_nothing_else():
    net = drawn()
    pairs = [("Fellow", " men"), ("", "We")]
    found = {bos: HarnessModel(net, TOKENIZER, bos=bos) for bos in ("always", "empty")}
    scores = {bos: [s for s, _ in lm.loglikelihood([request(*p) for p in pairs])] for bos, lm in found.items()}
    assert scores["always"][0] != pytest.approx(scores["empty"][0], abs=1e-3)
    assert scores["always"][1] == scores["empty"][1]
    rolled = [lm.loglikelihood_rolling([request("Fellow citizens of the Senate")]) for lm in found.values()]
    assert rolled[0] == rolled[1]
    kwargs = {"max_gen_toks": 5}
    (written,) = found["empty"].generate_until([request("Fellow", kwargs)])
    assert written == TOKENIZER.decode(generate(net, [list(b"Fellow")], max_new=5, end=EOT).tokens[0])
    (written,) = found["always"].generate_until([request("Fellow", kwargs)])
    assert written == TOKENIZER.decode(generate(net, [[EOT, *b"Fellow"]], max_new=5, end=EOT).tokens[0])
    with pytest.raises(ConfigError, match="`bos` is maybe"):
        HarnessModel(net, TOKENIZER, bos="maybe")


@torch.no_grad()
def test_letters_that_join_the_context_are_scored_as_lm_eval_scores_them():
    """`ab` + `c` is one token: lm_eval's rule takes the context's one id off, and nothing would be left to score."""
    tokenizer = train_bpe(BPE(vocab_size=260), ["abc" * 50])
    assert [len(tokenizer.encode(t)) for t in ("ab", "abc", "c")] == [1, 1, 1]
    net, eot = peaked(model(vocab=tokenizer.vocab_size), T), tokenizer.eot
    found = HarnessModel(net, tokenizer).loglikelihood([request("ab", "c"), request("ab", "cx")])
    assert found[0][0] == pytest.approx(by_hand(net, [eot, *tokenizer.encode("ab")], tokenizer.encode("c"))[0])
    assert found[1][0] == pytest.approx(by_hand(net, [eot, *tokenizer.encode("ab")], tokenizer.encode("x"))[0])


def test_what_is_cut_off_is_counted_by_task():
    lm = HarnessModel(drawn(), TOKENIZER)
    lm.loglikelihood([request("a" * 30, "bc", task="long"), request("a" * 14, "bc", task="fits")])
    lm.loglikelihood([request("a" * 15, "bc", task="long")])
    lm.generate_until([request("a" * 30, {"max_gen_toks": 6}, task="written")])
    lm.loglikelihood_rolling([request("a" * 99, task="rolled")])
    assert lm.requests == Counter(long=2, fits=1, written=1, rolled=1)
    assert {k: v for k, v in lm.cut_requests.items() if v} == {"long": 2, "written": 1}
    assert lm.cut_tokens == Counter(long=(1 + 30 + 2 - 1 - T) + 1, written=1 + 30 - (T - 6))


def test_a_continuation_longer_than_a_row_is_refused():
    lm = HarnessModel(drawn(), TOKENIZER)
    lm.loglikelihood([request("a", "b" * T)])
    with pytest.raises(ConfigError, match="a continuation of 17 tokens is to be scored, the model's rows have 16"):
        lm.loglikelihood([request("a", "b" * (T + 1))])


def test_what_is_not_causal_is_refused(monkeypatch):
    from lmlab.model.block import PreNorm

    monkeypatch.setattr(PreNorm, "noncausal", "it looks ahead", raising=False)
    with pytest.raises(ConfigError, match="this model is not causal: it looks ahead"):
        HarnessModel(drawn(), TOKENIZER)


def test_generation_ends_at_stop_strings(monkeypatch):
    net = drawn()
    lm = HarnessModel(net, TOKENIZER, batch_size=4)
    (whole,) = lm.generate_until([request("Fellow", {"max_gen_toks": 9})])
    stop = whole[3:5]
    assert whole.index(stop) <= 3
    passes: list[int] = []
    forward = Transformer.forward
    monkeypatch.setattr(Transformer, "forward", lambda *a, **k: (passes.append(1), forward(*a, **k))[1])
    (cut,) = lm.generate_until([request("Fellow", {"max_gen_toks": 9, "until": ["\x00never", stop]})])
    assert cut == whole[: whole.index(stop)]
    assert len(passes) < 9
    assert lm.generate_until([request("Fellow", {"max_gen_toks": 9, "until": stop})]) == [cut]


def test_sampled_repeats_differ_and_do_not_depend_on_the_batch():
    net = drawn()
    kwargs = {"do_sample": True, "temperature": 1.5, "top_k": 50, "max_gen_toks": 8}
    asked = [request("We", kwargs)] * 3 + [request("Fellow", kwargs), request("We", {"max_gen_toks": 8})]
    found = [HarnessModel(net, TOKENIZER, batch_size=size).generate_until(asked) for size in SIZES]
    assert found[0] == found[1] == found[2]
    assert len(set(found[0][:3])) == 3
    alone = generate(net, [[EOT, *b"We"]], max_new=8, end=EOT, sampling=Sampling(1.5, 50))
    assert found[0][0] == TOKENIZER.decode(alone.tokens[0])


@pytest.mark.parametrize("bos", ["always", "empty"])
def test_equals_lm_eval_s_own_model_on_what_is_exported(here, place, bos):
    """Its `hf` model, of transformers, on our export: scores, cut rows, rolling windows, generation."""
    import lmlab as lab

    transformers = pytest.importorskip("transformers", reason="transformers is in the `parity` extra")
    pytest.importorskip("accelerate", reason="accelerate, which lm_eval's hf model needs, is in the `parity` extra")
    from lm_eval.models.huggingface import HFLM

    if not (place / "exported").exists():
        here.lmlab("export", str(place / "run"), "--to", str(place / "exported"))
    theirs = HFLM(
        pretrained=transformers.AutoModelForCausalLM.from_pretrained(place / "exported"),
        tokenizer=transformers.AutoTokenizer.from_pretrained(place / "exported"),
        batch_size=2,
        max_length=64,
    )
    plain = theirs.tok_encode
    if bos == "always":  # this tokenizer has no beginning-of-text of its own that HFLM could be told to add
        theirs.tok_encode = lambda text, add_special_tokens=None, **more: (
            [EOT] * (add_special_tokens is None) + plain(text, add_special_tokens=False)
        )
    net, tokenizer, _ = lab.load(place / "run")
    ours = HarnessModel(net, tokenizer, batch_size=2, bos=bos)
    pairs = [request(*pair) for pair in PAIRS if pair[1] and pair[0].strip()] + [request("a" * 99, "bcd")]
    scores = [zip(*lm.loglikelihood(pairs, disable_tqdm=True), strict=True) for lm in (ours, theirs)]
    (ours_p, ours_greedy), (theirs_p, theirs_greedy) = scores
    assert ours_p == pytest.approx(theirs_p, rel=1e-6)
    assert ours_greedy == theirs_greedy
    assert ours.cut_tokens["t"] == (bos == "always") + 99 + 3 - 65
    if bos == "empty":  # rolling never adds one to the text itself
        texts = [request(text * 5) for text in TEXTS if text]
        expected = theirs.loglikelihood_rolling(texts, disable_tqdm=True)
        assert ours.loglikelihood_rolling(texts) == pytest.approx(expected, rel=1e-6)
        until = [request(c, {"until": ["e"], "max_gen_toks": 20}) for c in ("The state", "Fellow", "We", "a" * 99)]
        assert ours.generate_until(until) == theirs.generate_until(until, disable_tqdm=True)


@pytest.mark.parametrize("case", ["llama", "mistral", "gemma"])
def test_equals_lm_eval_s_own_model_on_a_folder_with_a_start_token(case, tmp_path):
    """A template `<s> $A`, which is not the end token: HFLM's own defaults, on the folder that is imported."""
    import lmlab as lab

    transformers = pytest.importorskip("transformers", reason="transformers is in the `parity` extra")
    pytest.importorskip("accelerate", reason="accelerate, which lm_eval's hf model needs, is in the `parity` extra")
    from lm_eval.models.huggingface import HFLM

    from tests.interop.made import begun
    from tests.parity.folders import CASES, model_of, run_of, saved

    cls, config = CASES[case]
    config = config | {"vocab_size": 258, "bos_token_id": 257, "eos_token_id": 256}
    folder = begun(saved(tmp_path / "theirs", model_of(cls, config)[1]))
    run = run_of(folder, tmp_path / "runs", "model.seq_len=64")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    names = transformers.AutoTokenizer.from_pretrained(folder)
    given, none = (HFLM(loaded, tokenizer=names, batch_size=2, max_length=64, add_bos_token=b) for b in (None, False))
    net, tokenizer, _ = lab.load(run.path)
    assert (given.prefix_token_id, names.eos_token_id) == (tokenizer.start, tokenizer.eot) == (257, 256)
    pairs = [request(*pair) for pair in PAIRS if pair[1] and pair[0].strip()] + [request("a" * 99, "bcd")]
    until = [request(c, {"until": ["e"], "max_gen_toks": 20}) for c in ("The state", "Fellow", "We", "a" * 99)]
    for bos, theirs in (("always", given), ("empty", none)):
        ours = HarnessModel(net, tokenizer, batch_size=2, bos=bos)
        (ours_p, ours_greedy), (theirs_p, theirs_greedy) = (
            zip(*lm.loglikelihood([*pairs, request("", "We")], disable_tqdm=True), strict=True) for lm in (ours, theirs)
        )
        assert ours_p == pytest.approx(theirs_p, rel=1e-6)
        assert ours_greedy == theirs_greedy
        assert ours.generate_until(until) == theirs.generate_until(until, disable_tqdm=True)
        texts = [request(text * 5) for text in TEXTS if text]  # one start before each text, which is not scored
        expected = none.loglikelihood_rolling(texts, disable_tqdm=True)
        assert ours.loglikelihood_rolling(texts) == pytest.approx(expected, rel=1e-6)


# ---------------------------------------------------------------- tasks of local files

QUESTIONS = [
    {"question": "The state of the Union is", "choices": ["strong", "weak", "a long word"], "answer": 0},
    {"question": "Fellow", "choices": ["citizens", "men", "x"], "answer": 1},
    {"question": "We", "choices": ["are", "were", "the people of the States"], "answer": 2},
    {"question": "I thank", "choices": ["you", "God", "Congress"], "answer": 0},
    {"question": "On", "choices": ["a", "b", "c"], "answer": 1},
]
PAGES = [{"page": "Fellow citizens of the Senate."}, {"page": "We, the people. " * 9}, {"page": "日本"}]
CHOICE = """
task: own_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/questions.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
metadata: {{version: 3.0}}
"""
ROLLING = """
task: own_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/pages.jsonl}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{page}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}, {{metric: bits_per_byte}}]
"""
WRITTEN = """
task: own_written
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/questions.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 6, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
FILES = {"choice": CHOICE, "rolling": ROLLING, "written": WRITTEN}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three task files, their data, and `run`: a run of a few steps."""
    folder = tmp_path_factory.mktemp("lm_eval")
    for name, docs in (("questions", QUESTIONS), ("pages", PAGES)):
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(d) for d in docs), encoding="utf-8")
    for name, text in FILES.items():
        (folder / f"{name}.yaml").write_text(text.format(folder=folder), encoding="utf-8")
    words = "tokenizer=byte model=nano model.n_layers=2 model.seq_len=64 train.batch_tokens=256 train.max_steps=8"
    words += f" lr=1e-2 train.eval_tokens=256 paths.runs={folder}/runs wandb.mode=disabled"
    (folder / "run").symlink_to(run_here(words.split()).path)
    return folder


@pytest.fixture
def here(place, monkeypatch, capsys):
    monkeypatch.chdir(place)

    class Here:
        def lmlab(self, *words: str) -> tuple[str, str]:
            assert app.run(words) == 0, capsys.readouterr().err
            return tuple(capsys.readouterr())

        def refused(self, *words: str) -> tuple[str, str]:
            assert app.run(words) == 2
            out, err = capsys.readouterr()
            assert out == ""
            said = [line for line in err.splitlines() if line.startswith(("error: ", "hint: "))]
            assert len(said) == 2, err
            return said[0], said[1]

    return Here()


def figure(report: dict[str, Any], task: str, metric: str) -> dict[str, Any]:
    (found,) = (f for f in report["tasks"][task]["figures"] if f["metric"] == metric)
    return found


@torch.no_grad()
def expected(net: Transformer, seq_len: int = 64) -> dict[str, float]:
    """The figures of the three tasks, computed from the logits of whole rows."""
    right = right_norm = nats = 0.0
    for doc in QUESTIONS:
        scores = []
        for choice in doc["choices"]:
            scores.append(by_hand(net, [EOT, *doc["question"].encode()], list(f" {choice}".encode()))[0])
        per_byte = [s / len(c.encode()) for s, c in zip(scores, doc["choices"], strict=True)]
        right += max(range(3), key=scores.__getitem__) == doc["answer"]
        right_norm += max(range(3), key=per_byte.__getitem__) == doc["answer"]
    for doc in PAGES:
        ids, at = list(doc["page"].encode()), 0
        while at < len(ids):
            end = min(at + seq_len, len(ids))
            nats -= by_hand(net, [EOT] if at == 0 else ids[end - seq_len - 1 : at], ids[at:end])[0]
            at = end
    n_bytes = sum(len(d["page"].encode()) for d in PAGES)
    n_words = sum(len(d["page"].split(" ")) for d in PAGES)
    return {
        "acc": right / 5,
        "acc_norm": right_norm / 5,
        "bits_per_byte": nats / n_bytes / math.log(2),
        "byte_perplexity": math.exp(nats / n_bytes),
        "word_perplexity": math.exp(nats / n_words),
    }


def test_tasks_of_files_through_simple_evaluate(place):
    import lmlab as lab

    net, tokenizer, _ = lab.load(place / "run")
    manager = TaskManager(include_path=str(place), include_defaults=False)
    lm = HarnessModel(net, tokenizer, batch_size=3)
    found = lm_eval.simple_evaluate(
        lm, tasks=["own_choice", "own_rolling", "own_written"], task_manager=manager, bootstrap_iters=0
    )
    by_name = {key.partition(",")[0]: value for row in found["results"].values() for key, value in row.items()}
    for name, value in expected(net).items():
        assert by_name[name] == pytest.approx(value, rel=1e-6), name
    for doc, sample in zip(QUESTIONS, found["samples"]["own_written"], strict=True):
        (ids,) = generate(net, [[EOT, *doc["question"].encode()]], max_new=6, end=EOT).tokens
        assert sample["resps"] == [[tokenizer.decode(ids).partition(".")[0]]]


def test_tasks_of_files_through_the_command(here, place):
    import lmlab as lab

    tasks = ",".join(f"lm_eval:{name}.yaml" for name in FILES)
    out, _ = here.lmlab("eval", "run", "--tasks", tasks, "--json", "--batch-size", "3")
    report = json.loads(out)
    net, *_ = lab.load(place / "run")
    for task, metrics in {
        "own_choice": ("acc", "acc_norm"),
        "own_rolling": ("bits_per_byte", "word_perplexity"),
    }.items():
        for metric in metrics:
            assert figure(report, task, metric)["value"] == pytest.approx(expected(net)[metric], rel=1e-6)
    choice = report["tasks"]["own_choice"]
    acc = figure(report, "own_choice", "acc")
    assert acc["stderr"] == pytest.approx(math.sqrt(acc["value"] * (1 - acc["value"]) / 4))
    assert (choice["version"], choice["n"], choice["n_all"], choice["n_shots"], choice["requests"]) == (
        3.0,
        5,
        5,
        0,
        15,
    )
    assert choice["file"] == str(place / "choice.yaml")
    assert figure(report, "own_rolling", "bits_per_byte")["stderr"] is None
    assert report["lm_eval"] == lm_eval.__version__
    assert (report["bos"], report["batch_size"], report["max_length"], report["limit"]) == ("always", 3, 64, None)
    assert report["precision"] == "float32"
    files = sorted((place / "run" / "eval").glob("*lm_eval-own_choice+own_rolling+own_written.json"))
    recorded = json.loads(files[-1].read_text())
    assert recorded.pop("when")
    assert recorded == report
    assert "test_evaluations" not in json.loads((place / "run" / "manifest.json").read_text()) or not report.get(
        "split"
    )


def test_the_table_has_errors_and_counts(place):
    """In a process of its own, where nothing is imported before."""
    words = "eval run --tasks lm_eval:choice.yaml,lm_eval:rolling.yaml --limit 3 --bos empty"
    done = subprocess.run([sys.executable, "-m", "lmlab", *words.split()], cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    out, err = done.stdout, done.stderr
    head, acc, norm, rolling, *_ = out.splitlines()
    assert rolling.split()[:6] == ["own_rolling", "–", "3", "0", "none", "word_perplexity"]
    assert rolling.split()[7] == "–"
    assert "it/s" not in err
    assert head.split() == ["task", "version", "n", "shots", "filter", "metric", "value", "stderr"]
    assert acc.split()[:6] == ["own_choice", "3.0", "3", "0", "none", "acc"]
    assert norm.split()[5] == "acc_norm"
    assert len(acc.split()) == 8
    assert "end-of-text before texts without a context" in err
    assert "cut off" not in err
    assert "using default" not in err


def test_what_is_cut_off_is_told(here, place):
    long = CHOICE.format(folder=place).replace('"{{question}}"', '"{{question * 9}}"').replace("own_choice", "own_long")
    (place / "long.yaml").write_text(long)
    out, err = here.lmlab("eval", "run", "--tasks", "lm_eval:long.yaml", "--json")
    cut = json.loads(out)["tasks"]["own_long"]
    assert cut["cut_requests"] > 0
    said = " ".join(err.split())
    assert (
        f"own_long: {cut['cut_requests']} of 15 requests are longer than 64 tokens: {cut['cut_tokens']} tokens" in said
    )


def test_a_shipped_task_needs_its_data(here):
    error, hint = here.refused("eval", "run", "--tasks", "lm_eval:arc_easy")
    assert error.startswith("error: lm_eval:arc_easy can't be loaded:")
    assert "HF_HUB_OFFLINE" in hint


def test_an_unknown_task_lists_near_names(here):
    error, hint = here.refused("eval", "run", "--tasks", "lm_eval:arc_esay")
    assert error == "error: `--tasks` lm_eval:arc_esay: lm_eval has no such task"
    assert "lm_eval:arc_easy" in hint


BROKEN = {
    "template": (("{{{{question}}}}", "{{{{ ''.__class__.__mro__ }}}}"), "unsafe"),
    "metric": (("metric: acc,", "metric: ./acc.py,"), "own_choice is scored by ./acc.py, which lm_eval has not"),
    "data": (("questions.jsonl", "absent.jsonl"), "can't be loaded: FileNotFoundError"),
    "kwargs": (("max_gen_toks: 6", "repetition_penalty: 2.0"), "generation_kwargs.repetition_penalty is 2.0"),
    "long": (("max_gen_toks: 6", "max_gen_toks: 64"), "generation_kwargs.max_gen_toks is 64, the model's rows have 64"),
}


MALFORMED = {  # what is written instead in one of the files, and the hint on it
    "template": ("choice", ("{{{{question}}}}", "{{{{question"), "mend the task file broken.yaml"),
    "a filter": (
        "choice",
        ("metadata:", "filter_list: [{{name: a, filter: [{{function: b}}]}}]\nmetadata:"),
        "mend the",
    ),
    "a key": ("choice", ("metadata:", "metadatum: 3\nmetadata:"), "mend the task file broken.yaml"),
    "metric_list": ("rolling", ("metric_list: [", "metric_list: 3 #"), "write metric_list: [{metric: acc}]"),
    "filter_list": ("choice", ("metadata:", "filter_list: 3\nmetadata:"), "write filter_list: [{name:"),
    "generation_kwargs": (
        "written",
        ("generation_kwargs: {{", "generation_kwargs: 5 #"),
        "write generation_kwargs: {un",
    ),
    "a target": ("choice", ("doc_to_target: answer", "doc_to_target: 7"), "mend the task file"),
    "no split": ("choice", ("test_split: test\n", ""), "mend the task file"),
    "another split": ("choice", ("test_split: test\n", "test_split: exam\n"), "mend the task file"),
    "dataset_kwargs": ("choice", ("dataset_kwargs: {{", "dataset_kwargs: 7 #"), "write dataset_kwargs: {data_files:"),
    "no data": ("choice", ("questions.jsonl", "absent.jsonl"), "or from data_files on this disk"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_is_not_told_to_ask_the_hub(here, place, name):
    file, (old, new), expected_hint = MALFORMED[name]
    assert old in FILES[file]
    (place / "broken.yaml").write_text(
        FILES[file].replace(old, new).format(folder=place).replace(f"own_{file}", "own_b")
    )
    error, hint = here.refused("eval", "run", "--tasks", "lm_eval:broken.yaml")
    assert expected_hint in hint, (error, hint)
    assert ("hub" in hint) == (name == "no data")


@pytest.mark.parametrize("name", BROKEN)
def test_what_can_not_be_run_is_told(here, place, name):
    change, message = BROKEN[name]
    (text,) = (text for text in (WRITTEN if name in ("kwargs", "long") else CHOICE,) if change[0] in text)
    (place / "broken.yaml").write_text(text.replace(*change).format(folder=place))
    (place / "acc.py").write_text("raise SystemExit('it was run')")
    error, _ = here.refused("eval", "run", "--tasks", "lm_eval:broken.yaml")
    assert message in error


def test_two_tasks_of_one_name_are_refused(here, place):
    (place / "same.yaml").write_text(CHOICE.format(folder=place))
    error, _ = here.refused("eval", "run", "--tasks", "lm_eval:choice.yaml,lm_eval:same.yaml")
    assert error == "error: two of `--tasks` are, or hold, the task own_choice"


def test_offline_nothing_is_connected_to():
    with harness._sealed(), socket.socket() as found, pytest.raises(ConnectionError, match="HF_HUB_OFFLINE=1"):
        found.connect(("127.0.0.1", 9))
    with socket.socket() as found, pytest.raises(ConnectionRefusedError):
        found.connect(("127.0.0.1", 9))


def test_tasks_are_loaded_before_the_model(here, monkeypatch):
    monkeypatch.setattr("lmlab.opened.computed_model", None)
    error, _ = here.refused("eval", "run", "--tasks", "lm_eval:absent.yaml")
    assert "absent.yaml can't be read: No such file" in error


def test_two_runs_share_what_was_loaded(here, place):
    out, _ = here.lmlab(
        "eval", "run", str(place / "run"), "--tasks", "lm_eval:choice.yaml,lm_eval:rolling.yaml", "--json"
    )
    first, second = (json.loads(line) for line in out.splitlines())
    assert first["tasks"] == second["tasks"]
