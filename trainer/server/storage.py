"""Deletes and forks checkpoints, and copies them to S3 and back."""

import asyncio
import logging
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from kit.manifest import read_manifest
from kit.state_dir import CHECKPOINTS, model_path, step_name
from kit.types import Json
from trainer import checkpoint
from trainer.errors import BadRequest, CheckpointError, Conflict, NotFound, storage_error
from trainer.server import s3
from trainer.server.admission import Admission
from trainer.server.model import Model
from trainer.server.models import Models
from trainer.server.wire import ForkRequest, S3Request
from trainer.server.workers import Workers

logger = logging.getLogger(__name__)
LEASE_SECONDS = 300  # a client renews its lease before
DELETING_SECONDS = 2.0  # clients of generation 1 give up after 5


class Storage:
    """Changes a model's checkpoints on disk, and keeps the engine in step with them."""

    def __init__(self, models: Models, workers: Workers, admission: Admission) -> None:
        self._models = models
        self._workers = workers
        self._admission = admission
        self._background: set[asyncio.Task[None]] = set()
        self._changing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Held by whatever changes files of a model's checkpoints, except its steps."""

    async def keep(self, model: Model, steps: Collection[int]) -> list[int]:
        """Delete all checkpoints except `steps`, the newest, and those that are in use.

        Returns the deleted steps. They are not served any more, but a part of their files may be
        deleted later: clients delete while the next step trains, and wait only seconds.
        """
        newest = model.step  # before the first `await`: nobody has asked to delete a later one
        found = await asyncio.to_thread(checkpoint.steps_on_disk, model.checkpoints)
        _forget_ended(model.leases)
        kept = {*steps, *(step for step, _ in model.leases.values())}
        used = self._admission.used()
        chosen = [
            step
            for step in found
            if step < newest and step not in kept and model.path(step).resolve() not in used
        ]
        self._forget(model, chosen)  # first, so that nobody leases a step that is being deleted
        sampled = [step for step in chosen if model.sampling[step]]
        if sampled:  # no client waits for the requests of others
            self._in_background(self._delete(model, sampled, newest))
        unused = [step for step in chosen if step not in sampled]
        deleting = self._in_background(self._delete(model, unused, newest))
        await asyncio.wait([deleting], timeout=DELETING_SECONDS)
        if deleting.done() and not deleting.cancelled():
            deleting.result()  # raises what the client can know in time
        return chosen

    async def _delete(self, model: Model, steps: list[int], newest: int) -> None:
        for step in steps:
            await _unused(model, step)  # an engine that dies meanwhile loads it again
        async with self._changing[model.key]:
            for training in self._admission.steps(model):
                if training.request.step <= newest:
                    # Until then a power cut would need the checkpoint before it.
                    await training.finished()
                    await training.sync.ended()
            if self._models.replaced(model):
                return
            # A pull that ran before may have brought one of them back.
            gone = [step for step in steps if step not in model.steps]
            await asyncio.to_thread(checkpoint.delete, model.checkpoints, gone)

    def lease(self, model: Model, step: int, id: str) -> None:
        """Keep the checkpoint of `step` until the lease `id` ends or is released."""
        if not model.serves(step):
            raise NotFound(
                f"`{model.name}` has no checkpoint of step `{step}`",
                hint=f"Available steps: {', '.join(map(str, model.served_steps)) or 'none'}",
            )
        _forget_ended(model.leases)
        model.leases[id] = step, time.monotonic() + LEASE_SECONDS

    async def delete_model(self, model: Model) -> None:
        """Delete a model and all its files, but nothing that a link points to."""
        async with self._idle(model):
            await self._delete_model(model)

    async def _delete_model(self, model: Model) -> None:
        for path in (model.directory, *model.directory.parents[:2]):
            if path.is_symlink():
                raise Conflict(
                    f"`{model.key}` is not deleted: `{path}` is a symbolic link",
                    hint="Delete the link, or the files where it points, by hand",
                )
        self._forget(model, list(model.steps))
        self._models.remove(model)
        await self._admission.forget(model)
        try:
            await asyncio.to_thread(shutil.rmtree, model.directory)
        except FileNotFoundError:
            return
        except OSError as exc:
            what = f"`{model.key}` is not served any more, but `{model.directory}` is not deleted"
            raise storage_error(exc, what) from exc

    async def fork(self, model: Model, request: ForkRequest) -> None:
        """Start `model` from a checkpoint of another run, at that checkpoint's step."""
        async with self._idle(model):
            await self._fork(model, request)

    async def _fork(self, model: Model, request: ForkRequest) -> None:
        project = request.from_project or model.project
        with tempfile.TemporaryDirectory() as temporary:
            source = model_path(self._models.state, project, request.from_model)
            if request.from_s3_bucket:
                source = Path(temporary)
                remote = s3.path_of(
                    request.from_s3_bucket, request.prefix, project, request.from_model
                )
                target = str(source / CHECKPOINTS)
                await s3.aws(
                    "s3", "sync", f"{remote}/{CHECKPOINTS}", target, verbose=request.verbose
                )
            step = await asyncio.to_thread(
                _newest, source / CHECKPOINTS, request.not_after_step, request.from_model
            )
            if step <= model.step:
                raise Conflict(
                    f"Model `{model.name}` is at step `{model.step}`; the fork is at `{step}`",
                    hint="Fork into a new model",
                )
            path = checkpoint.path_of(source / CHECKPOINTS, step)
            manifest = await asyncio.to_thread(checkpoint.verify, path)
            _check_fits(manifest, model, self._models.base_model, f"`{request.from_model}`")
            await asyncio.to_thread(checkpoint.fork, path, model.checkpoints)
        await self._adopt(model)

    async def push(self, model: Model, request: S3Request) -> None:
        """Copy the model's directory to S3, in ART's layout."""
        if request.only_step is not None:
            raise BadRequest("A push has no `only_step`", hint="Remove it; it is for pulls")
        remote = s3.path_of(request.s3_bucket, request.prefix, model.project, model.name)
        flags = (*s3.OWN_FILES, *_delete_flag(request))
        await s3.aws("s3", "sync", str(model.directory), remote, *flags, verbose=request.verbose)

    async def pull(self, model: Model, request: S3Request) -> None:
        """Copy the model's directory from S3, and continue from its newest complete checkpoint."""
        async with self._idle(model):
            await self._pull(model, request)

    async def _pull(self, model: Model, request: S3Request) -> None:
        remote = s3.path_of(request.s3_bucket, request.prefix, model.project, model.name)
        # Otherwise a file here that is older and of the same size stays, with other weights.
        flags = ("--exact-timestamps", *_delete_flag(request))
        local, wanted = str(model.directory), None
        before = await asyncio.to_thread(checkpoint.steps_on_disk, model.checkpoints)
        if request.only_step is None:
            flags = (*flags, *s3.OWN_FILES)
            await s3.aws("s3", "sync", remote, local, *flags, verbose=request.verbose)
        else:
            step = request.only_step
            wanted = step if isinstance(step, int) else await s3.latest_step(remote)
            name = f"{CHECKPOINTS}/{step_name(wanted)}"
            places = f"{remote}/{name}", f"{local}/{name}"
            await s3.aws("s3", "sync", *places, *flags, verbose=request.verbose)
            if not model.path(wanted).is_dir():
                raise NotFound(
                    f"There is no step `{step_name(wanted)}` in `{remote}`", hint="Check the step"
                )
        base_model = self._models.base_model or request.model.base_model
        try:
            await asyncio.to_thread(_check_pulled, model, wanted, base_model, f"`{remote}`")
        except Conflict:
            # Otherwise the next start of the server would serve what this one refuses.
            found = await asyncio.to_thread(checkpoint.steps_on_disk, model.checkpoints)
            new = [step for step in found if step not in before]
            await asyncio.to_thread(checkpoint.delete, model.checkpoints, new)
            raise
        await self._adopt(model)
        if wanted is not None and wanted not in model.steps:
            raise CheckpointError(
                f"Step `{wanted}` in `{remote}` is not whole",
                hint="Push it again, or pull another step",
            )
        on_disk = await asyncio.to_thread(checkpoint.steps_on_disk, model.checkpoints)
        if not model.steps and (before or on_disk):  # else it is the first run of a new model
            raise NotFound(
                f"`{remote}` holds no checkpoint that this server can use",
                hint="Push it from this kind of server: a checkpoint needs its `manifest.json`",
            )

    @asynccontextmanager
    async def _idle(self, model: Model) -> AsyncIterator[None]:
        """Refuse while the model trains; inside the block no step begins, and no file changes."""
        self._check_idle(model)  # first: an admission may wait for the steps under way
        async with self._changing[model.key], self._admission.paused(model):
            self._check_idle(model)
            for training in self._admission.steps(model):
                # Until then a power cut would need the checkpoint before it.
                await training.sync.ended()
            yield

    def _check_idle(self, model: Model) -> None:
        if not all(training.done for training in self._admission.steps(model)):
            raise Conflict(
                f"Model `{model.name}` is training",
                hint="Wait for the step to end, then try again",
            )

    async def _adopt(self, model: Model) -> None:
        """Serve the newest checkpoint on disk, after others were put there."""
        before = dict(model.steps)
        await asyncio.to_thread(model.read_steps)
        if not model.prepared:
            return
        async with self._workers.gate.sampling():  # the engine may sleep while a step trains
            for step, lora in before.items():
                if model.steps.get(step) != lora:  # the engine has the weights that were replaced
                    await self._workers.unload(model, step)
            if model.steps:
                await self._workers.load(model, model.step)

    def _forget(self, model: Model, steps: Iterable[int]) -> None:
        """Stop serving `steps`; requests that sample from them finish first, in the background."""
        for step in steps:
            if model.steps.pop(step, None) is not None:
                self._in_background(self._unload(model, step))

    def _in_background(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()):
            logger.warning("old checkpoints are still in the engine or on disk: %s", error)

    async def _unload(self, model: Model, step: int) -> None:
        await _unused(model, step)
        if step not in model.steps:
            await self._workers.unload(model, step)


async def _unused(model: Model, step: int) -> None:
    """Wait until no request samples from a step that is not served any more."""
    while model.sampling[step]:
        await asyncio.sleep(0.1)


def _forget_ended(leases: dict[str, tuple[int, float]]) -> None:
    """Drop leases that were not renewed: a client that died keeps nothing for good."""
    for id in [id for id, (_, ends) in leases.items() if ends < time.monotonic()]:
        del leases[id]


def _newest(checkpoints: Path, not_after: int | None, name: str) -> int:
    found = checkpoint.list_steps(checkpoints)
    steps = [step for step in found if not_after is None or step <= not_after]
    if not steps:
        raise NotFound(
            f"Model `{name}` has no checkpoint to fork from",
            hint="Check `from_model`, `from_project` and `not_after_step`",
        )
    return steps[-1]


def _check_fits(manifest: Json, model: Model, base_model: str | None, source: str) -> None:
    """Refuse a checkpoint that the model cannot continue from."""
    lora = model.lora.model_dump(mode="json", exclude={"seed"})
    base_fits = base_model is None or manifest.get("base_model") == base_model
    if not base_fits or manifest.get("lora") != lora:
        raise Conflict(
            f"Checkpoint `{manifest.get('step')}` of {source} has another base model or LoRA",
            hint="Use a run with the same base model and `peft_args`",
        )


def _check_pulled(model: Model, step: int | None, base_model: str | None, source: str) -> None:
    """Check `step`, or the newest one, before it is served; damaged ones never are."""
    step = checkpoint.latest(model.checkpoints) if step is None else step
    if step is not None and model.has_whole(step):
        _check_fits(read_manifest(model.path(step)) or {}, model, base_model, source)


def _delete_flag(request: S3Request) -> list[str]:
    return ["--delete"] if request.delete else []
