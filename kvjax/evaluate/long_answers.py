"""Problems that are answered at length while the policy works: several draws of each, every one by its own key.

KVPOP's evaluation (Sec. 2.2 and Table 1, which do not say how answers are drawn).
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.evaluate.answering import Answer
from kvjax.evaluate.measuring import Manner, Measurement, Tally, groups
from kvjax.files import write_text
from kvjax.inference.answers import decoded
from kvjax.inference.footprint_log import footprint_log
from kvjax.inference.generate import stream
from kvjax.models.decoder import Decoder
from kvjax.policies.policy import Policy
from kvjax.sampling_params import SamplingParams
from kvjax.tasks.sample import Sample, Tokens, as_tokens

BLOCK = 64
"""Tokens between two looks of the host."""


@dataclass(frozen=True)
class Drawing:
    """How answers are drawn."""

    draws: int
    """Answers to each problem."""
    temperature: float
    top_p: float
    top_k: int
    """Most likely tokens that are drawn from; 0: all."""
    seed: int = 0

    def sampling(self, problem: int, draw: int, tokens: int) -> SamplingParams:
        """Return how an answer of at most `tokens` tokens is drawn. Its seed follows from the problem's place and the
        draw, so that it is the same for every policy and in every batch."""
        seed = int(np.random.SeedSequence((self.seed, problem, draw)).generate_state(1)[0]) >> 1
        return SamplingParams(
            max_new_tokens=tokens, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=seed
        )


def measure_drawn(
    model: Decoder, policy: Policy, problems: Sequence[Sample], drawing: Drawing, manner: Manner
) -> Measurement:
    """Answer each problem `drawing.draws` times. An answer that its length cuts off is wrong.

    The measurement's `outputs` are by problem and draw, its kinds the problems, its entries those at the answers' ends.
    """
    tally = Tally()
    rows = [(index, draw) for index in range(len(problems)) for draw in range(drawing.draws)]
    for group in groups(rows, manner.batch):
        _add(tally, model, policy, problems, group, drawing, manner)
    return dataclasses.replace(tally.total(), interval=None, drawn=tally.drawn(drawing.draws))


def write_answers(
    file: Path, problems: Sequence[Sample], outputs: Sequence[Sequence[Tokens]], tokenizer: Any
) -> None:
    """A line for each answer of `measure_drawn`, for people to read, in its order: the problem, the draw, the true
    answer, what was said in the end, whether that was cut off, and all of the text. Makes the folder."""
    draws, rows = len(outputs) // len(problems), []
    for index, (tokens,) in enumerate(outputs):
        (question,) = problems[index // draws].questions
        assert question.concluded is not None
        rows.append(
            {
                "problem": question.kind,
                "draw": index % draws,
                "true": tokenizer.decode(question.answer.tolist()),
                "said": question.concluded(tokens),
                "cut": len(tokens) == question.answer_tokens,
                "tokens": len(tokens),
                "text": decoded(tokenizer, tokens),
            }
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, "".join(json.dumps(row) + "\n" for row in rows))


def _add(
    tally: Tally,
    model: Decoder,
    policy: Policy,
    problems: Sequence[Sample],
    group: Sequence[tuple[int, int]],
    drawing: Drawing,
    manner: Manner,
) -> None:
    """Answer the problems of a group, given by their places and draws. Their answers have the same most tokens."""
    watch, own = manner.watch, [problems[index] for index, _ in group]
    questions, prompts = [sample.questions[0] for sample in own], [sample.context for sample in own]
    sampling = [drawing.sampling(*row, questions[0].answer_tokens) for row in group]
    watch.lap()
    written = stream(
        model, prompts, sampling, policy=policy, capacity=manner.capacity, page_size=manner.page_size,
        chunk=manner.chunk, block=BLOCK,
    )  # fmt: skip
    parts: list[list[Tokens]] = []
    with footprint_log() as log:
        for part, held, *_ in written:
            cache, seconds = held, watch.lap()
            if parts:
                # a step costs the same however many of its rows are done
                tally.decoding.add(len(group) * max(map(len, part)), seconds, watch.compiled)
            else:
                tally.reading.add(sum(map(len, prompts)), seconds, watch.compiled)
            parts.append(part)
    answers = []
    for tokens in map(np.concatenate, zip(*parts, strict=True)):
        ended = bool(np.isin(tokens[-1], model.config.eos_ids))
        answers.append(Answer(as_tokens(tokens[: len(tokens) - ended]), 0.0, cut=not ended))
    tally.add_entries(cache, policy, len(group))
    tally.add_answers(questions, answers, log)
