"""What can go wrong where the model is, named for what the user sees.

TrainerError
├── BadRequest         the client sent something we cannot use (HTTP 400)
│   └── Unsupported    a setting or feature we do not have, by name
├── NotFound           no such model, step or checkpoint (404)
├── Conflict           it would clash with what is being served (409)
├── ModelError         the base model cannot be loaded
├── CheckpointError    a checkpoint is damaged or does not belong here
│   └── DiskFull       it cannot be written (507)
├── Diverged           a loss or gradient is not finite
├── OutOfMemory        the step does not fit the accelerator (507)
├── NotReady           the server is still starting (503)
└── WorkerDied         the engine or the learner process ended (503)
"""

from kit.errors import KitError


class TrainerError(KitError):
    """Any error of the trainer."""

    status = 500


class BadRequest(TrainerError):
    status = 400


class Unsupported(BadRequest):
    hint = "Remove it, or see the README for what is supported"


class NotFound(TrainerError):
    status = 404


class Conflict(TrainerError):
    status = 409


class ModelError(TrainerError):
    status = 400


class CheckpointError(TrainerError):
    status = 500


class DiskFull(CheckpointError):
    status = 507


class Diverged(TrainerError):
    hint = "The run stands at its last checkpoint; lower `learning_rate` and train again"


class OutOfMemory(TrainerError):
    status = 507
    hint = (
        "Lower `gpu_memory_utilization` of the engine, `max_seq_length` or the number of "
        "generations, or give the learner more GPUs"
    )


class NotReady(TrainerError):
    status = 503
    hint = "Try again in a while; `/health` answers meanwhile"


class WorkerDied(TrainerError):
    status = 503
    hint = "It is being restarted; see its log file for the cause"
