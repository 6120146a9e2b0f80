"""Test LongProc's records as samples: prompts, official scores, and the messages for damaged files."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvjax.errors import UserError
from kvjax.evaluate.__main__ import main
from kvjax.evaluate.config import parse
from kvjax.evaluate.sized_tasks import sized_tasks
from kvjax.tasks.longproc import NAMES, RESERVED, longproc_examples
from kvjax.tasks.longproc_scores import countdown_trace
from tests.evaluate.inputs import TEST_MODEL
from tests.evaluate.whole_run import lines

RECORDS = Path(__file__).parents[3] / "shared" / "data" / "longproc"
"""The first published records of countdown and its prompt."""
PROMPTS = {
    "html_to_tsv": "Page:\n{html_str}\n\n[TARGET INFORMATION]\n{task_topic}: {task_description}"
    "{filtering_instruction}\n{tsv_header}\n{{Your TSV output}}",
    "path_traversal": "From <CITY_NAME>.\n{city_context}\n\nNow find the route from {src_city} to {dst_city}.",
    "tom_tracking": "{{Ann: hall}}\n[STORY]\n{story}\n\n[QUESTION]\n{question}\n\n[YOUR ANSWER]",
    "countdown": "{demonstration}\n\n[Problem]\nNumbers: {nums}\nTarget: {target}",
}
ROWS: dict[str, dict[str, Any]] = {
    "html_to_tsv": {
        "html_path": "webpage/owls.html", "task_topic": "Owls", "task_description": "(1) Name; (2) Colour",
        "filtering_instruction": "", "tsv_header": "name\tcolour",
        "gt": "name\tcolour\nAda\tgrey\nBea\tThe red one\nCleo\tN/A\nAda\tgrey",
    },
    "path_traversal": {
        "context_nl": "You can travel from Ely to Ghent by bus.", "question_repr": ["Ely", "Rome"],
        "answer_nl": "From Ely, take a bus to Ghent.\nFrom Ghent, take a train to Oslo.\n"
        "From Oslo, take a plane to Rome.",
    },
    "tom_tracking": {
        "story": "Step 0: Ann is in the hall.", "question": "Where does Ann believe the pen is?",
        "solution": "Ann's belief on the pen:\n- Step 0: (initial state) {Ann location: hall; Ann sees pen: False}\n"
        "- Step 1: {Ann location: attic; Ann sees pen: True}\n- Step 2: {Ann location: None}\nFinal Answer: the attic",
    },
    "countdown": {"nums": [40, 19, 23, 7], "target": 29, "demonstration": "not read"},
}  # fmt: skip
PAGE = "<p>{Ada} & Bea</p>\n"
TRACE = countdown_trace([40, 19, 23, 7], 29) or ""
STEPS = TRACE.split("\n")
ROUTE = ROWS["path_traversal"]["answer_nl"].split("\n")
BELIEFS = ROWS["tom_tracking"]["solution"].split("\n")
ANSWERS = {
    "html_to_tsv": [
        "Here:\n```tsv\nname\tcolour\nBea\tred one\nADA.\ta grey\nDot\tblue\n```\nDone.",
        "```tsv\nname\tcolour\nAda\tgrey\nBea",
        "x\ty\nAda\tgrey\tbig\nCleo\tN/A\nThat is all.",
        "```tsv\nname\tcolour\nAda\tgrey\n```\nor\n```tsv\nname\tcolour\nCleo\tN/A\n```",
        "name\tname\nAda\tgrey",
        "name\nAda",
        'name\tcolour\n"Ada\tgrey\nCleo\tN/A',
        "name\tcolour\nAda\tg\rrey",
        "name\tcolour\nno table",
        "",
    ],
    "path_traversal": [
        "<Route>\n" + "\n".join(ROUTE) + "\n</Route>",
        "<Route>\n" + "\n".join([ROUTE[0], ROUTE[2], ROUTE[2]]) + "\n</Route>",
        "<Route>" + "\n".join(ROUTE[:2]) + "</Route>",
        "<Route>" + "\n".join([*ROUTE, ROUTE[0]]) + "</Route>",
        "<Route></Route>",
        "\n".join(ROUTE),
    ],
    "tom_tracking": [
        "\n".join(BELIEFS).upper(),
        "\n".join([BELIEFS[1].replace("the ", ""), "", BELIEFS[2], "- Step 2: Ann’s location: None"]),
        "\n".join(["   " + BELIEFS[1], "   " + BELIEFS[2], BELIEFS[3]]),
        "\n".join(BELIEFS[:3]),
        "\n".join([*BELIEFS, "- Step 3: {}"]),
        "",
    ],
    "countdown": [
        TRACE,
        "<Solution>\n19 - 23 = -4\n-4 + 40 = 36\n 36-7 = 29\n</Solution>",
        "<Solution>\n40 - 19 = 21\n23 - 21 = 2\n7 * 2 = 14\n</Solution>",
        "<Solution>\n19 - 23 = -4\n40 + 7 = 47\n-4 * 47 = -188\n</Solution>",
        "<Solution>40 + 7 = 47</Solution>",
        "\n".join(STEPS[:-6]),
        "\n".join(STEPS[:7]),
        "\n".join([*STEPS[:5], STEPS[5].replace("= ", "= 1"), *STEPS[6:9], "|- Try 1 + 1 = 2", *STEPS[9:12]]),
        "\n".join([*STEPS[:4], STEPS[4].replace("drop this branch", "stop")]),
        "\n".join(["# Search Procedure", *STEPS[2:6]]),
        "I give up.",
    ],
}
FIGURES = {
    "html_to_tsv": [0.705882, 0.666667, 0.333333, 0.461538, 0, 0, 0, 0, 0, 0],
    "path_traversal": [(1, 1), (0, 0.666667), (0, 0.666667), (0, 1), (0, 0.333333), (0, 0)],
    "tom_tracking": [(1, 1), (0, 0.666667), (0, 0.333333), (0, 0.666667), (0, 1), (0, 0)],
    "countdown": [
        (1, 1), (1, 1), (0, 0), (0, 0), (0, 0), (0, 0.909091), (0, 0.363636), (0, 0.636364), (0, 0.181818), (0, 0),
        (0, 0),
    ],
}  # fmt: skip
"""The official scorers' figures of the answers: F1, or accuracy and partial accuracy."""
TRACES = {
    ((9, 16, 6, 18), 12): "812887c9243bc785",
    ((40, 19, 23, 7), 29): "0394945b960cbf74",
    ((44, 48, 35, 6), 25): "0c42a28b666a6053",
    ((8, 8, 7, 7), 48): "9697507af3c6f7d0",
}
"""The official traces' SHA-256, by numbers and target. The last one divides by zero, and two have results too large."""
PUBLISHED = "719834f64ea4edd5", "cc93e8803c840258", "001d9caefe70118e", "9cd03e0b7be32492"
"""The official prompts' SHA-256 of the records in `RECORDS`."""


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.fixture
def data(tmp_path):
    """Return a folder with a record of each task in the published layout."""
    for task, row in ROWS.items():
        folder = tmp_path / task
        folder.mkdir()
        (folder / "prompts.yaml").write_text(json.dumps({"USER_PROMPT": PROMPTS[task]}))
        (folder / f"{task}_0.5k.json").write_text(json.dumps([row]))
    (tmp_path / "html_to_tsv" / "webpage").mkdir()
    (tmp_path / "html_to_tsv" / "webpage" / "owls.html").write_text(PAGE)
    return tmp_path


@pytest.mark.parametrize("task", ROWS)
def test_scores_equal_those_of_the_official_scorer(task, data):
    names = [name for name in NAMES if name.startswith(f"longproc_{task}_0.5k")]
    questions = [longproc_examples(name, data)[0].questions[0] for name in names]
    found = [tuple(round(question.score(answer), 6) for question in questions) for answer in ANSWERS[task]]
    assert found == [figures if isinstance(figures, tuple) else (figures,) for figures in FIGURES[task]]
    assert all(question.score(question.expected[0]) == 1 for question in questions)


def test_search_traces_equal_the_official_ones():
    for (numbers, target), trace in TRACES.items():
        assert digest(countdown_trace(list(numbers), target) or "") == trace
    assert countdown_trace([60, 50, 3, 2], 61) is None


def test_code_in_an_answer_is_not_run(data):
    (example,) = longproc_examples("longproc_countdown_0.5k", data)
    for line in ("print(1) + 2 = 3", "1 / 0 = 3", "9 ** 9 = 3", f"{'9' * 5000} + 1 = 3"):
        assert example.questions[0].score(f"<Solution>\n{line}\n{line}\n{line}\n</Solution>") == 0


@pytest.mark.parametrize(
    ("task", "context", "question"),
    [
        (
            "html_to_tsv",
            f"Page:\n{PAGE}\n\n",
            "[TARGET INFORMATION]\nOwls: (1) Name; (2) Colour\nname\tcolour\n{Your ",
        ),
        ("path_traversal", "from Ely to Ghent by bus.\n\n", "Now find the route from Ely to Rome."),
        (
            "tom_tracking",
            "{Ann: hall}\n[STORY]\nStep 0: Ann is in the hall.\n\n",
            "[QUESTION]\nWhere does Ann ",
        ),
        ("countdown", "\n</Solution>\n\n\n", "[Problem]\nNumbers: [40, 19, 23, 7]\nTarget: 29"),
    ],
)
def test_prompts_are_cut_where_the_question_begins(task, context, question, data):
    (example,) = longproc_examples(f"longproc_{task}_0.5k", data)
    assert example.context.endswith(context)
    assert example.questions[0].text.startswith(question)
    assert example.questions[0].reserved == 1024


def test_the_number_of_tasks():
    assert RESERVED["8k"] == 10240  # HELMET's longproc_addon/configs
    assert len(NAMES) == 3 + 3 * 3 * 2
    assert {"longproc_html_to_tsv_8k", "longproc_countdown_2k_partial"} < set(NAMES)
    assert "longproc_html_to_tsv_8k_partial" not in NAMES


@pytest.mark.parametrize(
    ("task", "change", "message"),
    [
        ("html_to_tsv", {"gt": 1}, "expected `gt` to be a string, got 1"),
        (
            "html_to_tsv",
            {"html_path": "../secret"},
            "expected `html_path` to be a file in the folder, got ../secret",
        ),
        ("html_to_tsv", {"html_path": "none.html"}, "cannot be read (No such file or directory)"),
        ("path_traversal", {"question_repr": ["Ely"]}, "expected `question_repr` to be two cities, got 1"),
        (
            "tom_tracking",
            {"solution": "none"},
            "expected `solution` to have lines that start with -, got none",
        ),
        ("countdown", {"nums": [1, 2]}, "expected `nums` to be four numbers, got [1, 2]"),
        ("countdown", {"nums": [1, 2, 3, "x"]}, "`nums` must be a whole number of at least 1, got 'x'"),
        ("countdown", {"target": 1999}, "expected `target` to be within reach of [40, 19, 23, 7], got 1999"),
    ],
)
def test_errors_name_damaged_records(task, change, message, data):
    file = data / task / f"{task}_0.5k.json"
    file.write_text(json.dumps([ROWS[task], ROWS[task] | change]))
    with pytest.raises(UserError) as error:
        longproc_examples(f"longproc_{task}_0.5k", data)
    assert str(error.value).startswith(f"--data longproc {file}: [1]: ")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("countdown_0.5k.json", "[", "is not JSON"),
        ("countdown_0.5k.json", "{}", "expected a JSON list of objects"),
        ("countdown_0.5k.json", "[1]", "[0]: expected an object, got 1"),
        ("prompts.yaml", "- x", "expected a YAML file with a text USER_PROMPT"),
        ("prompts.yaml", "USER_PROMPT: '[Problem'", "expected USER_PROMPT to have [Problem]"),
        (
            "prompts.yaml",
            "USER_PROMPT: '{nums.x}[Problem]'",
            "the fields demonstration, nums, target, got 'nums.x'",
        ),
        (
            "prompts.yaml",
            "USER_PROMPT: '}[Problem]'",
            "the fields demonstration, nums, target, got Single '}'",
        ),
    ],
)
def test_errors_name_damaged_files(file, text, message, data):
    (data / "countdown" / file).write_text(text)
    with pytest.raises(UserError) as error:
        longproc_examples("longproc_countdown_0.5k", data)
    assert str(error.value).startswith(f"--data longproc {data / 'countdown' / file}: ")
    assert message in str(error.value)


@pytest.fixture
def published(tmp_path):
    """Return a folder with the published records, in the published layout."""
    if not RECORDS.is_dir():
        pytest.skip(f"{RECORDS} does not exist")
    folder = tmp_path / "countdown"
    folder.mkdir()
    shutil.copy(RECORDS / "countdown.prompts.yaml", folder / "prompts.yaml")
    shutil.copy(RECORDS / "countdown_0.5k.first4.json", folder / "countdown_0.5k.json")
    return tmp_path


def test_prompts_of_published_records_equal_the_official_ones(published):
    examples = longproc_examples("longproc_countdown_0.5k", published)
    prompts = [example.context + example.questions[0].text for example in examples]
    assert tuple(map(digest, prompts)) == PUBLISHED
    assert len({example.source for example in examples}) == len(examples)


@pytest.mark.parametrize("name", ["longproc_countdown_0.5k", "longproc_countdown_0.5k_partial"])
def test_an_evaluation_makes_samples(name, published):
    options = [
        "--tasks",
        name,
        "--policies",
        "full",
        "--samples",
        "2",
        "--data",
        f"longproc={published}",
        "--out",
        str(published / "run"),
        "--context",
    ]
    (found,) = sized_tasks(parse([*TEST_MODEL, *options, "12288"]))
    sizes = [len(sample.context) + sample.tokens_after_context for sample in found.samples]
    with pytest.raises(UserError, match=f"--context 8192: a sample of {name} needs {sizes[0]} tokens, 1"):
        sized_tasks(parse([*TEST_MODEL, *options, "8192"]))
    assert all(
        question.score(question.answer) == 1 for sample in found.samples for question in sample.questions
    )


@pytest.mark.slow
def test_an_evaluation_reads_the_published_records(published, monkeypatch):
    # answers and worked examples as long as the published ones take long
    monkeypatch.setitem(RESERVED, "0.5k", 8)
    monkeypatch.setattr("kvjax.tasks.longproc.DEMONSTRATED", ())
    options = [
        "--tasks",
        "longproc_countdown_0.5k",
        "--policies",
        "full",
        "--samples",
        "1",
        "--context",
        "1024",
    ]
    main([*TEST_MODEL, *options, "--data", f"longproc={published}", "--out", str(published / "run")])
    (result,) = lines(published / "run")
    assert (result["task"], result["samples"]) == ("longproc_countdown_0.5k", 1)
    assert result["metric"] == "answers right"
