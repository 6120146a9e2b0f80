"""HELMET (Yen et al., ICLR 2025, arXiv:2410.02694) in its published form: its recall, RAG, re-ranking, ICL and LongQA
tasks whose metrics need no model as a judge, with the official prompts, demonstrations, answer lengths and metrics.

The records are those of the largest published length that fits the context, in an order that starts with the questions
of the official run. A question of KILT and MS MARCO has records with its passages in several orders; all of them are
compared, as in the official run. Documents that are too long lose their end, as in the official program. Two things
differ. InfiniteBench's novels are cut with the model's own tokenizer, to fill the context; the official program cuts
them with Llama 2's tokenizer, to 210 tokens less. And documents are cut again until no prompt exceeds `--context`.
Answers do not stop at line breaks: the official configurations ask for it with an option (`stop_new_line`) that the
official program does not read.

records, sampling: prompts and random choices for all tasks; retrieval, hub_tasks: the tasks; scores: the metrics.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvjax.errors import UserError
from kvjax.tasks.helmet.hub_tasks import Texts, icl, infbench
from kvjax.tasks.helmet.records import DATA, LENGTHS, OPTION, Files, Prompt, Prompts
from kvjax.tasks.helmet.retrieval import json_kv, kilt, msmarco, ruler
from kvjax.tasks.prompt import PromptEncoder
from kvjax.tasks.sample import Sample
from kvjax.tasks.splits import Split
from kvjax.tasks.suite import Dataset, Inputs, Suite

PREFIX = "helmet_"


@dataclass(frozen=True)
class HelmetTask:
    """A task of HELMET."""

    prompts: Callable[[Files], Prompts]
    """Reads its records."""
    reserved: int
    """The most tokens of an answer."""
    metric: str
    """Description of the score."""


RECALL, SUBSTRING, EXACT = "share of the needles found", "substring exact match", "exact match"


def _retrieval(test: str, demos: str, rare: bool = False) -> HelmetTask:
    return HelmetTask(partial(kilt, test=test, demos=demos, rare=rare), 20, SUBSTRING)


def _classification(*args: Any, **kwargs: Any) -> HelmetTask:
    return HelmetTask(partial(icl, texts=Texts(*args, **kwargs)), 20, EXACT)


TASKS = {
    "ruler_niah_mk_2": HelmetTask(partial(ruler, folder="niah_multikey_2"), 50, RECALL),
    "ruler_niah_mk_3": HelmetTask(partial(ruler, folder="niah_multikey_3"), 100, RECALL),
    "ruler_niah_mv": HelmetTask(partial(ruler, folder="niah_multivalue", multiple_values=True), 50, RECALL),
    "json_kv": HelmetTask(json_kv, 100, SUBSTRING),
    "kilt_nq": _retrieval("nq-dev-multikilt_1000_k{}_dep6", "nq-train-multikilt_1000_k3_dep6"),
    "kilt_triviaqa": _retrieval(
        "triviaqa-dev-multikilt_1000_k{}_dep6", "triviaqa-train-multikilt_1000_k3_dep6"
    ),
    "kilt_hotpotqa": _retrieval(
        "hotpotqa-dev-multikilt_1000_k{}_dep3", "hotpotqa-train-multikilt_1000_k3_dep3"
    ),
    "kilt_popqa": _retrieval("popqa_test_1000_k{}_dep6", "popqa_test_1000_k3_dep6", rare=True),
    "msmarco_rerank_psg": HelmetTask(msmarco, 200, "NDCG@10"),
    "icl_trec_coarse": _classification("CogComp/trec", "coarse_label", 6, (200, 400, 800, 1600, 3300, 6600)),
    "icl_trec_fine": _classification("CogComp/trec", "fine_label", 50, (200, 400, 800, 1600, 3200, 6400)),
    "icl_banking77": _classification("PolyAI/banking77", "label", 77, (180, 360, 720, 1450, 2900, 5900)),
    "icl_clinic150": _classification(
        "clinc/clinc_oos",
        "intent",
        151,
        (220, 440, 880, 1750, 3525, 7050),
        test="validation",
        configuration="plus",
    ),
    "icl_nlu": _classification(
        "xingkunliuxtracta/nlu_evaluation_data",
        "label",
        68,
        (250, 510, 1020, 2040, 4080, 8296),
        test="train",
    ),
    "infbench_qa_eng": HelmetTask(partial(infbench, choice=False), 10, "ROUGE-L"),
    "infbench_choice_eng": HelmetTask(partial(infbench, choice=True), 10, EXACT),
}


@dataclass(frozen=True)
class HelmetSamples:
    """The samples of a task. The records are read for every length, since each has its own files."""

    name: str
    """The task's name."""
    folder: Path | None
    """The data's folder."""
    encode: PromptEncoder
    published = True

    @property
    def metric(self) -> str:
        return TASKS[self.name].metric

    def answers(self, length: int) -> int:
        return 1

    def samples(self, split: Split, count: int, length: int) -> list[Sample]:
        """Return the samples of the first questions to compare, or a sample of each of the next ones to calibrate on.

        Raises UserError for a damaged record, too few records, or a length that leaves no documents.
        """
        index = max((index for index, published in enumerate(LENGTHS) if published <= length), default=0)
        prompts = TASKS[self.name].prompts(Files(self.folder, index))
        where = f"{OPTION} {self.folder or 'on the hub'}"
        taken = split.take_published(prompts, count, where, f"questions of {PREFIX}{self.name}")
        if split.calibration:
            # at different depths
            taken = [(source, [copies[index % len(copies)]]) for index, (source, copies) in enumerate(taken)]
        return [
            replace(self._sample(prompt(), length), source=source)
            for source, copies in taken
            for prompt in copies
        ]

    def _sample(self, prompt: Prompt, length: int) -> Sample:
        def encode(documents: str) -> Sample:
            reserved = TASKS[self.name].reserved
            return self.encode(prompt.example(documents, PREFIX + self.name, reserved, self.encode.chat))

        sample, documents = encode(prompt.documents), prompt.documents
        while (excess := len(sample.context) + sample.tokens_after_context - length) > 0:
            documents = self.encode.without_end(documents, excess)
            if not documents:
                raise UserError(
                    f"--context {length}: a sample of {PREFIX}{self.name} needs more tokens without its documents"
                )
            sample = encode(documents + prompt.omitted)
        return sample


def _open(name: str, inputs: Inputs) -> Dataset:
    folder = inputs.data.get(DATA)
    if folder is not None and not folder.is_dir():
        raise UserError(f"{OPTION} {folder}: expected a folder")
    return HelmetSamples(name.removeprefix(PREFIX), folder, inputs.encode)


SUITE = Suite(tuple(PREFIX + name for name in TASKS), _open, data=(DATA,))

__all__ = ["SUITE", "TASKS", "HelmetSamples"]
