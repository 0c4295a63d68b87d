"""SSH to a cluster: commands through Fabric, files through rsync, ports through `ssh -L`.

The only module that imports Fabric. All connections use the ssh configuration that SkyPilot writes
for each cluster. Fabric's `get` and `put` need SFTP, which Slurm lacks.
"""

import contextlib
import functools
import logging
import shlex
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, TextIO

from kit.errors import NotInstalled
from kit.package_data import how_to_install
from launcher.errors import RemoteError, Unreachable
from launcher.provider import Progress, Sent
from launcher.ssh import rsync
from launcher.ssh.forward import Forward

if TYPE_CHECKING:
    from fabric import Connection
    from paramiko import SSHConfig

_WATCHED = ("-q", "-oServerAliveInterval=15")  # notices a connection that is lost
# Prefer ciphers with hardware support: the slower end limits how fast checkpoints travel. The
# default ciphers stay available.
_TRANSFER_OPTIONS = (
    *_WATCHED,
    "-oCiphers=^aes128-gcm@openssh.com,aes256-gcm@openssh.com",
)
# Seconds for each attempt to connect. The first is short, because a machine that no longer exists
# does not refuse; the others are for a handshake on a busy machine.
_CONNECT_SECONDS = (10, 30, 60)


class Remote:
    """The head of one cluster, reached through the ssh alias that SkyPilot wrote for it."""

    def __init__(self, cluster: str) -> None:
        self.cluster = cluster
        self.ssh_config = Path.home() / ".sky" / "generated" / "ssh" / cluster

    def run(self, command: str, *, out: TextIO | None = None) -> str:
        """Run `command` in the cluster's home and return its output, or write it to `out`."""
        self._require_alias()
        try:
            from invoke.exceptions import UnexpectedExit
            from paramiko import SSHConfig, SSHException
        except ImportError as exc:
            raise NotInstalled("Fabric is not installed", hint=how_to_install("sky")) from exc
        config = SSHConfig.from_path(str(self.ssh_config))
        # Paramiko ignores `SetEnv`, which on Slurm selects the cluster's home.
        name, _, value = config.lookup(self.cluster).get("setenv", "").partition("=")
        try:
            with self._connect(config) as connection:
                result = connection.run(
                    command,
                    hide="stderr" if out else True,
                    out_stream=out,
                    in_stream=False,
                    env={name: value} if name else {},
                )
        except UnexpectedExit as exc:
            raise RemoteError(
                f"A command failed on cluster `{self.cluster}`: {exc.result.stderr.strip()}",
                hint=self._hint,
            ) from exc
        except (SSHException, OSError, EOFError) as exc:
            raise Unreachable(
                f"Cluster `{self.cluster}` does not answer: {exc}", hint=self._hint
            ) from exc
        return str(result.stdout)

    def _connect(self, config: "SSHConfig") -> "Connection":
        """Connect, and try again if the handshake takes too long: nothing has run yet."""
        from fabric import Config, Connection
        from paramiko import AuthenticationException, SSHException

        logging.getLogger("paramiko").setLevel(logging.WARNING)  # INFO logs every connection
        for seconds in _CONNECT_SECONDS:
            connection = Connection(
                self.cluster,
                config=Config(ssh_config=config),
                # Not as a prefix of the command: the shell's rc file reads the variable.
                inline_ssh_env=False,
                connect_timeout=seconds,
                # The connection may go through a program of SkyPilot that starts slowly.
                connect_kwargs={"banner_timeout": 60, "auth_timeout": 60},
            )
            try:
                connection.open()
                break
            except AuthenticationException:
                raise
            except (SSHException, EOFError):
                connection.close()
                if seconds == _CONNECT_SECONDS[-1]:
                    raise
        return connection

    @contextlib.contextmanager
    def writer(self, path: str) -> Iterator[Callable[[str], None]]:
        """See `Provider.writer`. It does not report whether the text arrived: read the file."""
        self._require_alias()
        folder, file = shlex.quote(str(Path(path).parent)), shlex.quote(path)
        # Each text follows its length, so that one that is cut off does not replace the file.
        script = (
            f"mkdir -p {folder} && while read -r length; do "
            f'head -c "$length" >{file}.new && test "$(wc -c <{file}.new)" -eq "$length" '
            f"&& mv {file}.new {file}; done"
        )
        process = subprocess.Popen(
            ["ssh", "-F", str(self.ssh_config), *_WATCHED, self.cluster, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdin
        try:
            yield functools.partial(_send_text, process.stdin)
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                process.stdin.close()
                process.wait(30)
        finally:
            process.kill()
            process.wait()
            with contextlib.suppress(OSError):
                process.stdin.close()

    def fetch(
        self,
        source: str,
        to: Path,
        patterns: Sequence[str],
        *,
        checksum: bool,
        progress: Progress,
    ) -> None:
        """Copy files below `source` to `to`; see `Provider.fetch`."""

        def report(line: str) -> None:
            if found := rsync.progress_of(line):
                progress(*found)

        # In place: the next transfer continues with what arrived, however this one ends.
        options = ["--archive", "--inplace", "--info=progress2", "--no-inc-recursive"]
        options += ["--checksum"] if checksum else []
        options += [*rsync.rules(patterns), "--rsh", self._ssh(*_TRANSFER_OPTIONS)]
        paths = [f"{self.cluster}:{source}/", f"{to}/"]
        self._require_alias()
        rsync.transfer([*options, *paths], self.cluster, report, place=f"`{to}`")

    def send(self, workdir: Path, to: str, files: Sequence[str], removed: Sequence[str]) -> Sent:
        """Copy `files` of `workdir` to `to`, and delete `removed` there."""
        self._require_alias()
        changes: list[list[str]] = []  # operation, size and name, see `--out-format`
        with tempfile.NamedTemporaryFile("w") as names:
            names.write("".join(f"{name}\0" for name in (*files, *removed)))
            names.flush()
            # Compare times to the nanosecond, to notice an edit within a second of the last sync.
            options = ["--archive", "--modify-window=-1", "--partial-dir=.rsync-partial", "--from0"]
            options += [f"--files-from={names.name}", "--delete-missing-args"]
            options += ["--out-format=%o %l %n", "--rsh", self._ssh(*_TRANSFER_OPTIONS)]
            rsync.transfer(
                [*options, f"{workdir}/", f"{self.cluster}:{to}/"],
                self.cluster,
                lambda line: changes.append(line.split(" ", 2)),
                place=f"The disk of cluster `{self.cluster}`",
            )
        sent = [(name, int(size)) for operation, size, name in changes if operation == "send"]
        files_sent = [(name, size) for name, size in sent if not name.endswith("/")]
        return Sent(
            files=tuple(name for name, _ in files_sent),
            removed=tuple(name for operation, _, name in changes if operation == "del."),
            bytes=sum(size for _, size in files_sent),
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
        forward = Forward(["ssh", "-F", str(self.ssh_config), *options, *forwards, self.cluster])
        try:
            self._wait_until_open(forward, list(local.values()))
            forward.start()  # keeps it open
            yield local
        finally:
            forward.close()

    def _wait_until_open(self, forward: Forward, ports: Sequence[int]) -> None:
        deadline = time.monotonic() + 60
        while not all(_answers(port) for port in ports):
            if not forward.alive or time.monotonic() > deadline:
                raise Unreachable(
                    f"The tunnel to cluster `{self.cluster}` did not open", hint=self._hint
                )
            time.sleep(0.2)

    def _ssh(self, *options: str) -> str:
        return " ".join(["ssh", "-F", f"'{self.ssh_config}'", *options])

    @property
    def _hint(self) -> str:
        # On Slurm and Kubernetes ssh goes through SkyPilot's API server.
        return f"Check that `ssh {self.cluster}` works, and that `sky api status` does"

    def _require_alias(self) -> None:
        if not self.ssh_config.is_file():
            raise RemoteError(
                f"There is no ssh alias for cluster `{self.cluster}`",
                hint=f"Run `sky status {self.cluster}`, which writes it",
            )


def _send_text(pipe: IO[bytes], text: str) -> None:
    data = text.encode()
    with contextlib.suppress(OSError):
        pipe.write(b"%d\n" % len(data) + data)
        pipe.flush()


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
            f"Port {port} on this machine is in use",
            hint="Choose other ports with `--port` and `--openai-port`",
        )
