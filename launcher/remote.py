"""SSH to a cluster: commands through Fabric, files through rsync, ports through `ssh -L`.

The only module that imports Fabric. SkyPilot writes an ssh configuration per cluster; everything
here goes through it. Slurm has no SFTP, so no `get` and `put`.
"""

import contextlib
import logging
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kit.errors import NotInstalled
from launcher.errors import RemoteError


class Remote:
    """The head of one cluster, reached by the ssh alias that SkyPilot made for it."""

    def __init__(self, cluster: str) -> None:
        self.cluster = cluster
        self.ssh_config = Path.home() / ".sky" / "generated" / "ssh" / cluster

    def run(self, command: str) -> str:
        """Run `command` in the cluster's home and return its output."""
        self._require_alias()
        try:
            from fabric import Config, Connection
            from invoke.exceptions import UnexpectedExit
            from paramiko import SSHConfig, SSHException
        except ImportError as exc:
            raise NotInstalled(
                "Fabric is not installed", hint="Install with `scripts/install`"
            ) from exc
        logging.getLogger("paramiko").setLevel(logging.WARNING)  # it tells every connection
        config = SSHConfig.from_path(str(self.ssh_config))
        # Paramiko leaves `SetEnv` out, and on Slurm it is what leads to the cluster's own home.
        name, _, value = config.lookup(self.cluster).get("setenv", "").partition("=")
        try:
            # Sent with the request, not as a prefix of the command: the shell's rc file reads it.
            with Connection(
                self.cluster, config=Config(ssh_config=config), inline_ssh_env=False
            ) as connection:
                result = connection.run(
                    command, hide=True, in_stream=False, env={name: value} if name else {}
                )
        except UnexpectedExit as exc:
            raise RemoteError(
                f"On cluster `{self.cluster}` a command failed: {exc.result.stderr.strip()}",
                hint=self._hint,
            ) from exc
        except (SSHException, OSError, EOFError) as exc:
            raise RemoteError(
                f"Cluster `{self.cluster}` does not answer: {exc}", hint=self._hint
            ) from exc
        return str(result.stdout)

    def fetch(self, source: str, to: Path, options: Sequence[str]) -> None:
        """Copy what is below `source` to `to` with rsync; a second call goes on where it ended."""
        self._require_alias()
        command = ["rsync", "--archive", "--partial", *options, "--rsh", self._ssh("-q")]
        try:
            done = subprocess.run(
                [*command, f"{self.cluster}:{source}/", f"{to}/"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
            )
        except FileNotFoundError as exc:
            raise NotInstalled("rsync is not installed", hint="Install `rsync`") from exc
        if done.returncode:
            why = (done.stderr.strip().splitlines() or [f"rsync exited {done.returncode}"])[0]
            raise RemoteError(
                f"The transfer from `{self.cluster}` failed: {why}",
                hint="Run the command again; it goes on where it stopped",
            )

    @contextlib.contextmanager
    def tunnel(self, ports: Mapping[int, int]) -> Iterator[Mapping[int, int]]:
        """Forward local ports to the cluster's loopback; see `Provider.tunnel`."""
        self._require_alias()
        local = {port: wanted or free_port() for port, wanted in ports.items()}
        for port in local.values():
            _require_free(port)
        forwards = [f"-L{mine}:127.0.0.1:{port}" for port, mine in local.items()]
        options = ["-q", "-N", "-oExitOnForwardFailure=yes", "-oServerAliveInterval=15"]
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                ["ssh", "-F", str(self.ssh_config), *options, *forwards, self.cluster],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
            )
            try:
                self._wait_until_open(process, list(local.values()))
                yield local
            finally:
                process.terminate()
                process.wait(timeout=10)

    def _wait_until_open(self, process: "subprocess.Popen[bytes]", ports: Sequence[int]) -> None:
        deadline = time.monotonic() + 60
        while not all(_answers(port) for port in ports):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RemoteError(
                    f"The tunnel to cluster `{self.cluster}` did not open", hint=self._hint
                )
            time.sleep(0.2)

    def _ssh(self, *options: str) -> str:
        return " ".join(["ssh", "-F", f"'{self.ssh_config}'", *options])

    @property
    def _hint(self) -> str:
        return f"Check that the cluster answers with `ssh {self.cluster}`"

    def _require_alias(self) -> None:
        if not self.ssh_config.is_file():
            raise RemoteError(
                f"There is no ssh alias for cluster `{self.cluster}`",
                hint=f"Run `sky status {self.cluster}`, which writes it",
            )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _require_free(port: int) -> None:
    if _answers(port):
        raise RemoteError(
            f"Port {port} of this machine is in use",
            hint="Choose others with `--port` and `--openai-port`",
        )
