"""The next batch, prepared while an accelerator works on this one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

from lmlab.data.batches import Batch
from lmlab.data.source import Batches


class Ahead:
    """`make(k)` of ascending k, each but the first made by a thread while the one before is in use. Whatever k is asked
    for is what is given: a batch depends on k alone."""

    def __init__(self, make: Callable[[int], Batch], pool: ThreadPoolExecutor, end: int) -> None:
        self.make, self.pool, self.end = make, pool, end
        self._next: tuple[int, Future[Batch]] | None = None

    def __call__(self, k: int) -> Batch:
        """Batch k. Raises what making it raised."""
        waiting, self._next = self._next, None
        batch = waiting[1].result() if waiting is not None and waiting[0] == k else self.make(k)
        if k + 1 < self.end:
            self._next = k + 1, self.pool.submit(self.make, k + 1)
        return batch


@contextmanager
def ahead(batches: Batches, device: torch.device, end: int) -> Iterator[Callable[[int], Batch]]:
    """k → batch k, k < end. For CUDA one ahead and in pinned memory, so that its copy is not waited for; on a CPU made
    when it is asked for: it takes 0.1 % of a step there, and a thread would take it from the same cores."""
    if device.type != "cuda":
        yield batches.batch
        return
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
        yield Ahead(lambda k: batches.batch(k).pinned(), pool, end)
