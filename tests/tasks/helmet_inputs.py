"""Records in the forms of HELMET's data.tar.gz and of its datasets on the hub, answers to them, and the official
program's prompts and scores for both.

`DIGESTS` and `FIGURES` were printed by the data.py and utils.py of princeton-nlp/HELMET (4526dfb), with datasets 5.2,
rouge_score 0.1.2 and pytrec_eval-terrier 0.5.11, for the records that `write_records` writes.
"""

import json

TITLES = "Ghent", "Rome", "Oslo", "Bern", "Riga"


def kilt(questions, depths, key="id", **more):
    """Return records of questions about passages, each question at several depths."""
    return [
        {
            key: f"q{number}" if key == "id" else f"Who lives in house {number}?",
            "question": f"Who lives in house {number}?",
            "answers": [f"The owl {number}", f"owl no. {number}"],
            "ctxs": [
                {"title": title, "text": f"House {number} of {title}.", "has_answer": place == depth}
                for place, title in enumerate(TITLES[:3])
            ],
            **more,
        }
        for number in questions
        for depth in range(depths)
    ]


def popqa(numbers, depths):
    """Return the same with whole numbers as ids; every seventh question is about a popular subject."""
    return [
        row | {"id": int(row["id"][1:]), "s_pop": 1000 if int(row["id"][1:]) % 7 == 0 else 999}
        for row in kilt(numbers, depths)
    ]


def msmarco(numbers, passages, title=None):
    """Return records with passages of relevance 0 to 3."""
    titled = {} if title is None else {"title": title}
    return [
        {
            "qid": str(number),
            "query": f"house {number}",
            "ctxs": [
                {"id": str(100 + place), **titled, "text": f"Text {place}.", "label": (place * number) % 4}
                for place in range(passages)
            ],
        }
        for number in numbers
    ]


def needles(values):
    return [
        {
            "context": f"One of the special magic numbers for tall-owl is: {number}.",
            "query": "tall-owl",
            "type_needle_v": "numbers" if values > 1 else "number",
            **(
                {"outputs": [str(number)]}
                if values == 1
                else {"answer": [str(number + i) for i in range(values)]}
            ),
        }
        for number in range(1000, 1103)
    ]


def json_kv():
    return [
        {
            "context": json.dumps({f"k{place}": f"v{place}" for place in range(number % 9 + 3)}),
            "question": "k2", "answer": "v2", "num_kvs": number % 9 + 3,
            "demos": [["k0", "v0"], ["k1", "v1"], ["k2", "v2"]],
        }
        for number in range(103)
    ]  # fmt: skip


def texts(count, labels, *fields, words="Say"):
    """Return labelled texts, the last label more frequent than the others."""
    return [
        {"text": f"{words} {number}?", **{field: min(number % (labels + 2), labels - 1) for field in fields}}
        for number in range(count)
    ]


def novels(choice):
    return [
        {
            "id": number,
            "context": f"Chapter {number}. " + "The hunters were running. " * 40,
            "input": f"What did the hunters do in chapter {number}?",
            "answer": ["Ran"] if choice else [f"They were running {number} miles", "ran"],
            "options": ["Slept", "Ran", "Ate", f"Left {number}"] if choice else [],
        }
        for number in range(104)
    ]


FILES = {
    "ruler/niah_multikey_2/validation_4096.jsonl": needles(1),
    "ruler/niah_multikey_3/validation_4096.jsonl": needles(1),
    "ruler/niah_multivalue/validation_4096.jsonl": needles(4),
    "json_kv/test_k50_dep6.jsonl": json_kv(),
    "kilt/nq-dev-multikilt_1000_k20_dep6.jsonl": kilt(range(103), 2, key="question"),
    "kilt/nq-train-multikilt_1000_k3_dep6.jsonl": kilt(range(200, 206), 2, key="question"),
    "kilt/triviaqa-dev-multikilt_1000_k20_dep6.jsonl": kilt(range(103), 2),
    "kilt/triviaqa-train-multikilt_1000_k3_dep6.jsonl": kilt(range(200, 206), 2),
    "kilt/hotpotqa-dev-multikilt_1000_k20_dep3.jsonl": kilt(range(99), 1),
    "kilt/hotpotqa-train-multikilt_1000_k3_dep3.jsonl": kilt(range(200, 206), 2),
    "kilt/popqa_test_1000_k20_dep6.jsonl": popqa(range(130), 2),
    "kilt/popqa_test_1000_k3_dep6.jsonl": popqa(range(9), 2),
    "msmarco/test_reranking_data_k14_dep3.jsonl": msmarco(range(1, 105), 14),
    "msmarco/test_reranking_data_k10_dep3.jsonl": msmarco(range(90, 99), 10),
    "trec/train.jsonl": texts(40, 5, "coarse_label", "fine_label"),
    "trec/test.jsonl": texts(30, 5, "coarse_label", "fine_label", words="Tell"),
    "banking77/train.jsonl": texts(60, 9, "label"),
    "banking77/test.jsonl": texts(520, 9, "label", words="Tell"),
    "clinc_oos/train.jsonl": texts(60, 9, "intent"),
    "clinc_oos/validation.jsonl": texts(520, 150, "intent", words="Tell"),
    "nlu_evaluation_data/train.jsonl": texts(5101, 68, "label"),
    "InfiniteBench/longbook_qa_eng.jsonl": novels(choice=False),
    "InfiniteBench/longbook_choice_eng.jsonl": novels(choice=True),
}  # fmt: skip
"""Records by file, for contexts of 4096 tokens."""


def write_records(folder, files=FILES):
    for name, rows in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


ANSWERS = {
    "ruler_niah_mk_2": [" {0}.", " 7"],
    "ruler_niah_mk_3": [" none"],
    "ruler_niah_mv": [" {0}, {2}", " {0}{1}{2}{3}"],
    "json_kv": [" {0}", " none", "\nCorresponding value: {0}\n"],
    "kilt_nq": [" {0}", " the\nowl no {0}!", " nobody", " Answer: OWL, no. 7"],
    "kilt_triviaqa": [" {1}"],
    "kilt_hotpotqa": [" It is {0}"],
    "kilt_popqa": ["{0}", " An owl"],
    "msmarco_rerank_psg": [
        " {0}", " 100 > 101 > 102 > 103", " [ID: 113] > ID112>ID111 >ID111 > 9", " none",
        " 103, 102 > 101 or 5 > 6 > 7", " 101 > 105 > 109 > 113 > 100 > 102 > 103 > 104 > 106 > 107 > 108",
    ],
    "icl_trec_coarse": [" {0}", " {0} or 99", " label: {0}\n\nSay", "\n{0}"],
    "icl_trec_fine": [" ({0})."],
    "icl_banking77": [" none"],
    "icl_clinic150": [" {0}\n"],
    "icl_nlu": ["label:{0}"],
    "infbench_qa_eng": [
        " {0}", " He runs a mile", " the hunters' running\nwas long", " Answer: {1}", "nothing. Answer: they were runs",
    ],
    "infbench_choice_eng": [" {0}", " {1}", " It is {1}, I think", " A", " ({0})", "{0}\nQuestion", "C. Ran, b. ran"],
}  # fmt: skip
"""By task: answers to the first record, with its expected strings."""
FIGURES = {
    "ruler_niah_mk_2": [1, 0], "ruler_niah_mk_3": [0], "ruler_niah_mv": [0.5, 1], "json_kv": [1, 0, 1],
    "kilt_nq": [1, 1, 0, 0], "kilt_triviaqa": [1], "kilt_hotpotqa": [1], "kilt_popqa": [1, 0],
    "msmarco_rerank_psg": [1, 0.29291, 0.25052, 0, 0.26364, 0.57553], "icl_trec_coarse": [1, 0, 1, 0],
    "icl_trec_fine": [1], "icl_banking77": [0], "icl_clinic150": [1], "icl_nlu": [1],
    "infbench_qa_eng": [1, 0.444444, 0.25, 1, 0.6], "infbench_choice_eng": [1, 1, 1, 0, 1, 1, 1],
}  # fmt: skip
"""The official score of each answer, without a chat template."""
CHAT_FIGURES = {"infbench_qa_eng": [1, 0.444444, 0.25, 1, 0.75], "infbench_choice_eng": [1, 1, 1, 0, 1, 1, 1]}
"""The official scores with a chat template, where the task uses it: the prompt then does not begin the answer."""
DIGESTS = {
    "ruler_niah_mk_2": (100, "a2b3a2de6e675283"), "ruler_niah_mk_3": (100, "a2b3a2de6e675283"),
    "ruler_niah_mv": (100, "52e5086fb88cbc25"), "json_kv": (100, "d11c7283adf27319"),
    "kilt_nq": (200, "c6ca18cdd0b424b0"), "kilt_triviaqa": (200, "5c90f4b73037d421"),
    "kilt_hotpotqa": (99, "378d9bdcfddddc4f"), "kilt_popqa": (200, "6ce15aab661e3bc5"),
    "msmarco_rerank_psg": (100, "72e877a0f9ef4ab9"), "icl_trec_coarse": (30, "83c41fa23583ff1a"),
    "icl_trec_fine": (30, "adb46c1e973bdc7c"), "icl_banking77": (500, "ab28b0660db92f2b"),
    "icl_clinic150": (500, "9401b836af34eead"), "icl_nlu": (500, "1227aac10331a7d6"),
    "infbench_qa_eng": (100, "7c34b76c7a51ee34"), "infbench_choice_eng": (100, "58f122c4c2ed6d13"),
}  # fmt: skip
"""Number of prompts that the official program makes of each task, and a digest of about twenty of them."""
