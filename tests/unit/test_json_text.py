"""JSON that is written fast reads back as it was."""

import json
import math
from typing import Any

from kit import json_text
from trainer.harness.sampled_groups import SampledGroup
from trainer.harness.types import EpisodeItem, EpisodeItemRole, Trajectory


def sampled(**record: Any) -> SampledGroup:
    item = EpisodeItem(role=EpisodeItemRole.USER, content="hi", logprobs=[math.nan])
    trajectory = Trajectory(episode=[item], reward=1.0, shaped_rewards=[math.nan, -math.inf])
    return SampledGroup(
        number=1, trajectories=[trajectory], sampled_by=[0], lost=[], records=[record]
    )


def read_back(group: SampledGroup) -> SampledGroup:
    return SampledGroup.model_validate(json.loads(json_text.dump(group)))


def test_numbers_that_json_does_not_have_stay_what_they_are() -> None:
    (found,) = read_back(sampled()).trajectories
    assert found.shaped_rewards is not None and math.isnan(found.shaped_rewards[0])
    assert found.shaped_rewards[1] == -math.inf and math.isnan(found.episode[0].logprobs[0])


def test_what_is_nested_deeply_and_half_an_emoji_are_kept() -> None:
    deep: Any = "\ud83d"
    for _ in range(400):
        deep = {"\ud83d": [deep]}
    assert read_back(sampled(output=deep)).records == [{"output": deep}]
