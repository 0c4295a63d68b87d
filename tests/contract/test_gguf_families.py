"""Small random models of every family in llama.cpp, and their chats in Go's template engine."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.contract.test_gguf import SAMPLING, llama_server, logprobs_of
from tests.environments import python_of, run_client
from trainer import checkpoint
from trainer.base_model.architecture import read_architecture
from trainer.base_model.resolve import resolve
from trainer.base_model.smollm2 import NAME as SMOLLM2
from trainer.base_model.tokenizer import Tokenizer
from trainer.config import LoraConfig
from trainer.errors import ModelError
from trainer.export import Form, export
from trainer.export.modelfile import find_turns
from trainer.learner.state import State
from trainer.policy.lora import lora_parameters
from trainer.policy.model import assemble, load_model
from trainer.policy.weights import hugging_face_names

LORA = LoraConfig(rank=4, alpha=8)
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "llama3": {"rope_scaling": LLAMA3},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "num_key_value_heads": 2},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("look", "ask")
]
CALLS = [{"id": "a", "type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": "Well.", "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "a", "name": "look", "content": "a cat"},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "Thanks"},
    ],
]


def make(directory: Path, **changes: Any) -> Path:
    """`tiny-random` with other settings, and random weights for them."""
    shutil.copytree(resolve("tiny-random"), directory)
    config = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = assemble(read_architecture(directory), None)
    random = torch.Generator().manual_seed(5)
    tensors = {
        theirs: torch.randn(model.get_parameter(ours).shape, generator=random) * 0.1
        + (1.0 if "norm" in theirs else 0.0)
        for ours, theirs in hugging_face_names(model).items()
    }
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_computes_every_family_as_we_do(family: str, tmp_path: Path) -> None:
    base = make(tmp_path / "base", **FAMILIES[family])
    policy = load_model(base, lora=LORA, dtype=torch.float32, device=torch.device("cpu"))
    random = torch.Generator().manual_seed(6)
    for parameter in lora_parameters(policy).values():
        parameter.data = torch.randn(parameter.shape, generator=random) * 0.1
    saved = checkpoint.save(
        tmp_path / "checkpoints",
        1,
        lambda path: State(policy, 0).write(path, base_model=str(base)),
        {"base_model": str(base)},
    )
    output = export(saved, tmp_path / "out", form=Form(gguf="f32"))
    prompt = list(range(32, 122))
    with llama_server(output / "out-F32.gguf") as server:
        # Of bytes that are no character the server returns no logprobs.
        body = {"prompt": prompt, "n_predict": 40, "n_probs": 1, "grammar": "root ::= [ -~]+"}
        body |= SAMPLING
        found = server.post("/completion", json=body).json()["completion_probabilities"]
    assert len(found) == 40
    ours = logprobs_of(policy, prompt, [token["id"] for token in found])
    theirs = torch.tensor([token["logprob"] for token in found])
    torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0)


def test_an_architecture_that_llama_cpp_lacks_is_refused_by_name(tmp_path: Path) -> None:
    base = make(tmp_path / "base", model_type="qwen3", rope_scaling=LLAMA3)
    policy = load_model(base, lora=LORA, dtype=torch.float32, device=torch.device("cpu"))
    saved = checkpoint.save(
        tmp_path / "checkpoints",
        1,
        lambda path: State(policy, 0).write(path, base_model=str(base)),
        {"base_model": str(base)},
    )
    with pytest.raises(ModelError, match="no `qwen3` with RoPE scaling `llama3`"):
        export(saved, tmp_path / "out", form=Form(gguf="f16"))


@pytest.mark.parametrize("name", ["tiny-random", SMOLLM2])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
def test_the_modelfiles_template_renders_in_go_as_the_original(
    name: str, tools: Any, tmp_path: Path
) -> None:
    tokenizer = Tokenizer(resolve(name))
    turns = find_turns(tokenizer)
    assert turns is not None
    (tmp_path / "template").write_text(turns.template())
    for chat in CHATS:
        (tmp_path / "values.json").write_text(json.dumps(ollama_values(chat, tools)))
        python = python_of("llama-cpp", ours=False)
        found = run_client(python, "render_go.py", "template", "values.json", cwd=tmp_path)
        assert found == tokenizer.render(chat, tools)


def ollama_values(chat: list[dict[str, Any]], tools: Any) -> dict[str, Any]:
    """A chat as Ollama hands it to a template; tools and arguments print as JSON."""
    messages = [
        {
            "Role": message["role"],
            "Content": message["content"],
            "ToolCalls": [
                {
                    "Function": {
                        "Name": call["function"]["name"],
                        "Arguments": json.dumps(call["function"]["arguments"]),
                    }
                }
                for call in message.get("tool_calls", [])
            ],
        }
        for message in chat
    ]
    system = "\n".join(message["content"] for message in chat if message["role"] == "system")
    return {"System": system, "Messages": messages, "Tools": [json.dumps(it) for it in tools or []]}


def test_a_template_without_fixed_texts_is_left_to_ollama(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(resolve("tiny-random"), directory)
    template = "{% for m in messages %}{{ m.content | upper }};{% endfor %}"
    (directory / "chat_template.jinja").write_text(template)
    assert find_turns(Tokenizer(directory)) is None


def test_stop_tokens_are_in_the_modelfile(tmp_path: Path) -> None:
    from trainer.export.modelfile import write_modelfile

    write_modelfile(tmp_path / "Modelfile", "x.gguf", resolve("tiny-random"), adds_bos=False)
    text = (tmp_path / "Modelfile").read_text()
    assert text.startswith('FROM ./x.gguf\nTEMPLATE """')
    assert re.findall(r"^PARAMETER stop (.*)$", text, re.M) == ['"<|endoftext|>"', '"<|im_end|>"']
