"""The root of a configuration: the groups and the plain nodes, typed. Torch-free."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Optional, Union

from lmlab.data.spec import DataSpec
from lmlab.model.spec import Arch, Decoder
from lmlab.registry import Spec, setting
from lmlab.train.spec import OptimSpec, ScheduleSpec, Train

GROUPS = (
    "norm",
    "block",
    "pos",
    "rope_scaling",
    "attn",
    "ffn",
    "moe",
    "model",
    "data",
    "tokenizer",
    "optim",
    "schedule",
    "kernels",
)
# Groups that came later: a configuration or a hash without one means the part that conf/config.yaml selects.
LATER_GROUPS = ("rope_scaling", "moe")


@dataclass
class Seed:
    """`seed=3` is short for `seed.all=3`; the three others follow it unless they are set."""

    all: int = setting(0, "every seed that is not set by itself", ge=0, lt=2**63, probe=1)
    init: Optional[int] = setting(None, "the draw of the weights; null = seed.all", ge=0, lt=2**63, probe=1)
    data: Optional[int] = setting(None, "the order of the batches; null = seed.all", ge=0, lt=2**63, probe=1)
    dropout: Optional[int] = setting(None, "dropout masks; null = seed.all", ge=0, lt=2**63)


@dataclass
class Init:
    """What the weights start from when they are not drawn."""

    run: Optional[str] = setting(
        None, "the run whose weights are taken (path, name or hash); null = they are drawn", identity=False, since=3
    )
    resize: str = setting(
        "none",
        "what becomes of a learned table of another length",
        choices=("none", "interpolate", "extend"),
        probe="extend",
        since=3,
    )
    source: Optional[str] = setting(
        None, "content hash of the weights that were taken; filled in by lmlab, never typed", since=3
    )


@dataclass
class Wandb:
    """Weights & Biases mirrors metrics.jsonl."""

    mode: str = setting(
        "auto",
        "auto: online with a key, else offline",
        choices=("auto", "online", "offline", "disabled"),
        identity=False,
    )
    project: str = setting("lmlab", "project", identity=False)
    entity: Optional[str] = setting(None, "user or team; null = your default", identity=False)
    group: Optional[str] = setting(None, "group; a sweep sets its own", identity=False)
    tags: list[str] = setting([], "tags", identity=False)
    notes: Optional[str] = setting(None, "free text", identity=False)


@dataclass
class Paths:
    runs: str = setting("runs", "where run directories lie", identity=False)
    cache: Optional[str] = setting(
        None, "prepared data and tokenizers; null = $LMLAB_CACHE, else ~/.cache/lmlab", identity=False
    )


@dataclass
class Experiment:
    """One composed and checked experiment. Plain dataclasses throughout: no OmegaConf object lives in it."""

    norm: Spec
    block: Spec
    pos: Spec
    rope_scaling: Spec
    attn: Spec
    ffn: Spec
    moe: Spec
    model: Decoder
    data: DataSpec
    tokenizer: Spec
    optim: OptimSpec
    schedule: ScheduleSpec
    kernels: Spec
    train: Train = setting(Train, "how much to train and how often to look")
    seed: Seed = setting(Seed, "seed=N sets all")
    init: Init = setting(Init, "what the weights start from", since=3)
    wandb: Wandb = setting(Wandb, "Weights & Biases", identity=False)
    paths: Paths = setting(Paths, "folders", identity=False)
    compile: Union[bool, str] = setting("auto", "torch.compile of the blocks; auto = on for CUDA", choices=("auto",))
    device: str = setting("auto", "auto, cpu, cuda or cuda:N", identity=False)
    name: Optional[str] = setting(
        None, "of the run's directory and in reports; null = what differs from the default", identity=False
    )
    plugins: list[str] = setting([], "Python files with parts of your own", identity=False)

    @property
    def arch(self) -> Arch:
        """The parts the model is built from."""
        return Arch(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Arch)})

    def seeds(self) -> dict[str, int]:
        """{"init": …, "data": …, "dropout": …} with null filled from seed.all."""
        own = {name: getattr(self.seed, name) for name in ("init", "data", "dropout")}
        return {name: self.seed.all if value is None else value for name, value in own.items()}
