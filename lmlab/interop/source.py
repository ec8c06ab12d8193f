"""Where a model to import comes from: a local folder, or a name on the Hugging Face hub, of which only JSON and
safetensors files are fetched."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from lmlab.data.hub import NO_NETWORK, NOT_THERE, local_folder, tokenizer_settings
from lmlab.data.tokenizer import Tokenizer, hf_tokenizer
from lmlab.errors import ConfigError, DataError, RunError

PATTERNS = ("*.json", "model.safetensors", "model-*.safetensors")  # some repositories hold the weights once more
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Source:
    """The name as it was typed, the folder, and the hub's commit (None for a local one)."""

    name: str
    folder: Path
    commit: str | None = None

    @property
    def label(self) -> str:
        """For the run's directory: the last part of the name."""
        last = self.folder.absolute().name if self.commit is None else self.name.rpartition("/")[2]
        return re.sub(r"[^A-Za-z0-9._+]+", "_", last).strip("_.") or "imported"

    @property
    def path(self) -> str:
        """What finds it again from anywhere."""
        return str(self.folder) if self.commit is None else self.name


def located(name: str, key: str = "SOURCE") -> Source:
    """Raises RunError: nothing there, no network."""
    try:
        folder = local_folder(name, key)
    except DataError as error:
        raise RunError(error.message, error.hint) from error
    if folder is None:
        found = _fetched(name, key)
        return Source(name, found, found.name)
    if folder.is_dir():
        return Source(name, folder)
    raise RunError(f"`{key}` {name} is a file", f"give the folder it lies in: {folder.parent}")


def _fetched(name: str, key: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(PATTERNS), ignore_patterns=["*/*"]))
    except Exception as error:  # its own, and whatever the network's library raises
        kinds = {cls.__name__ for cause in _causes(error) for cls in type(cause).__mro__}
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if kinds & NOT_THERE and not kinds & NO_NETWORK:
            hint = "check the spelling and that you may read it (huggingface-cli login), or give a local folder"
            raise RunError(f"`{key}` {name}: {text}", hint) from error
        reason = type(error).__name__ if kinds & NO_NETWORK else text
        raise RunError(
            f"`{key}` {name} is no folder here, and the Hugging Face hub can't be reached ({reason})",
            "give a local folder, as save_pretrained writes it",
        ) from error


def _causes(error: BaseException | None) -> list[BaseException]:
    found = []
    while error is not None:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


# ---------------------------------------------------------------- its tokenizer


def tokenizer_of(folder: Path) -> Tokenizer:
    """The folder's own. Raises DataError: no tokenizer.json; nothing is put in its place."""
    file = folder / TOKENIZER
    if not file.is_file():
        raise DataError(
            f"{folder} has no {TOKENIZER}",
            "name the folder of its tokenizer (tokenizer.path=FOLDER), or save a fast one there: "
            "AutoTokenizer.from_pretrained(…).save_pretrained(folder)",
        )
    text = file.read_bytes().decode("utf-8", errors="replace")
    return hf_tokenizer(text, tokenizer_settings(folder), str(folder))


def refuse_other(tokenizer: Tokenizer, rows: int, where: str) -> None:
    """Raises ConfigError when the tokenizer has ids that the embedding has no row for."""
    if tokenizer.vocab_size > rows:
        raise ConfigError(
            f"the tokenizer of {where} has {tokenizer.vocab_size} ids, and the embedding {rows} rows: another one",
            "give the tokenizer that the model was trained with: tokenizer.path=FOLDER",
        )
