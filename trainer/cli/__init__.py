"""The `trainer` command line, which runs where the model is. Commands parse, call and print.

One module per family of commands; `COMMANDS` lists them all.
"""

import click

import kit.cli
from trainer.cli.chat import chat
from trainer.cli.dry_run import dry_run
from trainer.cli.evaluate import evaluate
from trainer.cli.export import export
from trainer.cli.finetune import finetune
from trainer.cli.runs import doctor, models
from trainer.cli.serve import serve
from trainer.cli.view import view
from trainer.cli.watch import report, watch

COMMANDS = [
    serve,
    chat,
    finetune,
    dry_run,
    evaluate,
    models,
    doctor,
    export,
    view,
    watch,
    report,
]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(kit.cli.version(), prog_name="trainer")
def cli() -> None:
    """Serve a model and train it with GRPO.

    \b
    Example:
      trainer serve --base-model tiny-random
      trainer models
      trainer doctor
      trainer finetune finetune.yaml
    """


for _command in COMMANDS:
    cli.add_command(_command)


def main() -> None:
    kit.cli.run(cli, "trainer")
