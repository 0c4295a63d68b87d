"""The `trainer` command line, which runs where the model is. Commands parse, call and print."""

import logging
from pathlib import Path
from typing import Any

import click

import kit.cli
from kit.errors import NotInstalled

ENGINES = ["auto", "vllm", "embedded"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(kit.cli.version(), prog_name="trainer")
def cli() -> None:
    """Serve a model and train it with GRPO.

    \b
    Example:
      trainer serve --base-model tiny-random
      trainer models
      trainer doctor
      trainer finetune --config_file=config.yaml
    """


def devices(command: Any) -> Any:
    """Add the options that assign GPUs to the engine and the learner."""
    for name in ("learner", "engine"):
        text = f"GPUs for the {name}, such as 0,1.  [assigned automatically]"
        command = click.option(f"--{name}-devices", metavar="GPUS", help=text)(command)
    return command


@cli.command()
@click.option("--base-model", metavar="M", help="Model to load: built-in name, directory, hub id.")
@click.option("--engine", type=click.Choice(ENGINES), help="Engine that samples.  [auto]")
@click.option("--quantization", type=click.Choice(["fp8"]), help="Format of the frozen weights.")
@click.option("--host", help="Address to listen on.  [127.0.0.1]")
@click.option("--port", type=int, help="Port of the control API.  [7999]")
@click.option("--openai-port", type=int, help="Port of the OpenAI API.  [8000]")
@click.option("--state-dir", help="Directory for checkpoints and logs.  [.art]")
@devices
@click.option("--nodes", type=int, metavar="N", help="Machines that train together.  [1]")
@click.option("--nodes-host", metavar="HOST", help="Address where other machines join.")
@click.option("--nodes-port", type=int, metavar="PORT", help="Port where they join.  [7998]")
@click.option(
    "--idle-minutes", type=click.FloatRange(0), metavar="MINUTES", help="Exit when idle this long."
)
@click.option("--exit-when-idle", type=float, hidden=True)  # older name of `--idle-minutes`
@click.option("--max-hours", type=float, metavar="HOURS", help="Exit after this many hours.")
@click.option("--require-key", is_flag=True, default=None, help="Require the key on loopback too.")
@click.option("--cors", is_flag=True, default=None, help="Allow browser pages on loopback.")
@click.option("--config", "config_file", type=Path, metavar="YAML", help="Read settings from YAML.")
@click.option("--env-file", type=Path, metavar="FILE", help="Read variables from FILE.  [.env]")
def serve(
    config_file: Path | None,
    env_file: Path | None,
    idle_minutes: float | None,
    exit_when_idle: float | None,
    **flags: Any,
) -> None:
    """Serve the control API and the OpenAI API, and train on request.

    \b
    Example:
      trainer serve --base-model tiny-random
      trainer serve --config serve.yaml --port 7623
    """
    from kit.config import load, read_yaml
    from kit.settings import gather
    from trainer.config import ServerConfig

    if idle_minutes is not None and exit_when_idle is not None:
        raise click.UsageError(
            "`--exit-when-idle` is the older name of `--idle-minutes`: give only one of them"
        )
    flags["exit_when_idle"] = exit_when_idle if idle_minutes is None else idle_minutes
    file: dict[str, Any] = {}
    if config_file:
        load(ServerConfig, config_file)  # reports every fault with its line number
        file, _ = read_yaml(config_file)
    config = gather(ServerConfig, flags=flags, env_file=env_file, file=file)
    _require("fastapi", "uvicorn", "torch", "torchtune")
    _log()
    from trainer.server.app import serve

    serve(config)


@cli.command()
@click.option("--head", required=True, metavar="URL", help="Where the server accepts machines.")
@devices
@click.option("--node-dir", metavar="DIR", help="Directory for LoRAs and logs.  [.art/nodes]")
@click.option(
    "--patience",
    type=float,
    metavar="MINUTES",
    help="Exit when the server is unreachable this long.  [30]",
)
@click.option("--env-file", type=Path, metavar="FILE", help="Read variables from FILE.  [.env]")
def engine(env_file: Path | None, **flags: Any) -> None:
    """Join the server on another machine: sample for it and train with it.

    Connects to the server with ART_API_KEY and opens no port. The server decides what runs here.

    \b
    Example:
      trainer engine --head http://10.0.0.5:7998
    """
    from kit.settings import gather
    from trainer.config import NodeConfig

    config = gather(NodeConfig, flags=flags, env_file=env_file)
    _require("websockets", "torch", "torchtune")
    _log()
    from trainer.machines.node import run

    run(config)


@cli.command()
@click.option(
    "--config_file",
    "--config-file",
    type=Path,
    required=True,
    metavar="YAML",
    help="Config of the workflow and its training.",
)
@click.option(
    "--validation_dataset",
    "--validation-dataset",
    type=Path,
    metavar="FILE",
    help="Examples to evaluate on; they are never trained on.",
)
@click.option(
    "--validation_interval",
    "--validation-interval",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    metavar="N",
    help="Validate every N epochs.",
)
@click.option(
    "-o",
    "--override",
    "overrides",
    type=(str, str),
    multiple=True,
    metavar="NAME VALUE",
    help="Override one value of the file; may be repeated.",
)
@click.option("--resume", is_flag=True, help="Continue the run in the output directory.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def finetune(config_file: Path, as_json: bool, **options: Any) -> None:
    """Train an agent's model: sample, score and train, epoch by epoch.

    \b
    Example:
      trainer finetune --config_file=configs/finetune.yml
      trainer finetune --config_file=configs/finetune.yml \\
          --validation_dataset=data/val.json --validation_interval=5
      trainer finetune --config_file=configs/finetune.yml -o finetuning.num_epochs 50
    """
    from trainer.harness.finetune import closing_lines, finetune, summary

    try:
        result = finetune(config_file, **options)
    except KeyboardInterrupt:
        kit.cli.note("Stopped; run the same command with `--resume` to continue")
        raise click.exceptions.Exit(130) from None
    if result is None:
        return
    for line in closing_lines(result):
        kit.cli.note(line)
    if as_json:
        kit.cli.data(summary(result))


state_dir = click.option(
    "--state-dir",
    type=Path,
    default=Path(".art"),
    show_default=True,
    help="The server's state directory.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")


@cli.command()
@state_dir
@as_json
def models(state_dir: Path, as_json: bool) -> None:
    """List the models that were trained here, with their steps and rewards.

    \b
    Example:
      trainer models
      trainer models --state-dir ~/sky_workdir/.art --json
    """
    from trainer.runs import list_runs

    rows = [run.summary() for run in list_runs(state_dir)]
    if as_json:
        kit.cli.data(rows)
        return
    for row in rows:
        reward = "-" if row["reward"] is None else f"{row['reward']:.3f}"
        name = f"{row['project']}/{row['name']}"
        click.echo(f"{name}\tstep {row['step']}\treward {reward}\t{row['base_model']}")
    if not rows:
        kit.cli.note(f"There is no model in `{state_dir}` yet")


@cli.command()
@click.argument("run", required=False)
@state_dir
@as_json
def doctor(run: str | None, state_dir: Path, as_json: bool) -> None:
    """Report why RUN does not learn, likeliest cause first; exit 1 if there is a cause.

    \b
    Example:
      trainer doctor
      trainer doctor my_project/my_run --json
    """
    from trainer.doctor import examine
    from trainer.runs import find_run

    examined = find_run(state_dir, run)
    findings = examine(examined)
    if as_json:
        kit.cli.data([vars(finding) for finding in findings])
    for finding in [] if as_json else findings:
        click.echo(f"{finding.problem}\n  hint: {finding.hint}")
    if findings:
        raise SystemExit(1)
    kit.cli.note(f"Found no problem with `{examined.project}/{examined.name}`")


@cli.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--base-model", metavar="M", help="Base model, if it is elsewhere now.")
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="Data type of the exported weights.",
)
def export(checkpoint: Path, output: Path, base_model: str | None, dtype: str) -> None:
    """Merge CHECKPOINT into its base model and write it to OUTPUT as a Hugging Face model.

    \b
    Example:
      trainer export checkpoints/demo/models/nice/checkpoints/0005 nice-merged
    """
    _require("torch", "torchtune")
    from trainer.export import export

    path = export(checkpoint, output, base_model=base_model, dtype=dtype)
    click.echo(path)
    kit.cli.note(f"Load it with `AutoModelForCausalLM.from_pretrained({str(path)!r})`")


def _log() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request to vLLM
    logging.getLogger("websockets").setLevel(logging.WARNING)


def _require(*packages: str) -> None:
    """Raise an error with a hint if a package is missing, without importing it."""
    import importlib.util

    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        raise NotInstalled(
            f"This command needs {names}, which is not installed",
            hint="Run `scripts/install`, or on a GPU machine `scripts/install --only cluster`",
        )


def main() -> None:
    kit.cli.run(cli, "trainer")
