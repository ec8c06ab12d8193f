"""config.yaml: readable YAML that reads back exactly as it was.

PyYAML follows YAML 1.1, where `1e-6` is a string; here, as everywhere else a user writes numbers, it is a float. The
same rule serves writing, so that a string that looks like a number is quoted.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from lmlab.errors import RunError
from lmlab.runs.files import atomic_write

_FLOAT = re.compile(
    r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    pass


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:
        return True  # a list that stands in two places is written twice, not as `*id001`


for _cls in (_Loader, _Dumper):
    _cls.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def dumps(value: dict[str, Any]) -> str:
    """YAML of a plain dict (str, int, float, bool, None, list, dict), keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def write(path: Path, value: dict[str, Any]) -> None:
    atomic_write(path, dumps(value))


def read(path: Path) -> dict[str, Any]:
    """Raises RunError when the file is missing, is not YAML, or holds no mapping."""
    try:
        value = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except FileNotFoundError:
        raise RunError(f"{path} is missing", "this is not a run directory, or its config.yaml was removed") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise RunError(
            f"{path} can't be read: {reason}", "restore it from a copy, or train again with --force"
        ) from error
    if not isinstance(value, dict):
        raise RunError(f"{path} holds no mapping", "restore it from a copy, or train again with --force")
    return value
