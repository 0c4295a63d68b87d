"""Which cards hold which model, by the arithmetic that the learner plans with."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from click.testing import Result

from kit.errors import ConfigError
from kit.fit import ENGINE_OUTSIDE_GIB, GIB, activations, fit, fits
from kit.gpus import CARDS
from kit.model_shape import parse_shape, read_shape
from kit.settings import gather
from launcher.errors import LauncherError
from launcher.provider import Price
from launcher.skypilot import door
from launcher.skypilot.prices import prices
from launcher.skypilot.provider import SkyProvider
from launcher.skypilot.testing import FakeSky
from launcher.testing import FakeProvider
from trainer.config import ServerConfig

# Vocabulary, width, MLP, layers, heads, key-value heads, tied embeddings; billions of weights; and
# the fewest cards of 24, 80 and 140 GiB that hold it, None for none.
MODELS: dict[str, tuple[tuple[int, ...], float, tuple[int | None, ...]]] = {
    "Qwen2.5-0.5B": ((151_936, 896, 4864, 24, 14, 2, 1), 0.49, (1, 1, 1)),
    "Llama-3.2-1B": ((128_256, 2048, 8192, 16, 32, 8, 1), 1.24, (1, 1, 1)),
    "Qwen2.5-1.5B": ((151_936, 1536, 8960, 28, 12, 2, 1), 1.54, (1, 1, 1)),
    "Llama-3.2-3B": ((128_256, 3072, 8192, 28, 24, 8, 1), 3.21, (2, 1, 1)),
    "Mistral-7B": ((32_768, 4096, 14_336, 32, 32, 8, 0), 7.25, (4, 1, 1)),
    "Qwen2.5-7B": ((152_064, 3584, 18_944, 28, 28, 4, 0), 7.62, (4, 1, 1)),
    "Llama-3.1-8B": ((128_256, 4096, 14_336, 32, 32, 8, 0), 8.03, (4, 1, 1)),
    "Qwen2.5-14B": ((152_064, 5120, 13_824, 48, 40, 8, 0), 14.77, (8, 2, 1)),
    "Qwen2.5-32B": ((152_064, 5120, 27_648, 64, 40, 8, 0), 32.76, (None, 4, 2)),
    "Llama-3.1-70B": ((128_256, 8192, 28_672, 80, 64, 8, 0), 70.55, (None, 8, 4)),
}
PRICES = {
    ("L40S", 1): Price(2.3, "aws"),
    ("H100", 1): Price(1.9, "lambda"),
    ("T4", 1): Price(0.1, "gcp"),
}
NAMES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
NAMES += ("num_attention_heads", "num_key_value_heads", "tie_word_embeddings")


def config(name: str) -> dict[str, Any]:
    return dict(zip(NAMES, MODELS[name][0], strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_ten_models_get_the_cards_that_hold_them(name: str) -> None:
    shape = parse_shape(config(name), name)
    assert shape.parameters / 1e9 == pytest.approx(MODELS[name][1], abs=0.01)
    found = {one.card.name: one.count for one in fits(shape, list(CARDS.values()))}
    assert tuple(map(found.get, ("L4", "H100", "H200"))) == MODELS[name][2]


def test_one_card_is_shared_by_what_samples_and_what_trains() -> None:
    shape = parse_shape(config("Qwen2.5-7B"), "7B")
    one = fit(shape, CARDS["H100"])
    assert one.needed == one.engine + one.learner
    share = one.gpu_memory_utilization
    assert share is not None
    vllm = share * one.card.memory_gib + ENGINE_OUTSIDE_GIB
    assert one.engine <= vllm and one.learner <= one.card.memory_gib - vllm


def test_the_memory_of_a_step_is_that_measured_on_an_h200() -> None:
    # bench/results/learner_cuda.md: 31.0 GiB, recomputing, and 41.8 GiB without, of 8,192 tokens.
    shape = parse_shape(config("Qwen2.5-7B"), "7B")
    kept = activations(shape, 8192, fused=True, rank=8)
    weights = 2 * shape.parameters
    whole = (weights + shape.layers * kept.fast + kept.transient) / GIB
    assert whole == pytest.approx(41.8, rel=0.1)


@pytest.mark.parametrize(
    ("name", "sampling", "training"),
    [("Qwen2.5-0.5B", 4.6, 2.8), ("Llama-3.1-8B", 26.6, 18.6), ("Qwen2.5-7B", None, 17.3)],
)
def test_the_plan_is_what_was_measured_on_an_h200_or_a_little_more(
    name: str, sampling: float | None, training: float
) -> None:
    # bench/results/fit.md, without the part of vLLM's cache that was larger than planned.
    planned = fit(parse_shape(config(name), name), CARDS["H200"])
    assert training <= planned.learner <= training + 1.5
    assert sampling is None or sampling <= planned.engine <= sampling + 1.5


def test_a_directory_and_the_hub_cache_are_read_without_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("Qwen2.5-7B")))
    assert read_shape(str(tmp_path)).layers == 28
    snapshot = tmp_path / "hub/models--a--b/snapshots/1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(config("Llama-3.1-8B")))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert read_shape("a/b").layers == 32
    with pytest.raises(ConfigError, match="`a/c` is not on this machine, and the hub cannot be"):
        read_shape("a/c")


def test_the_config_of_a_gated_model_is_read_with_the_given_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []

    def get(url: str, *, headers: Any, **_: Any) -> httpx.Response:
        sent.append(headers)
        return httpx.Response(200, json=config("Llama-3.1-8B"))

    monkeypatch.setattr(httpx, "get", get)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert read_shape("a/gated", "hf_x").layers == 32
    assert sent == [{"Authorization": "Bearer hf_x"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "cannot be read"), ("[]", "no usable"), ('{"num_attention_heads": 0}', "no usable")],
)
def test_a_config_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_shape(str(tmp_path))


def test_doctor_lists_the_cards_and_says_if_there_is_none(
    invoke: Callable[..., Result], tmp_path: Path
) -> None:
    for name, layers in (("small", 28), ("huge", 2000)):
        Path(name).mkdir()
        changed = {**config("Qwen2.5-7B"), "num_hidden_layers": layers}
        Path(name, "config.json").write_text(json.dumps(changed))
    result = invoke("doctor", "./small", provider=FakeProvider())
    assert result.exit_code == 0 and "H100:1\t" in result.stdout and "L4:4\t" in result.stdout
    assert "`launcher up --for ./small`, which rents L40S:1" in result.stderr
    assert "Prices are unknown: there is no catalog" in result.stderr
    rows = json.loads(invoke("doctor", "./small", "--json", provider=FakeProvider()).stdout)
    assert rows[0]["card"] == "L40S" and rows[0]["gpu_memory_utilization"] > 0.4
    assert rows[0]["dollars_per_hour"] is None
    priced = FakeProvider(price_list=PRICES)
    shown = invoke("doctor", "./small", provider=priced).stdout.splitlines()
    assert shown[0].startswith("H100:1\t") and shown[0].endswith("\t$1.90 an hour on lambda")
    listed = json.loads(invoke("doctor", "--prices", "--json", provider=priced).stdout)
    cheap = {"card": "H100", "count": 1, "per_hour": 1.9, "cloud": "lambda"}
    assert cheap in listed and len(listed) == 2  # the kit knows nothing about a T4
    none = invoke("doctor", "./huge", provider=FakeProvider())
    assert none.exit_code == 1 and "No listed card holds `./huge`" in none.stderr
    missing = invoke("doctor", "./nothing", provider=FakeProvider())
    assert missing.exit_code == 1 and "There is no model `./nothing`" in missing.stderr


def test_up_for_a_model_rents_the_cheapest_cards_and_says_why(
    invoke: Callable[..., Result], healthy_port: int
) -> None:
    for name, layers in (("seven", 28), ("huge", 2000)):
        Path(name).mkdir()
        changed = {**config("Qwen2.5-7B"), "num_hidden_layers": layers}
        changed["max_position_embeddings"] = 131_072
        Path(name, "config.json").write_text(json.dumps(changed))
    provider = FakeProvider(port=healthy_port)
    result = invoke("up", "task.yaml", "--for", "./seven", provider=provider)
    assert result.exit_code == 0, result.stderr
    ((_, task, arguments),) = provider.launched
    assert arguments == ["--gpus", "L40S:1"] and task.envs["BASE_MODEL"] == "./seven"
    assert "`./seven` needs 22.2 GiB to sample and 18.4 GiB to train" in result.stderr
    assert "the smallest cards are chosen: there is no catalog" in result.stderr
    priced = FakeProvider(port=healthy_port, price_list=PRICES)
    result = invoke("up", "task.yaml", "--for", "./seven", provider=priced)
    ((_, task, arguments),) = priced.launched
    assert arguments == ["--gpus", "H100:1"] and "$1.90 an hour on lambda" in result.stderr
    # Half of the spare memory goes to vLLM, and a context that its cache cannot hold is cut.
    share = fit(read_shape("./seven"), CARDS["H100"]).gpu_memory_utilization
    settings = {"gpu_memory_utilization": share, "max_model_len": 65_536}
    assert json.loads(task.envs["ART_ENGINE_ARGS"]) == settings
    server = gather(ServerConfig, environment=task.envs)
    assert server.engine_args == settings
    clash = invoke("up", "--for", "./seven", "--env", "BASE_MODEL=x", provider=priced)
    assert clash.exit_code == 2 and "`--for` sets BASE_MODEL" in clash.stderr
    huge = invoke("up", "task.yaml", "--for", "./huge", provider=provider)
    assert huge.exit_code == 1 and "No listed card holds `./huge`" in huge.stderr
    refused = invoke("up", "task.yaml", "--for", "./seven", "--local", provider=provider)
    assert refused.exit_code == 2 and "`--for` rents GPUs" in refused.stderr
    assert len(provider.launched) == 1


def test_without_skypilot_cards_are_listed_and_prices_are_unknown(
    invoke: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sky", None)  # as if it were not installed
    result = invoke("doctor", "tiny-random", provider=SkyProvider())
    assert result.exit_code == 0 and "L4:1\t" in result.stdout
    assert "Prices are unknown: SkyPilot is not installed" in result.stderr
    checks = invoke("doctor", provider=SkyProvider())
    assert checks.exit_code == 1 and "BAD  provider: SkyPilot is not installed" in checks.stdout


def offer(card: str, count: float, price: float) -> SimpleNamespace:
    return SimpleNamespace(accelerator_name=card, accelerator_count=count, price=price)


def test_the_lowest_price_of_all_clouds_counts_and_a_missing_catalog_costs_the_others_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    catalogs = {
        "aws": [offer("H100", 1, 6.9), offer("H100", 8, 55.0), offer("L4", 1, float("nan"))],
        "lambda": [offer("H100", 1, 3.3), offer("H100", 0.5, 1.0)],
    }
    with door.replaced(FakeSky(clouds=("aws", "lambda", "gcp"), catalogs=catalogs)):
        assert prices() == {("H100", 1): Price(3.3, "lambda"), ("H100", 8): Price(55.0, "aws")}
    assert "no prices of gcp" in caplog.text
    for clouds, message in ((("gcp",), "gcp"), ((), "no access to any cloud")):
        with door.replaced(FakeSky(clouds=clouds)), pytest.raises(LauncherError, match=message):
            prices()
