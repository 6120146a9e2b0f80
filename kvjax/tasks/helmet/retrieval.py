"""HELMET's tasks from records in its data.tar.gz: recall of needles and values (RULER, JSON KV), questions about
retrieved passages (KILT) and rankings of passages (MS MARCO).

The prompts are the published ones. Their contexts contain the demonstrations.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kvjax.errors import UserError, whole_number
from kvjax.tasks.datasets import Row, row_field, row_objects, row_text, row_texts
from kvjax.tasks.helmet.records import LENGTHS, Files, Prompt, Prompts
from kvjax.tasks.helmet.sampling import SHOTS, demonstrations, row_key, sampled_first, shuffled
from kvjax.tasks.helmet.scores import ranking_gain, substring_match
from kvjax.tasks.prompt import all_present

RARE = 1000
"""A subject of PopQA is rare if it has fewer views than this."""
PASSAGE = "Document (Title: {title}): {text}"


def ruler(files: Files, folder: str, multiple_values: bool = False) -> Prompts:
    """Return the prompts of a RULER task, which ask for the value (or the values) of a needle."""
    rows = files.rows(f"ruler/{folder}/validation_{LENGTHS[files.length_index]}.jsonl")
    return [(row[0], [partial(_ruler_prompt, row, multiple_values)]) for row in shuffled(rows)]


def _ruler_prompt(row: Row, multiple_values: bool) -> Prompt:
    at, fields = row
    kind, key = row_text(fields, "type_needle_v", at), row_text(fields, "query", at)
    article, verb, verb_the = ("Some", "are", "are all the") if multiple_values else ("A", "is", "is the")
    about = f"for {key} mentioned in the provided text"
    return Prompt(
        f"{article} special magic {kind} {verb} hidden within the following text. Make sure to memorize it. I will "
        f"quiz you about the {kind} afterwards.\n",
        row_text(fields, "context", at),
        "\n",
        f"What {verb_the} special magic {kind} {about}?",
        f"\nThe special magic {kind} {about} {verb}",
        row_texts(fields, "answer" if "answer" in fields else "outputs", at),
        all_present,
    )


def json_kv(files: Files) -> Prompts:
    """Return the prompts that ask for the value of a key in a JSON object."""
    rows = files.rows(f"json_kv/test_k{(50, 105, 220, 440, 900, 1800)[files.length_index]}_dep6.jsonl")
    return [(row[0], [partial(_json_kv_prompt, row)]) for row in shuffled(rows)]


def _json_kv_prompt(row: Row) -> Prompt:
    at, fields = row
    demo_pairs = row_field(fields, "demos", at)
    pairs = demo_pairs[:SHOTS] if isinstance(demo_pairs, list) else []
    if not pairs or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise UserError(f"{at}: expected `demos` to be a list of keys and values, got {str(demo_pairs)[:60]}")
    demos = "".join(f"Key: {key}\nCorresponding value: {value}\n\n" for key, value in pairs)
    task = "Extract the value corresponding to the specified key in the JSON object below."
    return Prompt(
        "",
        row_text(fields, "context", at),
        f"\n\n{task}\n\n{demos}",
        f"Key: {row_text(fields, 'question', at)}",
        "\nCorresponding value:",
        row_texts(fields, "answer", at, single=True),
        substring_match,
    )


def kilt(files: Files, test: str, demos: str, rare: bool = False) -> Prompts:
    """Return the prompts that ask questions about passages.

    rare: True for PopQA, where only questions about rare subjects are asked, and the demonstrations are other questions
    of the same split.
    """
    passages = (20, 50, 105, 220, 440, 1000)[files.length_index]
    rows, demo_rows = files.rows(f"kilt/{test.format(passages)}.jsonl"), files.rows(f"kilt/{demos}.jsonl")
    if rare:
        rows, demo_rows = ([row for row in part if _is_rare(row)] for part in (rows, demo_rows))
    key = "id" if any("id" in fields for _, fields in rows) else "question"
    by_question, _ = sampled_first(rows, key)
    return [
        (question, [partial(_kilt_prompt, row, key, demo_rows, rare) for row in copies])
        for question, copies in by_question.items()
    ]


def _is_rare(row: Row) -> bool:
    at, fields = row
    return whole_number(at, "`s_pop`", row_field(fields, "s_pop", at), 0) < RARE


def _kilt_prompt(row: Row, key: str, demo_rows: Sequence[Row], rare: bool) -> Prompt:
    others = [demo for demo in demo_rows if row_key(demo, key) != row_key(row, key)] if rare else demo_rows
    demos = "".join(
        f"{_passages(at, demo, PASSAGE)}\n\nQuestion: {row_text(demo, 'question', at)}\n"
        f"Answer: {row_texts(demo, 'answers', at)[0]}\n\n"
        for at, demo in demonstrations(row, others, key)
    )
    at, fields = row
    return Prompt(
        "Use the given documents to write a concise and short answer to the question. Write your answer in the "
        f"following format:\nAnswer: [answer]\n\n{demos}",
        _passages(at, fields, PASSAGE),
        "\n\n",
        f"Question: {row_text(fields, 'question', at)}",
        "\nAnswer:",
        row_texts(fields, "answers", at),
        substring_match,
    )


def _passages(at: str, fields: Mapping[str, Any], template: str) -> str:
    """Return a record's passages, each with its fields in the template."""
    names = [name for name in ("id", "title", "text") if f"{{{name}}}" in template]
    return "\n\n".join(
        template.format(**{name: row_text(passage, name, where) for name in names})
        for where, passage in row_objects(fields, "ctxs", at)
    )


def msmarco(files: Files) -> Prompts:
    """Return the prompts that ask for a ranking of passages."""
    passages = (14, 50, 130, 285, 600, 1000)[files.length_index]
    rows = files.rows(f"msmarco/test_reranking_data_k{passages}_dep3.jsonl")
    demo_rows = files.rows("msmarco/test_reranking_data_k10_dep3.jsonl")
    by_query, sampled = sampled_first(rows, "qid")
    evaluated = sum(len(by_query[key]) for key in sampled)
    if len(demo_rows) > 2 * evaluated:
        demo_rows = [row for row in demo_rows if row_key(row, "qid") not in sampled]
    return [
        (query, [partial(_msmarco_prompt, row, demo_rows) for row in copies])
        for query, copies in by_query.items()
    ]


def _msmarco_prompt(row: Row, demo_rows: Sequence[Row]) -> Prompt:
    at, fields = row
    labels = _labels(at, fields)
    titled = "title" in row_objects(fields, "ctxs", at)[0][1]
    template = f"[ID: {{id}}] {PASSAGE if titled else 'Document: {text}'}"
    others = [demo for demo in demo_rows if row_key(demo, "qid") != row_key(row, "qid")]
    demos = "".join(
        f"{_passages(where, demo, template)}\n\nQuery: {row_text(demo, 'query', where)}\n"
        f"Ranking: {_true_ranking(_labels(where, demo))}\n\n"
        for where, demo in demonstrations(row, others, "qid")
    )
    return Prompt(
        "You are provided with a list of documents, each indicated by their ID. Rank each document based on their "
        "relevance to the question in descending order from most relelvant to least relevant texts. Include all "
        "documents in the rankings. Write your answer using the unique IDs, with the following format:\n"
        f"Ranking: ID3 > ID1 > ID2\n\n{demos}",
        _passages(at, fields, template),
        "\n\n",
        f"Query: {row_text(fields, 'query', at)}",
        "\nRanking:",
        (_true_ranking(labels),),
        ranking_gain(dict(labels)),
    )


def _labels(at: str, fields: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the ids of the passages, each with its relevance."""
    return [
        (
            row_text(passage, "id", where),
            whole_number(where, "`label`", row_field(passage, "label", where), 0),
        )
        for where, passage in row_objects(fields, "ctxs", at)
    ]


def _true_ranking(labels: Sequence[tuple[str, int]]) -> str:
    return " > ".join(name for name, _ in sorted(labels, key=lambda pair: -pair[1]))
