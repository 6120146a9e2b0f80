"""Rows of LongBench and SCBench in their published forms, answers to them, and the official scores of these answers.

The figures are those of LongBench's eval.py (with rouge 1.0.1, and fuzzywuzzy 0.18 on difflib) and of SCBench's
compute_scores.py and repo_qa_utils.py (rouge_score 0.1.2, nltk 3.10, tree_sitter_languages 1.10), from 0 to 100 and
from 0 to 1.
"""

import json

CLASSES = ["Number of something", "Number", "City", "Human", "Human group"]
CONTEXT = "Alan wrote the first part in 1931. Berta wrote the rest."
CODE = "def add(a, b):\n"


def longbench_row(question, answers, context=CONTEXT, classes=None, length=4000):
    return {
        "input": question, "context": context, "answers": answers, "length": length, "dataset": "any",
        "language": "en", "all_classes": classes, "_id": "0",
    }  # fmt: skip


LONGBENCH = {
    "qasper": (
        [
            ("Who?", ["Berta", "Alan and Berta"]),
            ("Is it?", ["unanswerable"]),
            ("When?", ["in the year 1931"]),
        ],
        ["It was Alan, and Berta.", " Unanswerable", "1931\nor later"],
    ),
    "gov_report": (
        [
            ("", ["GAO recommends that the agency review its plan.\nSpending rose in 2019."]),
            ("", ["Nothing."]),
        ],
        ["Spending rose 5% in 2019. GAO recommends a review. GAO recommends a plan.", "..."],
    ),
    "trec": (
        [("Question: How many?\nType:", ["Number of something"]), ("Question: Who?\nType:", ["Human group"])],
        ["\nNumber of something\nQuestion: Where? Type: City", " Human group, or City"],
    ),
    "triviaqa": ([("Who?\nAnswer:", ["Alan Alanson", "Alanson"])], [" Alanson\nPassage: Berta"]),
    "samsum": (
        [("A: Hi.\nSummary:", ["Alan greets Berta. She is glad."])],
        ["\nAlan greets her. Berta left.\nDialogue"],
    ),
    "passage_count": ([("", ["7"]), ("", ["12"])], ["There are 7 of 30, so 7.", "thirteen"]),
    "passage_retrieval_en": ([("An abstract.", ["Paragraph 15"])], ["Paragraph 15, not 1, 5"]),
    "passage_retrieval_zh": ([("摘要", ["段落3"])], ["段落3"]),
    "lsht": ([("新闻：…\n类别：", ["体育"])], ["体育；经济"]),
    "multifieldqa_zh": (
        [
            ("何时？", ["在2019年，由北京大学的研究人员提出。"]),
            ("几个？", ["三个", "共三个部分。"]),
        ],
        ["北京大学研究人员在2019年提出的", "共有三个部分"],
    ),
    "dureader": (
        [("怎么做？", ["先把鸡蛋打散，再加入适量的盐。", "把鸡蛋打散加盐"])],
        ["把鸡蛋打散，然后加入盐和水。"],
    ),
    "vcsum": (
        [("", ["会议讨论了公司明年的预算。与会者一致同意增加研发投入。"]), ("", ["无"])],
        ["与会者讨论了明年的预算，同意增加研发的投入.会议结束", "..."],
    ),
    "lcc": ([("", ["    return a + b"])], ["# adds\n```python\n    return b + a\n    pass"]),
    "repobench-p": ([("def sub(a, b):\n", ["    return a - b"])], ["// no\n`no`"]),
}
"""By task: questions with their true answers, and the answers that are scored."""
LSHT_CLASSES = ["体育", "经济", "科技"]
LONGBENCH_FIGURES = {
    "qasper": 69.44, "gov_report": 36.36, "trec": 75.0, "triviaqa": 100.0, "samsum": 54.55, "passage_count": 33.33,
    "passage_retrieval_en": 33.33, "passage_retrieval_zh": 100.0, "lsht": 50.0, "lcc": 88.0, "repobench-p": 0.0,
    "multifieldqa_zh": 80.39, "dureader": 60.0, "vcsum": 34.62,
}  # fmt: skip
"""The official scores of all of a task's answers."""
CHINESE_WORDS = "multifieldqa_zh", "dureader", "vcsum"
"""Tasks whose scores need jieba."""


def longbench_rows(task):
    classes = {"trec": CLASSES, "lsht": LSHT_CLASSES}.get(task)
    return [longbench_row(question, answers, classes=classes) for question, answers in LONGBENCH[task][0]]


FUNCTIONS = {
    "add": "def add(a, b):\n    total = a + b\n    rest = total * 2\n    return total - rest\n",
    "take": "def take(a, b):\n    less = a - b\n    more = less * 3\n    return less + more\n",
}
BOOK = "Alan lived in Ghent. Berta moved to Rome."
OPTIONS = ["Ghent", "Rome", "Oslo", "Bern"]


def turn(question, answer, **more):
    return {"input": question, "answer": answer, **more}


SCBENCH = {
    "scbench_kv": (
        [turn('Key: "k1"\nThe value associated:', "v-1"), turn('Key: "k2"', "v-2")],
        ['"v-1".', "V-2"],
    ),
    "scbench_prefix_suffix": ([turn("Starts with ab:", "abxyz")], ["it is abxyz"]),
    "scbench_vt": ([turn("Which have 7?", ["AB", "CD", "EF"])], ["They are ab and ef."]),
    "scbench_repoqa": (
        [turn("It adds.", FUNCTIONS["add"], name="add"), turn("It takes.", FUNCTIONS["take"], name="take")],
        [f"```python\nimport math\n\n{FUNCTIONS['add']}```", "```\ndef take(a): return a\n```"],
    ),
    "scbench_qa_eng": (
        [turn("Where did Alan live?", "Ghent"), turn("And Berta?", "Rome")],
        [" in GHENT", "Bern"],
    ),
    "scbench_choice_eng": (
        [turn("Alan?", "Ghent", options=OPTIONS), turn("Berta?", "Rome", options=OPTIONS)],
        ["A. Ghent", "I think the answer is C"],
    ),
    "scbench_many_shot": ([turn("Which?", "(B)")], [" (b)"]),
    "scbench_summary": (
        [turn("Please summarize.", "Alan stayed.\nBerta moved to Rome.")],
        ["Berta moved; Alan stayed in Rome."],
    ),
    "scbench_mf": (
        [turn("The largest number is", 9), turn("The second smallest number is", 3)],
        [": 9.5", "4, or 3"],
    ),
    "scbench_summary_with_needles": (
        [
            turn("Please summarize.", "Alan stayed.", task="scbench_summary"),
            turn("What is the pass key?", "71432", task="scbench_passkey"),
        ],
        ["Alan stayed there.", "It is 71432, 1."],
    ),
    "scbench_repoqa_and_kv": (
        [
            turn("It adds.", FUNCTIONS["add"], task="scbench_repoqa", name="add"),
            turn('Key: "k1"', "v-1", task="scbench_kv", name=None),
        ],
        [FUNCTIONS["add"], "none"],
    ),
    "scbench_qa_chn": ([turn("住在哪里？", ["根特", "在根特。"])], ["他在根特"]),
}
"""By task: the questions of a row, and the answers that are scored."""
SCBENCH_FIGURES = {
    "scbench_kv": [1, 0], "scbench_prefix_suffix": [1], "scbench_vt": [0.67], "scbench_repoqa": [1, 0],
    "scbench_qa_eng": [1, 0], "scbench_choice_eng": [1, 0], "scbench_many_shot": [1], "scbench_summary": [0.833333],
    "scbench_mf": [1, 0], "scbench_summary_with_needles": [0.8, 1], "scbench_repoqa_and_kv": [1, 0],
    "scbench_qa_chn": [0.857143],
}  # fmt: skip
"""The official score of each answer. scbench_many_shot's scorer looks for each item of a list, and would look for each
letter of a single string, so it was given a list of one."""


def scbench_row(task):
    context = [3, 9, 5] if task == "scbench_mf" else BOOK
    row = {"id": 0, "context": context, "multi_turns": SCBENCH[task][0]}
    return row | ({"repo": "a/b", "lang": "python"} if "repoqa" in task else {})


def write(folder, rows):
    """Write one .jsonl file per task, named after it."""
    for task, task_rows in rows.items():
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in task_rows))
    return folder
