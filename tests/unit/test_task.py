from pathlib import Path

import pytest

from kit.settings import variables
from launcher.errors import TaskError
from launcher.settings import Settings, read
from launcher.task import Task
from trainer.config import ServerConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "task.yaml"


@pytest.mark.parametrize("path", sorted((ROOT / "sky").glob("*.yaml")), ids=lambda path: path.name)
def test_every_task_in_sky_can_be_loaded(path: Path) -> None:
    task = Task.load(path, Settings())
    assert task.config["resources"]["autostop"]["down"] is True
    assert task.envs["ART_PORT"] == "7999"
    # A worker has no server, which is what reports to Weights & Biases.
    assert ("${WANDB_API_KEY:+wandb}" in task.config["setup"]) == (path.stem != "art-worker")
    # The machines of a cluster authenticate with a key that the user need not set.
    assert set(task.secrets) == ({"ART_API_KEY"} if "num_nodes" in task.config else set())


def test_sky_holds_no_python_that_would_shadow_skypilot() -> None:
    assert not list((ROOT / "sky").rglob("*.py"))


def test_a_wrong_key_is_reported_with_its_line_and_the_closest_key(write: Path) -> None:
    write.write_text("name: x\nsetpu: echo\nrun: echo\nnum_nodes: two\n")
    with pytest.raises(TaskError) as error:
        Task.load(write, Settings())
    assert "line 2: `setpu` is not a key of a task, did you mean `setup`?" in error.value.message
    assert "line 4: `num_nodes` cannot be `'two'`" in error.value.message


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("resources: {ordered: {accelerators: H100}}", "line 2: `ordered` must be a list of"),
        ("resources: {any_of: ['H100:1']}", "line 2: `any_of` must be a list of resources"),
        ("secrets: [{A: b}]", "line 2: `secrets` must be `NAME: null` lines"),
        ("secrets: {1: null}", "line 2: `secrets` must be `NAME: null` lines"),
        ("experimental: {config_overrides: {}}", "SkyPilot has renamed it to `config`"),
        ("service: {replicas: 2}", "`sky launch` would ignore it"),
    ],
)
def test_a_wrong_value_gives_one_sentence_and_a_hint(write: Path, line: str, fault: str) -> None:
    write.write_text(f"run: echo\n{line}\n")
    with pytest.raises(TaskError) as error:
        Task.load(write, Settings())
    assert fault in error.value.message and error.value.hint


def test_numbers_of_envs_become_text(write: Path) -> None:
    write.write_text("run: echo\nenvs: {STEPS: 3, RATE: 1e-6}\n")
    envs = Task.load(write, Settings()).envs
    assert (envs["STEPS"], float(envs["RATE"])) == ("3", 1e-6)


def test_settings_override_the_envs_of_the_task(write: Path) -> None:
    write.write_text("run: echo\nenvs: {BASE_MODEL: mine, ART_MAX_HOURS: 8}\n")
    assert Task.load(write, Settings()).envs["BASE_MODEL"] == "mine"
    envs = Task.load(write, Settings(base_model="yours", max_hours=0.5)).envs
    assert (envs["BASE_MODEL"], envs["ART_MAX_HOURS"]) == ("yours", "0.5")


def test_ports_come_from_the_flag_then_the_settings_the_task_and_the_default(write: Path) -> None:
    write.write_text("run: echo\nenvs: {ART_PORT: 9000}\n")
    assert Task.load(write, Settings()).ports == (9000, 8000)
    assert Task.load(write, Settings(port=7999)).ports == (7999, 8000)
    assert Task.load(write, Settings(port=1), envs={"ART_PORT": "2"}).ports == (2, 8000)


@pytest.mark.parametrize(
    ("env", "hint"),
    [
        ("ART_IDLE_MINUTES: 30m", "Give a number of minutes, such as 30; 0 is no limit"),
        ("ART_MAX_HOURS: -1", "Give a number of hours, such as 0.5; 0 is no limit"),
        ("ART_MAX_HOURS: .inf", "Give a number of hours, such as 0.5; 0 is no limit"),
        ("ART_PORT: http", "Give a port from 1 to 65535"),
    ],
)
def test_an_env_that_must_be_a_number_is_checked(write: Path, env: str, hint: str) -> None:
    write.write_text(f"run: echo\nenvs: {{{env}}}\n")
    with pytest.raises(TaskError, match=f"as `{env.partition(':')[0]}`") as error:
        Task.load(write, Settings())
    assert error.value.hint == hint


def test_only_declared_secrets_are_sent_and_none_is_shown(
    write: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (write.parent / ".env").write_text("HF_TOKEN=hf_x\nWANDB_API_KEY=w_x\nMINE=m_x\n")
    write.write_text("run: echo\nsecrets: {HF_TOKEN: null, MINE: null, ART_API_KEY: null}\n")
    task = Task.load(write, read())
    assert task.secrets == {"HF_TOKEN": "hf_x", "MINE": "m_x"}
    assert "hf_x" not in f"{task} {task.config} {read()}"


def test_a_secret_that_is_not_one_of_the_kits_must_have_a_value(write: Path) -> None:
    write.write_text("run: echo\nsecrets: {MINE: null}\n")
    with pytest.raises(TaskError, match="needs the secret `MINE`"):
        Task.load(write, Settings())


def test_a_secret_written_into_the_task_is_refused_without_its_value(write: Path) -> None:
    write.write_text("run: echo\nsecrets: {HF_TOKEN: hf_x}\n")
    with pytest.raises(TaskError) as error:
        Task.load(write, Settings())
    assert "hf_x" not in str(error.value)


def test_the_bucket_is_mounted_where_the_checkpoints_are(write: Path) -> None:
    write.write_text("run: echo\n")
    task = Task.load(write, Settings(bucket="s3://mine"))
    mount = {"source": "s3://mine", "mode": "MOUNT_CACHED"}
    assert task.config["file_mounts"] == {"~/sky_workdir/.art": mount}


def test_the_example_env_file_and_the_code_name_the_same_variables() -> None:
    lines = (ROOT / ".env.example").read_text().splitlines()
    named = {line.partition("=")[0] for line in lines if line and not line.startswith("#")}
    assert named == {*variables(Settings).values(), *variables(ServerConfig).values()}


def test_the_public_names_of_launcher_are_fixed() -> None:
    import launcher

    assert launcher.__all__ == ["Cluster", "LocalProvider", "Run", "Task"]
    assert all(getattr(launcher, name).__name__ == name for name in launcher.__all__)
