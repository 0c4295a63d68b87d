"""Where a server answers, and whether it does."""

import time
from dataclasses import dataclass

import httpx

from launcher.errors import ProviderError


@dataclass(frozen=True)
class Endpoints:
    """Where a server answers on this machine."""

    control: str
    openai: str

    @classmethod
    def on_loopback(cls, port: int, openai_port: int) -> "Endpoints":
        return cls(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{openai_port}/v1")

    def exports(self) -> dict[str, str]:
        return {"ART_BASE_URL": self.control, "OPENAI_BASE_URL": self.openai}


def is_healthy(endpoints: Endpoints) -> bool:
    """Whether both ports answer."""
    addresses = (endpoints.control, endpoints.openai.removesuffix("/v1"))
    try:
        # The addresses are loopback: a proxy of the environment has no say.
        with httpx.Client(trust_env=False, timeout=10) as client:
            return all(client.get(f"{address}/health").is_success for address in addresses)
    except httpx.TransportError:
        return False


def wait_until_healthy(endpoints: Endpoints, cluster: str, patience: float = 60.0) -> None:
    """Return when the server answers, or raise after `patience` seconds."""
    deadline = time.monotonic() + patience
    while not is_healthy(endpoints):
        if time.monotonic() > deadline:
            raise ProviderError(
                f"The server of cluster `{cluster}` does not answer",
                hint=f"See what it does with `launcher logs server -c {cluster}`",
            )
        time.sleep(1)


def wait_for_ever(endpoints: Endpoints, cluster: str) -> None:
    """Until Ctrl-C, or an error when the server is gone."""
    while True:
        time.sleep(30)
        wait_until_healthy(endpoints, cluster)
