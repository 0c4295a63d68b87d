"""`scripts/ray-cluster` in a real bash, with a `ray` that only says that it runs."""

import contextlib
import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import free_port

SCRIPT = Path(__file__).parents[2] / "scripts/ray-cluster"
RAY = """
echo $$ "$@" >>~/started
env >~/environment
echo Ray runtime started
exec sleep 600
"""
NAMES = ("PATH", "LANG")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "server/bin").mkdir(parents=True)
    make(tmp_path, "python", f'exec {sys.executable} "$@"')
    make(tmp_path, "ray", RAY)
    return tmp_path


def make(home: Path, name: str, script: str) -> None:
    program = home / "server/bin" / name
    program.write_text(f"#!/bin/bash\n{script}\n")
    program.chmod(0o755)


def ray_cluster(
    home: Path, *arguments: str, **envs: str
) -> "contextlib.AbstractContextManager[subprocess.Popen[str]]":
    base = {name: os.environ[name] for name in NAMES if name in os.environ}
    base |= {"HOME": str(home), "ART_SERVER": str(home / "server"), "ART_API_KEY": "secret"}
    return subprocess.Popen(
        [SCRIPT, *arguments],
        cwd=home,
        env={**base, **envs},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(home: Path, *arguments: str, **envs: str) -> tuple[int, str, str]:
    with ray_cluster(home, *arguments, **envs) as script:
        out, err = script.communicate()
        return script.returncode, out, err


def started(home: Path) -> list[list[str]]:
    """The process id and the arguments of every `ray` that was started."""
    return [line.split() for line in (home / "started").read_text().splitlines()]


def wait_for(text: str, script: "subprocess.Popen[str]") -> None:
    """Read what the script says until a line has `text`. bash itself says who was killed."""
    assert script.stderr is not None
    assert any(text in line for line in iter(script.stderr.readline, ""))


def is_alive(pid: str) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.fixture
def head() -> Iterator[socket.socket]:
    """Something that listens where a Ray head would."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address(head: socket.socket) -> tuple[str, str]:
    return "127.0.0.1", str(head.getsockname()[1])


def test_ray_ends_with_the_server_whose_exit_code_is_passed_on(home: Path) -> None:
    port = str(free_port())
    server = "cat ~/.art-cluster/ray-head; echo $RAY_ADDRESS $RAY_AUTH_MODE $RAY_AUTH_TOKEN; exit 5"
    code, out, err = outcome(
        home, "head", "127.0.0.1", port, "--", "bash", "-c", server, ENGINE="embedded"
    )
    token = hashlib.sha256(b"ray:secret").hexdigest()
    assert (code, out.splitlines()) == (
        5,
        [
            f"HEAD=127.0.0.1:{port}",
            "ENGINE=embedded",
            "ART_API_KEY=secret",
            f"127.0.0.1:{port} token {token}",
        ],
    ), err
    ((pid, *arguments),) = started(home)
    assert not is_alive(pid)
    assert not (home / ".art-cluster/ray-head").exists()
    line = " ".join(arguments)
    # Ray places nothing on the head, whose engine and learner are children of the server.
    assert (
        f"start --head --port {port} --num-cpus 0 --num-gpus 0 --no-monitor --include-dashboard"
        in line
    )
    assert "--node-ip-address 127.0.0.1 " in line
    used = {int(word) for word in arguments if word.isdecimal()}
    assert not used & {6380, 8266, 52365}  # SkyPilot's own Ray
    environment = (home / "environment").read_text()
    assert f"RAY_AUTH_TOKEN={token}\n" in environment and "RAY_AUTH_MODE=token\n" in environment
    assert "ART_API_KEY" not in environment  # what Ray starts needs the token only
    assert "RAY_USAGE_STATS_ENABLED=0\n" in environment


def test_a_dashboard_that_is_installed_is_on_loopback_and_noted_for_the_launcher(
    home: Path,
) -> None:
    (home / "aiohttp_cors.py").touch()  # of `ray[default]`
    envs = {"PYTHONPATH": str(home), "RAY_DASHBOARD_PORT": "8333"}
    server = "cd ~/.art-cluster; tail -n 1 ray-head; cat ray-token; stat -c %a ray-head ray-token"
    code, out, err = outcome(
        home, "head", "127.0.0.1", str(free_port()), "--", "bash", "-c", server, **envs
    )
    assert code == 0, err
    token = hashlib.sha256(b"ray:secret").hexdigest()
    assert out.splitlines() == ["DASHBOARD=8333", token, "600", "600"]
    line = " ".join(started(home)[0])
    assert "--include-dashboard true --dashboard-host 127.0.0.1 --dashboard-port 8333 " in line
    assert list((home / ".art-cluster").iterdir()) == []
    # Its metrics would have ports that ask for no token.
    environment = (home / "environment").read_text().splitlines()
    assert {"RAY_enable_metrics_collection=0", "DASHBOARD_METRIC_PORT=65536"} <= set(environment)


def test_a_server_that_was_killed_comes_back_to_the_same_ray(home: Path) -> None:
    server = "echo served; [ $(wc -l <~/starts) = 2 ] || kill -KILL $$; exit 3"
    command = f"echo >>~/starts; {server}"
    code, out, err = outcome(
        home, "head", "127.0.0.1", str(free_port()), "--", "bash", "-c", command
    )
    assert (code, out) == (3, "served\nserved\n")
    assert "the server was killed (exit code 137) and is started again" in err
    assert len(started(home)) == 1


def test_a_ray_head_that_was_killed_is_started_again_beside_the_server(home: Path) -> None:
    command = "kill -KILL $(cut -d' ' -f1 ~/started); until [ $(wc -l <~/started) = 2 ]; do :; done"
    code, _, err = outcome(home, "head", "127.0.0.1", str(free_port()), "--", "bash", "-c", command)
    assert code == 0 and "Ray's head was killed and is started again" in err
    assert not any(is_alive(pid) for pid, *_ in started(home))
    states = {line for line in (home / "environment").read_text().splitlines() if "storage" in line}
    # It finds its machines and engines again, because what it knows is on disk.
    assert "RAY_gcs_storage=rocksdb" in states and len(states) == 2


def test_a_signal_reaches_the_server_and_ends_ray(home: Path) -> None:
    command = "trap 'echo asked; exit 4' TERM; echo ready; while :; do sleep 0.1; done"
    arguments = ("head", "127.0.0.1", str(free_port()), "--", "bash", "-c", command)
    with ray_cluster(home, *arguments) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "ready\n"
        script.terminate()
        assert script.stdout.readline() == "asked\n"
        assert script.wait() == 4
    assert not is_alive(started(home)[0][0])


def test_a_ray_that_does_not_start_is_shown(home: Path) -> None:
    make(home, "ray", "echo the port is taken; exit 1")
    code, out, err = outcome(home, "head", "127.0.0.1", str(free_port()), "--", "echo", "served")
    assert (code, out) == (1, "")
    assert err.startswith("the port is taken\nerror: Ray did not start on 127.0.0.1:")


def test_a_machine_leaves_with_0_when_the_head_has_ended(home: Path, head: socket.socket) -> None:
    envs = {"RAY_GONE_S": "1", "RAY_NODE_IP": "127.0.0.7", "RAY_RESOURCES": '{"art_learner":1}'}
    envs |= {"SKYPILOT_NUM_GPUS_PER_NODE": "2"}
    place = ":".join(address(head))
    with ray_cluster(home, "join", *address(head), **envs) as script:
        wait_for("waiting for Ray's head at 127.0.0.1:", script)
        wait_for("this machine has joined Ray's head", script)
        head.close()
        wait_for("has ended", script)
        assert script.wait() == 0
    ((pid, *arguments),) = started(home)
    assert not is_alive(pid)
    line = " ".join(arguments)
    assert f"start --address {place} --num-gpus 2" in line
    assert '--node-ip-address 127.0.0.7 --resources {"art_learner":1}' in line


def test_a_machine_whose_ray_was_killed_joins_again(home: Path, head: socket.socket) -> None:
    with ray_cluster(home, "join", *address(head), RAY_GONE_S="1") as script:
        wait_for("has joined", script)
        os.kill(int(started(home)[0][0]), 9)
        wait_for("has joined", script)
        script.terminate()
        assert script.wait() == 143
    assert not any(is_alive(pid) for pid, *_ in started(home))


def test_a_machine_that_cannot_join_says_why(home: Path, head: socket.socket) -> None:
    ip, port = address(head)
    make(home, "ray", "echo RPC error: InvalidAuthToken: missing or incorrect; exit 1")
    code, _, err = outcome(home, "join", ip, port)
    assert code == 1
    assert f"error: The server at {ip}:{port} has another ART_API_KEY\n" in err
    head.close()
    code, _, err = outcome(home, "join", ip, port, RAY_PATIENCE_S="0")
    assert code == 1 and f"error: Nothing answers at {ip}:{port}\n" in err


@pytest.mark.parametrize(
    ("arguments", "envs", "code", "message"),
    [
        (("join", "127.0.0.1", "1"), {"ART_API_KEY": ""}, 1, "error: ART_API_KEY is not set"),
        (("join", "127.0.0.1", "x"), {}, 2, "error: `127.0.0.1:x` is not an address and a port"),
        (("join", "", ""), {}, 2, "error: `:` is not an address and a port"),
        (("join", "127.0.0.1", "1"), {"ART_SERVER": "/none"}, 1, "error: There is no Ray in"),
        (("head", "127.0.0.1", "1"), {}, 2, "ray-cluster head IP PORT -- COMMAND..."),
        ((), {}, 2, "ray-cluster head IP PORT -- COMMAND..."),
    ],
)
def test_wrong_uses_are_refused_before_ray_starts(
    home: Path, arguments: tuple[str, ...], envs: dict[str, str], code: int, message: str
) -> None:
    found, _, err = outcome(home, *arguments, **envs)
    assert found == code and message in err
    assert not (home / "started").exists()


def test_machines_that_share_a_host_get_different_ports(home: Path) -> None:
    with socket.socket() as taken:
        for first in range(20000, 30000, 100):
            with contextlib.suppress(OSError):
                taken.bind(("", first + 50))
                break
        outcome(
            *(home, "head", "127.0.0.1", str(free_port()), "--", "true"), RAY_NODE_PORTS=str(first)
        )
    ((_, *arguments),) = started(home)
    manager = int(arguments[arguments.index("--node-manager-port") + 1])
    assert manager > first and manager % 100 == 0
    workers = int(arguments[arguments.index("--max-worker-port") + 1])
    assert workers == manager + 99
