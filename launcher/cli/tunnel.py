"""The commands of `launcher` that bring a cluster's server to this machine."""

import contextlib
import signal
import sys
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import click

from kit.cli import data, note
from launcher.cli.reports import as_json
from launcher.cli.target import Target, on_cluster

if TYPE_CHECKING:
    from launcher.endpoints import Endpoints


def local_ports(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that choose the ports on this machine."""
    for name, title in (("--openai-port", "OpenAI"), ("--port", "control")):
        text = f"Local port of the {title} API."
        kind = click.IntRange(1, 65535)
        command = click.option(name, type=kind, metavar="PORT", help=text)(command)
    return command


@click.command()
@on_cluster
@local_ports
@click.option("--dashboard", is_flag=True, help="Forward Ray's dashboard too.")
@click.option(
    "--dashboard-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Local port of Ray's dashboard; implies --dashboard.",
)
@as_json
def tunnel(
    target: Target,
    port: int | None,
    openai_port: int | None,
    dashboard: bool,
    dashboard_port: int | None,
    as_json: bool,
) -> None:
    """Forward the server's two ports to this machine.

    Prints the environment variables for clients and the address of the page once the server
    answers, and runs until you press Ctrl-C. Do not change --openai-port for openpipe-art: it
    connects to the port that the server reports.

    A server on Ray has Ray's dashboard if its task sets RAY_DASHBOARD=1.

    \b
    Example:
      launcher tunnel
      launcher tunnel --port 17999 --openai-port 18000
      launcher tunnel --dashboard
    """
    with (
        _dashboard(target, dashboard_port) if dashboard or dashboard_port else nullcontext() as ray,
        _opened(target, port, openai_port) as (endpoints, page),
    ):
        if as_json:
            variables = endpoints.exports()
            data({**vars(endpoints), "page": page, "dashboard": ray, "variables": variables})
        else:
            for variable, value in endpoints.exports().items():
                click.echo(f"export {variable}={value}")
        sys.stdout.flush()
        if page:
            note(f"Page: {page}{_once(page)}")
        if ray:
            note(f"Ray's dashboard: {ray} (print its token with `{_print_token(target)}`)")
        note("The tunnel is open; press Ctrl-C to close it")


def _dashboard(target: Target, port: int | None) -> AbstractContextManager[str]:
    from launcher.ray_head import open_dashboard

    return open_dashboard(target.cluster.provider, target.cluster.name, port)


def _print_token(target: Target) -> str:
    """The command that prints the token. It is a secret, so `tunnel` does not print it itself."""
    from launcher.local.provider import LocalProvider
    from launcher.ray_head import RAY_TOKEN

    name = target.cluster.name
    if target.local:
        return f"cat {LocalProvider().root / name / 'home' / RAY_TOKEN}"
    return f"ssh {name} cat {RAY_TOKEN}"


@click.command("open")
@on_cluster
@local_ports
def open_page(target: Target, port: int | None, openai_port: int | None) -> None:
    """Open the tunnel, and the page of the server's runs in a browser.

    Prints the address where there is no browser, and runs until you press Ctrl-C.

    \b
    Example:
      launcher open
    """
    with _opened(target, port, openai_port) as (_, page):
        if page is None:
            note("The server has no page: it is of an older version")
        elif _browse(page):
            note("The page is open in the browser; press Ctrl-C to close the tunnel")
        else:
            click.echo(page)
            note(f"There is no browser here: open the address above{_once(page)}")
        sys.stdout.flush()


@contextlib.contextmanager
def _opened(
    target: Target, port: int | None, openai_port: int | None
) -> "Iterator[tuple[Endpoints, str | None]]":
    """Open the tunnel and give the server's addresses; then wait until Ctrl-C."""
    from launcher.endpoints import page_link, wait_until_healthy, wait_while_healthy

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: ssh ends with us
    cluster = target.cluster
    ports = cluster.ports
    with cluster.tunnel(port or ports[0], openai_port or ports[1]) as endpoints:
        wait_until_healthy(endpoints, cluster.name, cluster.provider.option)
        key = cluster.settings.art_api_key
        yield endpoints, page_link(endpoints, key.get_secret_value() if key else None)
        with contextlib.suppress(KeyboardInterrupt):
            wait_while_healthy(endpoints, cluster.name, cluster.provider.option)


def _browse(address: str) -> bool:
    try:
        return webbrowser.open(address)
    except webbrowser.Error:
        return False


def _once(page: str) -> str:
    return " (works once, within a minute)" if "?token=" in page else ""
