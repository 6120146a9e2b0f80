"""Test HELMET's records as samples: the official program's prompts and scores, the cut of long contexts, and the errors
for damaged records."""

import hashlib
import re
from pathlib import Path

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest

from kvjax.errors import UserError
from kvjax.evaluate.__main__ import main
from kvjax.evaluate.config import parse
from kvjax.evaluate.sized_tasks import sized_tasks
from kvjax.evaluate.sizing import check_policies
from kvjax.tasks.helmet import TASKS, HelmetSamples, hub_tasks
from kvjax.tasks.helmet.records import Files
from kvjax.tasks.prompt import PromptEncoder, any_present
from kvjax.tasks.registry import open_task
from kvjax.tasks.splits import Split
from tests.evaluate.whole_run import SMALL, lines
from tests.tasks.document_inputs import inputs
from tests.tasks.helmet_inputs import (
    ANSWERS,
    CHAT_FIGURES,
    DIGESTS,
    FIGURES,
    FILES,
    texts,
    write_records,
)
from tests.tasks.model_tokenizers import byte_tokenizer


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return write_records(tmp_path_factory.mktemp("helmet"))


def first(task, folder, chat=False):
    """Return the first prompt of a task."""
    _, (make, *_) = TASKS[task].prompts(Files(folder, 0))[0]
    prompt = make()
    return prompt.example(prompt.documents, task, 1, chat)


@pytest.mark.parametrize("task", TASKS)
def test_prompts_equal_the_official_ones(task, records, monkeypatch):
    """The prompts have context, question and the answer's beginning; records and demonstrations are sampled as
    officially."""
    monkeypatch.setattr(hub_tasks, "rouge_f1", lambda: any_present)
    count, digest = DIGESTS[task]
    whole = []
    makers = [make for _, copies in TASKS[task].prompts(Files(records, 0)) for make in copies]
    for make in makers[: count : max(1, count // 20)]:
        prompt = make()
        example = prompt.example(prompt.documents, task, 1, chat=False)
        (question,) = example.questions
        whole.append(example.context + question.text + question.answer_prefix)
    assert hashlib.sha256("\0".join(whole).encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("task", TASKS)
def test_scores_equal_those_of_the_official_scorer(task, chat, records):
    if task == "infbench_qa_eng":
        pytest.importorskip("rouge_score")
    (question,) = first(task, records, chat).questions
    scores = [question.score(answer.format(*question.expected)) for answer in ANSWERS[task]]
    figures = CHAT_FIGURES.get(task, FIGURES[task]) if chat else FIGURES[task]
    assert scores == pytest.approx(figures, abs=1e-6)


def test_a_prompt_is_cut_where_the_context_ends(records):
    example = first("kilt_triviaqa", records)
    assert example.as_is
    assert example.context == (
        "Use the given documents to write a concise and short answer to the question. Write your answer in the "
        "following format:\nAnswer: [answer]\n\n"
        "Document (Title: Ghent): House 201 of Ghent.\n\nDocument (Title: Rome): House 201 of Rome.\n\n"
        "Document (Title: Oslo): House 201 of Oslo.\n\nQuestion: Who lives in house 201?\nAnswer: The owl 201\n\n"
        "Document (Title: Ghent): House 203 of Ghent.\n\nDocument (Title: Rome): House 203 of Rome.\n\n"
        "Document (Title: Oslo): House 203 of Oslo.\n\nQuestion: Who lives in house 203?\nAnswer: The owl 203\n\n"
        "Document (Title: Ghent): House 0 of Ghent.\n\nDocument (Title: Rome): House 0 of Rome.\n\n"
        "Document (Title: Oslo): House 0 of Oslo.\n\n"
    )
    (question,) = example.questions
    assert (question.text, question.answer_prefix) == ("Question: Who lives in house 0?", "\nAnswer:")
    assert question.expected == ("The owl 0", "owl no. 0")


def test_a_chat_template_has_no_answer_prefix(records):
    (question,) = first("infbench_choice_eng", records, chat=True).questions
    assert question.answer_prefix == ""
    assert not first("infbench_choice_eng", records).as_is
    assert question.text.endswith("chapter 0?\nOptions:\nA. Slept\nB. Ran\nC. Ate\nD. Left 0")


def test_long_documents_lose_their_end(records):
    """The cut is that of the official program's `tokenize`. Each byte is one token, so that the prompt can be spelled
    out here."""
    tokenizer = byte_tokenizer()
    encode = PromptEncoder(tokenizer)

    def read(task, length):
        (sample,) = HelmetSamples(task, records, encode).samples(Split(0, 1), 1, length)
        assert len(sample.context) + sample.tokens_after_context <= length
        return str(tokenizer.decode(sample.context)), len(sample.context) + sample.tokens_after_context

    whole, size = read("json_kv", 4096)
    documents = '{"k0": "v0", "k1": "v1", "k2": "v2"}'
    assert whole.startswith(f"{documents}\n\nExtract the value")
    assert read("json_kv", size - 7) == (whole.replace(documents, documents[:-7]), size - 7)
    with pytest.raises(UserError, match="--context 200: a sample of helmet_json_kv needs more tokens"):
        read("json_kv", 200)
    novel, size = read("infbench_choice_eng", 4096)
    omitted = " ... [the rest of the text is omitted]"
    assert novel.endswith("The hunters were running. \n\n")
    assert read("infbench_choice_eng", size - 9)[0] == f"{novel[: -2 - 9 - len(omitted)]}{omitted}\n\n"


def test_the_longest_files_that_fit_are_read(tmp_path):
    for length, file in (
        (300, "json_kv/test_k50_dep6.jsonl"),
        (9000, "json_kv/test_k105_dep6.jsonl"),
        (131072, "json_kv/test_k1800_dep6.jsonl"),
    ):
        task = open_task("helmet_json_kv", inputs(helmet=tmp_path))
        with pytest.raises(UserError, match=f"--data helmet {tmp_path}/{file}: cannot be read"):
            task.samples(Split(0, 1), 1, length)


def test_datasets_are_read_from_the_hub_without_a_local_copy(tmp_path, monkeypatch):
    """If the folder has no copy, the hub's own .parquet files are read."""
    asked = []

    def downloaded(name, file, repo_type, revision):
        asked.append((name, file, repo_type, revision))
        words = "Tell" if "validation" in file else "Say"
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(texts(20, 3, "intent", words=words)), tmp_path / "rows.parquet"
        )
        return str(tmp_path / "rows.parquet")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", downloaded)
    wanted = write_records(
        tmp_path / "copy",
        {
            "clinc_oos/train.jsonl": texts(20, 3, "intent"),
            "clinc_oos/validation.jsonl": texts(20, 3, "intent", words="Tell"),
        },
    )
    assert first("icl_clinic150", None).context == first("icl_clinic150", wanted).context
    assert first("icl_clinic150", tmp_path).context == first("icl_clinic150", wanted).context
    assert asked[:2] == [
        ("clinc/clinc_oos", f"plus/{split}/0000.parquet", "dataset", "refs/convert/parquet")
        for split in ("train", "validation")
    ]


NQ, NQ_DEMOS = "kilt/nq-dev-multikilt_1000_k20_dep6.jsonl", "kilt/nq-train-multikilt_1000_k3_dep6.jsonl"
POPQA, RANKING = "kilt/popqa_test_1000_k20_dep6.jsonl", "msmarco/test_reranking_data_k14_dep3.jsonl"
NEEDLES, KV = "ruler/niah_multikey_2/validation_4096.jsonl", "json_kv/test_k50_dep6.jsonl"
CHOICES = "InfiniteBench/longbook_choice_eng.jsonl"


@pytest.mark.parametrize(
    ("task", "file", "change", "message"),
    [
        ("ruler_niah_mk_2", NEEDLES, {"query": None}, "line 1: expected `query` to be a string, got None"),
        ("ruler_niah_mk_2", NEEDLES, {"outputs": []}, "line 1: expected `outputs` to be a list of strings, got"),
        ("json_kv", KV, {"demos": ["k0"]}, "line 1: expected `demos` to be a list of keys and values, got"),
        ("kilt_nq", NQ, {"id": 1.5}, "line 1: expected `id` to be a string or a whole number, got 1.5"),
        ("kilt_nq", NQ, {"ctxs": []}, "line 1: expected `ctxs` to be a list of objects, got"),
        ("kilt_nq", NQ, {"ctxs": [{"title": "x"}]}, "line 1, `ctxs` 1 has no field `text`, it has title"),
        ("kilt_nq", NQ_DEMOS, {}, "k20_dep6.jsonl: line 1 needs demonstrations of 2 questions, got 1"),
        ("kilt_popqa", POPQA, {"s_pop": "x"}, "line 1: `s_pop` must be a whole number of at least 0, got 'x'"),
        ("msmarco_rerank_psg", RANKING, {"ctxs": [{"id": "1", "text": "x"}]}, "`ctxs` 1 has no field `label`"),
        ("icl_trec_fine", "trec/train.jsonl", {"fine_label": 50}, "`fine_label` must be a whole number of at most 49"),
        ("infbench_choice_eng", CHOICES, {"options": ["Slept"]}, "expected four `options`, with the answer Ran"),
    ],
)  # fmt: skip
def test_errors_name_damaged_records(task, file, change, message, tmp_path):
    """The file has one record, with the change."""
    rows = {name: records[:12] for name, records in FILES.items()} | {file: [FILES[file][0] | change]}
    with pytest.raises(UserError, match=message) as error:
        first(task, write_records(tmp_path, rows))
    assert str(error.value).startswith(f"--data helmet {tmp_path}")


def test_missing_data_is_refused(tmp_path):
    with pytest.raises(UserError, match="--data helmet none: expected a folder"):
        open_task("helmet_icl_nlu", inputs(helmet=Path("none")))
    with pytest.raises(UserError, match="a task needs --data helmet=PATH, the unpacked data.tar.gz"):
        open_task("helmet_kilt_nq", inputs()).samples(Split(0, 1), 1, 4096)
    write_records(tmp_path, {KV: FILES[KV][:2], "trec/train.jsonl": [], "trec/test.jsonl": []})
    with pytest.raises(UserError, match="there are 2 questions of helmet_json_kv, needed 3 to compare"):
        open_task("helmet_json_kv", inputs(helmet=tmp_path)).samples(Split(0, 3), 3, 4096)
    with pytest.raises(UserError, match="there are no rows in the split train of CogComp/trec"):
        first("icl_trec_fine", tmp_path)


def test_an_evaluation_makes_samples(records, tmp_path):
    tasks = ["helmet_ruler_niah_mk_2", "helmet_msmarco_rerank_psg"]
    options = ["--policies", "full", "--samples", "3", "--context", "4096", "--tasks", *tasks]
    config = parse([*SMALL, *options, "--data", f"helmet={records}", "--out", str(tmp_path)])
    check_policies(config)
    for task in sized_tasks(config):
        assert (task.published, len(task.samples)) == (True, 3)
        (question,) = task.samples[0].questions
        assert (question.kind, question.score(question.answer)) == (task.name, 1)


def test_all_records_of_a_question_are_compared(records, tmp_path):
    """One of them calibrates, and no question or novel does both."""
    tokenizer = byte_tokenizer()

    def asked(task, folder, pattern, **split):
        samples = HelmetSamples(task, folder, PromptEncoder(tokenizer)).samples(Split(0, 2, **split), 2, 4096)
        texts = [str(tokenizer.decode([*x.context, *x.questions[0].prompt])) for x in samples]
        return [sample.source for sample in samples], [re.findall(pattern, text)[-1] for text in texts]

    sources, houses = asked("kilt_nq", records, r"house (\d+)")
    assert (sources, len(set(houses))) == ([0, 0, 1, 1], 2)
    sources, others = asked("kilt_nq", records, r"house (\d+)", calibration=True)
    assert sources == [0, 1]
    assert not {*houses} & {*others}
    name = "InfiniteBench/longbook_choice_eng.jsonl"
    rows = [row | {"context": f"Novel {index % 3}."} for index, row in enumerate(FILES[name][:12])]
    folder = write_records(tmp_path, {name: rows})
    _, novels = asked("infbench_choice_eng", folder, r"Novel (\d)")
    _, others = asked("infbench_choice_eng", folder, r"Novel (\d)", calibration=True)
    assert not {*novels} & {*others}


@pytest.mark.slow
def test_a_whole_evaluation(records, tmp_path):
    options = [
        "--policies",
        "full",
        "--tasks",
        "helmet_ruler_niah_mk_2",
        "--samples",
        "3",
        "--context",
        "512",
    ]
    main([*SMALL, *options, "--data", f"helmet={records}", "--out", str(tmp_path)])
    (result,) = lines(tmp_path)
    assert (result["task"], result["samples"]) == ("helmet_ruler_niah_mk_2", 3)
    assert (result["metric"], result["footprint"]) == ("share of the needles found", 1.0)
