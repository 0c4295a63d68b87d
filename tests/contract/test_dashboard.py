"""Ray's real dashboard, as `launcher tunnel --dashboard` reaches it."""

from pathlib import Path

import httpx

from launcher.provider import Run, RunStatus
from launcher.ray_head import RAY_HEAD, RAY_TOKEN, open_dashboard
from launcher.testing import FakeProvider
from tests.ray_cluster import environment_with_dashboard, script_head
from tests.serving import free_port


def test_the_dashboard_shows_nothing_without_the_token(tmp_path: Path) -> None:
    server = environment_with_dashboard(tmp_path / "server")
    port = str(free_port())
    provider = FakeProvider(_runs={"art": [Run("1", "art-multi-node", RunStatus.RUNNING)]})
    with script_head(tmp_path / "log", "127.0.0.1", server=server, RAY_DASHBOARD_PORT=port):
        provider.files[RAY_HEAD] = (Path.home() / RAY_HEAD).read_text()
        with open_dashboard(provider, "art", None) as address:
            assert address == f"http://127.0.0.1:{port}"
            nodes = f"{address}/nodes?view=summary"
            assert httpx.get(nodes).status_code == 401
            assert httpx.get(nodes, headers={"Authorization": "Bearer guess"}).status_code == 403
            token = (Path.home() / RAY_TOKEN).read_text().strip()
            answer = httpx.get(nodes, headers={"Authorization": f"Bearer {token}"})
            assert answer.status_code == 200
            assert len(answer.json()["data"]["summary"]) == 1
    assert not (Path.home() / RAY_HEAD).exists() and not (Path.home() / RAY_TOKEN).exists()
