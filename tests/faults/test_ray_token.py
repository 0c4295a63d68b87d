"""Without its token a Ray cluster gives nothing away and does nothing, whatever port is tried."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import descendants
from tests.ray_cluster import KEY, environment_with_dashboard, script_head
from tests.serving import ROOT, free_port

NAMESPACE = "art-ray-token"
HEAD, STRANGER = "10.213.77.1", "10.213.77.2"
SERVICES = {
    "gcs_server": "ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "raylet node manager": "ray.rpc.NodeManagerService/GetSystemConfig",
    "raylet object manager": "ray.rpc.ObjectManagerService/Push",
    "client server": "ray.rpc.RayletDriver/ClusterInfo",
    "agent": "ray.rpc.ReporterService/HealthCheck",
}
AGENT = "agent"  # listens only where the dashboard is installed
UNAUTHENTICATED, NO_SUCH_METHOD = "16", "12"
JOIN = """
import sys
from trainer.machines.ray_cluster import connect
from trainer.errors import TrainerError
try:
    connect(sys.argv[1], sys.argv[2])
except TrainerError as error:
    sys.exit(error.message)
"""


@pytest.fixture
def network() -> Iterator[None]:
    """A network between this machine and a namespace that plays a stranger's."""
    commands = (
        f"ip netns add {NAMESPACE}",
        f"ip link add art-token type veth peer name stranger netns {NAMESPACE}",
        f"ip addr add {HEAD}/30 dev art-token",
        "ip link set art-token up",
        f"ip -n {NAMESPACE} addr add {STRANGER}/30 dev stranger",
        f"ip -n {NAMESPACE} link set stranger up",
    )
    if not (shutil.which("ip") and shutil.which("ss") and shutil.which("curl")):
        for install in ("update", "install -y --no-install-recommends iproute2 curl"):
            subprocess.run(["apt-get", "-qq", *install.split()], check=True)
    subprocess.run(["ip", "netns", "delete", NAMESPACE], capture_output=True)  # of a killed run
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        yield
    finally:
        subprocess.run(["ip", "netns", "delete", NAMESPACE], check=True)


@pytest.fixture(params=[False, True], ids=["bare", "dashboard"])
def head(
    request: pytest.FixtureRequest, network: None, tmp_path: Path
) -> Iterator[tuple[int, str, set[str]]]:
    """A head that `scripts/ray-cluster` started: pid, address and services."""
    server, services = Path(sys.prefix), set(SERVICES)
    if request.param:
        server = environment_with_dashboard(tmp_path / "server")
    else:
        services.remove(AGENT)
    dashboard = str(free_port())
    with script_head(tmp_path / "log", HEAD, server=server, RAY_DASHBOARD_PORT=dashboard) as (
        pid,
        address,
    ):
        yield pid, address, services


def stranger(*command: str) -> "subprocess.CompletedProcess[str]":
    inside = ["ip", "netns", "exec", NAMESPACE, *command]
    # A test before this one in the same process may have joined a cluster, and left the token.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(inside, capture_output=True, text=True, timeout=300, env=environment)


def ports_of(pid: int) -> dict[int, str]:
    """The TCP ports of a process and of all that it started, except those of loopback."""
    pids = {str(each) for each in [pid, *descendants(pid)]}
    found = {}
    for line in subprocess.check_output(["ss", "-Hltnp"], text=True).splitlines():
        address = line.split()[3]
        who = re.findall(r'"([^"]+)",pid=(\d+)', line)
        if any(each in pids for _, each in who) and "127.0.0.1" not in address:
            found[int(address.rpartition(":")[2])] = who[0][0]
    return found


def refusals(pid: int, frame: Path) -> set[str]:
    """Try every port and every service, and return the services that asked for the token."""
    refused = set()
    for port, name in ports_of(pid).items():
        url = f"http://{HEAD}:{port}"
        for service, method in SERVICES.items():
            grpc = ("-H", "content-type: application/grpc", "-H", "te: trailers")
            message = ("--data-binary", f"@{frame}", f"{url}/{method}")
            answer = stranger(
                *("curl", "-sS", "-m", "20", "-D", "-", "-o", "/dev/null"),
                *("--http2-prior-knowledge", *grpc, *message),
            )
            told = re.search(r"grpc-status: (\d+)", answer.stdout)
            status = told[1] if told else NO_SUCH_METHOD  # it speaks no gRPC
            assert status in (UNAUTHENTICATED, NO_SUCH_METHOD), (name, port, answer)
            if status == UNAUTHENTICATED:
                refused.add(service)
        page = stranger("curl", "-s", "-m", "20", "-o", "/dev/null", "-w", "%{http_code}", url)
        assert page.stdout in ("000", "401"), (name, port, page)
    return refused


def test_a_stranger_is_refused_at_every_port(
    head: tuple[int, str, set[str]], tmp_path: Path
) -> None:
    pid, address, services = head
    frame = tmp_path / "frame"
    frame.write_bytes(bytes(5))  # an empty message of gRPC
    deadline = time.monotonic() + 120
    while (refused := refusals(pid, frame)) != services:
        # Some of Ray's processes start to listen after Ray says that it has started.
        assert time.monotonic() < deadline, (refused, ports_of(pid))
        time.sleep(1)
    joined = stranger(sys.executable, "-c", JOIN, address, "guess")
    assert f"Cannot join the Ray cluster `{address}`" in joined.stderr
    # The same program with the key gets further: it misses a Ray of its own on that machine.
    assert "InvalidAuthToken" not in stranger(sys.executable, "-c", JOIN, address, KEY).stderr
