"""`reward_plot.png`: training and validation rewards, and the curriculum."""

from collections.abc import Sequence
from pathlib import Path

from kit.errors import NotInstalled
from kit.types import Json


def check_installed() -> None:
    """Raise if matplotlib is missing, so a run fails before its first epoch."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise NotInstalled(
            "`reward_plot.png` needs `matplotlib`, which is not installed",
            hint="Install it with `pip install '.[harness]'` in the checkout",
        )


def reward_plot(
    path: Path, training: Sequence[Json], validation: Sequence[Json], *, curriculum: bool
) -> None:
    """Draw the histories over training steps.

    Epoch n samples before its step, so its training reward is drawn at n - 1. Validation n is
    measured after n steps.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rows = [row for row in training if row.get("avg_reward") is not None]
    epochs = [row["epoch"] - 1 for row in rows]
    axes.plot(epochs, [row["avg_reward"] for row in rows], color="tab:blue", label="training")
    axes.fill_between(
        epochs,
        [row["avg_reward"] - row.get("reward_std_dev", 0) for row in rows],
        [row["avg_reward"] + row.get("reward_std_dev", 0) for row in rows],
        color="tab:blue",
        alpha=0.15,
        linewidth=0,
        label="± 1 standard deviation",
    )
    measured = [row for row in validation if row.get("avg_reward") is not None]
    if measured:
        axes.plot(
            [row["epoch"] for row in measured],
            [row["avg_reward"] for row in measured],
            color="tab:orange",
            marker="o",
            label="validation",
        )
    if curriculum:
        other = axes.twinx()
        shares = [100 * row.get("curriculum_percentile", 1.0) for row in rows]
        other.step(epochs, shares, where="post", color="tab:green", linestyle=":")
        other.set_ylabel("curriculum: % of groups", color="tab:green")
        other.set_ylim(0, 105)
    axes.set_xlabel("training steps")
    axes.set_ylabel("reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, dpi=120, format="png")
    temporary.replace(path)
