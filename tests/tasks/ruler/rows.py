"""Rows of RULER's own data, in both forms, and files of them."""

import json

import pyarrow.parquet

from kvjax.tasks import Example, ExampleQuestion

PUBLISHED = {
    "index": 3,
    "input": "Some numbers are hidden.\nWhat is hidden?\nfiller filler\nWhat is the number for x in the text?",
    "outputs": ["123", "456"],
    "length": 40,
    "answer_prefix": " The number is",
}
HUB = {
    "context": "Some numbers are hidden.\nfiller filler\n",
    "question": "What is the number for x in the text? ",
    "answer_prefix": "The number is",
    "answer": ["123", "456"],
    "task": "niah_multivalue",
    "max_new_tokens": 64,
}


def write_rows(folder, *rows, file="niah_multivalue.jsonl"):
    """Write a file of these rows and return its folder."""
    (folder / file).parent.mkdir(exist_ok=True, parents=True)
    if file.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), folder / file)
    else:
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        (folder / file).write_text("\n".join(lines) + "\n")
    return folder


def hub_example(task="niah_multivalue", reserved=64):
    question = ExampleQuestion(HUB["question"], HUB["answer_prefix"], ("123", "456"), "all", reserved, task)
    return Example(HUB["context"], (question,))
