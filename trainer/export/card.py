"""The model card of an export: `README.md`, as hubs show it, with a plot of the rewards."""

import json
from pathlib import Path
from typing import Any

import yaml

from kit.state_dir import HISTORY
from kit.version import version
from trainer.base_model import smollm2
from trainer.learner.state import ADAPTER, FULL
from trainer.page.reader import Run

CARD, PLOT = "README.md", "reward.png"
LICENSES = {smollm2.NAME: "apache-2.0"}
REWARDS = {"train/reward": "training", "val/reward": "validation"}


def write_card(
    output: Path,
    name: str,
    checkpoint_path: Path,
    manifest: dict[str, Any],
    base: Path,
    *,
    lora: bool,
) -> None:
    """Write the card of the export in `output`, made from a checkpoint and its run's history.

    `manifest` is the checkpoint's, `base` the directory of its base model.
    """
    run = checkpoint_path.parent.parent
    rewards = _rewards(run, int(manifest["step"])) if (run / HISTORY).is_file() else {}
    files = sorted(path.name for path in output.glob("*.gguf"))
    base_model = public_name(manifest["base_model"])
    parts = [
        _front_matter(base_model, base, lora=lora, gguf=bool(files)),
        f"# {name}",
        f"`{base_model}`, trained with GRPO for {manifest['step']} steps.",
    ]
    if rewards:
        _plot(rewards, output / PLOT)
        parts += [*_sentences(rewards), f"![Rewards over training steps]({PLOT})"]
    parts += ["## Use it", _usage(output, base_model, lora, files)]
    parts += ["## Where it comes from", _provenance(checkpoint_path, manifest, base_model)]
    if config := manifest.get("config"):
        settings = json.dumps(_public(config), indent=2, sort_keys=True)
        parts += ["## Settings of the last step", f"```json\n{settings}\n```"]
    (output / CARD).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def public_name(model: str) -> str:
    """A model's name without the directories of this machine."""
    return Path(model).name if _is_path(model) else model


def _is_path(text: str) -> bool:
    return text.startswith(("/", ".", "~")) or text.count("/") > 1 or Path(text).is_dir()


def _public(config: dict[str, Any]) -> dict[str, Any]:
    """The settings that were set, without the paths of the machine."""
    return {
        key: Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value
        for key, value in config.items()
        if value is not None
    }


def _text(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _front_matter(base_model: str, base: Path, *, lora: bool, gguf: bool) -> str:
    tags = ["grpo", "reinforcement-learning", "art-cluster"]
    tags += ["lora"] * lora + ["gguf"] * gguf
    about: dict[str, Any] = {
        "license": _license(base_model, base),
        "pipeline_tag": "text-generation",
        "tags": tags,
    }
    if "/" in base_model:  # hubs accept only names of their own models
        about["base_model"] = base_model
        about["base_model_relation"] = "adapter" if lora else "finetune"
    if not gguf:
        about["library_name"] = "peft" if lora else "transformers"
    return f"---\n{yaml.safe_dump(about, sort_keys=True)}---"


def _license(base_model: str, base: Path) -> str:
    """The license in the base model's own card; `unknown` without one."""
    card = base / CARD
    if card.is_file():
        _, _, rest = card.read_text(encoding="utf-8", errors="replace").partition("---\n")
        try:
            found = yaml.safe_load(rest.partition("\n---")[0])
        except yaml.YAMLError:
            found = None
        if isinstance(found, dict) and isinstance(found.get("license"), str):
            return str(found["license"])
    return LICENSES.get(base_model, "unknown")


def _rewards(run: Path, last: int) -> dict[str, list[tuple[int, float]]]:
    """The rewards of a run up to step `last`, by label."""
    steps = Run(run.parent.parent.name, run.name, run).history.steps
    found = {
        label: [(at, steps[at][name]) for at in sorted(steps) if at <= last and name in steps[at]]
        for name, label in REWARDS.items()
    }
    return {label: points for label, points in found.items() if points}


def _sentences(rewards: dict[str, list[tuple[int, float]]]) -> list[str]:
    return [
        f"The {label} reward went from {points[0][1]:.3f} at step {points[0][0]} to "
        f"{points[-1][1]:.3f} at step {points[-1][0]}."
        for label, points in rewards.items()
    ]


def _plot(rewards: dict[str, list[tuple[int, float]]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for label, points in rewards.items():
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
    axes.set(xlabel="training steps", ylabel="reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _usage(output: Path, base_model: str, lora: bool, files: list[str]) -> str:
    if files and lora:
        return f"```bash\nllama-server -m BASE.gguf --lora {files[0]}\n```"
    if files:
        lines = [f"llama-server -m {files[0]}"]
        lines += ["ollama create my-model -f Modelfile"] * (output / "Modelfile").is_file()
        return "```bash\n" + "\n".join(lines) + "\n```"
    if lora:
        return (
            f"```bash\nvllm serve {base_model} --enable-lora --lora-modules trained=DIRECTORY\n```"
        )
    return "```bash\nvllm serve DIRECTORY\n```"


def _provenance(checkpoint_path: Path, manifest: dict[str, Any], base_model: str) -> str:
    files = manifest["files"]
    weights = ADAPTER if ADAPTER in files else FULL
    parts = checkpoint_path.resolve().parts
    of = f"{parts[-5]}/{parts[-3]}" if parts[-2] == "checkpoints" and len(parts) > 5 else None
    lora = manifest.get("lora") or {}
    rows = {
        "Base model": f"`{base_model}`",
        "Run": of and f"`{of}`",
        "Step": manifest["step"],
        "Parent step": manifest.get("parent"),
        "LoRA": lora and ", ".join(f"{key} {_text(value)}" for key, value in sorted(lora.items())),
        f"sha256 of `{weights}`": f"`{files[weights]['sha256']}`",
        "Trained and exported with": f"art-cluster {version()}",
    }
    lines = [f"| {key} | {value} |" for key, value in rows.items() if value not in (None, "", {})]
    return "\n".join(["| | |", "|---|---|", *lines])
