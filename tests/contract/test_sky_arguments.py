"""Arguments that are not ours, parsed by SkyPilot's own command."""

import pytest

from launcher.errors import LauncherError

# SkyPilot warns about its own dependencies on import.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_task_is_found_among_the_arguments_of_sky_launch() -> None:
    from launcher.skypilot.door import split_arguments

    given = ["--infra", "slurm/lab", "sky/art-cpu.yaml", "--dryrun", "-i", "5"]
    rest = ["--infra", "slurm/lab", "--dryrun", "-i", "5"]
    assert split_arguments(given) == (["sky/art-cpu.yaml"], rest)
    assert split_arguments(["--name", "x.yaml", "x.yaml"]) == (
        ["x.yaml"],
        ["--name", "x.yaml"],
    )


def test_an_argument_that_sky_launch_does_not_know_is_named() -> None:
    from launcher.skypilot.door import split_arguments

    with pytest.raises(LauncherError, match="--nonsense") as error:
        split_arguments(["--nonsense"])
    assert error.value.hint == "See its options with `sky launch --help`"


def test_an_asynchronous_launch_is_refused_before_it_costs_anything() -> None:
    from launcher.skypilot.door import split_arguments

    with pytest.raises(LauncherError, match="`--async` would return") as error:
        split_arguments(["sky/art.yaml", "--async"])
    assert error.value.hint
    assert split_arguments(["--no-async"]) == ([], ["--no-async"])


@pytest.mark.parametrize("option", ["--workdir", "--git-url", "--git-ref"])
def test_a_directory_that_nobody_has_checked_is_refused(option: str) -> None:
    from launcher.skypilot.door import split_arguments

    with pytest.raises(LauncherError, match=f"`{option}` would replace the directory"):
        split_arguments(["sky/art.yaml", option, "."])
