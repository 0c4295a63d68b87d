"""The commands of `trainer` that start what samples and trains."""

from pathlib import Path
from typing import Any

import click

from trainer.cli.options import log_to_stderr, require

ENGINES = ["auto", "vllm", "embedded"]


def devices(command: Any) -> Any:
    """Add the options that assign GPUs to the engine and the learner."""
    for name in ("learner", "engine"):
        text = f"GPUs for the {name}, such as 0,1.  [assigned automatically]"
        command = click.option(f"--{name}-devices", metavar="GPUS", help=text)(command)
    return command


@click.command()
@click.option("--base-model", metavar="M", help="Model to load: built-in name, directory, hub id.")
@click.option(
    "--from",
    "checkpoint",
    metavar="CHECKPOINT",
    help="Serve this pulled checkpoint, and train nothing.",
)
@click.option("--engine", type=click.Choice(ENGINES), help="Engine that samples.  [auto]")
@click.option("--quantization", type=click.Choice(["fp8"]), help="Format of the frozen weights.")
@click.option("--host", help="Address to listen on.  [127.0.0.1]")
@click.option("--port", type=int, help="Port of the control API.  [7999]")
@click.option("--openai-port", type=int, help="Port of the OpenAI API.  [8000]")
@click.option("--state-dir", help="Directory for checkpoints and logs.  [.art]")
@devices
@click.option(
    "--ray", metavar="ADDRESS", help="Use the machines of a Ray cluster: auto, HOST:PORT."
)
@click.option("--nodes", type=int, metavar="N", help="Machines that train together.  [1]")
@click.option("--engine-nodes", type=int, metavar="N", help="Machines that hold one model.  [1]")
@click.option("--learner-port", type=int, metavar="PORT", help="Port for the learners.  [7997]")
@click.option("--keep-rollouts", metavar="SIZE", help="Disk space for trained attempts.  [2GB]")
@click.option(
    "--idle-minutes", type=click.FloatRange(0), metavar="MINUTES", help="Exit when idle this long."
)
@click.option("--exit-when-idle", type=float, hidden=True)  # older name of `--idle-minutes`
@click.option("--max-hours", type=float, metavar="HOURS", help="Exit after this many hours.")
@click.option("--max-requests", type=int, metavar="N", help="Requests, waiting ones too.  [1024]")
@click.option("--take-turns", is_flag=True, default=None, help="Do not sample while a step trains.")
@click.option("--mps", is_flag=True, default=None, help="Sample and train at once on a shared GPU.")
@click.option("--require-key", is_flag=True, default=None, help="Require the key on loopback too.")
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="Other name of this server; may be repeated.",
)
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
      trainer serve --from checkpoints/demo/models/demo/checkpoints/0008
    """
    from kit.config import load
    from kit.settings import gather
    from kit.yaml_files import read_yaml
    from trainer.config import ServerConfig

    if idle_minutes is not None and exit_when_idle is not None:
        raise click.UsageError(
            "`--exit-when-idle` is the older name of `--idle-minutes`: give only one of them"
        )
    flags["exit_when_idle"] = exit_when_idle if idle_minutes is None else idle_minutes
    flags["allowed_hosts"] = flags["allowed_hosts"] or None
    file: dict[str, Any] = {}
    if config_file:
        load(ServerConfig, config_file)  # reports every fault with its line number
        file, _ = read_yaml(config_file)
    config = gather(ServerConfig, flags=flags, env_file=env_file, file=file)
    require("fastapi", "uvicorn", "torch", "torchtune")
    log_to_stderr()
    from trainer.server.app import serve
    from trainer.server.pulled import with_checkpoint

    if config.checkpoint:
        config = with_checkpoint(config, base_model=flags["base_model"])
    serve(config)
