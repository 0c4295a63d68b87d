from pathlib import Path

from trainer.server.lease import farewell, unpulled


def test_what_nobody_brought_home_is_named_and_the_untrained_start_is_not(tmp_path: Path) -> None:
    for step in ("0000", "0001", "0002", ".0003-half"):
        (tmp_path / "p/models/m/checkpoints" / step).mkdir(parents=True)
    assert unpulled(tmp_path) == ["p/m/0001", "p/m/0002"]
    (tmp_path / "pulled").write_text("p/m/0000\np/m/0001\n")
    lost, advice = farewell(tmp_path, None)
    assert "NOT PULLED" in lost and lost.endswith("1 checkpoint: p/m/0002")
    assert "launcher pull" in advice
    assert farewell(tmp_path, "s3://b") == [
        "not pulled, but safe in s3://b: 1 checkpoint: p/m/0002"
    ]
    (tmp_path / "pulled").write_text("p/m/0001\np/m/0002\n")
    assert farewell(tmp_path, None) == []
