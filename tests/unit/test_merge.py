"""A checkpoint that is written as a model directory of Hugging Face's form."""

from pathlib import Path

from trainer.export.merge import copy_texts


def test_every_chat_template_goes_with_a_model(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    names = ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    target.mkdir()
    copy_texts(source, target)
    assert [(target / name).read_text() for name in names] == names
