"""Work done ahead by threads, handed over in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_order(
    jobs: Iterable[Callable[[], T]], workers: int, *, ahead: int, name: str = "loader"
) -> Generator[T, None, None]:
    """The results of jobs in their order, with some of them done or under way before they are asked for.

    An error of a job is raised in its turn; closing this generator ends the threads before it returns.

    Args:
        workers: threads; 0 does each job when its result is asked for, in the calling thread.
        ahead: jobs that are taken on beyond the one that is handed over.
        name: what the threads' names begin with.
    """
    if not workers:
        for job in jobs:
            yield job()
        return
    taken: deque[Future[T]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix=name)
    try:
        for job in jobs:
            taken.append(pool.submit(job))
            if len(taken) > ahead:
                yield taken.popleft().result()
        while taken:
            yield taken.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
