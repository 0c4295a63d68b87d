"""How GPUs are divided between engine and learner."""

import sys
from pathlib import Path

import pytest

from kit.errors import ConfigError
from trainer.base_model.resolve import resolve
from trainer.config import ServerConfig
from trainer.engines import choose, gpus
from trainer.engines.gpus import assign_gpus, gpus_are_shared, gpus_required, visible_gpus
from trainer.engines.vllm_args import VLLM_DEFAULTS, check, command_line, defaults, spread
from trainer.errors import Unsupported

# Heads and KV heads of Qwen2.5-7B and SmolLM2-135M.
QWEN, SMOL = (28, 4), (9, 3)


@pytest.fixture
def gpu_count(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    names = [str(number) for number in range(request.param)]
    monkeypatch.setattr(gpus, "visible_gpus", lambda: names)
    return len(names)


def model(directory: Path, heads: tuple[int, int]) -> Path:
    config = (resolve("tiny-random") / "config.json").read_text()
    shape = f'"num_attention_heads": {heads[0]}, "num_key_value_heads": {heads[1]}'
    (directory / "config.json").write_text(config.rstrip().rstrip("}") + f", {shape}}}")
    return directory


@pytest.mark.parametrize(
    ("gpu_count", "heads", "engine", "learner"),
    [
        (0, QWEN, None, None),
        (1, QWEN, None, None),
        (2, QWEN, "0", "1"),
        (3, QWEN, "0,1", "2"),
        (4, QWEN, "0,1", "2,3"),
        (8, QWEN, "0,1,2,3", "4,5,6,7"),
        (4, SMOL, "0", "1,2,3"),
    ],
    indirect=["gpu_count"],
)
def test_engine_and_learner_get_separate_gpus(
    tmp_path: Path, gpu_count: int, heads: tuple[int, int], engine: str | None, learner: str | None
) -> None:
    config = assign_gpus(ServerConfig(), model(tmp_path, heads), {}, multi_gpu_engine=True)
    assert (config.engine_devices, config.learner_devices) == (engine, learner)
    assert gpus_are_shared(config) == (gpu_count < 2)


@pytest.mark.parametrize(
    ("configured", "arguments", "engine", "learner"),
    [
        ({"engine_devices": "3"}, {}, "3", "0,1,2"),
        ({"learner_devices": "0"}, {}, "1,2", "0"),
        ({"engine_devices": "0,1,2,3"}, {}, "0,1,2,3", None),
        ({"learner_devices": "0,1,2,3"}, {}, None, "0,1,2,3"),
        ({"engine_devices": "0,1", "learner_devices": "1"}, {}, "0,1", "1"),
        ({"engine_devices": "7"}, {}, "7", None),  # not one of the visible GPUs
        ({}, {"tensor_parallel_size": 1}, "0", "1,2,3"),
        ({}, {"tensor_parallel_size": 1, "pipeline_parallel_size": 3}, "0,1,2", "3"),
        ({}, {"tensor_parallel_size": 4}, None, None),
        ({}, {"tensor_parallel_size": "four"}, "0,1", "2,3"),
        ({"quantization": "fp8"}, {}, "0,1", "2"),
    ],
)
@pytest.mark.parametrize("gpu_count", [4], indirect=True)
def test_configured_devices_stay_and_the_other_side_gets_the_rest(
    tmp_path: Path,
    gpu_count: int,
    configured: dict[str, str],
    arguments: dict[str, int],
    engine: str | None,
    learner: str | None,
) -> None:
    config = ServerConfig.model_validate(configured)
    config = assign_gpus(config, model(tmp_path, QWEN), arguments, multi_gpu_engine=True)
    assert (config.engine_devices, config.learner_devices) == (engine, learner)


@pytest.mark.parametrize("gpu_count", [4], indirect=True)
def test_a_machine_that_only_samples_gives_all_gpus_to_its_engine(
    tmp_path: Path, gpu_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "has_cuda", lambda: True)
    config = ServerConfig(engine="vllm", vllm=sys.executable)
    config = choose.with_gpus_assigned(config, model(tmp_path, QWEN), {}, trains=False)
    assert (config.engine_devices, config.learner_devices) == ("0,1,2,3", None)
    directory = resolve("tiny-random")
    engine = choose.create_engine(config, directory, tmp_path, trains=False)
    assert engine._defaults["gpu_memory_utilization"] == 0.9  # type: ignore[attr-defined]
    embedded = choose.with_gpus_assigned(ServerConfig(engine="embedded"), directory, {})
    assert (embedded.engine_devices, embedded.learner_devices) == ("0", "1,2,3")


@pytest.mark.parametrize(
    ("variable", "found", "expected"),
    [
        (None, 0, []),
        (None, 2, ["0", "1"]),
        ("4,6", 8, ["4", "6"]),
        ("GPU-8a, GPU-9b", 8, ["GPU-8a", "GPU-9b"]),
        ("1,-1,0", 2, ["1"]),
        ("", 2, []),
        ("-1", 2, []),
        ("0,1", 0, []),
    ],
)
def test_visible_gpus_are_those_that_cuda_would_see(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, found: int, expected: list[str]
) -> None:
    nodes = [Path(f"/dev/nvidia{number}") for number in range(found)]
    monkeypatch.setattr(Path, "glob", lambda *_: iter(nodes))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus() == expected


@pytest.mark.parametrize(
    ("engine", "learner", "parallel", "memory"),
    [("0,1", "2,3", 2, 0.9), ("0", "1", None, 0.9), ("0,1", "1", 2, 0.5), (None, None, None, 0.5)],
)
def test_an_engine_with_its_own_gpus_uses_all_of_them_and_their_memory(
    engine: str | None, learner: str | None, parallel: int | None, memory: float
) -> None:
    shared = gpus_are_shared(ServerConfig(engine_devices=engine, learner_devices=learner))
    assert spread({}, engine).get("tensor_parallel_size") == parallel
    settings = defaults(resolve("tiny-random"), rank=8, cuda=True, shared=shared)
    assert settings["gpu_memory_utilization"] == memory


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"data_parallel_size": 3},
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 1},
    ],
)
@pytest.mark.parametrize("gpu_count", [4], indirect=True)
def test_vllm_is_divided_over_all_of_its_gpus(
    tmp_path: Path, gpu_count: int, arguments: dict[str, int]
) -> None:
    config = assign_gpus(ServerConfig(), model(tmp_path, QWEN), arguments, multi_gpu_engine=True)
    assert config.engine_devices
    in_effect = {**spread(arguments, config.engine_devices), **arguments}
    assert gpus_required(in_effect) == len(config.engine_devices.split(","))


@pytest.mark.parametrize(
    ("arguments", "devices", "sizes"),
    [
        ({}, "0,1", (2, 2)),
        ({}, None, (1, 2)),
        ({"tensor_parallel_size": 1}, "0", (1, 2)),  # some clients set the default
        ({"tensor_parallel_size": 4, "pipeline_parallel_size": 1}, "0,1", (4, 1)),
        ({"pipeline_parallel_size": 4}, "0,1", (1, 4)),
    ],
)
def test_two_machines_divide_the_layers_unless_told_otherwise(
    arguments: dict[str, int], devices: str | None, sizes: tuple[int, int]
) -> None:
    check(arguments, devices, 2)
    told = {**VLLM_DEFAULTS, **spread(arguments, devices, 2), **arguments}
    assert (told["tensor_parallel_size"], told["pipeline_parallel_size"]) == sizes
    command = command_line(Path("model"), None, told)
    assert "--headless" in command and "--uds" not in command


@pytest.mark.parametrize("gpu_count", [4], indirect=True)
def test_on_each_of_two_machines_engine_and_learner_have_their_own_gpus(
    tmp_path: Path, gpu_count: int
) -> None:
    config = ServerConfig(ray="auto", nodes=2, engine_nodes=2)
    for arguments in ({}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 4}):
        assigned = assign_gpus(config, model(tmp_path, QWEN), arguments, multi_gpu_engine=True)
        assert (assigned.engine_devices, assigned.learner_devices) == ("0,1", "2,3")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"pipeline_parallel_size": 3}, "divides vLLM into 3 parts, but 2 machines hold one copy"),
        ({"data_parallel_size": 2}, "divides vLLM into 4 parts, but 2 machines hold one copy"),
        ({"tensor_parallel_size": 4}, "over 8 GPUs, but the engine has `0,1` on each of 2"),
        ({"distributed_executor_backend": "ray"}, "distributed_executor_backend` cannot be set"),
        ({"node_rank": 1}, "`engine_args.node_rank` cannot be set: .*`--engine-nodes`"),
    ],
)
def test_what_two_machines_cannot_divide_is_rejected(arguments: dict[str, int], told: str) -> None:
    with pytest.raises(Unsupported, match=told):
        check(arguments, "0,1", 2)


def test_only_vllm_is_divided_over_machines(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="engine_nodes is `2`, but ray is not set"):
        ServerConfig(engine_nodes=2)
    with pytest.raises(ValueError, match="engine is `embedded`, which needs engine_nodes to be 1"):
        ServerConfig(engine_nodes=2, ray="auto", engine="embedded")
    config = ServerConfig(engine_nodes=2, ray="auto")  # `auto` means the embedded one here
    with pytest.raises(ConfigError, match="Only vLLM divides a model over machines"):
        choose.create_engine(config, resolve("tiny-random"), tmp_path)


def test_more_gpus_than_the_engine_has_are_rejected() -> None:
    check({"tensor_parallel_size": 2}, "0,1")
    with pytest.raises(Unsupported, match="over 4 GPUs, but the engine has `0,1`") as caught:
        check({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "0,1")
    assert "--engine-devices" in caught.value.hint
