"""Runs our hooks in the classes of vLLM's GPU workers, and prints facts as JSON: `name -> fact`.

`test_kernels_in_vllm.py` runs it in the environment of vLLM for CPUs, where Triton's interpreter
runs our kernels and vLLM's. vLLM imports our hooks in `loading`; nothing may import them before.
"""

import json
import logging
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.backends import backends

# Before vLLM is imported: it uses Triton only with an active driver, and our hooks need a Hopper.
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
torch.cuda.get_device_capability = lambda *_: (9, 0)

from attention_in_vllm import HEADS, KV_HEADS, SIZE, attention  # noqa: E402  # beside this file
from vllm.config import CUDAGraphMode, VllmConfig  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.lora.layers import LoRAMapping  # noqa: E402
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA  # noqa: E402
from vllm.lora.ops.triton_ops import lora_shrink_op  # noqa: E402
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU  # noqa: E402
from vllm.model_executor.models import registry  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.attention.backends import flash_attn  # noqa: E402
from vllm.v1.worker import gpu_worker  # noqa: E402
from vllm.v1.worker.gpu import buffer_utils  # noqa: E402
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers  # noqa: E402
from vllm.v1.worker.gpu.sample import logprob, sampler  # noqa: E402
from vllm.v1.worker.gpu.states import RequestState  # noqa: E402
from vllm.v1.worker.worker_base import WorkerWrapperBase  # noqa: E402

CPU, RANK, WORDS = torch.device("cpu"), 8, 500
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": HEADS * SIZE,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "vocab_size": WORDS,
    "max_position_embeddings": 256,
    "torch_dtype": "float16",
}
REPLACED = {
    "FlashAttentionMetadataBuilder.build": (flash_attn.FlashAttentionMetadataBuilder, "build"),
    "FlashAttentionImpl.forward": (flash_attn.FlashAttentionImpl, "forward"),
    "PunicaWrapperGPU.add_lora_linear": (PunicaWrapperGPU, "add_lora_linear"),
    "sampler.gumbel_sample": (sampler, "gumbel_sample"),
    "logprob.compute_token_logprobs": (logprob, "compute_token_logprobs"),
    "Worker.init_device": (gpu_worker.Worker, "init_device"),
    "torch.cuda.Stream.__new__": (torch.cuda.Stream, "__new__"),
}


class Counted:
    """A kernel of ours that counts its launches."""

    def __init__(self, module: Any, name: str) -> None:
        self.launches, self.kernel = 0, getattr(module, name)
        setattr(module, name, self)

    def __getitem__(self, grid: Any) -> Any:
        self.launches += 1
        return self.kernel[grid]


def vllm_config(settings: dict[str, Any]) -> VllmConfig:
    """What vLLM configures with our settings, and with what it selects for a GPU."""
    registry._run_in_subprocess = lambda look: look()  # that process would import vLLM again
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(MODEL))
        config = EngineArgs(
            model=directory,
            skip_tokenizer_init=True,
            max_num_seqs=16,
            enable_lora=True,
            max_loras=2,
            max_lora_rank=RANK,
            **settings,
        ).create_engine_config()
    config.parallel_config.worker_cls = "vllm.v1.worker.gpu_worker.Worker"
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    config.compilation_config.max_cudagraph_capture_size = 64
    return config


def loading(config: VllmConfig) -> dict[str, Any]:
    """Let vLLM create a GPU worker, which loads our hooks, and see what they replaced."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("vllm").addHandler(handler)
    own = {name: getattr(*place) for name, place in REPLACED.items()}
    wrapper = WorkerWrapperBase(rpc_rank=0)
    others = {"local_rank": 0, "rank": 0, "distributed_init_method": "unused"}
    wrapper.init_worker([{"vllm_config": config, **others}])
    return {
        "worker is extended": isinstance(wrapper.worker, sys.modules["gpu_kernels"].Worker),
        "warnings": [it for it in warnings if "without our" in it or "no priority" in it],
        "not replaced": [name for name, place in REPLACED.items() if own[name] is getattr(*place)],
    }


def loras(config: VllmConfig) -> dict[str, Any]:
    """Tokens with one of two LoRAs or none, in a joined layer; long prompts stay with vLLM."""
    import lora_kernel
    import lora_linear

    own = lora_shrink_op.get_lora_op_configs
    # vLLM divides a product among 64 programs, for which the interpreter needs seconds.
    lora_shrink_op.get_lora_op_configs = lambda *given, **named: (
        own(*given, **named) | {"split_k": 1}
    )
    launches = Counted(lora_kernel, "_expand")
    width, outputs, facts = 64, (32, 16, 16), {}
    wrapper = PunicaWrapperGPU(64, 16, CPU, lora_config=config.lora_config)
    weight = torch.randn(width, sum(outputs)).half() / 8
    a = tuple(torch.randn(2, 1, RANK, width).half() / 8 for _ in outputs)
    b = tuple(torch.randn(2, 1, count, RANK).half() / 2 for count in outputs)
    parts = SimpleNamespace(
        punica_wrapper=wrapper, lora_a_stacked=a, lora_b_stacked=b, output_slices=outputs
    )

    def layer(x: Tensor) -> Tensor:
        return BaseLinearLayerWithLoRA._apply_lora_to_output(parts, x, x @ weight).relu()

    def exact(x: Tensor, ids: list[int]) -> Tensor:
        y = (x @ weight).float()
        for row, number in enumerate(ids):
            if number:
                lows = (x[row].float() @ it[number - 1, 0].float().T for it in a)
                ups = (it[number - 1, 0].float().T for it in b)
                y[row] += torch.cat([low @ up for low, up in zip(lows, ups, strict=True)])
        return y.relu()

    # Layers that vLLM compiles take any number of tokens, and have no graph breaks.
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for name, run, ids, most in (
        ("eager", layer, [1, 0, 2, 2] * 5, 64),
        ("eager, none", layer, [0] * 20, 64),
        ("eager, long", layer, [1, 0, 2, 2] * 5, 19),
        ("compiled", compiled, [1, 0, 2, 2] * 5, 64),
        ("compiled, fewer", compiled, [2, 0, 1], 64),
        ("compiled, none", compiled, [0] * 20, 64),
        ("compiled, long", compiled, [1, 0, 2, 2] * 5, 19),
    ):
        lora_linear.MOST_TOKENS, launches.launches = most, 0
        wrapper.update_metadata(LoRAMapping(tuple(ids), tuple(ids)), [1, 2], 2, WORDS)
        x = torch.randn(len(ids), width).half()
        with torch.inference_mode():
            found, expected = run(x), exact(x, ids)
        facts[f"LoRA {name}"] = float((found.float() - expected).norm() / expected.norm())
        facts[f"our LoRA kernels {name}"] = launches.launches
    return facts


def sampling(config: VllmConfig) -> dict[str, Any]:
    """A step of vLLM's sampler for requests that must get a certain word, and others."""
    import sampling_kernel

    buffer_utils.is_uva_available = lambda: False  # memory that a GPU reads from its host
    draws, logprobs = (Counted(sampling_kernel, name) for name in ("_draw", "_logprobs"))
    only, drawn = 17, {"temperature": 0.7, "logprobs": 2}
    settings = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.01},
        {"allowed_token_ids": [only]},
        {"temperature": 0.7},
        {**drawn, "seed": 5},
        {**drawn, "seed": 6},
    ]
    count = len(settings)
    logits = 3 * torch.randn(count, WORDS)
    logits[4] = -torch.inf  # as the mask of a grammar
    logits[4, only] = 0.5
    logits[5:] = 0  # any word is as likely
    states = RequestState(count, 64, 64, 0, WORDS, CPU)
    samples = sampler.Sampler(config, count, WORDS, CPU, states)
    for row, setting in enumerate(settings):
        states.add_request(str(row), 1, [3], 0, 8)
        samples.add_request(states.req_id_to_index[str(row)], SamplingParams(**setting))
    states.apply_staged_writes()
    samples.apply_staged_writes()
    batch = InputBatch.make_dummy(count, count, InputBuffers(count, count, CPU))
    slots = torch.tensor([states.req_id_to_index[str(row)] for row in range(count)])
    assert slots.tolist() != list(range(count))  # or a mistake in them would show nowhere
    batch.idx_mapping = batch.expanded_idx_mapping = slots
    batch.idx_mapping_np = slots.numpy()
    outputs = []
    for position in (0, 0, 1):
        batch.positions = torch.full_like(batch.positions, position)
        outputs.append(samples(logits.clone(), batch))
    table, words = outputs[0].logprobs_tensors, [it.sampled_token_ids[:, 0] for it in outputs]
    exact = logits.log_softmax(-1).gather(1, table.logprob_token_ids)
    differences = torch.where(table.logprobs == exact, 0, table.logprobs - exact)  # both -inf
    return {
        "likeliest words": words[0][:3].tolist() == logits[:3].argmax(-1).tolist(),
        "only word": words[0][3:5].tolist() == [only] * 2,
        "seeds repeat": torch.equal(words[0][5:], words[1][5:]),
        "words by seed and position": words[0][5:].tolist() + words[2][5:].tolist(),
        "words of logprobs": torch.equal(table.logprob_token_ids[:, 0], words[0]),
        "logprobs": float(differences.abs().max()),
        "our sampling kernels": [draws.launches, logprobs.launches],
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    config = vllm_config(json.loads(sys.argv[1]))
    facts = loading(config)
    import decode_attention

    decode_attention.FEWEST = 1  # these batches are small
    facts |= {**attention(config), **loras(config), **sampling(config)}
    sys.stdout.write(json.dumps(facts) + "\n")
