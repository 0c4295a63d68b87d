"""Every setting in a request takes effect or is refused by name."""

from pathlib import Path
from typing import Any

import pydantic
import pytest

from kit.manifest import write_manifest
from trainer.config import LoraConfig, ServerConfig
from trainer.errors import BadRequest, NotFound, Unsupported
from trainer.server.client_settings import check_internal_config, inference_key, lora_config
from trainer.server.model import Model
from trainer.server.step_settings import grpo_config, max_seq_length
from trainer.server.wire import ModelWire, TrainRequest


def model(**internal: Any) -> ModelWire:
    return ModelWire.model_validate(
        {"name": "m", "project": "p", "base_model": "b", "_internal_config": internal}
    )


def step(
    config: Any = None,
    dev_config: Any = None,
    at: Any = None,
    parent: int | None = None,
    **internal: Any,
) -> Any:
    request = TrainRequest(
        model=model(**internal),
        trajectory_groups=[],
        config=config or {},
        dev_config=dev_config or {},
        digest="",
    )
    steps = at or {0: "", 3: ""}
    run = Model("p", "m", Path("m"), LoraConfig(), step=max(steps), steps=steps)
    return grpo_config(request, run, run.step if parent is None else parent)


def test_the_settings_of_nats_guide_are_accepted() -> None:
    wire = model(
        init_args={"max_seq_length": 1024, "dtype": None},
        engine_args={"gpu_memory_utilization": 0.9, "tensor_parallel_size": 1},
        trainer_args={"learning_rate": 1e-6, "beta": 0.1},
    )
    check_internal_config(wire, "embedded")
    check_internal_config(wire, "vllm")
    assert max_seq_length(wire) == 1024
    check_internal_config(model(init_args=None, engine_args=None, trainer_args=None), "embedded")


def test_the_yaml_overrides_nats_defaults_and_a_steps_settings_override_both() -> None:
    nat = {"learning_rate": 5e-5, "kl_penalty_coef": 0.0}
    yaml = {"learning_rate": 1e-6, "beta": 0.1}
    config = step(nat, trainer_args=yaml)
    assert (config.learning_rate, config.kl_penalty_coef) == (1e-6, 0.1)
    assert step(nat, {"learning_rate": 3e-4, "ppo": None}, trainer_args=yaml).learning_rate == 3e-4
    assert step({"learning_rate": 1e-4, "beta": 0.2}).kl_penalty_coef == 0.2


def test_tinkers_settings_of_optimizer_and_loss_take_effect() -> None:
    adam = {"learning_rate": 1e-4, "beta1": 0.8, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0}
    config = step(dev_config={"adam_params": {**adam, "grad_clip_norm": 0.0}})
    assert (config.learning_rate, config.adam_beta1, config.adam_beta2) == (1e-4, 0.8, 0.95)
    assert (config.adam_epsilon, config.weight_decay) == (1e-12, 0.0)
    assert config.max_grad_norm > 1e6
    clip = {"clip_low_threshold": 0.75, "clip_high_threshold": 1.5}
    assert step(dev_config={"loss_fn_config": clip}).clip_range == (0.75, 1.5)
    with pytest.raises(Unsupported, match=r"`adam_params\.momentum`"):
        step(dev_config={"adam_params": {"momentum": 0.9}})
    for bad in ({"adam_params": [1]}, {"adam_params": {"beta1": "x"}}):
        with pytest.raises(BadRequest, match="adam_params"):
            step(dev_config=bad)


def test_the_reference_is_the_checkpoint_of_the_named_step() -> None:
    config = {"kl_penalty_coef": 0.1, "kl_penalty_reference_step": 3}
    assert step(dev_config=config).kl_ref_adapter_path == "m/checkpoints/0003"
    with pytest.raises(NotFound, match=r"`kl_penalty_reference_step`.*no such checkpoint"):
        step(dev_config={**config, "kl_penalty_reference_step": 2})
    for wrong in ("3", [3], -1, True):
        with pytest.raises(BadRequest, match="`kl_penalty_reference_step` is"):
            step(dev_config={**config, "kl_penalty_reference_step": wrong})


def test_the_reference_may_lag_behind_the_policy_and_starts_at_the_base_model() -> None:
    config = {"kl_penalty_coef": 0.1, "kl_penalty_step_lag": 2}
    at = {0: "", 3: "", 4: "", 5: ""}
    assert step(dev_config=config, at=at).kl_ref_adapter_path == "m/checkpoints/0003"
    config["kl_penalty_step_lag"] = 9
    assert step(dev_config=config, at=at).kl_ref_adapter_path == "m/checkpoints/0000"
    assert step(dev_config=config, at={3: ""}).kl_ref_adapter_path is None
    with pytest.raises(BadRequest, match="Both"):
        step(dev_config={**config, "kl_penalty_reference_step": 3})
    with pytest.raises(BadRequest, match="`kl_penalty_step_lag` needs `kl_penalty_coef`"):
        step(dev_config={"kl_penalty_step_lag": 2})


def test_the_reference_lags_behind_the_step_that_is_trained_from_though_it_is_under_way() -> None:
    config = {"kl_penalty_coef": 0.1, "kl_penalty_step_lag": 1}
    assert step(dev_config=config, parent=6).kl_ref_adapter_path == "m/checkpoints/0005"
    config["kl_penalty_step_lag"] = 3
    assert step(dev_config=config, parent=6).kl_ref_adapter_path == "m/checkpoints/0003"
    with pytest.raises(NotFound, match="refers to step `2`"):
        step(dev_config=config, parent=5)


def test_a_reference_by_its_path_is_a_checkpoint_of_this_server(tmp_path: Path) -> None:
    state, elsewhere = tmp_path / ".art", tmp_path / "elsewhere"
    kept = state / "p" / "models" / "other" / "checkpoints" / "0002"
    kept.mkdir(parents=True)
    shape = LoraConfig().model_dump(mode="json", exclude={"seed"})
    write_manifest(kept, {"base_model": "tiny-random", "lora": shape})
    (elsewhere / "q/models/m/checkpoints/0001").mkdir(parents=True)
    (kept.parent / "0003").symlink_to(elsewhere, target_is_directory=True)
    run = Model("p", "m", state / "p" / "models" / "m", LoraConfig())

    def reference(path: Any) -> Any:
        config = {"kl_penalty_coef": 0.1, "kl_ref_adapter_path": path}
        wire = TrainRequest(model=model(), trajectory_groups=[], dev_config=config, digest="")
        return grpo_config(wire, run, 0).kl_ref_adapter_path

    assert reference(str(kept)) == str(kept.resolve())
    for path in (
        *("/etc", str(elsewhere), str(elsewhere / "q/models/m/checkpoints/0001"), str(state)),
        *(str(kept.parent / "0003"), str(kept.parent), f"{kept}/../0009", "a\0b", "x" * 5000, 7),
    ):
        with pytest.raises(BadRequest, match="which is not a checkpoint of this server"):
            reference(path)
    own = {"base_model": "tiny-random", "lora": shape}
    run.path(0).mkdir(parents=True)
    write_manifest(run.path(0), own)
    assert reference(str(kept)) == str(kept.resolve())
    for other in ({"base_model": "other"}, {"lora": {**shape, "alpha": 99}}, {"lora": None}):
        write_manifest(kept, {**own, **other})
        with pytest.raises(BadRequest, match="another base model or LoRA than `m`"):
            reference(str(kept))


def test_the_settings_of_art_0_5_23_act_by_their_own_names() -> None:
    sent = {"loss_fn": "ppo", "ppo": True, "normalize_advantages": True, "scale_rewards": True}
    config = step(dev_config={**sent, "kl_penalty_coef": 0.1, "kl_penalty_source": "sample"})
    assert config.ppo and config.scale_rewards and config.kl_penalty_source == "sample"
    kept = {"optimizer_save_interval": 5, "final_training_step": 9, "save_checkpoint": False}
    assert step(dev_config={"loss_fn": "cispo", **kept}) == step(dev_config={"ppo": False})
    for clash in ({"loss_fn": "ppo", "ppo": False}, {**sent, "scale_rewards": False}):
        with pytest.raises(BadRequest, match="disagree"):
            step(dev_config=clash)
    with pytest.raises(Unsupported, match="`loss_fn` is `dro`"):
        step(dev_config={"loss_fn": "dro"})
    with pytest.raises(BadRequest, match="`optimizer_save_interval` is `0`"):
        step(dev_config={"optimizer_save_interval": 0})
    with pytest.raises(BadRequest, match="moe_routing_replay_path"):
        step(dev_config={"moe_routing_replay_path": "x"})


def test_lora_config_is_what_peft_args_were() -> None:
    sent = {"rank": 4, "alpha": 8, "target_modules": ["q_proj"], "random_state": 7, "dropout": 0.0}
    wire = model().model_copy(update={"lora_config": sent})
    check_internal_config(wire, "embedded")
    wanted = LoraConfig(rank=4, alpha=8, targets=("q_proj",), seed=7)
    assert lora_config(wire, LoraConfig()) == wanted
    old = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "random_state": 7}
    assert lora_config(model(peft_args=old), LoraConfig()) == wanted
    for name, value in {"dropout": 0.1, "modules_to_save": ["lm_head"], "colour": 1}.items():
        wire = model().model_copy(update={"lora_config": {name: value}})
        with pytest.raises(Unsupported, match=f"`lora_config.{name}`"):
            check_internal_config(wire, "embedded")
    both = model(peft_args={"r": 4}).model_copy(update={"lora_config": {"rank": 4}})
    with pytest.raises(BadRequest, match="Both"):
        lora_config(both, LoraConfig())


def test_the_models_length_limit_applies_to_its_trajectories() -> None:
    sections = {"init_args": {"max_seq_length": 512}, "engine_args": {"max_model_len": 256}}
    assert step(**sections).max_seq_length == 256
    assert step().max_seq_length is None


@pytest.mark.parametrize(
    ("internal", "named"),
    [
        ({"init_args": {"load_in_4bit": True}}, "init_args.load_in_4bit"),
        ({"engine_args": {"tensor_parallel_size": 2}}, "engine_args.tensor_parallel_size"),
        ({"engine_args": {"swap_space": 4}}, "engine_args.swap_space"),
        ({"trainer_args": {"optim": "sgd"}}, "trainer_args.optim"),
        ({"peft_args": {"lora_dropout": 0.1}}, "peft_args.lora_dropout"),
        ({"torchtune_args": {"tensor_parallel_dim": 2}}, "torchtune_args.tensor_parallel_dim"),
        ({"trainer_gpu_ids": [0]}, "trainer_gpu_ids"),
        ({"tinker_args": {"renderer_name": "x"}}, "tinker_args"),
    ],
)
def test_a_setting_that_would_be_ignored_is_refused_by_name(internal: Any, named: str) -> None:
    with pytest.raises(Unsupported, match=f"`{named}`"):
        check_internal_config(model(**internal), "embedded")


def test_vllm_gets_all_engine_args_except_those_the_server_needs() -> None:
    check_internal_config(model(engine_args={"tensor_parallel_size": 2, "swap_space": 4}), "vllm")
    with pytest.raises(Unsupported, match=r"`engine_args\.host`"):
        check_internal_config(model(engine_args={"host": "0.0.0.0"}), "vllm")


@pytest.mark.parametrize(
    "internal",
    [
        {"trainer_args": {"learning_rate": -1}},
        {"trainer_args": {"learning_rate": "fast"}},
    ],
)
def test_a_value_of_the_wrong_type_is_refused_at_registration(internal: Any) -> None:
    with pytest.raises(BadRequest):
        check_internal_config(model(**internal), "embedded")


def test_a_section_that_is_not_an_object_is_refused() -> None:
    with pytest.raises(pydantic.ValidationError, match="`init_args`"):
        model(init_args=[1])


def test_peft_args_configure_the_lora() -> None:
    wire = model(
        peft_args={"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "random_state": 3}
    )
    assert lora_config(wire, LoraConfig()) == LoraConfig(
        rank=4, alpha=8, targets=("q_proj",), seed=3
    )


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (None, "default"),
        ({"server_args": None, "engine_args": None}, "default"),
        ({"server_args": {"api_key": "k", "host": "127.0.0.1", "port": 8000}}, "k"),
        ({"server_args": {"tool_call_parser": "hermes"}}, "default"),
    ],
)
def test_a_client_keeps_its_own_key(config: Any, key: str) -> None:
    assert inference_key(config, ServerConfig(), 8000) == key


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"server_args": {"port": 8001}}, "server_args.port"),
        ({"server_args": {"host": "0.0.0.0"}}, "server_args.host"),
        ({"server_args": {"chat_template": "x"}}, "server_args.chat_template"),
        ({"log_file": "/tmp/x"}, "log_file"),
        ({"engine_args": {"dtype": "half"}}, "engine_args.dtype"),
    ],
)
def test_settings_that_the_inference_server_cannot_change_are_refused_by_name(
    config: Any, named: str
) -> None:
    with pytest.raises(Unsupported, match=f"`{named}`"):
        inference_key(config, ServerConfig(), 8000)


def test_a_required_key_is_returned_and_any_other_is_refused() -> None:
    server = ServerConfig(require_key=True, api_key=pydantic.SecretStr("real"))
    assert inference_key(None, server, 8000) == "real"
    with pytest.raises(BadRequest, match="not this server's key"):
        inference_key({"server_args": {"api_key": "other"}}, server, 8000)
