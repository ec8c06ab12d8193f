from tests.train.conftest import corpus, small, trainer  # noqa: F401  # the same small experiment
