"""LongBench's tasks: their prompts, answer lengths and metrics.

The prompts are the published ones (config/dataset2prompt.json and dataset2maxlen.json), word for word, including typos
("asconcisely"). In all of them the question follows the context, and they are cut there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvjax.tasks.longbench.chinese import chinese_f1, chinese_rouge
from kvjax.tasks.longbench.scores import (
    best,
    class_share,
    code_line,
    first_line,
    number_share,
    paragraph_share,
)
from kvjax.tasks.prompt import Scoring
from kvjax.tasks.text_scores import rouge_l, similarity, words_f1

PASSAGES = "Answer the question based on the given passages. Only give me the answer and do not output any other words."
NO_EXPLANATION = "using a single phrase if possible. Do not provide any explanation."
QASPER = (
    "concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based on "
    'the information in the article, write "unanswerable". If the question is a yes/no question, answer "yes", "no", '
    'or "unanswerable". Do not provide any explanation.'
)


@dataclass(frozen=True)
class Metric:
    """A metric."""

    name: str
    """The description in reports."""
    scoring: Callable[[Sequence[str]], Scoring]
    """Makes the scoring of a row from its classes."""
    classes: bool = False
    """True if the scoring needs a row's classes."""


F1 = Metric("F1 of the words", lambda classes: best(words_f1))
F1_LINE = Metric("F1 of the first line's words", lambda classes: best(words_f1, first_line))
ROUGE = Metric("ROUGE-L", lambda classes: best(rouge_l))
ROUGE_LINE = Metric("ROUGE-L of the first line", lambda classes: best(rouge_l, first_line))
CHINESE_F1 = Metric("F1 of the words", lambda classes: best(chinese_f1()))
CHINESE_ROUGE = Metric("ROUGE-L", lambda classes: best(chinese_rouge()))
CLASS = Metric(
    "share of the classes named that are right",
    lambda classes: best(class_share(classes), first_line),
    classes=True,
)
COUNT = Metric("share of the numbers named that are right", lambda classes: best(number_share))
PARAGRAPH = Metric("share of the numbers named that are right", lambda classes: best(paragraph_share))
CODE = Metric("similarity of the first line of code", lambda classes: best(similarity, code_line))


@dataclass(frozen=True)
class LongBenchTask:
    """A task, with its prompt in two parts: the context, and the question after it."""

    context: str
    """The first part, with the field `{context}`."""
    question: str
    """The second part, with the field `{input}` or the same for all rows."""
    reserved: int
    """The most tokens of an answer."""
    metric: Metric
    chat: bool = True
    """True if the chat template is used. The few-shot and code tasks do not use it."""
    even: bool = False
    """True if it is also a task of LongBench-E, with its even distribution of lengths."""


def _passages() -> LongBenchTask:
    context = f"{PASSAGES}\n\nThe following are given passages.\n{{context}}\n\n"
    return LongBenchTask(context, f"{PASSAGES}\n\nQuestion: {{input}}\nAnswer:", 32, F1, even=True)


TASKS = {
    "narrativeqa": LongBenchTask(
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question "
        f"asconcisely as you can, {NO_EXPLANATION}\n\nStory: {{context}}\n\n",
        f"Now, answer the question based on the story asconcisely as you can, {NO_EXPLANATION}\n\n"
        "Question: {input}\n\nAnswer:",
        128,
        F1,
    ),
    "qasper": LongBenchTask(
        f"You are given a scientific article and a question. Answer the question as {QASPER}\n\n"
        "Article: {context}\n\n",
        f" Answer the question based on the above article as {QASPER}\n\nQuestion: {{input}}\n\nAnswer:",
        128,
        F1,
        even=True,
    ),
    "multifieldqa_en": LongBenchTask(
        "Read the following text and answer briefly.\n\n{context}\n\n",
        "Now, answer the following question based on the above text, only give me the answer and do not output any "
        "other words.\n\nQuestion: {input}\nAnswer:",
        64,
        F1,
        even=True,
    ),
    "multifieldqa_zh": LongBenchTask(
        "阅读以下文字并用中文简短回答：\n\n{context}\n\n",
        "现在请基于上面的文章回答下面的问题，只告诉我答案，不要输出任何其他字词。\n\n问题：{input}\n回答：",
        64,
        CHINESE_F1,
    ),
    "hotpotqa": _passages(),
    "2wikimqa": _passages(),
    "musique": LongBenchTask(_passages().context, _passages().question, 32, F1),
    "dureader": LongBenchTask(
        "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n",
        "请基于上述文章回答下面的问题。\n\n问题：{input}\n回答：",
        128,
        CHINESE_ROUGE,
    ),
    "gov_report": LongBenchTask(
        "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
        "Report:\n{context}\n\n",
        "Now, write a one-page summary of the report.\n\nSummary:",
        512,
        ROUGE,
        even=True,
    ),
    "qmsum": LongBenchTask(
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one "
        "or more sentences.\n\nTranscript:\n{context}\n\n",
        "Now, answer the query based on the above meeting transcript in one or more sentences.\n\n"
        "Query: {input}\nAnswer:",
        512,
        ROUGE,
    ),
    "multi_news": LongBenchTask(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\n",
        "Now, write a one-page summary of all the news.\n\nSummary:",
        512,
        ROUGE,
        even=True,
    ),
    "vcsum": LongBenchTask(
        "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n{context}\n\n",
        "会议总结：",
        512,
        CHINESE_ROUGE,
    ),
    "trec": LongBenchTask(
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n",
        "{input}",
        64,
        CLASS,
        chat=False,
        even=True,
    ),
    "triviaqa": LongBenchTask(
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
        "The following are some examples.\n\n{context}\n\n",
        "{input}",
        32,
        F1_LINE,
        chat=False,
        even=True,
    ),
    "samsum": LongBenchTask(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n",
        "{input}",
        128,
        ROUGE_LINE,
        chat=False,
        even=True,
    ),
    "lsht": LongBenchTask(
        "请判断给定新闻的类别，下面是一些例子。\n\n{context}\n", "{input}", 64, CLASS, chat=False
    ),
    "passage_count": LongBenchTask(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read "
        "these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other "
        "words, how many non-repeating paragraphs are there in total?\n\n{context}\n\n",
        "Please enter the final count of unique paragraphs after removing duplicates. The output format should only "
        "contain the number, such as 1, 2, 3, and so on.\n\nThe final answer is: ",
        32,
        COUNT,
        even=True,
    ),
    "passage_retrieval_en": LongBenchTask(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract "
        "is from.\n\n{context}\n\n",
        "The following is an abstract.\n\n{input}\n\nPlease enter the number of the paragraph that the abstract is "
        'from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: ',
        32,
        PARAGRAPH,
        even=True,
    ),
    "passage_retrieval_zh": LongBenchTask(
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n",
        "下面是一个摘要\n\n{input}\n\n请输入摘要所属段落的编号。答案格式必须是"
        '"段落1"，"段落2"等格式\n\n答案是：',
        32,
        PARAGRAPH,
    ),
    "lcc": LongBenchTask(
        "Please complete the code given below. \n{context}",
        "Next line of code:\n",
        64,
        CODE,
        chat=False,
        even=True,
    ),
    "repobench-p": LongBenchTask(
        "Please complete the code given below. \n{context}",
        "{input}Next line of code:\n",
        64,
        CODE,
        chat=False,
        even=True,
    ),
}
EVEN = "_e"
"""The suffix of the names of LongBench-E's tasks."""


def longbench_task(name: str) -> LongBenchTask:
    """Return the task of a name in `NAMES`."""
    return TASKS[name.removesuffix(EVEN)]


NAMES = *TASKS, *(name + EVEN for name, task in TASKS.items() if task.even)
"""The names of LongBench's tasks and of LongBench-E's."""
