"""Measures how busy the harness keeps the backend: the share of time in sampling and training.

    trainer serve --base-model HuggingFaceTB/SmolLM2-135M-Instruct &
    python bench/loop.py [--epochs 4] [--port 7999] [--openai-port 8000] [--base-model NAME]
    python bench/loop.py --cuda      serves and trains a 7B shape on this GPU; writes its table

The target is at least 90 %. The rest is the harness's own work: scoring, files, the plot.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.report import write_report
from trainer.harness.finetune import finetune

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--port", type=int, default=7999)
    parser.add_argument("--openai-port", type=int, default=8000)
    parser.add_argument("--base-model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--cuda", action="store_true", help="report on `scripts/gpu-smoke 7b`")
    arguments = parser.parse_args()
    if arguments.cuda:
        return on_gpu()
    with tempfile.TemporaryDirectory() as output:
        settings = {
            "llms.policy.base_url": f"http://127.0.0.1:{arguments.openai_port}/v1",
            "llms.policy.model_name": "bench-loop",
            "trainer_adapters.backend.backend.name": "bench-loop",
            "trainer_adapters.backend.backend.port": str(arguments.port),
            "trainer_adapters.backend.backend.base_model": arguments.base_model,
            "finetuning.num_epochs": str(arguments.epochs),
            "finetuning.output_dir": output,
            "eval.general.output_dir": f"{output}/runs",
        }
        started = time.monotonic()
        config = ROOT / "examples" / "temporal_clue" / "config.yaml"
        result = finetune(config, overrides=list(settings.items()))
        wall = time.monotonic() - started
        assert result is not None and result.history is not None
        rows = result.history.metrics
    sampled = sum(row["time/sample_s"] for row in rows)
    trained = sum(row["time/train_s"] for row in rows)
    trajectories = sum(row["num_trajectories"] for row in rows)
    print(
        json.dumps(
            {
                "epochs": len(rows),
                "wall_s": round(wall, 2),
                "sampling_s": round(sampled, 2),
                "training_s": round(trained, 2),
                "share_sampling_and_training": round((sampled + trained) / wall, 4),
                "trajectories_per_s": round(trajectories / wall, 3),
            }
        )
    )


def on_gpu() -> None:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as out:
        subprocess.run([ROOT / "scripts" / "gpu-smoke", "7b", out], check=True)
        table = (Path(out) / "report.md").read_text().strip()
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    what = f"A 7B shape served and trained on one {card} by `scripts/gpu-smoke 7b`"
    write_report("loop_cuda", what, table, load, packages=("torch", "vllm", "torchtune"))


if __name__ == "__main__":
    main()
