"""The whole life of a cluster on a real Slurm, through SkyPilot, ssh and rsync.

The tests of this module are one story in their order: a cluster comes up, is worked on and torn
down, a second one trains a project outside the clone, another is ended by SkyPilot alone, and the
last goes away by itself: its server after a minute in which nobody used it, and the rest after two
in which nothing ran.
"""

import base64
import json
import os
import re
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

LAB = Path("/tmp/art-slurm-lab")
LAUNCHER = ".venv/bin/launcher"
FINETUNE = (
    "cd sky_workdir/tests/e2e/small_letters && trainer finetune --config_file=config.yaml "
    "-o finetuning.output_dir ~/sky_workdir/.art/letters -o eval.general.output_dir ~/runs --json "
)
# A second cluster need not install what the first one shows: it runs what the laptop has.
LIGHT = """
name: light
resources: {{cpus: 2, memory: 4, autostop: {{idle_minutes: 2, wait_for: jobs, down: true}}}}
envs: {{BASE_MODEL: tiny-random}}
run: |
  {clone}/.venv/bin/trainer serve --engine embedded --port $ART_PORT --openai-port $ART_OPENAI_PORT
"""
BIG = """
import os, pathlib
from kit.manifest import write_manifest
path = pathlib.Path(".art/big/models/m/checkpoints/0001")
path.mkdir(parents=True)
(path / "weights").write_bytes(os.urandom(1 << 20) * 400)
write_manifest(path, {"step": 1})
"""
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def laptop(slurm_laptop: Any) -> Any:
    return slurm_laptop


@pytest.fixture(scope="module")
def secret_seen(laptop: Any) -> Iterator[list[str]]:
    """Command lines that show the secret, watched while the tests of this module run."""
    seen: list[str] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(1):
            told = subprocess.run(["ps", "-eo", "user:20,args"], capture_output=True, text=True)
            seen.extend(line for line in told.stdout.splitlines() if laptop.secret in line)

    thread = threading.Thread(target=watch)
    thread.start()
    yield seen
    over.set()
    thread.join()


@pytest.fixture(scope="module")
def art(laptop: Any, secret_seen: list[str]) -> Any:
    """The cluster `art`, launched twice at once: one of the two is refused."""
    command = "./launch-cluster.sh --infra slurm/lab --max-cost 1 sky/art-cpu.yaml"
    first = laptop.start(command)
    turn = laptop.clone.parent / ".art-cluster/launching/art"
    while first.poll() is None and not turn.exists():
        time.sleep(0.1)
    refused = laptop.fails(command)
    laptop.finish(first)
    assert "error: Another command is already launching cluster `art`" in refused
    return laptop


def test_up_twice_is_one_server_and_all_is_well(art: Any) -> None:
    assert "is already running" in art.run("./launch-cluster.sh sky/art-cpu.yaml 2>&1")
    doctor = json.loads(art.run(f"{LAUNCHER} doctor --json"))
    assert [check["name"] for check in doctor if not check["ok"]] == []
    assert {"clouds", "API server", "cluster", "health"} <= {check["name"] for check in doctor}


def test_ssh_finds_trainer_and_finetunes(art: Any) -> None:
    assert art.run("ssh -q art command -v trainer").endswith("sky_workdir/.venv/bin/trainer\n")
    ports = dict(line.split("=") for line in (art.clone / ".env").read_text().splitlines())
    options = (
        f"-o llms.policy.base_url http://127.0.0.1:{ports['ART_OPENAI_PORT']}/v1 "
        f"-o trainer_adapters.backend.backend.port {ports['ART_PORT']}"
    )
    told = json.loads(art.run(f"ssh -q art '{FINETUNE} {options}'"))
    assert (told["epochs"], len(told["rewards"])) == (2, 2)


def test_a_run_works_beside_the_server_and_its_log_stays(art: Any) -> None:
    command = "test $(command -v trainer) = $PWD/.venv/bin/trainer && curl -sf $ART_BASE_URL/health"
    told = art.run(f"{LAUNCHER} run --wait '{command}; exit 3'", code=3)
    assert '"status"' in told
    run_id = art.run(f"{LAUNCHER} run sleep 600").strip()
    art.run(f"{LAUNCHER} cancel {run_id}")
    runs = json.loads(art.run(f"{LAUNCHER} ls -c art --json"))
    assert [run["status"] for run in runs] == ["running", "failed", "cancelled"]
    assert '"status"' in art.run(f"{LAUNCHER} logs {runs[-2]['id']} --no-follow")
    assert "OpenAI API on" in art.run(f"{LAUNCHER} logs server --no-follow")
    assert len(art.run(f"{LAUNCHER} logs learner --no-follow --tail 1").splitlines()) <= 1


def test_a_bundle_holds_every_log_and_no_secret(art: Any) -> None:
    art.run(f"{LAUNCHER} logs --bundle report.tar.gz")
    with tarfile.open(art.clone / "report.tar.gz") as archive:
        names = archive.getnames()
        texts = [archive.extractfile(name).read() for name in names]  # type: ignore[union-attr]
    assert {"art/art/logs/learner.log", "art/art/logs/engine.log"} <= set(names)
    assert any(name.startswith("art/run-") and "art-cpu" in name for name in names)
    assert not any(art.secret.encode() in text for text in texts)
    holders = list(holding(art.secret, LAB / "home/arthpc"))
    assert holders and all(hidden(path) for path in holders), holders


def test_sync_sends_what_changed_and_deletes_what_is_gone(art: Any) -> None:
    art.run("echo one >new.txt && echo other >gone.txt")
    sent = json.loads(art.run(f"{LAUNCHER} sync --json"))
    assert {"new.txt", "gone.txt"} <= set(sent["files"])
    art.run("ssh -q art 'echo mine >sky_workdir/made-there.txt'")
    art.run("rm gone.txt && echo two >new.txt")
    sent = json.loads(art.run(f"{LAUNCHER} sync --json"))
    assert (sent["files"], sent["removed"]) == (["new.txt"], ["gone.txt"])
    there = art.run(
        "ssh -q art 'cd sky_workdir && cat new.txt made-there.txt; ls gone.txt .env'||:"
    )
    assert there == "two\nmine\n"


def test_the_client_trains_through_a_tunnel_that_opened_again_after_its_ssh_was_killed(
    art: Any, train_two_steps: Callable[[Any, str], None]
) -> None:
    with art.tunnel() as exports:
        health = f"curl --silent --fail http://127.0.0.1:{art.ports[0]}/health"
        art.run(health)
        forward = f"ssh .*-L{art.ports[0]}:127"
        (pid,) = art.run(f"pgrep -f '^{forward}'").split()
        art.run(f"kill -9 {pid}")
        art.run(f"for _ in $(seq 240); do sleep 1; ! {health} || exit 0; done; exit 1")
        assert art.run(f"pgrep -f '^{forward}'").split() != [pid]
        train_two_steps(art, exports)
    listed = art.run("ssh -q art ls sky_workdir/.art/e2e/models/tiny/checkpoints")
    assert listed.split() == ["0000", "0001", "0002"]


def test_a_pull_that_was_cut_goes_on_and_every_hash_is_right(art: Any) -> None:
    (art.clone / "big.py").write_text(BIG)
    art.run(f"{LAUNCHER} sync && ssh -q art 'cd sky_workdir && python big.py'")
    pull = art.start(f"{LAUNCHER} pull")
    weights = art.clone / "checkpoints/big/models/m/checkpoints/0001/weights"
    while pull.poll() is None and (not weights.exists() or weights.stat().st_size < 1 << 24):
        time.sleep(0.05)
    subprocess.run(["pkill", "-KILL", "-u", "artdev", "-f", "^ssh .* rsync --server"], check=True)
    _, err = pull.communicate()
    assert pull.returncode == 1 and "continues where it stopped" in err, err
    assert weights.stat().st_size < 400 << 20
    # On a disk that is full the sentence says so, and nothing is lost.
    small = art.clone / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,mode=777", "tmpfs", small], check=True)
    try:
        assert "`small` is full" in art.fails(f"{LAUNCHER} pull --to small")
    finally:
        subprocess.run(["umount", small], check=True)
    pulled = json.loads(art.run(f"{LAUNCHER} pull --json"))
    assert [(it["project"], it["model"], it["step"]) for it in pulled] == [
        ("big", "m", 1),
        *(("e2e", model, step) for model in ("letters", "tiny") for step in range(3)),
    ]
    find = "find . -path './*/checkpoints/*' -type f -exec sha256sum {} +"
    there = art.run(f'ssh -q art "cd sky_workdir/.art && {find}"')
    here = art.run(f"cd checkpoints && {find}")
    assert sorted(here.splitlines()) == sorted(there.splitlines())
    assert not any(it["new"] for it in json.loads(art.run(f"{LAUNCHER} pull --json")))
    art.run("test -s checkpoints/e2e/models/tiny/history.jsonl -a -s checkpoints/letters/*.jsonl")


def test_the_lease_in_dollars_became_hours_by_the_price_of_the_cluster(art: Any) -> None:
    cost = json.loads(art.run(f"{LAUNCHER} cost --json"))
    assert 0 < cost["so_far"] < cost["per_hour"]
    assert cost["projected"] == pytest.approx(1, abs=0.02)


def test_down_leaves_nothing_and_may_be_repeated(art: Any, secret_seen: list[str]) -> None:
    told = art.run(f"{LAUNCHER} down --yes 2>&1")
    assert "every file matches its sha256" in told and re.search(r"it cost \$\d", told)
    art.run(f"{LAUNCHER} down --yes")
    assert left("art") == []
    # The secret is where the user wrote it and in SkyPilot's requests; nobody else can read these.
    home = LAB / "home/artdev"
    holders = set(holding(art.secret, home))
    assert {path.parent for path in holders} == {art.clone, home / ".sky/api_server"}
    assert {path for path in holders if hidden(path)} == holders
    assert secret_seen == []


def test_a_project_made_with_the_wheel_is_trained_and_pulled(laptop: Any) -> None:
    # The wheel of a clone with a change, in an environment that takes all else from the clone's.
    with (laptop.clone / "trainer/__init__.py").open("a") as file:
        file.write('\nCHANGED = "changed here"\n')
    laptop.run(
        "kit=$(.venv/bin/python -c 'from launcher.shipping import pack; print(pack())'); "
        "uv venv --quiet --python .venv/bin/python ~/own; "
        "uv pip install --quiet --no-deps --python ~/own/bin/python $kit/*.whl; "
        "echo $PWD/.venv/lib/python3.*/site-packages >packages.pth; "
        "mv packages.pth ~/own/lib/python3.*/site-packages/"
    )
    # vLLM and the kit cannot live with this pin; the project gets it all the same.
    laptop.run(
        "~/own/bin/launcher init ~/demo --yes; "
        """sed -i 's/^dependencies = .*/dependencies = ["pydantic<2"]/' ~/demo/pyproject.toml"""
    )
    control, openai = laptop.free_ports()
    ports = f"cd ~/demo; export ART_PORT={control} ART_OPENAI_PORT={openai} PATH=~/own/bin:$PATH"
    options = (
        f"-o llms.policy.base_url http://127.0.0.1:{openai}/v1 "
        f"-o trainer_adapters.backend.backend.port {control} "
        "-o finetuning.num_epochs 1 -o trajectory_builders.builder.examples_per_epoch 2"
    )
    try:
        laptop.run(f"{ports}; launcher up -c own --infra slurm/lab art-cpu")
        versions = (
            'echo pydantic $(python -c "import pydantic; print(pydantic.VERSION)"); '
            '~/.art-cluster/server/bin/python -c "import trainer; print(trainer.CHANGED)"'
        )
        command = f"{versions}; trainer finetune finetune.yaml {options}"
        told = laptop.run(f"{ports}; launcher run -c own --wait '{command}'")
        assert "pydantic 1." in told and "changed here" in told
    finally:
        ended = laptop.run(f"{ports}; launcher down -c own --yes --json")
    pulled = [(it["project"], it["model"], it["step"]) for it in json.loads(ended)["pulled"]]
    assert pulled == [("demo", "demo", 0), ("demo", "demo", 1)]
    assert left("own") == []
    laptop.run("test -s ~/demo/checkpoints/demo/models/demo/report.html; rm -r ~/demo ~/own")


def test_skypilot_passes_the_suite_of_the_providers_and_sky_down_ends_its_cluster(
    laptop: Any,
) -> None:
    laptop.run(  # SkyPilot leaves files open and processes behind, which are not the suite's
        "ART_TEST_SKYPILOT=art .venv/bin/pytest -q tests/contract/test_providers.py -k skypilot "
        "--basetemp ~/pytest -p no:unraisableexception"
    )
    assert left("art") != []
    laptop.run(".venv/bin/sky down --yes art")
    assert left("art") == []


@pytest.fixture(scope="module")
def brief(laptop: Any) -> Any:
    """A cluster that nobody uses, beside which nothing more is launched.

    Another launch would end what tears down a cluster on the same machine. Whoever launches it is
    killed on the way, and launches it again.
    """
    laptop.clone.parent.chmod(0o755)  # the account may run what the laptop installed
    (laptop.clone / "light.yaml").write_text(LIGHT.format(clone=laptop.clone))
    command = "./launch-cluster.sh -c brief --idle-minutes 1 light.yaml"
    killed = laptop.start(command)
    while killed.poll() is None and not left("brief"):
        time.sleep(0.1)
    subprocess.run(["pkill", "-KILL", "-u", "artdev", "-f", "launcher up -c brief"], check=True)
    killed.communicate()
    laptop.run(command)
    return laptop


def test_a_launch_that_lost_its_client_is_taken_up_by_the_next(brief: Any) -> None:
    # One run, and no second beside it; it ends after an idle minute.
    (run,) = json.loads(brief.run(f"{LAUNCHER} ls -c brief --json"))
    assert run["status"] in ("running", "succeeded")


def test_a_rehearsal_launches_nothing(brief: Any) -> None:
    # Task and arguments of `sky launch` in any order; the GPUs of the lab are declared, not real.
    told = brief.run("./launch-cluster.sh --dryrun --infra slurm/lab -c gpu sky/art.yaml 2>&1")
    assert "Nothing was launched" in told and left("gpu") == []


def test_what_cannot_be_is_one_sentence_and_a_hint(brief: Any) -> None:
    for command, sentence in (
        ("up -c huge sky/art-cpu.yaml --cpus 999", "No capacity for cluster `huge`"),
        ("up -c huge sky/art-cpu.yaml --nonsense", "`sky launch` does not accept these arguments"),
        ("run -c none true", "There is no cluster `none`"),
        ("pull -c none", "There is no cluster `none`"),
    ):
        told = brief.fails(f"{LAUNCHER} {command}").strip().splitlines()
        assert any(line.startswith(f"error: {sentence}") for line in told), told
        assert told[-1].startswith("hint: "), told
    dead = brief.fails(f"SKYPILOT_API_SERVER_ENDPOINT=http://127.0.0.1:9 {LAUNCHER} ls")
    assert "API server does not answer" in dead and "sky api start" in dead


def test_an_idle_cluster_goes_away_by_itself(brief: Any) -> None:
    for _ in range(200):
        if not left("brief"):
            break
        time.sleep(3)
    assert left("brief") == []
    assert json.loads(brief.run(f"{LAUNCHER} ls --json")) == []
    brief.run(f"{LAUNCHER} down -c brief --yes")


def left(cluster: str) -> list[str]:
    """What is left of a cluster on Slurm: its jobs, and its home."""
    squeue = ["squeue", "--noheader", "--format=%j"]
    environment = {**os.environ, "SLURM_CONF": str(LAB / "slurm/slurm.conf")}
    jobs = subprocess.run(squeue, env=environment, capture_output=True, text=True).stdout.split()
    homes = [str(path) for path in (LAB / "home/arthpc/.sky_clusters").glob(f"{cluster}-*")]
    return [job for job in jobs if job.startswith(f"{cluster}-")] + homes


def holding(secret: str, directory: Path) -> Iterator[Path]:
    """The files that contain `secret`, as it is or in base64, which has three forms of it."""
    coded = [base64.b64encode(b"-" * before + secret.encode()) for before in range(3)]
    # Without the characters that also depend on the bytes around it.
    forms = [
        secret.encode(),
        *(code[start:-4] for code, start in zip(coded, (0, 2, 3), strict=True)),
    ]
    for folder, folders, names in os.walk(directory):
        folders[:] = set(folders) - {".venv"}
        for path in (Path(folder) / name for name in names):
            if path.is_file() and any(form in path.read_bytes() for form in forms):
                yield path


def hidden(path: Path) -> bool:
    """Whether nobody but its owner can read a file."""
    return not (path.stat().st_mode & 0o077 and path.parent.stat().st_mode & 0o077)
