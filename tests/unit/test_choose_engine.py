import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kit.config import validate
from kit.errors import ConfigError, NotInstalled
from kit.types import Json
from trainer.base_model.resolve import resolve
from trainer.config import ServerConfig
from trainer.engines import choose
from trainer.engines.vllm import VllmEngine
from trainer.engines.vllm_args import (
    EXTENSION,
    GRAPHS,
    IN_VLLM,
    KERNELS,
    check,
    command_line,
    defaults,
    environment,
    flags,
    rank_for,
)
from trainer.engines.vllm_sampling import WARM_UP
from trainer.errors import Unsupported, WorkerDied
from trainer.learner.process import LearnerProcess
from trainer.machines.members import settings_for
from trainer.processes.worker import Worker, gpu_environment


@pytest.mark.parametrize(
    ("cuda", "vllm", "setting", "expected"),
    [
        (True, True, "auto", "vllm"),
        (True, False, "auto", "embedded"),
        (False, True, "auto", "embedded"),
        (True, True, "embedded", "embedded"),
        (False, False, "vllm", "vllm"),
    ],
)
def test_auto_means_vllm_if_a_gpu_and_vllm_are_found(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, vllm: bool, setting: str, expected: str
) -> None:
    monkeypatch.setattr(choose, "has_cuda", lambda: cuda)
    monkeypatch.setattr(choose, "_is_installed", lambda _: vllm)
    config = ServerConfig.model_validate({"engine": setting})
    assert choose.engine_kind(config) == expected


def test_the_vllm_setting_may_be_a_python_an_environment_or_a_program(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("python", "vllm"):
        (tmp_path / "bin" / name).symlink_to(sys.executable)
    module = ["-m", "start_vllm", "serve"]
    python = str(tmp_path / "bin" / "python")
    assert choose.vllm_program(python) == [python, *module]
    assert choose.vllm_program(str(tmp_path)) == [python, *module]
    assert choose.vllm_program(f"{tmp_path}/bin/vllm") == [f"{tmp_path}/bin/vllm", "serve"]
    with pytest.raises(NotInstalled, match="`ART_VLLM` is"):
        choose.vllm_program(f"{tmp_path}/nope")


def test_a_missing_vllm_is_reported_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_is_installed", lambda _: False)
    with pytest.raises(NotInstalled, match="needs `vllm`") as caught:
        choose.vllm_program(None)
    assert "ART_VLLM" in caught.value.hint


def test_the_embedded_engine_rejects_settings_of_vllm(tmp_path: Path) -> None:
    config = ServerConfig(engine="embedded", engine_args={"max_num_seqs": 4})
    with pytest.raises(ConfigError, match="`max_num_seqs`"):
        choose.create_engine(config, tmp_path, tmp_path)


def test_fp8_needs_vllm_on_a_gpu_and_applies_to_both_engine_and_learner(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = ServerConfig(engine="vllm", quantization="fp8", vllm=sys.executable)
    with pytest.raises(ConfigError, match="needs vLLM on a CUDA GPU"):
        choose.create_engine(config, tmp_path, tmp_path)
    monkeypatch.setattr(choose, "has_cuda", lambda: True)
    engine = choose.create_engine(config, resolve("tiny-random"), tmp_path)
    assert isinstance(engine, VllmEngine)
    assert engine._arguments["quantization"] == "fp8_per_channel"
    several = settings_for(config, "base", "10.0.0.1:7997", None)
    assert several["settings"]["engine_args"] == {"quantization": "fp8_per_channel"}
    learner = LearnerProcess("base", log=tmp_path / "log", config=config)
    assert learner._worker._command[-2:] == ["--quantization", "fp8"]
    for change, match in (
        ({"engine": "embedded"}, "needs vLLM on a CUDA GPU"),
        ({"engine_args": {"quantization": "awq"}}, "are both set"),
    ):
        with pytest.raises(ConfigError, match=match):
            choose.create_engine(config.model_copy(update=change), tmp_path, tmp_path)
    with pytest.raises(ConfigError, match="needs nodes to be 1"):
        validate(
            ServerConfig,
            {"nodes": 2, "ray": "auto", "quantization": "fp8"},
            source="here",
        )


def test_machines_that_train_get_the_heads_devices_and_others_use_all_of_theirs() -> None:
    config = ServerConfig(
        engine="embedded", ray="auto", nodes=2, engine_devices="0", learner_devices="1,2"
    )
    second, third = (settings_for(config, "base", "10.0.0.1:7997", number) for number in (1, None))
    assert second["learner"] == {"master": "10.0.0.1:7997", "nodes": 2, "number": 1}
    assert second["settings"]["learner_devices"] == "1,2"
    assert third["learner"] is None and "engine_devices" not in third["settings"]


async def test_a_worker_sees_only_its_assigned_gpus(tmp_path: Path) -> None:
    # The process prints the variable and exits; the error quotes its last line.
    (tmp_path / "seen.py").write_text("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    worker = Worker("learner", "seen", [], log=tmp_path / "log", environment=gpu_environment("2,3"))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(WorkerDied, match="2,3"):
        patch.setenv("PYTHONPATH", str(tmp_path))
        await worker.start()
    assert gpu_environment(None) == {}


def test_invalid_devices_and_nodes_are_rejected() -> None:
    for faulty in ({"engine_devices": "0,"}, {"learner_devices": "gpu0"}, {"nodes": 2}):
        with pytest.raises(ValueError, match=next(iter(faulty))):
            ServerConfig.model_validate(faulty)


def test_settings_become_flags_of_vllm() -> None:
    assert flags(
        {
            "gpu_memory_utilization": 0.5,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "quantization": None,
            "allowed_origins": ["a", "b"],
            "compilation_config": {"level": 3},
        }
    ) == [
        *("--gpu-memory-utilization", "0.5", "--enforce-eager", "--no-enable-prefix-caching"),
        *("--allowed-origins", "a", "b", "--compilation-config", '{"level": 3}'),
    ]


def test_a_setting_that_would_break_the_server_is_rejected_by_name() -> None:
    check({"tensor_parallel_size": 2, "max_model_len": 8192})
    for name in ("host", "uds", "enable_lora", "logprobs_mode", "no such-name"):
        with pytest.raises(Unsupported, match=rf"`engine_args\.{name}`"):
            check({name: 1})


def test_the_rank_is_the_smallest_of_vllms_that_fits_the_lora() -> None:
    assert [rank_for(rank) for rank in (1, 8, 9, 64, 300)] == [8, 8, 16, 64, 320]
    with pytest.raises(Unsupported, match="513"):
        rank_for(513)


def test_copies_of_a_model_have_one_api_process_because_it_alone_knows_the_loras() -> None:
    for socket, settings, count in (
        (Path("socket"), {"data_parallel_size": 2}, ["1"]),
        (Path("socket"), {}, []),
        (None, {"data_parallel_size": 2}, []),
    ):
        command = command_line(Path("model"), socket, settings)
        assert [after for flag, after in pairwise(command) if flag == "--api-server-count"] == count


def test_our_route_and_a_users_middleware_both_reach_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    command = command_line(Path("model"), Path("socket"), {"middleware": "mine.Middleware"})
    named = [after for flag, after in pairwise(command) if flag == "--middleware"]
    assert named == ["flat_completions.Middleware", "mine.Middleware"]
    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert environment(cuda=True)["PYTHONPATH"] == f"{IN_VLLM}:/mine"
    for name in ("flat_completions", "light_scheduler", "start_vllm"):
        assert (IN_VLLM / f"{name}.py").is_file()
    assert "light_scheduler.scheduler" in flags(defaults(resolve("tiny-random"), rank=8, cuda=True))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, {"art_cluster_kernels": 1}),
        ({"additional_config": {"a": 1}}, {"a": 1, "art_cluster_kernels": 1}),
        ({EXTENSION: "", "additional_config": {"a": 1}}, {"a": 1}),
        ({EXTENSION: ""}, None),
    ],
)
def test_only_a_vllm_with_our_kernels_loads_code_that_was_compiled_with_them(
    arguments: dict[str, Any], expected: dict[str, int] | None
) -> None:
    settings = defaults(resolve("tiny-random"), rank=8, cuda=True)
    command = command_line(Path("model"), Path("socket"), {**settings, **arguments})
    given = [text for name, text in pairwise(command) if name == "--additional-config"]
    assert [json.loads(text) for text in given] == ([expected] if expected else [])
    (extension,) = (text for name, text in pairwise(command) if name == "--worker-extension-cls")
    assert extension == arguments.get(EXTENSION, KERNELS)


def test_the_loras_kernels_have_settings_for_every_number_of_merged_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_TUNED_CONFIG_FOLDER", raising=False)
    files = list(Path(environment(cuda=True)["VLLM_TUNED_CONFIG_FOLDER"]).iterdir())
    assert files
    for file in files:
        (by_slices,) = json.loads(file.read_text()).values()
        assert sorted(by_slices) == ["1", "2", "3"]  # vLLM dies of a missing one: q, k, v are 3
        for by_tokens in by_slices.values():
            # The last are vLLM's own. Their kernels are compiled before a request waits, with the
            # graphs or by the prompts that are longer.
            assert min(map(int, by_tokens)) < 128
            assert max(map(int, by_tokens)) <= max(GRAPHS) + 1 < max(WARM_UP)
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", "mine")
    assert environment(cuda=True)["VLLM_TUNED_CONFIG_FOLDER"] == "mine"
    assert "VLLM_TUNED_CONFIG_FOLDER" not in environment(cuda=False)


def test_vllm_on_a_gpu_uses_one_thread_of_its_host_unless_the_user_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert environment(cuda=True)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in environment(cuda=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert environment(cuda=True)["OMP_NUM_THREADS"] == "4"


def test_vllm_forks_its_processes_on_a_cpu_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    assert environment(cuda=False)["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"
    assert "VLLM_WORKER_MULTIPROC_METHOD" not in environment(cuda=True)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    assert environment(cuda=False)["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


@pytest.mark.parametrize(
    ("setting", "ours"),
    [({}, True), ({"enforce_eager": False}, True), ({"enforce_eager": True}, False),
     ({"max_num_seqs": 16}, False), ({"compilation_config": {"mode": 0}}, False)],
)  # fmt: skip
def test_vllm_captures_the_graphs_that_we_name_unless_the_user_decides(
    tmp_path: Path, setting: Json, ours: bool
) -> None:
    engine = VllmEngine(
        resolve("tiny-random"), program=[], log=tmp_path, rank=8, cuda=True, arguments=setting
    )
    sizes = engine._effective_arguments.get("cudagraph_capture_sizes", [])
    assert (sizes[-1:] == [2048]) == ours
