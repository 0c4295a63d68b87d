"""What the README tells a newcomer to type works as it stands."""

import re
import subprocess
import sys
from pathlib import Path

from tests.serving import Serving

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_quickstart_trains_as_it_is_printed(server: Serving, tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(import asyncio\n.*?)```", README, re.DOTALL)
    assert "http://127.0.0.1:7999" in script
    (tmp_path / "train.py").write_text(script.replace("http://127.0.0.1:7999", server.control))
    result = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    steps = [line.split()[0] for line in result.stdout.splitlines()]
    assert steps == ["1", "2", "3", "4", "5"]


def test_every_file_that_the_readme_links_to_exists() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links and all((Path(__file__).parents[2] / link).exists() for link in links)
