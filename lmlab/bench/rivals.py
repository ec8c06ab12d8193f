"""Who computes an operation here: each choice of `kernels`, and the plain formula compiled; each function once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lmlab.errors import LmlabError, in_one_line
from lmlab.kernels.ops import Ops
from lmlab.kernels.resolve import resolve
from lmlab.registry import OPTIONS

REFERENCE, AUTO, TRITON, COMPILED = "reference", "auto", "triton", "compiled"


@dataclass(frozen=True)
class Own:
    """functions: by the first name that has each; same: that name for every one that is measured."""

    functions: Mapping[str, Callable[..., Any]]
    same: Mapping[str, str]


@dataclass(frozen=True)
class Rivals:
    """ops: by the name of the `kernels` option, reference first. compiles: whether there is a compiler."""

    ops: dict[str, Ops]
    compiles: bool

    @property
    def names(self) -> list[str]:
        return [*self.ops, *([COMPILED] if self.compiles else [])]

    @classmethod
    def here(cls, device: torch.device, dtype: torch.dtype, told: list[str]) -> Rivals:
        """Those that can run; why others can't is added to `told`."""
        ops: dict[str, Ops] = {}
        for name in sorted(OPTIONS["kernels"], key=lambda name: (name != REFERENCE, name != AUTO)):
            try:
                if name == TRITON and device.type == "cpu":
                    raise LmlabError("Triton's interpreter is for tests: it has no speed")
                ops[name] = resolve(OPTIONS["kernels"][name](), device, dtype)
            except LmlabError as error:
                told.append(f"kernels={name} is not measured: {in_one_line(error)}")
        try:
            torch.compile(torch.sin)(torch.ones(2, device=device))
        except RuntimeError as error:  # no compiler at hand
            told.append(f"compiled code is not measured: {in_one_line(error)}")
            return cls(ops, compiles=False)
        return cls(ops, compiles=True)

    def of(self, pick: Callable[[Ops], Callable[..., Any]]) -> Own:
        """The functions of one operation."""
        functions: dict[str, Callable[..., Any]] = {}
        same: dict[str, str] = {}
        for name, ops in self.ops.items():
            f = pick(ops)
            twin = next((other for other, g in functions.items() if g == f), None)
            same[name] = name if twin is None else twin
            if twin is None:
                functions[name] = f
        if self.compiles:
            torch._dynamo.reset()  # what was compiled before is not called again
            functions[COMPILED] = torch.compile(functions[REFERENCE], dynamic=False, fullgraph=True)
            same[COMPILED] = COMPILED
        return Own(functions, same)
