"""The kit is packed as it is installed here, and sent with a task that installs it."""

import importlib
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from kit import package_data
from launcher import shipping
from launcher.errors import LauncherError
from launcher.packaged import tasks
from launcher.settings import Settings
from launcher.shipping import pack, with_kit
from launcher.task import Task

ROOT = Path(__file__).parents[2]


def names(packed: Path) -> set[str]:
    (wheel,) = packed.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def installed(packed: Path, to: Path) -> Path:
    """Unpack a wheel as an installer does."""
    (wheel,) = packed.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(to)
    return to


def python(code: str, packages: Path) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=packages, env={"HOME": str(packages), "PYTHONPATH": str(packages)},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout.strip()


def test_the_wheel_of_a_clone_has_its_code_and_data_and_no_tests() -> None:
    packed = pack()
    found = names(packed)
    assert {"trainer/cli/serve.py", "launcher/shipping.py", "kit/errors.py"} <= found
    assert {"kit/data/sky/art.yaml", "kit/data/requirements/cluster.txt"} <= found
    assert "kit/data/examples/temporal_clue/config.yaml" in found
    assert not [name for name in found if "__pycache__" in name or name.startswith("tests/")]
    sent = {path.relative_to(packed).as_posix() for path in packed.rglob("*") if path.is_file()}
    assert {"requirements/laptop.txt", "scripts/install", "scripts/activate"} <= sent
    assert (packed / "scripts/project-environment").stat().st_mode & 0o111
    assert pack() == packed


def test_an_installed_kit_is_packed_again_as_the_same_wheel(tmp_path: Path) -> None:
    packages = installed(pack(), tmp_path / "packages")
    again = Path(python("from launcher.shipping import pack; print(pack())", packages))
    assert again.name == pack().name  # the hash of the content
    assert names(again) == names(pack())
    listed = python("from launcher.packaged import tasks; print(*tasks())", packages)
    assert listed.split() == list(tasks())


def test_a_change_in_the_code_is_sent(tmp_path: Path) -> None:
    packages = installed(pack(), tmp_path / "packages")
    (packages / "trainer/errors.py").write_text("# changed\n")
    again = Path(python("from launcher.shipping import pack; print(pack())", packages))
    assert again.name != pack().name
    (wheel,) = again.glob("*.whl")
    assert zipfile.ZipFile(wheel).read("trainer/errors.py") == b"# changed\n"


def test_a_damaged_installation_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = installed(pack(), tmp_path / "packages")
    (packages / "trainer/errors.py").unlink()
    monkeypatch.syspath_prepend(str(packages))
    importlib.import_module("importlib_metadata")  # it replaces Python's own, as from 3.12 on
    with pytest.raises(LauncherError, match="not installed completely"):
        shipping._of_installation()


def test_the_requirements_of_the_wheel_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = shipping._metadata({**project, "optional-dependencies": {"x": ["a>1; os_name == 'nt'"]}})
    assert f"Requires-Dist: {project['dependencies'][0]}\n" in text
    assert "Requires-Dist: a>1 ; (os_name == 'nt') and extra == 'x'\n" in text
    assert f"Requires-Python: {project['requires-python']}\n" in text


def test_every_packaged_task_gets_the_kit_in_a_project_and_not_in_the_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in tasks().values():
        monkeypatch.chdir(tmp_path)
        sent = with_kit(Task.load(path, Settings()))
        ((target, source),) = sent.config["file_mounts"].items()
        assert target == f"~/.art-cluster/kits/{pack().name}" and Path(source) == pack()
        assert sent.config["setup"].startswith(f"export ART_KIT={target} ")
        assert "PYTHONSAFEPATH=1" in sent.config["run"]
        monkeypatch.chdir(ROOT)
        task = Task.load(path, Settings())
        assert with_kit(task) is task


def test_a_task_that_does_not_install_the_kit_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text("run: python serve.py\n")
    task = Task.load(tmp_path / "task.yaml", Settings())
    assert with_kit(task) is task


def test_a_clone_is_known_by_its_name(tmp_path: Path) -> None:
    assert package_data.is_clone(ROOT)
    assert not package_data.is_clone(tmp_path)
    (tmp_path / "pyproject.toml").write_text('project = "art-cluster"\n')
    assert not package_data.is_clone(tmp_path)


def test_hints_name_the_script_of_a_clone_only_in_a_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert package_data.how_to_install("sky") == "Run `scripts/install`"
    assert package_data.how_to_install("cluster") == "Run `scripts/install --only cluster`"
    monkeypatch.setattr(package_data, "_PACKAGES", tmp_path)
    assert "`art-cluster[sky]` from the wheel" in package_data.how_to_install("sky")


@pytest.mark.parametrize("task", tasks().values(), ids=lambda path: path.stem)
def test_the_first_command_in_a_tasks_header_works_without_a_clone(task: Path) -> None:
    commands = [line for line in task.read_text().splitlines() if line.startswith("#   ")]
    assert commands[0].split()[1:3] == ["launcher", "up"]
    assert not any("launch-cluster" in command for command in commands)


def test_old_kits_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(8):
        content = {**shipping._contents(), "kit/number.py": str(number).encode()}
        monkeypatch.setattr(shipping, "_contents", lambda content=content: content)
        newest = pack()
    assert newest.is_dir() and len(list(newest.parent.iterdir())) == 5
