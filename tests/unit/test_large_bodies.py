"""Large bodies: what identifies them is the bytes they came as."""

import hashlib
import json

from trainer.server.large_bodies import _parse
from trainer.server.wire import TrainRequest

BODY = {"model": {"name": "m", "project": "p"}, "trajectory_groups": []}


def test_a_request_is_known_by_its_bytes_whatever_it_says_itself() -> None:
    sent = json.dumps({**BODY, "digest": "mine"}).encode()
    assert _parse(sent, TrainRequest).digest == hashlib.sha256(sent).hexdigest()
    assert _parse(sent, TrainRequest) != _parse(sent + b" ", TrainRequest)
