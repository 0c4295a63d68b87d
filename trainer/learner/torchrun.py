"""Starts the learner: `python -m trainer.learner.torchrun --base-model tiny-random`.

The default is one learner process per GPU. A single one runs in this process. For several, here or
with `--nodes M` on M machines, this process becomes torchrun's agent and starts them. The agent
never restarts them: the server knows which step was lost, and restarts the agent. Arguments that
this module does not know are passed to the worker.
"""

import argparse
import fcntl
import logging
import os
import signal
import socket
import struct
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainer.processes.worker import OUT_OF_MEMORY, PARENT_VARIABLE, die_with_parent, run_worker

JOIN_WITHIN = timedelta(minutes=30)  # other machines may still be starting
NAME = "learner"  # of the run and of its rendezvous
BROKEN = "broken"  # key that a machine sets in the store when it joins a second time


class LearnerRendezvous(StaticTCPRendezvous):
    """torchrun's static rendezvous, but on one address only, and closed when a machine is lost."""

    def get_backend(self) -> str:
        return NAME

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the store. A machine that joins again has lost its processes, and breaks it."""
        if self.rank == 0:
            # Without a socket of ours, the store would listen on every address of this machine.
            listening = _listen(self.master_addr, self.master_port)
            self.master_port = listening.getsockname()[1]
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                self.master_addr,
                self.master_port,
                self.world_size,
                is_master=True,
                timeout=self.timeout,
                master_listen_fd=listening.detach(),
            )
        info = super().next_rendezvous()
        self.store = info.store
        if self.store.add(f"joined/{self.rank}", 1) > 1:
            self.store.set(BROKEN, "yes")
        self.num_nodes_waiting()
        return info

    def num_nodes_waiting(self) -> int:
        """Return 0. The agent calls this often, so it is where we notice a lost machine."""
        try:
            broken = self.store.check([BROKEN])
        except Exception:  # the first machine is gone; the exception differs by torch version
            broken = True
        if broken:
            raise RendezvousClosedError("The learner's processes lost each other")
        return 0


def launch(processes: int, nodes: int, number: int, master: str, arguments: list[str]) -> None:
    """Run the processes of machine `number` of `nodes` until they end. All connect to `master`."""
    host, _, port = (master if nodes > 1 else "127.0.0.1:0").rpartition(":")
    if interface := interface_towards(host):
        # By default they may use the host name's address: loopback, or one open to others.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    within = int(JOIN_WITHIN.total_seconds())
    rendezvous_handler_registry.register(
        NAME, lambda _: LearnerRendezvous(host, int(port), number, nodes, NAME, within)
    )
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=processes,
        run_id=NAME,
        rdzv_backend=NAME,
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(os.devnull),  # they inherit this process's output
    )
    logging.disable(logging.ERROR)  # the last line of the log is shown as the worker's error
    try:
        elastic_launch(config, sys.executable)("-P", "-m", "trainer.learner.worker", *arguments)
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:  # the agent sends it
                sys.exit(f"Process {rank} of the learner was killed by `{failure.signal_name()}`")
        codes = [failure.exitcode for failure in error.failures.values()]
        sys.exit(OUT_OF_MEMORY if OUT_OF_MEMORY in codes else 1)
    except RendezvousClosedError as error:
        sys.exit(str(error))
    except SignalException as error:
        sys.exit(128 + error.sigval)


def interface_towards(address: str) -> str | None:
    """The name of the network interface that leads to `address`, or None if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing
        except OSError:
            return None
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                found = fcntl.ioctl(probe, 0x8915, request)[20:24]  # SIOCGIFADDR
            except OSError:
                continue  # it has no address
            if found == own:
                return name
    return None


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


def main() -> None:
    die_with_parent(signal.SIGKILL)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=max(torch.cuda.device_count(), 1))
    parser.add_argument("--nodes", type=int, default=1, help="number of machines")
    parser.add_argument("--number", type=int, default=0, help="number of this machine, from 0")
    parser.add_argument("--master", default="", help="HOST:PORT of machine 0")
    world, arguments = parser.parse_known_args()
    if world.processes * world.nodes > 1:
        launch(world.processes, world.nodes, world.number, world.master, arguments)
    else:
        from trainer.learner.worker import main as work  # slow to import, useless to the agent

        work(arguments)


if __name__ == "__main__":
    run_worker(main)
