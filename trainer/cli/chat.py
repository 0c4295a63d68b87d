"""`trainer chat`: talks to a served model in the terminal."""

import os
import sys
import time
from collections.abc import Iterator

import click

import kit.cli
from kit.errors import KitError


@click.command()
@click.argument("model")
@click.option(
    "--url",
    default="http://127.0.0.1:8000",
    show_default=True,
    metavar="URL",
    help="OpenAI port of the server.",
)
@click.option("--system", metavar="TEXT", help="First message, which instructs the model.")
@click.option("--max-tokens", type=click.IntRange(1), metavar="N", help="Longest answer.")
def chat(model: str, url: str, system: str | None, max_tokens: int | None) -> None:
    """Talk to MODEL: NAME follows the newest step, NAME@STEP is one checkpoint.

    Each line is a message, and the conversation is kept until Ctrl-D. A pipe gets the plain
    answers, one after the other. The key of the server is read from ART_API_KEY.

    \b
    Example:
      trainer chat my-agent@24
      trainer chat Qwen/Qwen2.5-1.5B-Instruct@base --system "Answer in one word."
      echo "How much does a lamp cost?" | trainer chat my-agent > answer.txt
    """
    from trainer.client.talk import Conversation

    key = os.environ.get("ART_API_KEY")
    conversation = Conversation(url, model, key=key, system=system, max_tokens=max_tokens)
    terminal = sys.stdin.isatty()
    try:
        if conversation.is_starting():
            kit.cli.note("The server is starting; waiting for it")
            while conversation.is_starting():
                time.sleep(0.5)
        if terminal:
            kit.cli.note(f"Talking to `{model}`; end with Ctrl-D")
        for line in _lines(terminal):
            try:
                for piece in conversation.say(line):
                    click.echo(piece, nl=False)
                click.echo()
            except KitError as error:
                if not terminal:
                    raise
                kit.cli.show_error(error)
    except KeyboardInterrupt:
        click.echo()
        raise click.exceptions.Exit(130) from None
    finally:
        conversation.close()


def _lines(terminal: bool) -> Iterator[str]:
    """The lines of stdin that are not empty; a terminal shows where to type."""
    while True:
        if terminal:
            click.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")
