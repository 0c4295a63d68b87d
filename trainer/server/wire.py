"""The bodies that ART's clients send, checked at the routes.

Clients of every ART generation send more keys than we need. Unknown keys of the model object are
ignored, as upstream does; its settings take effect or are refused by name (`client_settings`).
"""

import re
from typing import Annotated, Literal

import pydantic

from kit.state_dir import is_reserved
from kit.types import Json
from trainer import rewards

# A name becomes a directory: no separators and no leading dot.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def _is_a_plain_name(value: str) -> str:
    if not NAME.fullmatch(value):
        raise ValueError("may contain only letters, digits, `.`, `_` and `-`")
    return value


def _is_no_name_of_ours(value: str) -> str:
    if is_reserved(value):
        raise ValueError(f"may not be `{value}`, which names a file of the server itself")
    return value


def _are_groups(groups: list[Json]) -> list[Json]:
    """Check the outline, so that the code behind the routes finds lists where it expects them."""
    for group in groups:
        for trajectory in _objects(group, "trajectories"):
            for history in (trajectory, *_objects(trajectory, "additional_histories")):
                _objects(history, "messages_and_choices")
                _objects(history, "tools")
        if not isinstance(group.get("exceptions") or [], list):
            raise ValueError("hold `exceptions` that are not a list")
    return groups


def _with_rewards(groups: list[Json]) -> list[Json]:
    """Normalise the rewards here, once, so that journal, learner, history and W&B agree."""
    rewards.normalise(groups)
    return groups


def _are_trajectories(trajectories: list[Json]) -> list[Json]:
    _are_groups([{"trajectories": trajectories}])
    return trajectories


def _objects(holder: Json, key: str) -> list[Json]:
    found = holder.get(key) or []
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise ValueError(f"hold `{key}` that are not a list of objects")
    return found


PlainName = Annotated[str, pydantic.AfterValidator(_is_a_plain_name)]
StoredName = Annotated[PlainName, pydantic.AfterValidator(_is_no_name_of_ours)]
"""The name of a project or a model, which is a directory beside the server's own files."""
Groups = Annotated[
    list[Json], pydantic.AfterValidator(_are_groups), pydantic.AfterValidator(_with_rewards)
]


class ModelWire(pydantic.BaseModel):
    """ART's model object. Identity is (`project`, `run`)."""

    model_config = pydantic.ConfigDict(extra="ignore", populate_by_name=True)

    name: StoredName
    project: StoredName
    run_name: StoredName | None = None
    """Where the run is stored, from openpipe-art 0.5.19 on; `name` is then only an alias."""
    base_model: str | None = None
    trainable: bool = True
    lora_config: Json | None = None
    """Replaces `peft_args` in the same releases."""
    internal_config: Json | None = pydantic.Field(None, alias="_internal_config")

    @property
    def run(self) -> str:
        """The name under which the run is stored; clients without `run_name` have one name."""
        return self.run_name or self.name

    @pydantic.field_validator("internal_config")
    @classmethod
    def _sections_are_objects(cls, value: Json | None) -> Json | None:
        for name, part in (value or {}).items():
            if name.endswith("_args") and not isinstance(part, dict | None):
                raise ValueError(f"holds `{name}`, which is not an object")
        return value

    def section(self, name: str) -> Json:
        """One section of the internal config, without nulls."""
        return without_nulls((self.internal_config or {}).get(name))


def without_nulls(values: Json | None) -> Json:
    """Drop nulls, which clients send for absent values."""
    return {key: value for key, value in (values or {}).items() if value is not None}


class PrepareRequest(pydantic.BaseModel):
    model: ModelWire
    config: Json | None = None


class TrainRequest(pydantic.BaseModel):
    model: ModelWire
    trajectory_groups: Groups
    config: Json = {}
    dev_config: Json = {}
    verbose: bool = False
    digest: str
    """Hash of the body: the same body sent again is not trained twice."""


class SftRequest(pydantic.BaseModel):
    model: ModelWire
    trajectories: Annotated[list[Json], pydantic.AfterValidator(_are_trajectories)]
    config: Json = {}
    verbose: bool = False
    digest: str

    def as_step(self) -> TrainRequest:
        """The same step as a TrainRequest, so that the journal and the learner know one form."""
        group = {"trajectories": self.trajectories}
        config = {**self.config, "kind": "sft"}
        return TrainRequest(
            model=self.model,
            trajectory_groups=[group],
            config=config,
            verbose=self.verbose,
            digest=self.digest,
        )


class LogRequest(pydantic.BaseModel):
    model: ModelWire
    trajectory_groups: Groups
    split: PlainName = "val"


class KeepRequest(pydantic.BaseModel):
    model: ModelWire
    steps_to_keep: list[int]


class LeaseRequest(pydantic.BaseModel):
    """A step to keep while a client samples from it; with an `id`, one that is leased already."""

    model: ModelWire
    step: int
    id: str | None = None


class S3Request(pydantic.BaseModel):
    """Push or pull of a model's directory; only pulls accept `only_step`."""

    model: ModelWire
    s3_bucket: PlainName | None = None
    prefix: str | None = None
    verbose: bool = False
    delete: bool = False
    only_step: int | Literal["latest"] | None = None


class ForkRequest(pydantic.BaseModel):
    model: ModelWire
    from_model: PlainName
    from_project: PlainName | None = None
    from_s3_bucket: PlainName | None = None
    not_after_step: int | None = None
    prefix: str | None = None
    verbose: bool = False


class DeployRequest(pydantic.BaseModel):
    model: ModelWire
    deploy_to: str
