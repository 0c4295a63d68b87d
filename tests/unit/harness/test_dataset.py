import json
from pathlib import Path

import pytest

from kit.errors import ConfigError
from trainer.harness.components import FileDatasetConfig
from trainer.harness.dataset import load_examples

ROWS = [{"id": 1, "question": "a?", "answer": "x", "more": 5}, {"id": 2, "question": "b?"}]


def dataset(path: Path, kind: str = "jsonl", **settings: object) -> FileDatasetConfig:
    return FileDatasetConfig.model_validate({"_type": kind, "file_path": path, **settings})


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    return path


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv"])
def test_json_json_lines_and_csv_give_the_same_examples(tmp_path: Path, kind: str) -> None:
    texts = {
        "json": json.dumps(ROWS),
        "jsonl": "\n".join(map(json.dumps, ROWS)) + "\n\n",
        "csv": "id,question,answer,more\n1,a?,x,5\n2,b?,,\n",
    }
    found = load_examples(dataset(write(tmp_path, texts[kind]), kind))
    assert [(e.id, e.question, e.answer or None) for e in found] == [
        ("1", "a?", "x"),
        ("2", "b?", None),
    ]
    assert str(found[0].row["more"]) == "5"


def test_field_names_can_be_set(tmp_path: Path) -> None:
    path = write(tmp_path, '{"key": "k", "prompt": "p", "gold": "g"}')
    structure = {"question_key": "prompt", "answer_key": "gold"}
    (example,) = load_examples(dataset(path, id_key="key", structure=structure))
    assert (example.id, example.question, example.answer) == ("k", "p", "g")


@pytest.mark.parametrize("start", ["", "["])
def test_json_that_is_nested_too_deeply_is_a_fault_like_any_other(
    tmp_path: Path, start: str
) -> None:
    path = write(tmp_path, start + '{"id": ' + "[" * 99_999)
    with pytest.raises(ConfigError, match=r"line 1: not valid JSON \(nested too deeply\)"):
        load_examples(dataset(path))


def test_every_fault_of_a_file_is_reported_with_its_line(tmp_path: Path) -> None:
    text = '{"id": 1, "question": "a"}\n{"id": 1, "question": "b"}\n{"id": 3\n{"id": 4}\n7\n'
    with pytest.raises(ConfigError) as caught:
        load_examples(dataset(write(tmp_path, text)))
    message = caught.value.message
    assert "has 4 faults" in message
    assert "entry 2: same id `1` as entry 1" in message
    assert "line 3: not valid JSON" in message
    assert "entry 4: missing `question`" in message
    assert "entry 5: expected an object, found `7`" in message


def test_many_faults_are_counted_instead_of_listed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has 50 faults.*and 45 more"):
        load_examples(dataset(write(tmp_path, "{\n" * 50)))


@pytest.mark.parametrize(
    ("text", "expected"), [("", "is empty"), ("\n", "is empty"), ("[", "line 1")]
)
def test_an_empty_or_broken_file_is_an_error(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_examples(dataset(write(tmp_path, text), "json"))


def test_the_error_for_a_missing_file_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nope\.json"):
        load_examples(dataset(tmp_path / "nope.json", "json"))


def test_line_breaks_within_a_cell_or_a_string_are_kept(tmp_path: Path) -> None:
    cell = write(tmp_path, 'id,question,answer\n1,"line one\nline two",x\n')
    (example,) = load_examples(dataset(cell, "csv"))
    assert example.question == "line one\nline two"
    text = write(tmp_path, '{"id": 1, "question": "a\u2028b", "answer": "x"}\n')
    (example,) = load_examples(dataset(text))
    assert example.question == "a\u2028b"


def test_a_row_with_more_values_than_columns_is_a_fault_with_its_line(tmp_path: Path) -> None:
    rows = 'id,question,answer\n\n1,"one, two\nthree",x\n2,one, two,x\n3,b?,x\n'
    with pytest.raises(ConfigError, match="has 1 fault: line 5: more values than columns"):
        load_examples(dataset(write(tmp_path, rows), "csv"))


@pytest.mark.parametrize("row", ["2,{},x\n", '2,"{},x\n3,b?,x\n'])
def test_a_value_too_long_for_csv_is_a_fault_with_its_line(tmp_path: Path, row: str) -> None:
    rows = "id,question,answer\n1,a?,x\n" + row.format("b" * 131_073)
    with pytest.raises(ConfigError, match=r"has 1 fault: line 3: not valid CSV \(field larger"):
        load_examples(dataset(write(tmp_path, rows), "csv"))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("csv", "id,question,answer\n1,é?,x\n"),
        ("json", '[{"id": 1, "question": "é?"}]'),
        ("jsonl", '{"id": 1, "question": "é?"}\n'),
    ],
)
def test_a_file_may_start_with_a_byte_order_mark(tmp_path: Path, kind: str, text: str) -> None:
    path = tmp_path / "data"
    path.write_text(text, encoding="utf-8-sig")
    (example,) = load_examples(dataset(path, kind))
    assert (example.id, example.question) == ("1", "é?")


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_the_hint_for_another_encoding_says_so(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "data.csv"
    path.write_text("id,question,answer\n1,é?,x\n", encoding=encoding)
    with pytest.raises(ConfigError, match="is not encoded as UTF-8") as caught:
        load_examples(dataset(path, "csv"))
    assert caught.value.hint == "Save it as UTF-8"
