"""Our side and the real SkyPilot: tasks that it parses, errors that it raises, and its fake."""

import contextlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.errors import LauncherError
from launcher.settings import Settings
from launcher.skypilot import door
from launcher.skypilot.plan import shared_resources
from launcher.skypilot.provider import SkyProvider
from launcher.skypilot.testing import FakeSky, FakeTask
from launcher.task import Task
from tests.serving import free_port

ROOT = Path(__file__).parents[2]
# SkyPilot warns about its own dependencies on import.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("path", sorted((ROOT / "sky").glob("*.yaml")), ids=lambda path: path.name)
def test_skypilot_accepts_every_task_of_ours_with_a_bucket(path: Path) -> None:
    import sky

    ours = Task.load(path, Settings(bucket="s3://mine/here"))
    task = sky.Task.from_yaml_config(dict(ours.config), env_overrides=list(ours.envs.items()))
    (storage,) = task.storage_mounts.values()
    assert list(task.storage_mounts) == ["~/sky_workdir/.art"]
    assert (storage.source, storage.mode.value) == ("s3://mine/here", "MOUNT_CACHED")
    assert task.envs["ART_BUCKET"] == "s3://mine/here"  # the server reports what is safe there
    assert all(resources.autostop_config.down for resources in task.resources)


def test_skypilot_makes_a_slurm_cluster_larger_than_its_job() -> None:
    import sky

    ours = Task.load(ROOT / "sky/art-cpu.yaml", Settings())
    nothing = dict.fromkeys(("infra", "cloud", "cpus", "memory", "gpus", "instance_type"))
    resources = shared_resources(ours.config["resources"], nothing, ["slurm"])
    (taken,) = sky.Task.from_yaml_config({**ours.config, "resources": resources}).resources
    assert taken.cloud.get_vcpus_mem_from_instance_type(taken.instance_type) == (4.0, 8.0)
    assert taken.cpus == "3+"  # the job requests less


def launcher(*arguments: str, home: Path, **environment: str) -> str:
    """The output of `launcher`, which has to fail, on a laptop with an empty home."""
    done = subprocess.run(
        [sys.executable, "-c", "from launcher.cli.main import main; main()", *arguments],
        env={**os.environ, "HOME": str(home), "NO_COLOR": "1", **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr + done.stdout


@pytest.mark.parametrize(
    "command", ["ls", "up sky/art-cpu.yaml", "run true", "logs", "cancel 1", "cost", "down --yes"]
)
def test_an_api_server_that_is_down_is_named(tmp_path: Path, command: str) -> None:
    dead = {"SKYPILOT_API_SERVER_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    output = launcher(*command.split(), home=tmp_path, **dead)
    assert "error: SkyPilot's API server does not answer\n\nhint: Start it with" in output


def test_doctor_names_an_api_server_that_is_down(tmp_path: Path) -> None:
    dead = {"SKYPILOT_API_SERVER_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    output = launcher("doctor", home=tmp_path, **dead)
    assert "BAD  API server: SkyPilot's API server does not answer\n     Start it with" in output


def test_without_any_cloud_the_error_says_what_to_do(tmp_path: Path) -> None:
    own = {"SKYPILOT_API_SERVER_LOCAL_PORT": str(free_port())}
    try:
        output = launcher("up", "sky/art-cpu.yaml", home=tmp_path, **own)
        assert "error: SkyPilot has no access to any cloud" in output
        assert "\n\nhint: Run `sky check` to see what each cloud needs\n" in output
        output = launcher("doctor", home=tmp_path, **own)
        assert "BAD  clouds: SkyPilot has no access to any cloud\n     Run `sky check`" in output
    finally:
        sky = str(Path(sys.executable).with_name("sky"))
        subprocess.run([sky, "api", "stop"], env={**os.environ, "HOME": str(tmp_path), **own})


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ClusterNotUpError", "Cluster `art` is not up"),
        ("ResourcesUnavailableError", "No capacity for cluster `art`: why"),
        ("NoCloudAccessError", "SkyPilot has no access to any cloud"),
        ("ApiServerConnectionError", "SkyPilot's API server does not answer"),
        ("RequestCancelled", "Another command cancelled SkyPilot's request for cluster `art`"),
    ],
)
def test_errors_of_skypilot_are_one_sentence_and_a_hint(kind: str, message: str) -> None:
    from sky import exceptions

    from launcher.skypilot.door import translated

    theirs = getattr(exceptions, kind)
    error = theirs.__new__(theirs)
    error.args = ("\x1b[31mwhy\x1b[0m\nand a long story",)
    with pytest.raises(LauncherError) as ours, translated("art"):
        raise error
    assert ours.value.message == message
    assert ours.value.hint


def test_a_log_whose_reader_is_gone_is_not_a_lost_connection() -> None:
    from sky.server import rest

    from launcher.skypilot.door import LogStream

    ours, theirs = os.pipe()
    os.close(ours)
    tries = []

    @rest.retry_transient_errors()  # as `tail_logs` is
    def tail(out: LogStream) -> None:
        tries.append(out)
        print("line", file=out, flush=True)

    out = os.fdopen(theirs, "w")
    stream = LogStream(out)
    with pytest.raises(KeyboardInterrupt):
        tail(stream)
    assert stream.is_broken and len(tries) == 1
    with contextlib.suppress(BrokenPipeError):
        out.close()


def test_an_error_that_is_not_about_one_cluster_names_none() -> None:
    from launcher.skypilot.door import ANY, translated

    with pytest.raises(LauncherError) as error, translated(ANY):
        raise RuntimeError("no catalog")
    assert error.value.message == "SkyPilot failed: no catalog"


@pytest.mark.parametrize(
    ("status", "ever_up", "ours"),
    [("UP", True, "up"), ("INIT", False, "init"), ("INIT", True, "unhealthy")],
)
def test_a_cluster_that_was_up_is_not_mistaken_for_a_half_made_one(
    sky: FakeSky, status: str, ever_up: bool, ours: str
) -> None:
    from sky.schemas.api.responses import StatusResponse

    known = dict.fromkeys(("cluster_hash", "user_hash", "user_name", "workspace"), "x")
    numbers = {"launched_at": 0, "autostop": 5, "to_down": True, "is_managed": False, "nodes": 1}
    sky.records["art"] = StatusResponse(
        name="art", status=status, cluster_ever_up=ever_up, **known, **numbers, cloud="Slurm"
    )
    (cluster,) = SkyProvider().clusters()
    assert cluster.status == ours


def test_the_fake_takes_only_what_the_real_skypilot_takes(sky: FakeSky) -> None:
    real = door.installed()
    pairs = [(FakeTask.from_yaml_config, real.Task.from_yaml_config)]
    for fake, module, names in [
        (sky, real, ("get", "stream_and_get", "api_status", "status", "queue", "exec", "tail_logs",
                     "cancel", "cost_report", "down")),
        (sky, real.client.sdk, ("enabled_clouds",)),
        (sky.jobs, real.jobs, ("launch", "queue_v2", "tail_logs", "cancel")),
    ]:  # fmt: skip
        pairs += [(getattr(fake, name), getattr(module, name)) for name in names]
    for ours, theirs in pairs:
        positional, taken = [], inspect.signature(theirs).parameters
        for name, parameter in inspect.signature(ours).parameters.items():
            assert name in taken, f"{theirs.__name__} takes no {name}"
            if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                positional.append(name)
        assert positional == list(taken)[: len(positional)], theirs.__name__
    modes = real.StatusRefreshMode
    assert (modes.NONE.value, modes.AUTO.value) == ("NONE", "AUTO")
    assert issubclass(real.exceptions.ClusterNotUpError, Exception)
    door.installed("utils.cluster_utils").SSHConfigHelper.remove_cluster("art")


def test_an_api_server_that_ends_while_it_starts_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sky.server import common

    starts = []

    def start(*_: object) -> None:
        starts.append(1)
        if len(starts) == 1:
            raise RuntimeError("SkyPilot API server process exited unexpectedly.")

    monkeypatch.setattr(common, "check_server_healthy_or_start_fn", start)
    monkeypatch.setattr(door, "_wake_api_server", door._wake_api_server.__wrapped__)
    assert door.sky().__name__ == "sky" and starts == [1]
    common.check_server_healthy_or_start(lambda: None)()  # as every function of the SDK
    assert starts == [1, 1]
