"""`trainer export`: a trained model for other programs and for hubs."""

from pathlib import Path

import click

import kit.cli
from kit.errors import ConfigError
from trainer.cli.options import require, state_dir
from trainer.runs import find_checkpoint


@click.command()
@click.argument("checkpoint")
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--base-model", metavar="M", help="Base model, if it is elsewhere now.")
@click.option("--lora", is_flag=True, help="Write the LoRA alone instead of the merged model.")
@click.option(
    "--gguf",
    metavar="TYPE",
    help="Write GGUF, for llama.cpp and Ollama: f32, bf16, f16, q8_0, q5_1, q5_0, q4_1 or q4_0.",
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="Data type of a merged Hugging Face model.  [default: bfloat16]",
)
@click.option(
    "--push",
    metavar="REPO",
    help="Upload OUTPUT to this repository of the hub in `HF_ENDPOINT`, with `HF_TOKEN`.",
)
@state_dir
def export(
    checkpoint: str,
    output: Path,
    base_model: str | None,
    lora: bool,
    gguf: str | None,
    dtype: str | None,
    push: str | None,
    state_dir: Path,
) -> None:
    """Write the model of CHECKPOINT to the directory OUTPUT, with a model card.

    CHECKPOINT is a directory, or NAME or NAME@STEP of a model in the state directory. By default
    its LoRA is merged into the base model, and the result is a Hugging Face model.

    \b
    Example:
      trainer export checkpoints/demo/models/nice/checkpoints/0005 nice-merged
      trainer export nice@5 nice-gguf --gguf q8_0
      trainer export nice@5 nice-lora --lora --gguf f16
      trainer export nice nice-merged --push me/nice
    """
    if dtype and (gguf or lora):
        raise ConfigError(
            "`--dtype` is for a merged Hugging Face model",
            hint="Remove it; `--gguf` has types of its own, and a LoRA is copied as it is",
        )
    require("torch", "torchtune")
    from trainer.export import Form, Hub, export

    path = find_checkpoint(state_dir, checkpoint)
    hub = Hub(push) if push else None
    if hub:
        hub.create()  # a hub that refuses does so before anything is written
    form = Form(lora=lora, gguf=gguf and gguf.lower(), dtype=dtype)
    export(path, output, base_model=base_model, form=form, reuse=hub is not None)
    click.echo(output)
    if hub:
        kit.cli.note(f"Pushed to {hub.upload(output, f'Export of step {int(path.name)}')}")
    elif gguf and lora:
        kit.cli.note("Load it with `llama-server -m BASE.gguf --lora FILE`")
    elif gguf:
        kit.cli.note(f"Load it with `ollama create NAME -f {output}/Modelfile`")
    elif not lora:
        kit.cli.note(f"Load it with `AutoModelForCausalLM.from_pretrained({str(output)!r})`")
