"""The small experiment of tests/train, for sweeps."""

from tests.train.conftest import corpus, small  # noqa: F401
