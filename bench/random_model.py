"""Creates a model directory of a given shape with random weights, for timing engine and learner.

    python bench/random_model.py 7b TOKENIZER_DIR OUT_DIR

The tokenizer may be any model's, because text sampled from random weights has no meaning.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.shapes import QWEN3_4B, QWEN25_7B, random_policy
from trainer.policy.weights import hugging_face_names

SHAPES = {"7b": QWEN25_7B, "4b": QWEN3_4B}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True)
    for path in arguments.tokenizer.glob("tokenizer*"):
        shutil.copy(path, arguments.out)
    eos = json.loads((arguments.tokenizer / "config.json").read_text())["eos_token_id"]
    config = {**SHAPES[arguments.shape], "eos_token_id": eos, "hidden_act": "silu"}
    (arguments.out / "config.json").write_text(json.dumps(config, indent=2))
    policy = random_policy(config, 8, torch.device("cuda"), compiled=False)
    names, parameters = hugging_face_names(policy), dict(policy.named_parameters())
    for shard in range(8):
        mine = list(names)[shard::8]
        tensors = {names[name]: parameters[name].detach().bfloat16().cpu() for name in mine}
        save_file(tensors, arguments.out / f"model-{shard}.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
