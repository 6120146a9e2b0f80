"""Problems that are answered at length while the policy evicts: several sampled answers to each, by seeds of their own.

This is KVPOP's evaluation (Sec. 2.2 and Table 1, which do not say how answers are sampled).
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
"""Decoding steps of one block. The host looks at the tokens after each block."""


@dataclass(frozen=True)
class Drawing:
    """Sampling settings of answers."""

    draws: int
    """The number of answers to each problem."""
    temperature: float
    top_p: float
    top_k: int
    """The number of most likely tokens to sample from; 0: all."""
    seed: int = 0

    def sampling(self, problem: int, draw: int, tokens: int) -> SamplingParams:
        """Return the sampling parameters of an answer of at most `tokens` tokens. The seed follows from the problem's
        index and the answer's, so that it is the same for every policy and in every batch."""
        seed = int(np.random.SeedSequence((self.seed, problem, draw)).generate_state(1)[0]) >> 1
        return SamplingParams(
            max_new_tokens=tokens, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=seed
        )


def measure_drawn(
    model: Decoder, policy: Policy, problems: Sequence[Sample], drawing: Drawing, manner: Manner
) -> Measurement:
    """Answer each problem `drawing.draws` times. An answer that the length limit cuts off is wrong.

    In the measurement, `outputs` go by problem and then by answer, the kinds are the problems, and the entries are
    those at the answers' ends.
    """
    tally = Tally()
    rows = [(index, draw) for index in range(len(problems)) for draw in range(drawing.draws)]
    for group in groups(rows, manner.batch):
        _add(tally, model, policy, problems, group, drawing, manner)
    return dataclasses.replace(tally.total(), interval=None, drawn=tally.drawn(drawing.draws))


def write_answers(
    file: Path, problems: Sequence[Sample], outputs: Sequence[Sequence[Tokens]], tokenizer: Any
) -> None:
    """Write a line for each answer of `measure_drawn`, in its order, for people to read: the problem, the answer's
    index, the true answer, the answer's conclusion, True if it was cut off, its number of tokens, and its text. Makes
    the folder."""
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
    """Answer the problems of a group, given by the indices of problem and answer. All have the same length limit."""
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
