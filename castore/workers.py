"""Work in other threads, processes or machines, through any `concurrent.futures.Executor`.

A job is a function of a module and arguments that pickle. Of all jobs only a few for each worker
are handed over at a time, so memory does not grow with their number; results come back in the
order of the jobs, each exactly once. A job that fails because its worker died is handed over
again. Jobs must therefore bear to be done twice.

Secrets do not travel: a repository pickles without them, and each worker opens it with what its
own environment says (``AWS_*``); see `Lent`.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
)
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing import get_context
from typing import Any, Generic, TypeVar

from castore import document
from castore.backend import Backend
from castore.errors import BackendError, CastoreError, InvalidInputError
from castore.repository import CONFIG, Repository

T = TypeVar("T")

TRIES = 4
"""How often one job is handed over while workers die under it."""

ELSEWHERE = (
    "credentials do not travel with jobs, they come from each worker's environment (AWS_*), and a"
    " local path must lead every worker to the same disk"
)
"""What to look at where a worker does not see what its caller sees."""

_UNKNOWN = 32  # workers, where an executor does not tell


def _dask_client(executor: Executor) -> Any:
    """The client behind a Dask executor; None for another."""
    client = getattr(executor, "_client", None)
    return client if hasattr(client, "nthreads") else None


def workers_of(executor: Executor | None) -> int:
    """How many jobs the executor does at once; 32 where it does not tell, 1 without one.

    The standard executors and those built on them keep the number, Dask's asks its scheduler.
    """
    if executor is None:
        return 1
    client = _dask_client(executor)
    if client is not None:
        found: object = sum(client.nthreads().values())
    else:
        found = getattr(executor, "_max_workers", None)
    return found if isinstance(found, int) and found > 0 else _UNKNOWN


def results(
    executor: Executor | None, work: Callable[..., T], jobs: Iterable[tuple[Any, ...]]
) -> Iterator[T]:
    """``work(*job)`` for each job, in their order; without an executor one after the other, here.

    At most two jobs a worker, and three more, are under way. Whatever ends the iteration, an
    error, Ctrl-C or the caller, takes back the jobs that have not begun.

    Raises
    ------
    BackendError
        Workers died `TRIES` times under one job, or the executor gave up.
    """
    if executor is None:
        for job in jobs:
            yield work(*job)
        return
    limit = 2 * workers_of(executor) + 3
    under_way: deque[_Job[T]] = deque()
    try:
        for job in jobs:
            under_way.append(_Job(executor, work, job))
            if len(under_way) >= limit:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        for left in under_way:
            left.cancel()


class _Job(Generic[T]):
    """One job and the future of its latest try."""

    def __init__(self, executor: Executor, work: Callable[..., T], arguments: tuple[Any, ...]):
        self._executor, self._work, self._arguments = executor, work, arguments
        # Dask takes equal jobs for one, and would give what it saw for another caller.
        self._each = {} if _dask_client(executor) is None else {"pure": False}
        self._future: Future[T] | None = None
        self._submit()

    def _submit(self) -> None:
        try:
            self._future = self._executor.submit(self._work, *self._arguments, **self._each)
        except BrokenExecutor:  # `result` hands it over again
            self._future = None

    def cancel(self) -> None:
        if self._future is not None:
            self._future.cancel()

    def result(self) -> T:
        died: BaseException | None = None
        for _ in range(TRIES):
            if self._future is not None:
                try:
                    return self._future.result()
                except BrokenExecutor as e:
                    died = e
                except CancelledError as e:
                    raise BackendError("the executor cancelled a job: is it shut down?") from e
                except Exception as e:
                    if type(e).__module__.partition(".")[0] != "distributed":
                        raise
                    raise BackendError(
                        f"Dask gave a job up: {type(e).__name__}: {str(e)[:400]}"
                    ) from e
            self._submit()
        raise BackendError(
            f"workers died {TRIES} times under one job, or the pool is broken: killed, or out of"
            " memory? Take fewer workers or more memory; castore.workers.Processes replaces a"
            " broken pool, and a check with a state file goes on where it was"
        ) from died


# -- what travels


class Lent:
    """A repository on its way to workers.

    In the caller's process it is the very object, secrets included. Elsewhere it is opened from
    its URL and options less secrets, once a process, and refused where that gives none or another:
    a worker without credentials, or with another disk, must not be taken for a damaged store.

    It is opened by the job that asks for it, not where it arrives: an error of that ends a process
    of a standard pool without a word.
    """

    def __init__(self, repository: Repository):
        self._repository: Repository | None = repository
        self._recipe: _Recipe | None = None

    @property
    def repository(self) -> Repository:
        """The repository itself.

        Raises
        ------
        BackendError
            This process finds none, or another.
        """
        if self._repository is None:
            assert self._recipe is not None
            # A new one each time: what it remembers of its own writes would grow without end.
            self._repository = Repository(_opened(self._recipe), self._recipe.id)
        return self._repository

    def __getstate__(self) -> dict[str, Any]:
        if self._recipe is None:
            repository = self.repository
            reduced = repository.backend.__reduce__()
            assert isinstance(reduced, tuple)
            make, parts = reduced[:2]
            self._recipe = _Recipe(repository.id, repr(parts), make, parts)
        return {"_repository": None, "_recipe": self._recipe}


@dataclass(frozen=True)
class _Recipe:
    """How a backend is made: what its own pickle holds, which is without secrets.

    Equal where the repository is, and all that the backend is made of (``said``).
    """

    id: str
    said: str
    make: Any = field(compare=False)
    parts: Any = field(compare=False)


@lru_cache(maxsize=8)
def _opened(recipe: _Recipe) -> Backend:
    """This process's backend: the connections behind it outlive single jobs."""
    backend: Backend = recipe.make(*recipe.parts)
    id = recipe.id
    try:
        found = document.decode(backend.get(CONFIG), "config", ["hash", "id"], CONFIG)["id"]
    except CastoreError as e:
        raise BackendError(f"a worker cannot open {backend.url}: {e}; {ELSEWHERE}") from e
    if found != id:
        raise BackendError(
            f"a worker finds another repository at {backend.url} (id {found}, expected {id}):"
            f" {ELSEWHERE}"
        )
    return backend


# -- executors


class Processes(Executor):
    """Local worker processes, spawned; a pool that a dead worker broke is replaced.

    Ctrl-C reaches the caller alone: workers end what they have in hand, and stop.
    """

    def __init__(self, workers: int):
        if workers < 1:
            raise InvalidInputError(f"{workers} workers: expected 1 or more")
        self._max_workers, self._lock = workers, threading.Lock()
        self._pool = self._new()

    def _new(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            self._max_workers, mp_context=get_context("spawn"), initializer=_leave_interrupts
        )

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        with self._lock:
            try:
                return self._pool.submit(fn, *args, **kwargs)
            except BrokenExecutor:
                self._pool.shutdown(wait=False)
                self._pool = self._new()
                return self._pool.submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._pool.shutdown(wait, cancel_futures=cancel_futures)

    def __exit__(self, kind: Any, *rest: object) -> None:
        self.shutdown(cancel_futures=kind is not None)


def _leave_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def opened(workers: int | None = None, dask: str | None = None) -> Iterator[Executor | None]:
    """The executor that ``--workers`` or ``--dask`` asks for, closed on leaving; None for neither.

    Raises
    ------
    InvalidInputError
        Both are given, or Dask is not installed.
    BackendError
        No scheduler answers at the address.
    """
    if workers is not None and dask is not None:
        raise InvalidInputError("workers and a Dask scheduler at once: choose one of the two")
    if dask is not None:
        with _scheduler(dask) as executor:
            yield executor
    elif workers is not None:
        with Processes(workers) as processes:
            yield processes
    else:
        yield None


@contextmanager
def _scheduler(address: str) -> Iterator[Executor]:
    try:
        import distributed
    except ImportError as e:
        raise InvalidInputError("a Dask scheduler needs Dask: pip install 'castore[dask]'") from e
    make: Any = distributed.Client
    try:
        client = make(address, set_as_default=False)
    except (OSError, ValueError, TypeError) as e:
        raise BackendError(f"no Dask scheduler answers at {address}: {e}") from e
    with client:
        executor: Executor = client.get_executor()
        yield executor
