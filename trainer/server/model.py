"""One model under training: its checkpoints, its journal and the step that is served."""

import dataclasses
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from kit.manifest import damage, read_manifest, trust
from kit.state_dir import CHECKPOINTS
from trainer import checkpoint
from trainer.config import LoraConfig
from trainer.engines.engine import SampleRequest
from trainer.errors import Conflict, TooLong, storage_error
from trainer.server.health import Health
from trainer.server.journal import Journal, JournaledRequest
from trainer.server.pace import Pace


@dataclass
class Model:
    """A model under training: a LoRA on the shared base, and its newest served step."""

    project: str
    name: str
    """The run's name, under which it is stored."""
    directory: Path
    lora: LoraConfig
    alias: str = ""
    """Another name that serves this run; several runs may share it."""
    step: int = 0
    steps: dict[int, str] = field(default_factory=dict)
    """Complete checkpoints on disk, with the sha256 of each LoRA."""
    prepared: bool = False
    max_seq_length: int | None = None
    """Limit of prompt and completion together, in tokens; None is the base model's limit."""
    leases: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Steps that clients keep and when each lease ends, by its id."""
    sampling: Counter[int] = field(default_factory=Counter)
    """Number of requests in flight, by the step they sample from."""
    pace: Pace = field(default_factory=Pace, repr=False, compare=False)
    health: Health = field(default_factory=Health, repr=False, compare=False)

    @property
    def key(self) -> str:
        # Two projects may use the same name.
        return f"{self.project}/{self.name}"

    @property
    def names(self) -> list[str]:
        """The names that serve this run, unless they are another one's too."""
        return list(dict.fromkeys(filter(None, (self.name, self.alias))))

    @property
    def served_steps(self) -> list[int]:
        return sorted(filter(self.serves, self.steps))

    def serves(self, step: int) -> bool:
        """Whether a step may be sampled. A newer one may have a checkpoint and still fail."""
        return step in self.steps and step <= self.step

    @property
    def checkpoints(self) -> Path:
        return self.directory / CHECKPOINTS

    @cached_property
    def journal(self) -> Journal:
        return Journal(self.directory, self.health)

    def unfinished(self) -> list[JournaledRequest]:
        """The requests that a kill left undelivered or a power cut damaged, in order.

        A step whose checkpoint is damaged is trained again, and so are the ones after it, which
        were trained from it.
        """
        requests = [*self.journal.pending(), *self.journal.unsynced()]
        requests.sort(key=lambda request: request.step)
        unfinished: list[JournaledRequest] = []
        for index, request in enumerate(requests):
            step = request.step
            if self.has_whole(step):
                if self.journal.awaits(step):
                    unfinished.append(request)
                else:
                    checkpoint.sync(self.path(step))
                    self.journal.synced(step)
                continue
            after = {later for later in self.steps if later > step}
            if after <= {request.step for request in requests[index:]}:
                self.step = max((before for before in self.steps if before < step), default=0)
                for later in after:
                    self.discard(later)
                return unfinished + requests[index:]
            self.journal.forget(step)  # its checkpoint was deleted after it was served
        return unfinished

    def path(self, step: int) -> Path:
        return checkpoint.path_of(self.checkpoints, step)

    def lora_name(self, step: int) -> str:
        return f"{self.key}@{step}"

    def fit(self, request: SampleRequest, step: int) -> SampleRequest:
        """The request for the engine: with this step's LoRA, within the model's length limit."""
        if self.max_seq_length is not None:
            room = self.max_seq_length - len(request.prompt_ids)
            needed = 1 if request.max_tokens is None else request.max_tokens
            if needed > room:
                raise TooLong(
                    f"{len(request.prompt_ids)} prompt tokens and `max_tokens` {needed} do not "
                    f"fit the model's `max_seq_length` of {self.max_seq_length}",
                    hint="Shorten the messages, or raise `max_seq_length` in `init_args`",
                )
        # Not as `max_tokens`: the engine refuses a number of tokens that its context cannot hold.
        limit = self.max_seq_length
        return dataclasses.replace(request, lora=self.lora_name(step), max_length=limit)

    @contextmanager
    def used(self, step: int) -> Iterator[None]:
        """Count a request that samples from `step`, which keeps the step loaded."""
        self.sampling[step] += 1
        try:
            with self.pace.sampling():
                yield
        finally:
            self.sampling[step] -= 1

    def read_steps(self) -> None:
        """Read the checkpoints on disk. This hashes every file, so it is too slow per request."""
        # Assigned at the end: until then, chats find their step among the old ones.
        steps = {step: self._lora_hash(step) for step in checkpoint.list_steps(self.checkpoints)}
        self.steps, self.step = steps, max(steps, default=0)

    def has_whole(self, step: int) -> bool:
        """Whether the checkpoint of `step` is on disk and every file matches its hash."""
        return self.path(step).is_dir() and not damage(self.path(step))

    def check_newest(self) -> None:
        """Refuse to go on if the checkpoint that is served was deleted or changed on disk.

        The next step would be trained from an older one, under a number that was taken.
        """
        if self.step in self.steps and (faults := damage(self.path(self.step))):
            raise Conflict(
                f"The newest checkpoint of `{self.name}` was deleted or changed while it is "
                f"served: {faults[0]}",
                hint=f"Put `{self.path(self.step)}` back, or restart the server, which continues "
                "from the newest checkpoint that is whole",
            )

    def discard(self, step: int) -> None:
        """Delete the checkpoint of a step that failed after it was written."""
        if step <= self.step:
            return
        self.steps.pop(step, None)
        path = self.path(step)
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            return
        except OSError as exc:
            what = f"The checkpoint `{path}` of a step that failed cannot be deleted"
            raise storage_error(exc, what) from exc

    def add_step(self, step: int) -> None:
        """Add a checkpoint that was just written."""
        self.steps[step] = self._lora_hash(step)

    def _lora_hash(self, step: int) -> str:
        """The sha256 of a step's LoRA by its manifest, whose files are trusted from here on."""
        manifest = read_manifest(self.path(step)) or {"files": {}}
        lora = manifest["files"].get("adapter_model.safetensors", {})
        trust(self.path(step))
        return str(lora.get("sha256", ""))
