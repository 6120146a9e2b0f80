"""Contests: problems that are answered at length while the policy evicts, several times with different seeds.

This is KVPOP's evaluation (Sec. 2.2 and Table 1, which do not say how answers are sampled).
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvjax.evaluate.answering import Answer
from kvjax.evaluate.measuring import Measurement, MeasureSettings, Tally, groups
from kvjax.inference.footprint_log import footprint_log
from kvjax.inference.generate import stream
from kvjax.models.decoder import Decoder
from kvjax.policies.policy import Policy
from kvjax.sampling_params import SamplingParams
from kvjax.tasks.sample import Sample, Tokens, as_tokens

BLOCK = 64
"""Decoding steps of one block. The host looks at the tokens after each block."""


@dataclass(frozen=True)
class SamplingSettings:
    """Settings for sampling answers to contests."""

    draws: int
    """The number of answers to each problem."""
    temperature: float
    top_p: float
    top_k: int
    """The number of most likely tokens to sample from; 0 means all."""
    seed: int = 0

    def params(self, problem: int, draw: int, tokens: int) -> SamplingParams:
        """Return the sampling parameters of an answer of at most `tokens` tokens.

        The seed follows from the problem's and the answer's index, so it is the same for every policy and batch.
        """
        seed = int(np.random.SeedSequence((self.seed, problem, draw)).generate_state(1)[0]) >> 1
        return SamplingParams(
            max_new_tokens=tokens, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=seed
        )


def measure_contest(
    model: Decoder,
    policy: Policy,
    problems: Sequence[Sample],
    sampling: SamplingSettings,
    settings: MeasureSettings,
) -> Measurement:
    """Answer each problem `sampling.draws` times. An answer that the length limit cuts off is wrong.

    In the measurement, `outputs` has all answers to the first problem, then all to the second, and so on. The kinds are
    the problems, and the entries are counted at the answers' ends.
    """
    tally = Tally()
    rows = [(index, draw) for index in range(len(problems)) for draw in range(sampling.draws)]
    for group in groups(rows, settings.batch):
        _answer_group(tally, model, policy, problems, group, sampling, settings)
    return dataclasses.replace(tally.total(), interval=None, drawn=tally.contest_statistics(sampling.draws))


def _answer_group(
    tally: Tally,
    model: Decoder,
    policy: Policy,
    problems: Sequence[Sample],
    group: Sequence[tuple[int, int]],
    sampling: SamplingSettings,
    settings: MeasureSettings,
) -> None:
    """Answer the problems of a group, given by the indices of problem and answer. All have the same length limit."""
    watch, samples = settings.watch, [problems[index] for index, _ in group]
    questions, prompts = [sample.questions[0] for sample in samples], [sample.context for sample in samples]
    params = [sampling.params(*row, questions[0].answer_tokens) for row in group]
    watch.lap()
    blocks = stream(
        model, prompts, params, policy=policy, capacity=settings.capacity, page_size=settings.page_size,
        chunk=settings.chunk, block=BLOCK,
    )  # fmt: skip
    parts: list[list[Tokens]] = []
    with footprint_log() as log:
        for part, cache, *_ in blocks:  # noqa: B007 (the last cache is used below)
            seconds = watch.lap()
            if parts:
                # a step costs the same whether or not rows have finished
                tally.decoding.add(len(group) * max(map(len, part)), seconds, watch.compiled)
            else:
                tally.reading.add(sum(map(len, prompts)), seconds, watch.compiled)
            parts.append(part)
    answers = []
    for tokens in map(np.concatenate, zip(*parts, strict=True)):
        ended = bool(np.isin(tokens[-1], model.config.eos_ids))
        answers.append(Answer(as_tokens(tokens[: len(tokens) - ended]), 0.0, cut=not ended))
    tally.add_entries(cache, policy, [index for index, _ in group])
    tally.add_answers(questions, answers, log)
