"""Imports go one way. The syntax tree of every module is walked; what stands under TYPE_CHECKING counts as well."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lmlab"
EVERYONE = {"errors"}
SPECS = {"model.spec", "data.spec", "train.spec", "kernels.spec"}
BUILD = {"model", "kernels", "config"}  # whoever may import model may import what it is built with

# module or package → what it may import besides itself and lmlab.errors. The longest matching name holds.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "registry": set(),
    "compat": {"registry", *SPECS, "config.tree", "config.meaning", "config.mixing"},
    "model.spec": {"registry"},
    "data.spec": {"registry"},
    "train.spec": {"registry"},
    "kernels.spec": {"registry"},
    "config": {"registry", *SPECS, "compat"},
    "kernels": {"registry"},
    "model": {"kernels", "registry"},
    "data": {"registry"},
    "runs": set(),
    "runs.checkpoint": {"registry"},
    "cost": BUILD,
    "check": {"cost", "compat", "registry", "runs.files", *BUILD},
    "check.oracle": set(),
    "eval.loss": {"data", *BUILD},
    "eval.long": {"runs", "data", "generate", "registry", *BUILD},
    "eval": {"runs", "data", "generate", *BUILD},
    "generate": {"runs", "data.tokenizer", *BUILD},
    "train": {"data", "runs", "eval.loss", "eval.task_scores", "registry", *BUILD},
    "interop": {"runs", "data", "registry", "train.spec", *BUILD},
    "opened": {"data", "runs", "registry", "train.device", "train.twin", *BUILD},
    "inherit": {"opened", "runs", "compat", "registry", "config"},
    "api": {"opened", "runs", "data", *BUILD, "registry"},
    "__init__": {"api"},
    "__main__": {"cli"},
    "report": {"runs"},
    "bench": {"train", "data", "compat", "runs", "cost", "eval", "generate", "registry", *BUILD},
    "sweep": {"config", "runs", "compat", "inherit"},
    "cli": {"*"},
}
TORCH_FREE = (
    "errors",
    "registry",
    "compat",
    "inherit",
    "config",
    "runs",
    "report",
    *SPECS,
)
TORCH_FREE_BUT = ("runs.checkpoint",)
TORCH = {"torch", "safetensors", "transformers"}


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        found[name] = path
    return found


def imported(path: Path) -> set[str]:
    """Dotted names of every import in the file, wherever it stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            names |= {f"{node.module}.{a.name}" for a in node.names}
    return names


def inside(name: str, packages: set[str] | tuple[str, ...]) -> bool:
    return any(name == p or name.startswith(p + ".") for p in packages)


def rule(name: str) -> set[str]:
    keys = [k for k in ALLOWED if inside(name, {k})]
    assert keys, f"lmlab.{name} has no rule: add it to ALLOWED"
    return ALLOWED[max(keys, key=len)]


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_go_one_way(name: str) -> None:
    path, allowed = modules()[name], rule(name)
    own = {name.split(".")[0]}
    for target in imported(path):
        if not inside(target, {"lmlab"}) or target in ("lmlab.__version__",):
            continue
        short = target.removeprefix("lmlab.")
        fits = "*" in allowed or inside(short, EVERYONE | own | allowed)
        assert fits, f"lmlab.{name} imports {target}; allowed: {sorted(allowed)}"


@pytest.mark.parametrize(
    "name", sorted(n for n in modules() if inside(n, TORCH_FREE) and not inside(n, TORCH_FREE_BUT))
)
def test_torch_free(name: str) -> None:
    heavy = {t.split(".")[0] for t in imported(modules()[name])} & TORCH
    assert not heavy, f"lmlab.{name} imports {heavy}"


@pytest.mark.parametrize(
    "package", sorted({n.split(".")[0] for n in modules() if (PACKAGE / n.split(".")[0]).is_dir()})
)
def test_package_init_is_empty(package: str) -> None:
    assert (PACKAGE / package / "__init__.py").read_text() == ""


def test_light_imports_stay_light() -> None:
    heavy = "('torch', 'hydra', 'wandb', 'datasets')"
    code = f"import sys, lmlab.cli.app, lmlab.config.tree; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_parts_never_name_variants_in_the_block() -> None:
    """The composite knows roles: block.py and transformer.py name no option of norm, pos, attn or ffn."""
    import lmlab.config.tree  # noqa: F401  # fills OPTIONS
    from lmlab.registry import OPTIONS

    for file in ("block.py", "transformer.py"):
        tree = ast.parse((PACKAGE / "model" / file).read_text(encoding="utf-8"))
        words = {n.id.lower() for n in ast.walk(tree) if isinstance(n, ast.Name)}
        words |= {
            n.value
            for n in ast.walk(tree)
            if isinstance(n, ast.Constant) and isinstance(n.value, str) and " " not in n.value
        }
        named = words & {name for group in ("norm", "pos", "attn", "ffn") for name in OPTIONS[group] if name != "none"}
        assert not named, f"{file} names {named}"
