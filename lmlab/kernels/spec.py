"""Which implementation computes an operation. Torch-free."""

from __future__ import annotations

from lmlab.registry import Spec, option


@option("kernels", "auto")
class Auto(Spec):
    """The fastest implementation this device and dtype has; which one it was is recorded in the run."""


@option("kernels", "reference")
class Reference(Spec):
    """Plain torch for everything."""


@option("kernels", "triton")
class Triton(Spec):
    """lmlab's own Triton kernels for everything that has one, in compiled blocks too."""
