"""Every error of the trainer and the harness, named for what the user sees.

TrainerError
├── BadRequest         the client sent something we cannot use (HTTP 400)
│   ├── Unsupported    a setting or feature we do not have, by name
│   ├── NotJson        the body is declared as something else (415)
│   └── TooLong        the prompt and its answer do not fit the context
├── NotFound           no such step, checkpoint or response (404)
│   ├── UnknownModel   no such model
│   ├── UnknownThread  no such conversation of Anthropic's API
│   └── DamagedBatch   the recorded attempts of a step cannot be read
├── Conflict           it would clash with what is being served (409)
├── ModelError         the base model cannot be loaded
├── CheckpointError    a checkpoint is damaged, gone or does not belong here
├── HubError           a model hub refuses an upload, or cannot be reached
├── StorageError       a file cannot be written or read, e.g. the disk is read-only (503)
│   └── DiskFull       the disk or the quota is full (507)
├── Diverged           a loss or gradient is not finite
├── OutOfMemory        the step does not fit the accelerator (507)
├── NotReady           the server is still starting (503)
├── WorkerDied         the engine or the learner process ended (503)
│
│   In the harness, beside the agent:
├── NotConnected       no backend answers at the configured address
├── BackendBehind      the backend lacks steps of the run being resumed
├── TrainingFailed     the backend could not train an epoch
├── NothingToTrainOn   no group of several epochs had a training signal
├── RunFailed          a run of the workflow failed, and `on_failure` is `stop`
├── LlmUnavailable     an LLM's endpoint is down, overloaded or too slow
├── LlmRefused         an LLM's endpoint rejected the request
├── BadScore           an evaluator returned no usable score
├── JudgeUnclear       a judge replied with something other than scores
└── OutOfOrder         an episode's roles are in an order no chat template renders
"""

import contextlib
import errno
import sqlite3
from collections.abc import Iterator

from kit.errors import KitError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOTDIR, errno.ESTALE}
_SQLITE_FULL = {sqlite3.SQLITE_FULL}
_SQLITE_REFUSED = {
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_PERM,
}


class TrainerError(KitError):
    """Any error of the trainer."""

    status = 500


class BadRequest(TrainerError):
    """`param` names the field of the request, as OpenAI's errors do."""

    status = 400
    code: str | None = None

    def __init__(self, message: str, *, hint: str | None = None, param: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class Unsupported(BadRequest):
    code = "unsupported_parameter"
    hint = "Remove it"


class NotJson(BadRequest):
    status = 415
    hint = "Send it with the header `Content-Type: application/json`"


class TooLong(BadRequest):
    code = "context_length_exceeded"  # OpenAI's; agents shorten their memory when they see it
    hint = "Shorten the messages, or lower `max_tokens`"


class NotFound(TrainerError):
    status = 404
    code = "not_found"


class DamagedBatch(NotFound):
    hint = "Open another step; training does not need this file"


class UnknownModel(NotFound):
    code = "model_not_found"  # OpenAI's


class UnknownThread(NotFound):
    code = "thread_not_found"  # Anthropic's; its client then sends the whole conversation


class Conflict(TrainerError):
    status = 409


class ModelError(TrainerError):
    status = 400


class CheckpointError(TrainerError):
    status = 500


class HubError(TrainerError):
    status = 502


class StorageError(TrainerError):
    status = 503
    hint = "Make the state directory writable again, and send the request again"


class DiskFull(StorageError):
    status = 507
    hint = "Free disk space, or keep fewer checkpoints, and send the request again"


class Diverged(TrainerError):
    hint = "The run is still at its last checkpoint; lower `learning_rate` and train again"


class OutOfMemory(TrainerError):
    status = 507
    hint = (
        "Lower `gpu_memory_utilization` of the engine, `max_seq_length` or the number of "
        "generations, or give the learner more GPUs"
    )


class NotReady(TrainerError):
    status = 503
    hint = "Wait and try again; `/health` responds while the server starts"


class WorkerDied(TrainerError):
    status = 503
    hint = "It is being restarted; see its log file for the cause"


# The harness's errors never cross HTTP, so they keep the default status.


class NotConnected(TrainerError):
    hint = "Start it with `trainer serve`, and check the trainer adapter's `ip` and `port`"


class BackendBehind(TrainerError):
    hint = "Use the state directory of that run, or start a new run without `--resume`"


class TrainingFailed(TrainerError):
    hint = "Read the server's log, then continue with `--resume`"


class NothingToTrainOn(TrainerError):
    hint = (
        "Raise `num_generations` or `temperature`, give partial credit in the reward, "
        "and check the runs in `eval.general.output_dir`"
    )


class RunFailed(TrainerError):
    hint = "Fix it, or set `eval.general.on_failure: continue` to skip failed runs"


class LlmUnavailable(TrainerError):
    hint = "Check that the endpoint is up, and `base_url` in `llms`"


class LlmRefused(TrainerError):
    hint = "Check the workflow's request, and `model_name` in `llms`"


class BadScore(TrainerError):
    hint = "Return a finite number, or a dict with a finite number as `reward`"


class JudgeUnclear(TrainerError):
    hint = (
        "Use a stronger judge, give it `max_tokens` for a sentence and a score, or state the task "
        "more plainly in `instructions`"
    )


class OutOfOrder(TrainerError):
    hint = "Start with a user or system message, and never put two assistant messages in a row"


def is_storage_fault(error: BaseException) -> bool:
    """Whether the disk is to blame: it is full, read-only or broken."""
    if isinstance(error, sqlite3.Error):
        return _sqlite_code(error) in _SQLITE_FULL | _SQLITE_REFUSED
    return isinstance(error, OSError) and error.errno in _FULL | _REFUSED


@contextlib.contextmanager
def storage_faults() -> Iterator[None]:
    """Raise faults of the disk as a StorageError, which the end of a stream can word."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        if not is_storage_fault(error):
            raise
        raise storage_error(error) from error


def storage_error(
    error: OSError | sqlite3.Error, what: str = "A file of the state directory cannot be written"
) -> StorageError:
    """The error for people, with the status that fits the cause; `what` begins its sentence."""
    if isinstance(error, sqlite3.Error):
        full, cause = _sqlite_code(error) in _SQLITE_FULL, str(error)
    else:
        full, cause = error.errno in _FULL, error.strerror or str(error)
    return (DiskFull if full else StorageError)(f"{what}: {cause}")


def _sqlite_code(error: sqlite3.Error) -> int:
    """The primary code; the rest of an extended one only tells where it happened."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF
