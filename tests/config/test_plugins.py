"""Parts of your own: imported under the file's name, checked, and in a run's identity only when they are used."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmlab.config.identity import code_hash, from_dict, to_dict
from lmlab.config.load import load
from lmlab.config.plugins import SOURCE, import_plugins, parts_in
from lmlab.errors import ConfigError, LmlabError
from lmlab.registry import OPTIONS

NORM = """
from lmlab.registry import Spec, option, setting
@option("norm", "{name}", build="{name}:Part")
class PartSpec(Spec):
    eps: float = setting({eps}, "added", gt=0)
class Part: ...
"""


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """What a plug-in leaves in the process is taken back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    before = {group: dict(options) for group, options in OPTIONS.items()}
    yield
    for group in list(OPTIONS):
        if group in before:
            OPTIONS[group].clear()
            OPTIONS[group].update(before[group])
        else:
            del OPTIONS[group]
    for name in [n for n, m in sys.modules.items() if hasattr(m, SOURCE)]:
        del sys.modules[name]


def norm(name: str, eps: float = 1e-3, folder: Path = Path()) -> str:
    (folder / f"{name}.py").write_text(NORM.format(name=name, eps=eps))
    return str(folder / f"{name}.py")


def test_a_plugin_is_composed_hashed_and_read_back() -> None:
    norm("my_norm")
    loaded = load(["plugins=[my_norm.py]", "norm=my_norm", "norm.eps=0.5"])
    assert (loaded.experiment.norm.name, loaded.experiment.norm.eps) == ("my_norm", 0.5)
    assert from_dict(to_dict(loaded.experiment)) == loaded.experiment
    assert list(loaded.plugin_sources) == ["my_norm.py"]
    assert pickle.loads(pickle.dumps(loaded.experiment)) == loaded.experiment


def test_only_a_used_plugin_enters_identity() -> None:
    norm("used_norm"), norm("idle_norm")
    idle = load(["plugins=[used_norm.py,idle_norm.py]"])
    assert set(idle.plugin_sources) == {"used_norm.py", "idle_norm.py"}
    assert idle.used_plugins() == {}
    used = load(["plugins=[used_norm.py,idle_norm.py]", "norm=used_norm"])
    assert list(used.used_plugins()) == ["used_norm.py"]
    assert code_hash(used.used_plugins()) != code_hash(idle.used_plugins())


def test_a_base_class_from_another_plugin_enters_identity() -> None:
    norm("base_norm")
    text = NORM.format(name="child_norm", eps=1).replace("(Spec)", "(Base)")
    Path("child_norm.py").write_text("from base_norm import PartSpec as Base\n" + text)
    loaded = load(["plugins=[base_norm.py,child_norm.py]", "norm=child_norm"])
    assert set(loaded.used_plugins()) == {"base_norm.py", "child_norm.py"}


def test_wrong_fields_of_a_plugin_are_told_like_any_other() -> None:
    norm("field_norm")
    with pytest.raises(LmlabError, match=r"`norm.epz` is not a field of norm=field_norm") as caught:
        load(["plugins=[field_norm.py]", "norm=field_norm", "norm.epz=1"])
    assert "norm.eps" in caught.value.hint


def test_another_copy_of_a_plugin_takes_its_place(tmp_path: Path) -> None:
    """A run keeps its own copy; two runs of different versions can be opened one after the other."""
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    old, new = norm("copied_norm", 1, tmp_path / "old"), norm("copied_norm", 2, tmp_path / "new")
    for path, eps in ((old, 1), (new, 2), (old, 1)):
        assert load([f"plugins=[{path}]", "norm=copied_norm"]).experiment.norm.eps == eps


def test_it_hides_nothing_and_workers_find_it(tmp_path: Path) -> None:
    norm("last_norm")
    load(["plugins=[last_norm.py]", "norm=last_norm"])
    assert sys.path[-1] == str(tmp_path)
    assert os.environ["PYTHONPATH"].split(os.pathsep)[-1] == str(tmp_path)


def test_names_are_read_without_running(tmp_path: Path) -> None:
    norm("read_norm")
    assert parts_in(Path("read_norm.py")) == [("norm", "read_norm")]
    Path("no.py").write_text("def (")
    assert parts_in(Path("no.py")) == []


HEAD = "from lmlab.registry import Spec, option, setting\n"
BROKEN = {
    "missing": (None, "`plugins` names broken.py, which is not a file here"),
    "syntax": ("x = (\n", "broken.py, line 1, can't be imported: SyntaxError"),
    "raises": ("x = 1\ny = 1 / 0\n", "broken.py, line 2, can't be imported: ZeroDivisionError: division by zero"),
    "no part": ("x = 1\n", "broken.py defines no part"),
    "no group": (f"{HEAD}@option('nrm', 'x')\nclass A(Spec): ...\n", "broken.py: nrm=x belongs to no group"),
    "taken": (f"{HEAD}@option('norm', 'rmsnorm')\nclass A(Spec): ...\n", "`norm=rmsnorm` is already defined by lmlab"),
    "not built": (f"{HEAD}@option('norm', 'x', build='broken:No')\nclass A(Spec): ...\n", "is built by broken:No"),
    "no spec": (f"{HEAD}@option('norm', 'x')\nclass A: ...\n", "is not a Spec"),
    "no default": (f"{HEAD}@option('norm', 'x')\nclass A(Spec):\n    a: int\n", "has a field a without a default"),
    "odd type": (f"{HEAD}@option('norm', 'x')\nclass A(Spec):\n    a: dict = setting(None, '')\n", "can't be typed"),
    "bad default": (f"{HEAD}@option('norm', 'x')\nclass A(Spec):\n    a: int = setting(0, '', ge=1)\n", "default is 0"),
    "unknown name": (
        f"{HEAD}@option('norm', 'x')\nclass A(Spec):\n    a: 'Opt[int]' = setting(1, '')\n",
        "type can't be",
    ),
}


@pytest.mark.parametrize(("text", "message"), BROKEN.values(), ids=list(BROKEN))
def test_a_broken_plugin_is_told(text: str | None, message: str) -> None:
    if text is not None:
        Path("broken.py").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(["plugins=[broken.py]", "norm=x", "norm.z=1"])
    assert message in caught.value.message
    assert caught.value.hint
    assert "broken" not in sys.modules or text is not None
    assert load([]).experiment.norm.name == "rmsnorm", "nothing of it is left"


def test_a_module_of_python_is_not_hidden() -> None:
    Path("json.py").write_text("")
    Path("a-b.py").write_text("")
    sources, errors = import_plugins(["json.py", "a-b.py"])
    assert sources == {}
    assert "Python already has a module json" in errors[0].message
    assert "which Python can't import" in errors[1].message
