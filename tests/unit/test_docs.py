"""Links, anchors, the navigation and the file names in the documentation lead somewhere.

`scripts/docs` checks the site the same way; this needs no documentation tools.
"""

import ast
import re
from pathlib import Path

import pytest

from dev.setting_tables import slug
from trainer.harness.config_file import load_config

ROOT = Path(__file__).parents[2]
MANUAL = sorted((ROOT / "docs").glob("**/*.md"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "dev/LOG.md")),
    *MANUAL,
    *sorted((ROOT / "examples").glob("*/README.md")),
]
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NOT_MESSAGES = {
    "A step runs out of GPU memory",
    "Rewards do not rise",
    "Everything is slow on a busy machine",
}
OUR_FOLDERS = "kit|launcher|trainer|tests|scripts|sky|bench|examples|docs|dev|requirements"
OUR_FILE = re.compile(rf"`((?:{OUR_FOLDERS})/[\w./-]*\w/?)`")


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {slug(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)) for heading in headings}


def links(page: Path) -> list[str]:
    found = LINK.findall(re.sub(r"`[^`\n]*`", "", prose(page)))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_and_anchor_resolves(page: Path) -> None:
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", MANUAL, ids=lambda page: page.name)
def test_the_manual_links_only_to_its_own_pages(page: Path) -> None:
    outside = [link for link in links(page) if link.startswith(("..", "/"))]
    assert outside == []


def test_every_page_of_the_manual_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2].partition("theme:")[0]
    listed = re.findall(r"([\w/-]+\.md)$", navigation, re.MULTILINE)
    assert sorted(listed) == [str(page.relative_to(ROOT / "docs")) for page in MANUAL]


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in ("CHANGELOG.md", "LOG.md")],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    assert [name for name in OUR_FILE.findall(prose(page)) if not (ROOT / name).exists()] == []


def test_the_first_config_of_the_manual_loads(tmp_path: Path) -> None:
    page = (ROOT / "docs/your-agent.md").read_text()
    (tmp_path / "config.yaml").write_text(re.findall(r"```yaml\n(llms:.*?)```", page, re.DOTALL)[0])
    config = load_config(tmp_path / "config.yaml")
    assert config.finetuning.enabled and config.reward_name == "mine"


def messages() -> set[str]:
    """Every message of the program that the documentation quotes."""
    tables = (ROOT / "README.md").read_text() + (ROOT / "docs/troubleshooting.md").read_text()
    quoted = re.findall(r"^\| (`+) ?(.+?) ?\1 \|", tables.partition("| Message |")[2], re.MULTILINE)
    headings = re.findall(r"^### (.+)$", prose(ROOT / "docs/troubleshooting.md"), re.MULTILINE)
    return {text for _, text in quoted} | set(headings) - NOT_MESSAGES


def strings_of_the_code() -> str:
    found = []
    for folder in ("kit", "launcher", "trainer"):
        for path in (ROOT / folder).glob("**/*.py"):
            nodes = ast.walk(ast.parse(path.read_text()))
            found += [node.value for node in nodes if isinstance(node, ast.Constant)]
    return "\n".join(text for text in found if isinstance(text, str))


def test_every_quoted_message_is_one_that_the_code_prints() -> None:
    code = strings_of_the_code()
    parts = [
        (message, part.strip(" `,:"))
        for message in sorted(messages())
        for part in re.split(r"…|`[^`]*`|\b[NM]\b|\d+", message)
    ]
    assert len(parts) > 20
    assert [message for message, part in parts if part not in code] == []


def test_a_broken_anchor_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# `eval.general`: A & B\n\n[here](#evalgeneral-a--b) [gone](#nowhere)\n")
    assert [link for link in links(page) if link[1:] not in anchors(page)] == ["#nowhere"]
