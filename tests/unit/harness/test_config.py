"""The guide's YAML loads as it stands, with the guide's defaults."""

import re
from pathlib import Path
from typing import Any

import pytest

from kit.errors import ConfigError
from trainer.harness.backend_config import ArtBackendConfig, EngineArgs, InitArgs, TrainingArgs
from trainer.harness.components import ArtTrajectoryBuilderConfig
from trainer.harness.config import FinetuneConfig
from trainer.harness.config_file import load_config
from trainer.harness.finetune import Result, closing_lines
from trainer.harness.history import History

# "Basic Configuration" of NVIDIA's guide, with workflow, evaluator and dataset filled in.
GUIDE = """\
llms:
  training_llm:
    _type: openai
    model_name: Qwen/Qwen2.5-3B-Instruct
    base_url: http://localhost:8000/v1  # ART inference endpoint
    api_key: default
    temperature: 0.4

workflow:
  _type: python
  function: my_agent:answer
  llm: training_llm

eval:
  general:
    max_concurrency: 16
    output_dir: .tmp/nat/finetuning/eval
    dataset:
      _type: json
      file_path: data/training_data.json

  evaluators:
    my_reward:
      _type: exact_match

trajectory_builders:
  art_builder:
    _type: openpipe_art_traj_builder
    num_generations: 2

trainer_adapters:
  art_adapter:
    _type: openpipe_art_trainer_adapter
    backend:
      ip: "localhost"
      port: 7623
      name: "my_training_run"
      project: "my_project"
      base_model: "Qwen/Qwen2.5-3B-Instruct"
      api_key: "default"
    training:
      learning_rate: 1e-6

trainers:
  art_trainer:
    _type: openpipe_art_trainer

finetuning:
  enabled: true
  trainer: art_trainer
  trajectory_builder: art_builder
  trainer_adapter: art_adapter
  reward_function:
    name: my_reward
  num_epochs: 20
  output_dir: .tmp/nat/finetuning/output
"""

# The guide's tables: field, type, default.
TABLES: dict[type[Any], str] = {
    ArtTrajectoryBuilderConfig: "| `num_generations` | `int` | `2` |",
    ArtBackendConfig: """\
| `ip` | `str` | - |
| `port` | `int` | - |
| `name` | `str` | `"trainer_run"` |
| `project` | `str` | `"trainer_project"` |
| `base_model` | `str` | `"Qwen/Qwen2.5-7B-Instruct"` |
| `api_key` | `str` | `"default"` |
| `delete_old_checkpoints` | `bool` | `false` |""",
    InitArgs: "| `max_seq_length` | `int` | - |",
    EngineArgs: """\
| `gpu_memory_utilization` | `float` | - |
| `tensor_parallel_size` | `int` | - |""",
    TrainingArgs: """\
| `learning_rate` | `float` | `5e-5` |
| `beta` | `float` | `0.0` |""",
}
CURRICULUM = """\
  curriculum_learning:
    enabled: true
    initial_percentile: 0.3      # Start with easiest 30%
    increment_percentile: 0.2     # Add 20% each expansion
    expansion_interval: 5         # Expand every 5 epochs
    min_reward_diff: 0.1         # Filter no-variance groups
    sort_ascending: false         # Easy-to-hard
"""


def read(tmp_path: Path, text: str, *overrides: tuple[str, str]) -> FinetuneConfig:
    path = tmp_path / "config.yml"
    path.write_text(text)
    return load_config(path, overrides)


def refused(tmp_path: Path, text: str, *overrides: tuple[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, *overrides)
    assert caught.value.hint
    return caught.value.message


def test_the_guides_file_loads_as_it_stands(tmp_path: Path) -> None:
    config = read(tmp_path, GUIDE + CURRICULUM)
    assert config.llms["training_llm"].sampling == {"temperature": 0.4}
    assert config.eval.general.max_concurrency == 16
    adapter = config.trainer_adapters["art_adapter"]
    assert adapter.training.wire() == {"learning_rate": 1e-6}
    assert config.reward_name == "my_reward"
    assert config.finetuning.curriculum_learning.enabled
    assert config.finetuning.num_epochs == 20


@pytest.mark.parametrize("model", TABLES, ids=lambda model: model.__name__)
def test_every_field_of_the_guides_tables_has_its_documented_default(model: type[Any]) -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (\S+) \|", TABLES[model], re.MULTILINE)
    assert len(rows) == TABLES[model].count("\n") + 1
    for name, kind, default in rows:
        field = model.model_fields[name]
        if default == "-":
            assert field.is_required() or field.default is None
            continue
        value = getattr(field.default, "get_secret_value", lambda f=field: f.default)()
        written = default.strip("`").strip('"')
        expected = {"true": True, "false": False}.get(written, written)
        assert value == (float(written) if kind in ("int", "float") else expected), name


def test_the_curriculum_defaults_are_those_the_guide_shows(tmp_path: Path) -> None:
    shown = read(tmp_path, GUIDE + CURRICULUM).finetuning.curriculum_learning
    default = read(tmp_path, GUIDE).finetuning.curriculum_learning
    assert default == shown.model_copy(update={"enabled": False})


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("num_epoch: 20", "num_epochs"),
        ("num_generation: 2", "num_generations"),
        ("learning_rat: 1e-6", "learning_rate"),
        ("max_concurency: 16", "max_concurrency"),
        ("temprature: 0.4", "temperature"),
    ],
)
def test_the_error_for_a_misspelt_setting_gives_its_line_and_the_right_name(
    tmp_path: Path, wrong: str, right: str
) -> None:
    value = wrong.split(": ")[1]
    text = GUIDE.replace(f"{right}: {value}", wrong)
    message = refused(tmp_path, text)
    line = next(n for n, row in enumerate(text.splitlines(), 1) if wrong in row)
    assert f"line {line}: `" in message
    assert f".{wrong.split(':')[0]}` is not a setting, did you mean `{right}`?" in message


def test_the_error_for_a_misspelt_type_lists_those_that_exist(tmp_path: Path) -> None:
    message = refused(tmp_path, GUIDE.replace("_type: exact_match", "_type: exact_mach"))
    assert "did you mean `exact_match`?" in message and "`llm_judge`" in message


def test_all_undefined_names_are_reported_at_once(tmp_path: Path) -> None:
    text = GUIDE.replace("llm: training_llm", "llm: trainig_llm")
    text = text.replace("    name: my_reward", "    name: my_rewards")
    message = refused(tmp_path, text)
    assert "has 2 faults" in message
    assert "did you mean `training_llm`?" in message and "did you mean `my_reward`?" in message


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        GUIDE,
        ("finetuning.num_epochs", "50"),
        ("trainer_adapters.art_adapter.training.learning_rate", "1e-4"),
        ("finetuning.curriculum_learning.enabled", "true"),
        ("finetuning.target_functions", "[a, b]"),
    )
    assert config.finetuning.num_epochs == 50
    assert config.trainer_adapters["art_adapter"].training.learning_rate == 1e-4
    assert config.finetuning.curriculum_learning.enabled
    assert config.finetuning.target_functions == ["a", "b"]


def test_an_override_of_an_unknown_setting_is_rejected_by_name(tmp_path: Path) -> None:
    message = refused(tmp_path, GUIDE, ("finetuning.num_epoch", "5"))
    assert "`finetuning.num_epoch` is not a setting, did you mean `num_epochs`?" in message
    assert "line" not in message
    message = refused(tmp_path, GUIDE, ("finetuning.num_epochs.x", "5"))
    assert "Cannot set `-o finetuning.num_epochs.x`" in message


def test_enabled_finetuning_needs_its_three_components_a_dataset_and_a_reward(
    tmp_path: Path,
) -> None:
    message = refused(tmp_path, GUIDE.replace("  trainer: art_trainer\n", ""))
    assert "trainer must be set" in message
    text = GUIDE[: GUIDE.index("    dataset:")] + GUIDE[GUIDE.index("  evaluators:") :]
    assert "`eval.general.dataset` is required" in refused(tmp_path, text)


def test_a_custom_component_keeps_its_arguments(tmp_path: Path) -> None:
    text = GUIDE.replace(
        "_type: exact_match", '_type: "my_pack.rewards:Brevity"\n      longest: 20'
    )
    evaluator = read(tmp_path, text).eval.evaluators["my_reward"]
    assert evaluator.type == "my_pack.rewards:Brevity"
    assert evaluator.arguments == {"longest": 20}


def test_taking_turns_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "guide.yml"
    path.write_text(GUIDE)
    finetuning = load_config(path).finetuning
    assert finetuning.max_steps_off_policy == 0
    ahead = load_config(path, [("finetuning.max_steps_off_policy", "1")]).finetuning
    assert (ahead.groups_per_step, ahead.oversample) == (None, 1.5)


AHEAD = ("finetuning.max_steps_off_policy", "1")


@pytest.mark.parametrize(
    ("overrides", "seconds", "advised"),
    [
        ([], (6.0, 3.0), True),
        ([], (9.5, 0.4), False),  # training takes no time worth saving
        ([], (0.4, 9.5), False),
        ([AHEAD], (6.0, 3.0), False),
        ([("trainers.art_trainer", "{_type: 'mine:Own'}")], (6.0, 3.0), False),  # cannot do it
    ],
)
def test_a_run_that_lost_time_by_taking_turns_says_so(
    tmp_path: Path, overrides: list[tuple[str, str]], seconds: tuple[float, float], advised: bool
) -> None:
    path = tmp_path / "guide.yml"
    path.write_text(GUIDE)
    history = History(tmp_path, "run")
    sampling, training = seconds
    epoch = {"time/epoch_s": 10.0, "time/sample_s": sampling, "time/train_s": training}
    history.metrics = [epoch, epoch]
    lines = closing_lines(Result(load_config(path, overrides), [], history))
    advice = (
        "Sampling took 60% of the time and training 30%, in turns; with "
        "`finetuning.max_steps_off_policy: 1` they overlap"
    )
    assert (advice in lines, "in turns" in " ".join(lines)) == (advised, advised)


CUSTOM = "{_type: 'mine:Own'}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([("finetuning.groups_per_step", "4")], "`finetuning.groups_per_step` is not used with"),
        ([("finetuning.oversample", "2")], "`finetuning.oversample` is not used with"),
        ([("finetuning.pin_runs", "true")], "`finetuning.pin_runs` is not used with"),
        (
            [AHEAD, ("trajectory_builders.art_builder", CUSTOM)],
            "does not go with a trajectory_builder of your own",
        ),
        ([AHEAD, ("trainers.art_trainer", CUSTOM)], "does not go with a trainer of your own"),
        (
            [
                *(AHEAD, ("finetuning.groups_per_step", "4")),
                ("trajectory_builders.art_builder.examples_per_epoch", "4"),
            ],
            "`examples_per_epoch` of the trajectory builder are both set",
        ),
        ([("finetuning.max_steps_off_policy", "32")], "less than or equal to 31"),
        ([AHEAD, ("finetuning.oversample", "0.9")], "greater than or equal to 1"),
    ],
)
def test_settings_of_sampling_ahead_that_do_nothing_are_refused(
    tmp_path: Path, overrides: list[tuple[str, str]], message: str
) -> None:
    path = tmp_path / "guide.yml"
    path.write_text(GUIDE)
    with pytest.raises(ConfigError, match=re.escape(message)) as refused:
        load_config(path, overrides)
    assert "\n" not in refused.value.message and refused.value.hint
