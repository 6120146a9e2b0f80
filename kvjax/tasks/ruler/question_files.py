"""Readers of the published files of SQuAD and HotpotQA, for the two question tasks."""

from pathlib import Path
from typing import Any

from kvjax.errors import UserError, check_unicode
from kvjax.tasks.datasets import load_json
from kvjax.tasks.ruler.questions import DataQuestion, QuestionAnswering


def read_squad(file: Path, name: str = "qa_1") -> QuestionAnswering:
    """Read SQuAD 1.1 or 2.0 (JSON). Each paragraph is a document, near which are the other paragraphs of its article.

    Questions without an answer are left out.

    Raises:
        UserError: the file does not exist or is not JSON, a field is missing or invalid, or there is no question.
    """
    documents: dict[str, int] = {}
    questions = []
    for i, article in enumerate(
        _field(load_json(file, "--data squad"), "data", list, f"--data squad {file}:")
    ):
        at = f"--data squad {file}: data[{i}]"
        places = []
        paragraphs = _field(article, "paragraphs", list, at)
        for j, paragraph in enumerate(paragraphs):
            text = _field(paragraph, "context", str, f"{at}.paragraphs[{j}]").strip()
            places.append(documents.setdefault(text, len(documents)))
        for j, paragraph in enumerate(paragraphs):
            for k, entry in enumerate(_field(paragraph, "qas", list, f"{at}.paragraphs[{j}]")):
                where = f"{at}.paragraphs[{j}].qas[{k}]"
                question = _field(entry, "question", str, where)
                entries = _field(entry, "answers", list, where)
                answers = [_field(a, "text", str, f"{where}.answers[{n}]") for n, a in enumerate(entries)]
                if answers:
                    near = tuple(place for place in dict.fromkeys(places) if place != places[j])
                    questions.append(
                        DataQuestion(question.strip(), tuple(dict.fromkeys(answers)), (places[j],), near)
                    )
    return _task(name, f"--data squad {file}", documents, questions)


def read_hotpotqa(file: Path, name: str = "qa_2") -> QuestionAnswering:
    """Read HotpotQA (JSON). A document is a title with its paragraph. All ten documents of a question are always given.

    Raises:
        UserError: the file does not exist or is not JSON, a field is missing or invalid, or there is no question.
    """
    documents: dict[str, int] = {}
    questions = []
    entries = load_json(file, "--data hotpotqa")
    if not isinstance(entries, list):
        raise UserError(f"--data hotpotqa {file}: expected a JSON list of questions")
    for i, entry in enumerate(entries):
        at = f"--data hotpotqa {file}: [{i}]"
        question, answer = _field(entry, "question", str, at), _field(entry, "answer", str, at)
        context = _field(entry, "context", list, at)
        try:
            texts = [f"{title}\n{''.join(lines).strip()}" for title, lines in context]
        except (TypeError, ValueError):
            raise UserError(f"{at}: expected `context` to be a list of [title, [sentences]]") from None
        if not texts:
            raise UserError(f"{at}: `context` has no document")
        given = dict.fromkeys(documents.setdefault(text, len(documents)) for text in texts)
        questions.append(DataQuestion(question.strip(), (answer,), tuple(given)))
    return _task(name, f"--data hotpotqa {file}", documents, questions)


def _field(record: Any, name: str, kind: type, at: str) -> Any:
    """Return a field of a record. `at`: the record's position in the file, for errors."""
    if not isinstance(record, dict) or name not in record:
        raise UserError(f"{at} has no field `{name}`")
    if not isinstance(record[name], kind):
        raise UserError(
            f"{at}: expected `{name}` to be a {kind.__name__}, got a {type(record[name]).__name__}"
        )
    if kind is str:
        check_unicode(record[name], f"{at}: `{name}`")
    return record[name]


def _task(
    name: str, where: str, documents: dict[str, int], questions: list[DataQuestion]
) -> QuestionAnswering:
    if not questions:
        raise UserError(f"{where}: there is no question with an answer in it")
    return QuestionAnswering(name, tuple(documents), tuple(questions))
