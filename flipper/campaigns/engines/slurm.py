"""The slurm engine: each run is a job of its own, handed to Slurm by submitit.

What the cluster needs: flipper and the campaign's folder under the same paths on all nodes. What the jobs ask for
stands in the campaign file, or is given by --set slurm.partition=gpu:

    [slurm]
    partition = "gpu"
    time = 30               # minutes; 60 without it
    nodes = 1
    gpus_per_node = 2       # the names are those of submitit's AutoExecutor and of its SlurmExecutor

A recipe's ranks are processes of one node, so its jobs ask for one node and for a processor for each rank. A user's own
training may span nodes: with nodes = 2 and tasks_per_node = 1 the job's first node runs the command line, which starts
its processes on all of them by srun:

    [commands]
    fsdp = "sh -c 'srun torchrun --nnodes $SLURM_NNODES --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint \
$SLURMD_NODENAME:29500 train.py --resume {checkpoint} --metrics {metrics}'"

and then {checkpoint}, {metrics} and {output} have to lie where all nodes see them: set TMPDIR to such a folder.
submitit starts no job step of its own (use_srun = false), which would take the place of the command's.

A job takes seconds until Slurm starts it and until torch is imported, so runs that are shorter are better made by an
array of shards: `flipper campaign run SPEC --shard $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT`.

A run whose job dies is handed in again, three times in all.
"""

from __future__ import annotations

import getpass
import math
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from flipper.campaigns.engines.engine import Engine
from flipper.campaigns.folder import Campaign
from flipper.errors import EndedError, FlipperError, TrainingError, UsageError

if TYPE_CHECKING:
    import submitit

AT_ONCE: Final = 32
"""Jobs that are asked for at once without --workers."""

ATTEMPTS: Final = 3
MINUTES: Final = 60

POLL_SECONDS: Final = 0.5
QUEUE_SECONDS: Final = 15.0
"""How often Slurm is asked for the jobs that it has, at most: it doesn't like to be asked."""

PATIENCE_SECONDS: Final = 15.0
"""How long the result of a job that has ended may take to be seen here, over a network filesystem."""


class JobLost(FlipperError):
    """A run's job ended without a result, each time."""


@contextmanager
def slurm_engine(campaign: Campaign, workers: int | None = None) -> Iterator[Engine]:
    """workers: jobs at once."""
    executor = JobExecutor(_submitit(campaign), campaign.spec.slurm)
    try:
        yield Engine(executor, workers or AT_ONCE, lambda error: isinstance(error, JobLost))
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


def _submitit(campaign: Campaign, cluster: str = "slurm") -> submitit.AutoExecutor:
    try:
        import submitit
    except ModuleNotFoundError as error:
        raise UsageError(f"--engine slurm needs {error.name}; pip install 'flipper-ckpt[slurm]'") from error
    try:
        return submitit.AutoExecutor(campaign.folder.jobs.absolute() / "%j", cluster=cluster)
    except RuntimeError as error:
        raise UsageError(f"--engine slurm: {error}") from error


class JobExecutor(Executor):
    """Each call is a job of a submitit executor, whose folder has one for each job (%j).

    parameters: what jobs ask for. attempts: how often a call whose job ends without a result is tried. patience:
    seconds that a result may take to be seen.
    """

    slots = 1 << 30

    def __init__(
        self,
        executor: submitit.AutoExecutor,
        parameters: Mapping[str, Any] | None = None,
        attempts: int = ATTEMPTS,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self._executor, self._attempts, self._patience = executor, attempts, patience
        self._parameters = _parameters(parameters or {})
        _update(executor, self._parameters)
        self._calls: dict[Future[Any], _Call] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._queue: set[str] = set()
        self._asked = -math.inf
        threading.Thread(target=self._watch, name="flipper-jobs", daemon=True).start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call fn in a job of one rank."""
        return self._submit(_Call(1, fn, args, kwargs))

    def submit_ranks(self, ranks: int, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Call fn in a job with a processor for each rank."""
        return self._submit(_Call(ranks, fn, args, {}))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; wait for those that were taken, or cancel their jobs."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if cancel_futures:
                for future, call in self._calls.items():
                    future.cancel()
                    _cancel(call.job)
                self._calls.clear()
            while wait and self._calls:
                self._changed.wait(0.5)  # a signal may be seen only when the wait is over

    def _submit(self, call: _Call) -> Future[Any]:
        future: Future[Any] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("the executor was shut down")
            self._start(call)
            self._calls[future] = call
            self._changed.notify_all()
        return future

    def _start(self, call: _Call) -> None:
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        _update(self._executor, {"cpus_per_task": call.ranks, **self._parameters})
        try:
            call.job = self._executor.submit(_in_job, call.work, call.arguments, call.options)
        except (FailedSubmissionError, FailedJobError, OSError) as error:
            raise TrainingError(f"the job was not taken: {_last_line(str(error))}") from error
        call.attempt, call.begun, call.ended = call.attempt + 1, time.monotonic(), None

    def _watch(self) -> None:
        """Settle the futures of jobs that have ended, until there is no more to come."""
        while True:
            with self._changed:
                if not self._calls:
                    if self._closed:
                        return
                    self._changed.wait()
                for future, call in list(self._calls.items()):
                    if future.cancelled():
                        _cancel(call.job)
                        del self._calls[future]
                    elif self._settled(future, call):
                        del self._calls[future]
                self._changed.notify_all()
            time.sleep(POLL_SECONDS)

    def _settled(self, future: Future[Any], call: _Call) -> bool:
        """Whether the call has come to its end, and its future been told."""
        job = call.job.task(0)
        result: Any = None
        error: Exception | None
        try:
            if not job.paths.result_pickle.exists():
                if not self._has_ended(call):
                    return False
                call.ended = call.ended or time.monotonic()
                if time.monotonic() - call.ended < self._patience:
                    return False
                if call.attempt < self._attempts:
                    _remove(job)
                    self._start(call)
                    return False
                raise JobLost(f"job {job.job_id} ended without a result; {_written(job)}")
            result, error = _result(job)
            _remove(job)
            if isinstance(error, EndedError):
                error = EndedError(f"{error}; if its time was up, give it more by slurm.time")
        except Exception as failure:
            error = failure
        if future.set_running_or_notify_cancel():
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        return True

    def _has_ended(self, call: _Call) -> bool:
        """Whether a job has ended. Slurm's queue is asked, not its accounts, as by submitit: not all keep any."""
        if self._executor.cluster != "slurm":
            return bool(call.job.task(0).done())
        if time.monotonic() - self._asked > QUEUE_SECONDS:
            asked = ["squeue", "--noheader", "--format=%A", f"--user={getpass.getuser()}"]
            answer = subprocess.run(asked, capture_output=True, text=True)
            if answer.returncode:  # its controller doesn't answer now
                return False
            self._queue, self._asked = set(answer.stdout.split()), time.monotonic()
        return call.begun < self._asked and call.job.job_id not in self._queue


@dataclass
class _Call:
    """What a job is to do. begun: when it was handed in. ended: when it was first seen to have ended with none."""

    ranks: int
    work: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    job: Any = None
    attempt: int = 0
    begun: float = 0.0
    ended: float | None = None


def _in_job(work: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
    """In the job: the result, or flipper's own error, which submitit would make a text of."""
    signal.signal(signal.SIGTERM, _end)  # submitit ignores it, and Slurm may not find what stays
    try:
        return work(*arguments, **options), None
    except FlipperError as error:
        return None, error


def _end(number: int, frame: FrameType | None) -> None:
    raise EndedError("the job was told to end")


def _result(job: Any) -> tuple[Any, FlipperError | None]:
    """What `_in_job` has returned; TrainingError when it hasn't."""
    from submitit.core.utils import FailedJobError

    try:
        returned: tuple[Any, FlipperError | None] = job.result()
        return returned
    except FailedJobError as failure:
        text = str(failure)
        if "UncompletedJobError" in text:  # submitit's own, when Slurm tells it that time is up
            reason = "it ran into its time limit; give it more by slurm.time (minutes)"
        else:
            reason = _last_line(text.rpartition("----------------------")[0])
        raise TrainingError(f"job {job.job_id}: {reason}; {_written(job)}") from failure


def _written(job: Any) -> str:
    return f"what it wrote is in {job.paths.stderr}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip(" -")]
    return lines[-1][:300] if lines else "no reason was given"


def _cancel(job: Any) -> None:
    with suppress(Exception):  # it has ended by itself, or Slurm doesn't answer
        job.cancel(check=False)
    _remove(job)


def _remove(job: Any) -> None:
    """Remove a job's folder, and the links to it that submitit has left beside it."""
    shutil.rmtree(job.paths.folder, ignore_errors=True)
    for link in job.paths.folder.parent.glob(".submission_file_*.sh"):
        if link.is_symlink() and not link.exists():
            link.unlink(missing_ok=True)


def _parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    """What [slurm] says, by submitit's names."""
    import submitit

    generic = submitit.AutoExecutor._typed_parameters()
    named = {key if key in generic or re.match("slurm_|local_", key) else f"slurm_{key}": given[key] for key in given}
    time = named.pop("slurm_time", None)
    if time is not None:
        named["timeout_min"] = time
    minutes = named.setdefault("timeout_min", MINUTES)
    if type(minutes) is not int or minutes < 1:
        raise UsageError(f"slurm.time must be a whole number of minutes, not {minutes!r}")
    return {"slurm_use_srun": False, "name": "flipper", **named}


def _update(executor: submitit.AutoExecutor, parameters: Mapping[str, Any]) -> None:
    try:
        executor.update_parameters(**parameters)
    except (NameError, ValueError, AssertionError, TypeError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"[slurm]: {first}") from error
