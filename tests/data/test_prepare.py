"""Preparing: done once, by one process, whole or not at all, and the same everywhere."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_cases import in_child

from lmlab.data import prepare as preparing
from lmlab.data.corpora import SPLITS, split_documents
from lmlab.data.prepare import Prepared, cache_dir, prepare
from lmlab.data.spec import BPE, Byte, HubTokenizer, TextFiles
from lmlab.data.tokenizer import Tokenizer, load_hf
from lmlab.data.tokens import TokenWriter
from lmlab.errors import DataError
from tests.interop.made import EOT, begun, tokenizer_folder

N_DOCS = 40


def corpus(root: Path, n: int = N_DOCS) -> TextFiles:
    """n documents of a few lines in one .jsonl; a fifth of them each for val and test."""
    rng = random.Random(0)
    words = ["the", "state", "of", "union", "is", "strong", "and", "our", "people", "naïve", "中文"]
    texts = [" ".join(rng.choices(words, k=rng.randrange(5, 80))) + f"\n{i}" for i in range(n)]
    root.mkdir(parents=True, exist_ok=True)
    (root / "docs.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return TextFiles(files=[str(root)], val_frac=0.2, test_frac=0.2)


@pytest.fixture
def data(tmp_path: Path) -> TextFiles:
    return corpus(tmp_path / "corpus")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def leftovers(cache: Path) -> list[str]:
    return [p.name for p in (cache / "data").iterdir() if ".tmp" in p.name]


def texts_of(done: Prepared) -> dict[str, list[str]]:
    found = {}
    for split in SPLITS:
        file = getattr(done, split)
        parts = np.split(np.asarray(file.tokens), file.doc_starts[1:])
        found[split] = [done.tokenizer.decode(ids[1:].tolist()) for ids in parts]
    return found


@pytest.mark.parametrize("tokenizer", [BPE(vocab_size=300), Byte()], ids=["bpe", "byte"])
def test_every_document_is_in_its_split_once(data: TextFiles, cache: Path, tokenizer: Any) -> None:
    done = prepare(data, tokenizer, cache)
    lines = Path(data.files[0], "docs.jsonl").read_text().splitlines()
    expected: dict[str, list[str]] = {split: [] for split in SPLITS}
    for split, text in split_documents((json.loads(line)["text"] for line in lines), 0.2, 0.2):
        expected[split].append(text)
    assert texts_of(done) == expected
    for split in SPLITS:
        file = getattr(done, split)
        assert file.raw_bytes == sum(len(t.encode()) for t in expected[split])
        assert file.raw_bytes == done.tokenizer.token_bytes[file.tokens].sum()
        assert (file.tokens == done.tokenizer.eot).sum() == file.n_docs == len(expected[split])


@pytest.mark.parametrize("trained", [False, True], ids=["by its folder", "a run's own"])
def test_documents_begin_with_the_tokenizer_s_own_start(
    data: TextFiles, cache: Path, tmp_path: Path, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template's BOS, another token than end-of-text; what was prepared without it is made again."""
    spec = HubTokenizer(path=str(begun(tokenizer_folder(tmp_path / "t"))))
    how = {"trained": load_hf(spec)} if trained else {}
    with monkeypatch.context() as before:
        before.setattr(Tokenizer, "start", property(lambda self: self.eot))
        old = prepare(data, spec, cache, **how)
        assert prepare(data, spec, cache, **how).fingerprint == old.fingerprint
    done = prepare(data, spec, cache, **how)
    assert done.fingerprint != old.fingerprint
    for split in SPLITS:
        file = getattr(done, split)
        assert (file.tokens[file.doc_starts] == 257).all()
        assert (file.tokens == 257).sum() == file.n_docs
        assert 256 not in file.tokens
        assert file.raw_bytes == done.tokenizer.token_bytes[file.tokens].sum()
    assert prepare(data, spec, cache, **how).fingerprint == done.fingerprint


@pytest.mark.parametrize("name", [None, EOT], ids=["no template", "a template of end-of-text"])
def test_other_tokenizers_keep_their_files(
    data: TextFiles, cache: Path, tmp_path: Path, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tokenizer_folder(tmp_path / "t")
    spec = HubTokenizer(path=str(folder if name is None else begun(folder, name)))
    with monkeypatch.context() as before:
        before.setattr(Tokenizer, "start", property(lambda self: self.eot))
        old = prepare(data, spec, cache)
    monkeypatch.setattr(preparing, "_write", None)
    done = prepare(data, spec, cache)
    assert (done.fingerprint, done.train.path) == (old.fingerprint, old.train.path)
    assert (done.train.tokens[done.train.doc_starts] == 256).all()


def test_bpe_is_trained_on_the_train_split_alone(data: TextFiles, cache: Path) -> None:
    done = prepare(data, BPE(vocab_size=300), cache)
    from lmlab.data.tokenizer import train_bpe

    assert train_bpe(BPE(vocab_size=300), texts_of(done)["train"]).hash == done.tokenizer_hash


def test_the_second_time_reads_the_cache(data: TextFiles, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(data, Byte(), cache)
    monkeypatch.setattr(preparing, "_write", None)
    again = prepare(data, Byte(), cache)
    assert (again.fingerprint, again.info, again.train.path) == (first.fingerprint, first.info, first.train.path)


def test_what_does_not_change_the_tokens_is_found_again(data: TextFiles, cache: Path, tmp_path: Path) -> None:
    first = prepare(data, Byte(), cache)
    data.packing = "documents"
    assert prepare(data, Byte(), cache).train.path == first.train.path
    data.files = [str(Path(data.files[0]).rename(tmp_path / "moved") / "*.jsonl")]
    assert prepare(data, Byte(), cache).train.path == first.train.path


def change_fraction(data: TextFiles) -> None:
    data.val_frac = 0.3


def change_text(data: TextFiles) -> None:
    path = Path(data.files[0], "docs.jsonl")
    path.write_text(path.read_text().replace("union", "onion"))


@pytest.mark.parametrize("change", [change_fraction, change_text], ids=lambda f: f.__name__)
def test_what_changes_the_tokens_is_prepared_anew(data: TextFiles, cache: Path, change: Callable) -> None:
    first = prepare(data, Byte(), cache)
    change(data)
    assert prepare(data, Byte(), cache).fingerprint != first.fingerprint
    assert len(list((cache / "data").glob("[!.]*"))) == 2


def test_the_fingerprint_does_not_know_the_folder(data: TextFiles, tmp_path: Path) -> None:
    one, two = prepare(data, BPE(vocab_size=300), tmp_path / "a"), prepare(data, BPE(vocab_size=300), tmp_path / "b")
    assert (one.fingerprint, one.tokenizer_hash, one.info) == (two.fingerprint, two.tokenizer_hash, two.info)
    assert one.fingerprint != prepare(data, BPE(vocab_size=301), tmp_path / "a").fingerprint


def test_info_says_what_a_manifest_needs(data: TextFiles, cache: Path) -> None:
    said: list[tuple[str, float | None]] = []
    info = prepare(data, BPE(vocab_size=4096), cache, progress=lambda what, share: said.append((what, share))).info
    assert json.loads(json.dumps(info)) == info
    assert info["corpus"] == "text"
    assert len(info["source_hash"]) == 64
    assert sum(info["splits"][s]["documents"] for s in SPLITS) == N_DOCS
    split = info["splits"]["val"]
    assert split["bytes_per_token"] == pytest.approx(split["bytes"] / split["tokens"], abs=1e-4)
    assert 257 < info["tokenizer"]["vocab_size"] < 4096
    assert any("`tokenizer.vocab_size` asked for 4096" in what for what, _ in said)
    assert ("tokens", pytest.approx(0, abs=1)) in [(what, share) for what, share in said if share is not None]


def test_another_runs_tokenizer_can_be_used(data: TextFiles, cache: Path, tmp_path: Path) -> None:
    own = prepare(data, BPE(vocab_size=300), cache)
    own.tokenizer.save(tmp_path / "saved")
    saved = Tokenizer.load(tmp_path / "saved")
    assert prepare(data, BPE(vocab_size=300), cache, trained=saved).fingerprint == own.fingerprint
    other = prepare(corpus(tmp_path / "other", 90), BPE(vocab_size=290), cache, trained=saved)
    assert other.tokenizer_hash == own.tokenizer_hash
    assert other.train.vocab_size == 300


# ---------------------------------------------------------------- faults


def test_a_damaged_cache_is_told_and_force_repairs_it(data: TextFiles, cache: Path) -> None:
    first = prepare(data, Byte(), cache)
    path = first.val.path
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError) as caught:
        prepare(data, Byte(), cache)
    assert str(path) in caught.value.message
    assert "lmlab data prepare --force" in caught.value.hint
    assert prepare(data, Byte(), cache, force=True).fingerprint == first.fingerprint
    assert prepare(data, Byte(), cache).fingerprint == first.fingerprint
    assert leftovers(cache) == []


@pytest.mark.parametrize("file", ["info.json", "train.bin", "tokenizer/lmlab.json"])
def test_a_missing_part_is_told(data: TextFiles, cache: Path, file: str) -> None:
    (prepare(data, Byte(), cache).train.path.parent / file).unlink()
    with pytest.raises(DataError, match="damaged") as caught:
        prepare(data, Byte(), cache)
    assert "--force" in caught.value.hint


def test_files_of_another_preparation_are_told(data: TextFiles, cache: Path, tmp_path: Path) -> None:
    one = prepare(data, Byte(), cache)
    two = prepare(corpus(tmp_path / "other", 90), Byte(), cache)
    shutil.copy(two.val.path, one.val.path)
    with pytest.raises(DataError, match="are not the ones it describes"):
        prepare(data, Byte(), cache)


EMPTY = {
    "one short document": (
        "ab",
        "the split `val` of `data=text` would be empty \\(5 tokens in all, `data.val_frac` 0.05",
        "data.val_frac",
    ),
    "one letter": ("x", "the split `val` of `data=text` would be empty", "bring more text"),
}


@pytest.mark.parametrize("case", EMPTY)
def test_an_empty_split_is_refused(tmp_path: Path, cache: Path, case: str) -> None:
    text, message, hint = EMPTY[case]
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        prepare(TextFiles(files=[str(tmp_path / "a.txt")]), Byte(), cache)
    assert hint in caught.value.hint
    assert list((cache / "data").glob("[!.]*")) == []


def test_a_full_disk_leaves_nothing_half_written(data: TextFiles, cache: Path) -> None:
    def fill() -> str:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
        try:
            prepare(data, Byte(), cache)
        except DataError as e:
            return str(e)
        return "written"

    status, said = in_child(fill)
    assert status == 0
    assert "File too large" in said
    assert said.count("\n") == 1
    assert "hint: free some space, or set paths.cache" in said
    assert [p.name for p in (cache / "data").iterdir() if not p.name.endswith(".lock")] == []


def test_a_cache_that_can_not_be_written_is_told(data: TextFiles, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="can't write"):
        prepare(data, Byte(), tmp_path / "file")


# ---------------------------------------------------------------- several processes, and killed ones

STEPS = [(os, "replace"), (os, "fsync"), (Path, "mkdir"), (Path, "rename"), (shutil, "rmtree"), (TokenWriter, "add"),
         (Tokenizer, "save")]  # fmt: skip


def die_at(n: int) -> None:
    """In this process: SIGKILL just before the n-th step that touches the disk."""
    left = [n]

    def counted(step: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*args, **kwargs)

        return run

    for owner, name in STEPS:
        setattr(owner, name, counted(getattr(owner, name)))


@pytest.mark.slow
@pytest.mark.parametrize("force", [False, True], ids=["first", "force"])
def test_killed_at_any_moment_the_next_one_succeeds(cache: Path, tmp_path: Path, force: bool) -> None:
    data = corpus(tmp_path / "small", 16)
    expected = prepare(data, Byte(), tmp_path / "whole").fingerprint
    n_killed = 0
    for n in range(500):
        if not force:
            shutil.rmtree(cache, ignore_errors=True)

        def killed(n: int = n) -> object:
            die_at(n)
            return prepare(data, Byte(), cache, force=force).fingerprint

        status, said = in_child(killed)
        if status == 0:
            assert said == expected
            break
        assert status == -signal.SIGKILL
        n_killed += 1
        assert prepare(data, Byte(), cache).fingerprint == expected
        assert prepare(data, Byte(), cache, force=True).fingerprint == expected
        assert leftovers(cache) == []
    assert n_killed > 16 + 10


SCRIPT = """
import sys
from pathlib import Path
from lmlab.data.prepare import prepare
from lmlab.data.spec import BPE, TextFiles
data = TextFiles(files=[sys.argv[1]], val_frac=0.2, test_frac=0.2)
print("ready", flush=True)
say = lambda what, share: print(what, flush=True)
print(prepare(data, BPE(vocab_size=500), Path(sys.argv[2]), progress=say).fingerprint)
"""


def start(data: TextFiles, cache: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", SCRIPT, data.files[0], str(cache)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_killed_from_outside_several_times(tmp_path: Path, cache: Path) -> None:
    data = corpus(tmp_path / "big", 4000)
    for delay in (0.0, 0.03, 0.1):
        child = start(data, cache)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(delay)
        child.kill()
        child.wait()
    one, two = start(data, cache), start(data, cache)
    outputs = [child.communicate(timeout=60)[0].split("\n") for child in (one, two)]
    expected = prepare(data, BPE(vocab_size=500), tmp_path / "whole").fingerprint
    assert [lines[-2] for lines in outputs] == [expected] * 2
    assert leftovers(cache) == []


def test_of_two_at_once_the_second_waits_and_says_so(
    data: TextFiles, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, may_end, n_writes = threading.Event(), threading.Event(), []
    original = preparing._write

    def slow(*args: Any) -> None:
        n_writes.append(1)
        writing.set()
        assert may_end.wait(20)
        original(*args)

    monkeypatch.setattr(preparing, "_write", slow)
    done: dict[str, str] = {}
    waits = threading.Event()

    def work(name: str) -> None:
        def heard(what: str, share: float | None) -> None:
            if what.startswith("waiting for another process"):
                assert name == "second"
                waits.set()

        done[name] = prepare(data, Byte(), cache, progress=heard).fingerprint

    first, second = (threading.Thread(target=work, args=(name,)) for name in ("first", "second"))
    first.start()
    assert writing.wait(20)
    second.start()
    assert waits.wait(20)
    may_end.set()
    first.join(20)
    second.join(20)
    assert done["first"] == done["second"]
    assert len(n_writes) == 1


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LMLAB_CACHE", "/by/environment")
    assert cache_dir("~/mine") == tmp_path / "mine"
    assert cache_dir(None) == Path("/by/environment")
    monkeypatch.delenv("LMLAB_CACHE")
    assert cache_dir(None) == tmp_path / ".cache/lmlab"


def test_the_lock_is_free_after_an_error(data: TextFiles, cache: Path) -> None:
    path = Path(data.files[0], "docs.jsonl")
    text = path.read_text()
    path.write_text(text + "{")
    with pytest.raises(DataError, match=f"{path.name}:{N_DOCS + 1}: invalid JSON"):
        prepare(data, Byte(), cache)
    path.write_text(text)
    assert prepare(data, Byte(), cache).info["splits"]["train"]["documents"] > 0
