"""Large bodies are identified by their bytes."""

import hashlib
import json

from trainer.server.large_bodies import _parse
from trainer.server.wire import TrainRequest

BODY = {"model": {"name": "m", "project": "p"}, "trajectory_groups": []}


def test_the_digest_is_computed_from_the_bytes_even_if_the_body_holds_one() -> None:
    sent = json.dumps({**BODY, "digest": "mine"}).encode()
    assert _parse(sent, TrainRequest).digest == hashlib.sha256(sent).hexdigest()
    assert _parse(sent, TrainRequest) != _parse(sent + b" ", TrainRequest)
