"""Transfers and tunnels over a connection that fails: real rsync, and an `ssh` that disconnects."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kit.manifest import write_manifest
from launcher.checkpoints import pull
from launcher.errors import ClusterNotFound, ProviderError, RemoteError, Unreachable
from launcher.provider import CLUSTER_STATE_DIR, ClusterInfo
from launcher.skypilot.provider import SkyProvider
from launcher.ssh.remote import Remote, free_port

FAKE_SSH = Path(__file__).with_name("fake_ssh.py")
SIZE = 20_000_000  # far more than buffers hold


@pytest.fixture
def remote(rsync: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Remote:
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE_SSH} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_HOME", str(tmp_path / "there"))
    (tmp_path / "there" / "sky_workdir").mkdir(parents=True)
    remote = Remote("art")
    remote.ssh_config.parent.mkdir(parents=True)
    remote.ssh_config.write_text("Host art\n")
    return remote


def quiet(arrived: int, share: float) -> None:
    pass


def test_a_pull_continues_after_the_connection_was_lost(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there" / CLUSTER_STATE_DIR / "p/models/m[1]"  # a name, not a pattern
    step = there / "checkpoints" / "0001"
    step.mkdir(parents=True)
    (there / "history.jsonl").write_text("{}\n")
    (there / "checkpoints" / ".0002-half").mkdir()
    (there / "checkpoints" / ".0002-half" / "weights").write_bytes(b"x")
    (step / "weights").write_bytes(os.urandom(SIZE))
    write_manifest(step, {"step": 1})
    home = tmp_path / "home"
    monkeypatch.setenv("FAKE_SSH_CUT", str(SIZE // 2))
    monkeypatch.setattr(SkyProvider, "clusters", lambda self: [ClusterInfo("art", "up", "")])
    with pytest.raises(RemoteError, match="The transfer with cluster `art` failed") as error:
        pull(SkyProvider(), "art", home, quiet)
    assert error.value.hint == "Run the command again; it continues where it stopped"
    half = home / "p/models/m[1]/checkpoints/0001/weights"
    assert 0 < half.stat().st_size < SIZE
    # The rest stays below this limit only if the first half is kept.
    monkeypatch.setenv("FAKE_SSH_CUT", str(SIZE * 3 // 4))
    shares: list[float] = []
    (pulled,) = pull(SkyProvider(), "art", home, lambda arrived, share: shares.append(share))
    assert (pulled.step, pulled.new) == (1, True)
    assert half.read_bytes() == (step / "weights").read_bytes()
    assert (home / "p/models/m[1]/history.jsonl").read_text() == "{}\n"
    assert not list(home.rglob(".0002*"))
    assert shares == sorted(shares) and shares[-1] > 0.9
    assert (there.parents[2] / "pulled").read_text() == "p/m[1]/0001\n"


@pytest.mark.filterwarnings("ignore")  # SkyPilot warns about its own dependencies
@pytest.mark.parametrize(
    ("clusters", "error", "message"),
    [
        (
            [],
            ClusterNotFound,
            "Cluster `art` no longer exists: someone ended it, or its lease ran out",
        ),
        ([ClusterInfo("art", "stopped", "")], ProviderError, "Cluster `art` is stopped, not up"),
        ([ClusterInfo("art", "up", "")], Unreachable, "The transfer with cluster `art` failed"),
    ],
)
def test_if_ssh_fails_the_error_says_what_skypilot_knows_about_the_cluster(
    clusters: list[ClusterInfo],
    error: type[Exception],
    message: str,
    remote: Remote,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (Path(os.environ["PATH"].split(":")[0]) / "ssh").write_text("#!/bin/sh\nexit 255\n")
    monkeypatch.setattr(SkyProvider, "clusters", lambda self: clusters)
    with pytest.raises(error, match=message):
        pull(SkyProvider(), "art", tmp_path / "home", quiet)
    assert remote.ssh_config.is_file() == bool(clusters)


@pytest.mark.filterwarnings("ignore")
def test_if_ssh_and_the_api_server_fail_the_error_names_the_api_server(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead(self: SkyProvider) -> list[ClusterInfo]:
        raise ProviderError("SkyPilot's API server does not answer")

    (Path(os.environ["PATH"].split(":")[0]) / "ssh").write_text("#!/bin/sh\nexit 255\n")
    monkeypatch.setattr(SkyProvider, "clusters", dead)
    with pytest.raises(ProviderError, match="API server does not answer"):
        SkyProvider().tunnel("art", {7999: 0}).__enter__()


def test_a_pull_from_a_cluster_without_any_state_is_no_error(
    remote: Remote, tmp_path: Path
) -> None:
    remote.fetch(CLUSTER_STATE_DIR, tmp_path / "home", ["*"], checksum=False, progress=quiet)
    assert pull(SkyProvider(), "art", tmp_path / "home", quiet) == []


def test_sync_sends_changed_files_and_deletes_removed_ones(remote: Remote, tmp_path: Path) -> None:
    work, there = tmp_path / "work", tmp_path / "there" / "sky_workdir"
    for name in ("a.txt", "deep/b.txt"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(name)
    (there / "made-there.txt").write_text("x")
    sent = remote.send(work, "sky_workdir", ["a.txt", "deep/b.txt"], [])
    assert (sent.files, sent.removed, sent.bytes) == (("a.txt", "deep/b.txt"), (), 15)
    (work / "a.txt").unlink()
    (work / "deep/b.txt").write_text("changed it")  # same size, within a second
    sent = remote.send(work, "sky_workdir", ["deep/b.txt"], ["a.txt"])
    assert (sent.files, sent.removed) == (("deep/b.txt",), ("a.txt",))
    names = sorted(str(path.relative_to(there)) for path in there.rglob("*") if path.is_file())
    assert names == ["deep/b.txt", "made-there.txt"]


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a small disk")
def test_a_full_disk_is_named(remote: Remote, tmp_path: Path) -> None:
    (tmp_path / "there/sky_workdir/big").write_bytes(os.urandom(SIZE))
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], check=True)
    try:
        with pytest.raises(RemoteError, match=f"`{small}` is full"):
            remote.fetch("sky_workdir", small, ["big"], checksum=False, progress=quiet)
    finally:
        subprocess.run(["umount", small], check=True)


def forwarding(port: int) -> tuple[int, int]:
    """The pid of the ssh that listens on `port`, and the port that it forwards to."""
    for _ in range(1200):
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
                pid, there = connection.recv(100).split()
                return int(pid), int(there)
        except (OSError, ValueError):
            time.sleep(0.05)
    raise AssertionError(f"nothing listens on port {port}")


def test_a_tunnel_opens_again_when_its_ssh_dies(
    remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    with remote.tunnel({7999: 0, 8000: 0}) as local:
        pid, there = forwarding(local[7999])
        assert there == 7999
        os.kill(pid, signal.SIGKILL)
        again, there = forwarding(local[8000])
        assert again != pid and there == 8000
        assert "The tunnel closed; opening it again" in caplog.text
    with pytest.raises(ProcessLookupError):
        os.kill(again, 0)


def test_a_local_port_that_is_in_use_is_named(remote: Remote) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(
            RemoteError, match=f"Port {taken.getsockname()[1]} on this machine is in use"
        ),
        remote.tunnel({7999: taken.getsockname()[1]}),
    ):
        raise AssertionError("it opened")
    assert free_port() > 0


def test_a_handshake_that_fails_is_tried_again_before_the_cluster_counts_as_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        remote = Remote("art")
        remote.ssh_config.parent.mkdir(parents=True)
        port = server.getsockname()[1]
        remote.ssh_config.write_text(f"Host art\n  HostName 127.0.0.1\n  Port {port}\n")
        connections: list[str] = []

        def hang_up() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                connections.append("one")
                connection.close()

        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        with pytest.raises(Unreachable, match="Cluster `art` does not answer"):
            remote.run("true")
        server.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    assert len(connections) == 3
