"""What one can do with an imported run, and what not, on the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import lmlab
from lmlab.cli import app
from lmlab.config.amend import amend
from lmlab.data.corpora import split_documents
from lmlab.opened import ends_of, experiment_of, prepared
from lmlab.runs.checkpoint import load
from lmlab.runs.rundir import RunDir
from tests.composed import close, rows
from tests.interop.made import BOS, EOT, begun, tokenizer_folder
from tests.parity.folders import CASES, ROWS, logits, model_of, saved

transformers = pytest.importorskip("transformers", reason="transformers is in the `hf` extra")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `theirs`, and with `data.txt`."""
    root = tmp_path_factory.mktemp("imported")
    saved(root / "theirs", model_of(*CASES["qwen3 alternating"])[1])
    (root / "data.txt").write_text("Fellow citizens, the union is strong.\n" * 200)
    return root


@pytest.fixture
def here(place, monkeypatch, capsys):
    """lmlab(words) → stdout, run in the folder; refused(words) → the two lines."""
    monkeypatch.chdir(place)

    class Here:
        def lmlab(self, line: str) -> str:
            return self.said(line.split())

        def said(self, words: list[str]) -> str:
            assert app.run(words) == 0, capsys.readouterr().err
            return capsys.readouterr().out

        def refused(self, line: str) -> str:
            assert app.run(line.split()) == 2
            out, err = capsys.readouterr()
            assert out == ""
            lines = [text for text in err.splitlines() if text.startswith(("error: ", "hint: "))]
            assert len(lines) == 2
            return "\n".join(lines)

        @property
        def run(self) -> RunDir:
            return RunDir(json.loads(self.lmlab(f"import theirs {DATA} --json"))["run"])

    return Here()


DATA = "data=text data.files=[data.txt] model.seq_len=32"


def test_the_words_compose_it_again(here):
    told = json.loads(here.lmlab(f"import theirs {DATA} --json"))
    assert told["state"] == "imported"
    assert told["family"] == "qwen3"
    assert told["dtypes"] == ["float32"]
    assert {"attn=gqa", "attn.window=6", "attn.pattern='SL'", "model.seq_len=32"} <= set(told["words"])
    from lmlab.config.load import load as composed

    exp = composed(told["words"]).experiment
    config = RunDir(told["run"]).config()
    assert config["init"]["source"] == load(RunDir(told["run"]).checkpoints()[0].path).content_hash
    from lmlab.config.identity import to_dict

    exp.init.source = config["init"]["source"]
    assert to_dict(exp) == config
    assert json.loads(here.lmlab(f"import theirs {DATA} --json"))["existed"] is True


def test_it_is_evaluated_by_its_own_tokenizer(here):
    found = json.loads(here.lmlab(f"eval {here.run.name} --json"))
    net, tokenizer, _ = lmlab.load(here.run.path)
    assert found["content_hash"] == load(here.run.checkpoints()[0].path).content_hash
    assert found["own_data"] is False
    assert found["bits_per_byte"] > 0
    assert f" tokens, {found['precision']}:  loss " in here.lmlab(f"eval {here.run.name}")
    assert net.dims.vocab_size == ROWS > tokenizer.vocab_size
    again = json.loads(here.lmlab(f"eval {here.run.name} train.precision=fp32 compile=false --json"))
    assert again["loss"] == pytest.approx(found["loss"], rel=0.02)


def test_it_is_the_newest_that_is_done(here):
    run = here.run
    net, _, config = lmlab.load(root=run.path.parent)
    assert config == run.config()
    tokens, _ = rows(1, 20, vocab=ROWS)
    theirs = transformers.AutoModelForCausalLM.from_pretrained("theirs", attn_implementation="eager").eval()
    close(logits(net, tokens), logits(theirs, tokens), 1e-4)
    assert "exported" in here.lmlab("export --to again")
    assert (Path("again") / "config.json").is_file()


@pytest.mark.parametrize("bos", [None, EOT, BOS], ids=["no start", "its end", "its own"])
def test_it_goes_on_as_theirs_does(here, bos, tmp_path, monkeypatch):
    """Text in, text out, by their tokenizer with its template: a BOS in front where it has one."""
    folder = saved(tmp_path / "theirs", model_of(*CASES["llama"])[1])
    if bos is not None:
        begun(folder, bos)
    monkeypatch.chdir(tmp_path)
    run = json.loads(here.lmlab(f"import theirs {DATA.replace('data.txt', '/dev/null')} --json"))["run"]
    words = ["generate", run, "--prompt", "Fellow", "--max-new", "9", "--temperature", "0", "--json"]
    mine = json.loads(here.said(words))
    theirs = transformers.AutoModelForCausalLM.from_pretrained("theirs").eval()
    asked = transformers.AutoTokenizer.from_pretrained("theirs")("Fellow", return_tensors="pt")["input_ids"]
    assert asked.shape[1] == len("Fellow") + (bos is not None)
    allowed = {"suppress_tokens": list(range(lmlab.load(run)[1].vocab_size, ROWS))}  # rows of no token
    out = theirs.generate(asked, max_new_tokens=9, do_sample=False, eos_token_id=256, pad_token_id=0, **allowed)
    new = out[0, asked.shape[1] :].tolist()
    new = new[: new.index(256)] if 256 in new else new
    assert mine["text"] == lmlab.load(run)[1].decode(new)
    assert mine["tokens"] == len(new)


def test_documents_begin_with_its_own_start(here, tmp_path, monkeypatch):
    """`lmlab eval` of an import with a BOS: transformers' loss on rows that begin with it."""
    folder = begun(saved(tmp_path / "theirs", model_of(*CASES["llama"])[1]))
    texts = [f"Fellow citizens, {n} times the union is strong." for n in range(200)]
    (tmp_path / "docs.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    monkeypatch.chdir(tmp_path)
    words = "data=text data.files=[docs.jsonl] data.val_frac=0.5 data.packing=documents"
    run = json.loads(here.lmlab(f"import theirs {words} model.seq_len=48 --json"))["run"]
    found = json.loads(here.lmlab(f"eval {run} train.precision=fp32 --json"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    begin_text = transformers.AutoTokenizer.from_pretrained(folder)
    val = [begin_text(t)["input_ids"] for split, t in split_documents(texts, 0.5, 0.05) if split == "val"]
    assert {ids[0] for ids in val} == {257}
    stream = torch.tensor([i for ids in val for i in ids])
    assert len(stream) == found["tokens"] + 1
    nats = 0.0
    for at in range(0, found["tokens"], 48):  # rows of the stream, each document in a row alone
        row, begin = stream[at : at + 49], 0
        while begin < len(row) - 1:
            end = next((n for n in range(begin + 1, len(row) - 1) if row[n] == 257), len(row) - 1)
            out = logits(theirs, row[None, begin:end])[0]
            nats += float(torch.nn.functional.cross_entropy(out, row[begin + 1 : end + 1], reduction="sum"))
            begin = end
    assert found["loss"] == pytest.approx(nats / found["tokens"], rel=1e-5)


def test_what_is_trained_on_from_it_begins_and_ends_as_its_data_do(here, tmp_path, monkeypatch):
    begun(saved(tmp_path / "theirs", model_of(*CASES["llama"])[1]))
    shutil.copy("data.txt", tmp_path)
    monkeypatch.chdir(tmp_path)
    run = RunDir(json.loads(here.lmlab(f"import theirs {DATA} --json"))["run"])
    words = "train.max_steps=2 train.batch_tokens=128 train.eval_tokens=64 wandb.mode=disabled name=on"
    here.lmlab(f"train --from {run.name} {words}")
    (made,) = (RunDir(path) for path in Path("runs").glob("on-*"))
    tokenizer = lmlab.load(made.path)[1]
    assert ends_of(run, tokenizer) == (256,)
    assert ends_of(made, tokenizer) == (256, 257)
    exp = experiment_of(made)
    assert prepared(exp, made.tokenizer_path, lambda what, share: None).train.tokens[0] == 257
    assert (
        json.loads(here.said(["generate", made.name, "--prompt", "Fellow", "--max-new", "2", "--json"]))["tokens"] <= 2
    )


def test_lists_and_reports_take_it(here):
    run = here.run
    (line,) = [x for x in json.loads(here.lmlab("runs ls --json")) if x["name"] == run.name]
    assert line["state"] == "imported"
    assert not line["problem"]
    assert "imported" in here.lmlab(f"runs show {run.name}")
    here.lmlab(f"report {run.path} --format md --out out")
    assert "imported" in (next(Path("out").rglob("*.md"))).read_text()
    assert run.name in set(lmlab.results("runs")["run"])


def test_what_the_folder_decides_is_not_changed(here):
    assert "`norm.eps` is 1e-05, and the folder's is 1e-06" in here.refused("import theirs norm.eps=1e-5")
    assert "`attn.window` is 8, and the folder's is 6" in here.refused("import theirs attn.window=8")
    assert "`preset` can't be set at import" in here.refused("import theirs preset=llama")
    assert "`init.source` is given as abc; lmlab fills it in" in here.refused("import theirs init.source=abc")
    assert "takes a SOURCE first" in here.refused("import norm=rmsnorm")
    assert "no such file or folder" in here.refused("import ./nowhere")
    assert "the Hugging Face hub can't be reached" in here.refused("import some/model")
    same = here.lmlab(f"import theirs {DATA} norm.eps=1e-6 attn.backend=dense pos.pairing=interleaved --json")
    assert RunDir(json.loads(same)["run"]).config()["pos"]["pairing"] == "interleaved"


@pytest.mark.parametrize(
    "name", ["${oc.env:HOME}", "\\${x}", "a${", "a\\back", "back\\", "a'b\\'", "na=me", "~no one", "a,b", "[x]", "null"]
)
def test_a_folder_of_any_name(name, here, place, tmp_path, monkeypatch):
    """The name is a name, wherever it is read again: nothing in it is replaced, escaped or taken for a key."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(place / "theirs", tmp_path / name)
    for typed in (name, f"./{name}", str(tmp_path / name)):
        told = json.loads(here.said(["import", typed, "model.seq_len=32", "--json"]))
    run = RunDir(told["run"])
    assert run.config()["tokenizer"]["path"] == str(tmp_path / name) == run.manifest()["imported"]["source"]
    again = amend(experiment_of(run), ["train.precision=fp32"]).experiment
    assert again.tokenizer.path == str(tmp_path / name)
    assert "exported" in here.said(["export", run.name, "--to", f"./~{name}"])
    assert (tmp_path / f"~{name}" / "config.json").is_file()


def test_a_key_in_place_of_a_folder(here):
    assert "lmlab import FOLDER attn.window=6" in here.refused("import attn.window=6")
    assert "`SOURCE` ./na=me: no such file or folder" in here.refused("import ./na=me")


def test_there_is_nothing_to_go_on_with(here):
    name = here.run.name
    assert f"lmlab train --from {name}" in here.refused(f"train --resume {name}")
    assert "nothing to replay" in here.refused(f"verify {name}")


def test_other_weights_are_another_run(here):
    net = model_of(*CASES["qwen3 alternating"])[1]
    with torch.no_grad():
        next(net.parameters()).add_(1)
    saved(Path("others"), net)
    tokenizer = "tokenizer.path=theirs"
    a, b = (json.loads(here.lmlab(f"import {f} {DATA} {tokenizer} --json"))["run"] for f in ("theirs", "others"))
    configs = [RunDir(run).config() for run in (a, b)]
    assert Path(a).name != Path(b).name
    assert configs[0].pop("init") != configs[1].pop("init")
    assert configs[0] == configs[1]


def test_another_tokenizer_is_not_taken_for_the_same_import(here):
    run = here.run
    tokenizer_folder(Path("theirs"), more=3)
    again = json.loads(here.lmlab(f"import theirs {DATA} --json"))
    assert (again["run"], again["existed"]) == (str(run.path), False)
    assert lmlab.load(run.path)[1].vocab_size == 260
    assert Path(f"{run.path}.old-1").is_dir()
    tokenizer_folder(Path("theirs"))
    assert json.loads(here.lmlab(f"import theirs {DATA} --json"))["existed"] is False


def test_where_an_export_may_go(here):
    name = here.run.name
    assert "`--to` theirs is not empty" in here.refused(f"export {name} --to theirs")
    assert "`--to` data.txt is a file" in here.refused(f"export {name} --to data.txt")
    assert "`--to` is not given" in here.refused(f"export {name}")
    assert "`--family` is lama" in here.refused(f"export {name} --to x --family lama")
    assert "`--dtype` is float8" in here.refused(f"export {name} --to x --dtype float8")
    assert "takes one RUN" in here.refused(f"export {name} {name} --to x")
    Path("loop").symlink_to("loop")
    assert "`--to` loop is a link that leads in a circle" in here.refused(f"export {name} --to loop")
    Path("link").symlink_to("empty")
    for to in ("link", "empty"):
        Path("empty").mkdir(exist_ok=True)
        assert f"exported  {to}  Qwen3ForCausalLM" in here.lmlab(f"export {name} --to {to}")
        assert (Path("empty") / "config.json").is_file()
        shutil.rmtree("empty")
    assert "exported  link" in here.lmlab(f"export {name} --to link")
    assert Path("link").is_symlink()
    assert {p.name for p in Path().iterdir() if p.name.startswith(".")} == set()
