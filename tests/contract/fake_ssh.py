"""An `ssh` for tests: runs commands on this machine in $FAKE_HOME, and listens on ports of `-L`.

If $FAKE_SSH_CUT is set, the connection is lost once the command has sent more bytes than that.
"""

import os
import socket
import subprocess
import sys
import threading
import time


def main(arguments: list[str]) -> None:
    forwards = [it.removeprefix("-L").split(":") for it in arguments if it.startswith("-L")]
    while arguments[0].startswith("-"):
        del arguments[: 2 if arguments[0] == "-F" else 1]
    if forwards:
        for mine, _, port in forwards:
            threading.Thread(target=listen, args=(int(mine), int(port)), daemon=True).start()
        time.sleep(600)
    os.set_blocking(1, True)  # rsync makes its ends of the connection non-blocking
    cut = int(os.environ.get("FAKE_SSH_CUT", "0"))
    process = subprocess.Popen(
        ["bash", "-c", " ".join(arguments[1:])],
        cwd=os.environ["FAKE_HOME"],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    passed = 0
    while chunk := process.stdout.read1(65536):  # type: ignore[attr-defined]
        os.write(1, chunk)
        passed += len(chunk)
        if cut and passed > cut:
            process.kill()
            os._exit(255)
    sys.exit(process.wait())


def listen(mine: int, port: int) -> None:
    """Write our pid and the remote port to every connection, instead of forwarding it."""
    with socket.create_server(("127.0.0.1", mine), reuse_port=False) as server:
        while True:
            connection, _ = server.accept()
            with connection:
                connection.sendall(f"{os.getpid()} {port}".encode())


main(sys.argv[1:])
