"""One suite for every provider, real and fake; SkyPilot's if ART_TEST_SKYPILOT names a cluster.

`tests/e2e/test_slurm.py` sets it, on the laptop of its Slurm cluster.
"""

import io
import os
import pwd
import re
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kit.manifest import write_manifest
from launcher.cluster import Cluster
from launcher.errors import ClusterNotFound, LauncherError, ProviderError, TaskError
from launcher.files import select
from launcher.local.provider import LocalProvider
from launcher.provider import CLUSTER_STATE_DIR, Provider, RunStatus
from launcher.settings import Settings
from launcher.startup import INSTALLING
from launcher.task import Task
from launcher.testing import FakeProvider
from tests.serving import free_port

# Read at import: a fixture unsets the variables of the kit while a test runs.
SKYPILOT = os.environ.get("ART_TEST_SKYPILOT")
NAME = SKYPILOT or "suite"
TASK = """
name: demo
workdir: work
resources: {cpus: 3, memory: 2}
envs: {GREETING: hello}
secrets: {HF_TOKEN: null}
setup: |
  set -e
  echo "setup in $(basename "$PWD")"
run: |
  echo "$GREETING $HF_TOKEN $(ls)"
  sleep 900
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.chdir(tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    (work / "kept.txt").write_text("kept")
    (work / "left.log").write_text("ignored")
    (work / ".gitignore").write_text("*.log\n")
    (tmp_path / "task.yaml").write_text(TASK)
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    return Task.load(tmp_path / "task.yaml", Settings.model_validate({"hf_token": "hf_x"}))


PROVIDERS = ["local", "fake", *(["skypilot"] if SKYPILOT else [])]


@pytest.fixture(params=PROVIDERS)
def provider(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Provider]:
    if request.param == "fake":
        yield FakeProvider()
        return
    provider: Provider = LocalProvider(tmp_path / "clusters")
    if request.param == "skypilot":
        from launcher.skypilot.provider import SkyProvider

        monkeypatch.setenv("HOME", pwd.getpwuid(os.getuid()).pw_dir)  # where its credentials are
        provider = SkyProvider()
    yield provider
    if request.param == "local":
        provider.down(NAME)


def no_progress(received: int, share: float) -> None:
    pass


def wait(provider: Provider, run_id: str) -> RunStatus:
    for _ in range(600):
        (run,) = [run for run in provider.runs(NAME) if run.id == run_id]
        if run.status.over:
            return run.status
        time.sleep(0.05)
    raise AssertionError(f"run {run_id} did not end")


def names(provider: Provider) -> set[str]:
    return {cluster.name for cluster in provider.clusters()}


@pytest.mark.filterwarnings("ignore")  # SkyPilot warns about its own dependencies
def test_a_cluster_comes_up_works_and_goes_away(
    provider: Provider, task: Task, tmp_path: Path
) -> None:
    assert NAME not in names(provider)
    server = provider.launch(NAME, task, [])
    assert server is not None
    assert NAME in names(provider)
    assert provider.runs(NAME)[-1].id == server.id
    assert not provider.runs(NAME)[-1].status.over

    run = provider.run(NAME, "echo beside", {}, {})
    assert wait(provider, run.id) is RunStatus.SUCCEEDED
    assert provider.exit_code(NAME, run.id) == 0
    out = io.StringIO()
    provider.logs(NAME, run.id, follow=False, tail=0, out=out)
    assert "beside" in out.getvalue() or isinstance(provider, FakeProvider)

    (tmp_path / "work" / "kept.txt").unlink()
    (tmp_path / "work" / "new.txt").write_text("new")
    sent = provider.sync(NAME, tmp_path / "work", select(tmp_path / "work"))
    assert "new.txt" in sent.files and "left.log" not in sent.files
    assert sent.removed == ("kept.txt",)
    assert provider.sync(NAME, tmp_path / "work", select(tmp_path / "work")).files == ()

    with provider.writer(NAME, f"{CLUSTER_STATE_DIR}/note") as write:
        for text in ("", "one\n", "one\ntwo\n"):
            write(text)
    with provider.writer(NAME, f"{CLUSTER_STATE_DIR}/note"):
        pass  # a writer that is not called changes nothing
    out = io.StringIO()
    provider.read(NAME, f"{CLUSTER_STATE_DIR}/note", follow=False, tail=1, out=out)
    assert out.getvalue().endswith("two\n")
    if not isinstance(provider, FakeProvider):
        provider.fetch(
            NAME, CLUSTER_STATE_DIR, tmp_path / "x", ["no*"], checksum=False, progress=no_progress
        )
        assert (tmp_path / "x" / "note").read_text() == "one\ntwo\n"

    spent = provider.cost(NAME)
    assert spent.so_far >= 0 and spent.per_hour >= 0
    assert all(check.ok for check in provider.checks())
    provider.cancel(NAME, server.id)
    assert wait(provider, server.id) is RunStatus.CANCELLED
    if SKYPILOT:
        return  # the test that created the cluster ends it
    provider.down(NAME)
    provider.down(NAME)
    assert NAME not in names(provider)


@pytest.mark.filterwarnings("ignore")
def test_a_missing_cluster_is_named(provider: Provider, tmp_path: Path) -> None:
    for call in (
        lambda: provider.runs("absent"),
        lambda: provider.run("absent", "true", {}, {}),
        lambda: provider.sync("absent", tmp_path, []),
        lambda: provider.cost("absent"),
        lambda: provider.exit_code("absent", "1"),
        lambda: provider.read("absent", "x", follow=False, tail=0, out=io.StringIO()),
        lambda: provider.fetch(
            "absent", CLUSTER_STATE_DIR, Path("x"), [], checksum=False, progress=no_progress
        ),
        lambda: provider.tunnel("absent", {1: 1}).__enter__(),
    ):
        with pytest.raises(ClusterNotFound, match="`absent`"):
            call()


@pytest.fixture
def local(tmp_path: Path, task: Task) -> Iterator[LocalProvider]:
    provider = LocalProvider(tmp_path / "clusters")
    provider.launch("art", task, [])
    yield provider
    provider.down("art")


def test_local_syncs_sets_up_and_passes_envs_and_secrets(local: LocalProvider) -> None:
    out = io.StringIO()
    for _ in range(100):
        out = io.StringIO()
        local.logs("art", "1", follow=False, tail=0, out=out)
        if "kept.txt" in out.getvalue():
            break
        time.sleep(0.05)
    assert out.getvalue() == "setup in sky_workdir\nhello hf_x kept.txt\n"
    local.down("art")
    assert not list(local.root.iterdir())


def test_local_neither_stores_nor_shows_a_secret(task: Task, tmp_path: Path) -> None:
    secret = f"hf_{os.urandom(12).hex()}"
    task.path.write_text("run: 'sleep 60'\nsecrets: {HF_TOKEN: null}\nworkdir: work\n")
    settings = Settings.model_validate({"hf_token": secret})
    provider = LocalProvider(tmp_path / "clusters")
    try:
        provider.launch("art", Task.load(task.path, settings), [])
        run = provider.run("art", 'test -n "$HF_TOKEN" && sleep 60', {}, settings.secrets())
        assert not provider.runs("art")[int(run.id) - 1].status.over
        shown = ""
        while "sleep 60" not in shown:
            shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
        assert secret not in shown
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert any(path.name == "0.sh" for path in files)
        assert not [path for path in files if secret.encode() in path.read_bytes()]
    finally:
        provider.down("art")


def test_local_down_ends_the_processes_of_its_runs(local: LocalProvider) -> None:
    pid = int((local.root / "art/runs/1/pid").read_text().split()[0])
    local.down("art")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_local_runs_that_start_at_the_same_time_get_different_ids(local: LocalProvider) -> None:
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda number: local.run("art", f"echo {number}", {}, {}), range(8)))
    assert sorted(int(run.id) for run in runs) == list(range(2, 10))
    for number, run in enumerate(runs):
        out = io.StringIO()
        local.logs("art", run.id, follow=True, tail=0, out=out)
        assert out.getvalue() == f"{number}\n"


def test_local_returns_the_exit_code_and_follows_a_log_to_its_end(local: LocalProvider) -> None:
    run = local.run("art", "echo one; sleep 0.3; echo two; exit 7", {}, {})
    out = io.StringIO()
    local.logs("art", run.id, follow=True, tail=0, out=out)
    assert out.getvalue() == "one\ntwo\n"
    assert Cluster("art", provider=local, settings=Settings()).wait(run, interval=0.05) == 7
    out = io.StringIO()
    local.logs("art", run.id, follow=False, tail=1, out=out)
    assert out.getvalue() == "two\n"
    local.down("art")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("set -e", "exit 3"), "The setup of cluster `art` failed"),
        (("sleep 900", "echo no model; exit 1"), "exited before it was healthy: `no model`"),
    ],
)
def test_local_reports_why_the_server_never_became_healthy(
    task: Task, tmp_path: Path, change: tuple[str, str], sentence: str
) -> None:
    task.path.write_text(TASK.replace(*change))
    provider, shown = LocalProvider(tmp_path / "clusters"), io.StringIO()
    ports = Settings.model_validate({"port": free_port(), "openai_port": free_port()})
    cluster = Cluster("art", provider=provider, settings=ports)
    with pytest.raises(ProviderError, match=sentence) as error:
        cluster.up(Task.load(task.path, ports), interval=0.2, log=shown)
    assert error.value.hint and "launcher logs 1 --local -c art" in error.value.hint
    provider.down("art")


def test_local_reports_what_the_server_is_doing_until_it_is_healthy(
    task: Task, tmp_path: Path
) -> None:
    install = (Path(__file__).parents[2] / "scripts/install").read_text()
    assert f'echo "{INSTALLING}' in install  # its lines are recognised by this word
    text = TASK.replace(
        "set -e", f"echo {INSTALLING} packages; until [ -f ~/installed ]; do sleep 0.1; done"
    )
    task.path.write_text(text)
    provider, messages = LocalProvider(tmp_path / "clusters"), list[str]()
    ports = Settings.model_validate({"port": free_port(), "openai_port": free_port()})

    installed = tmp_path / "clusters/art/home/installed"

    def progress(message: str) -> None:
        messages.append(message)
        if message.startswith("Installing the server's environment… "):
            installed.touch()
        elif installed.exists():
            provider.cancel("art", "1")

    with pytest.raises(ProviderError, match="exited before it was healthy"):
        Cluster("art", provider=provider, settings=ports).up(
            Task.load(task.path, ports), interval=0.5, progress=progress
        )
    provider.down("art")
    assert re.fullmatch(r"Setting up the server… \d+ s", messages[-1])


def test_local_pulls_only_finished_checkpoints(local: LocalProvider, tmp_path: Path) -> None:
    checkpoints = local.root / "art/home" / CLUSTER_STATE_DIR / "p/models/m/checkpoints"
    for name in ("0001", ".0002-half"):
        (checkpoints / name).mkdir(parents=True)
        (checkpoints / name / "lora").write_text("x")
    write_manifest(checkpoints / "0001", {"step": 1})
    cluster = Cluster("art", provider=local, settings=Settings())
    (pulled,) = cluster.pull(tmp_path / "home")
    assert (pulled.step, pulled.new) == (1, True)
    assert not list((tmp_path / "home").rglob(".0002*"))
    assert [it.new for it in cluster.down(tmp_path / "home")[0]] == [False]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("resources: {accelerators: 'H100:1'}", "GPUs"),
        ("resources: {ordered: [{accelerators: 'H100:1'}]}", "GPUs"),
        ("num_nodes: 2", "2 nodes"),
        ("file_mounts: {~/x: {source: s3://b, mode: MOUNT_CACHED}}", "the bucket at `~/x`"),
        ("volumes: {/mnt: v}", "`volumes`"),
        ("workdir: {url: 'https://example.com/x.git'}", "a `workdir` from git"),
    ],
)
def test_local_names_and_refuses_what_it_does_not_support(
    task: Task, tmp_path: Path, change: str, named: str
) -> None:
    rest = TASK.replace("resources: {cpus: 3, memory: 2}\n", "").replace("workdir: work\n", "")
    task.path.write_text(rest + change)
    with pytest.raises(TaskError, match=named):
        LocalProvider(tmp_path / "c").launch("art", Task.load(task.path, Settings()), [])
    with pytest.raises(LauncherError, match="--gpus"):
        LocalProvider(tmp_path / "c").launch("art", task, ["--gpus", "L4"])
    assert LocalProvider(tmp_path / "c").clusters() == []
