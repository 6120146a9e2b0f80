"""Generation of answers in blocks of tokens.

A block is one `lax.scan` over tokens with the cache as its carry. Only between blocks does the host look at tokens, at
ended answers and at the pool's free count.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from kvjax import cache as caches
from kvjax.cache import Cache
from kvjax.errors import UserError, named_arguments, shown, whole_number
from kvjax.inference import triggers
from kvjax.inference.answers import Answers, Block, Generation, stop_tokens_of, whole_answers
from kvjax.inference.checks import check_arguments, check_in_front
from kvjax.inference.decode import decode_block, first_tokens
from kvjax.inference.footprint_log import log_steps
from kvjax.inference.forward import drop_observation_state
from kvjax.inference.prefill import CHUNK, extend, read
from kvjax.inference.sampler import count_tokens, make_sampler
from kvjax.mesh import BATCH, batch_shards, on_host, put, use_mesh
from kvjax.models.chat import Prompts, prompt_list, token_rows
from kvjax.models.decoder import Decoder
from kvjax.policies.policy import Policy
from kvjax.sampling_params import SamplingParams

BLOCK = 16
"""Tokens that are decoded before the host looks at them."""
GREEDY = SamplingParams()


@named_arguments()
def stream(
    model: Decoder,
    prompts: Prompts,
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    *,
    tokenizer: Any = None,
    policy: Policy | None = None,
    cache: Cache | None = None,
    share: Any = False,
    capacity: int | str | None = None,
    page_size: int | None = None,
    chunk: int = CHUNK,
    block: int = BLOCK,
) -> Iterator[Block]:
    """Generate block by block. Arguments and errors are as in `generate`.

    The first block is the single token after prefill; the next `block` tokens are computed only when they are asked
    for. An answer's tokens include the stop token or the stop text that ends it.
    """
    check_arguments("generate", model, policy, cache)
    page_size = None if page_size is None else whole_number("generate", "page_size", page_size)
    chunk, block = whole_number("generate", "chunk", chunk), whole_number("generate", "block", block)
    part = "whole" if cache is None else "end"
    questions = token_rows(prompts, model.config.vocab_size, tokenizer, part)
    params, prompt_of, numbers = _by_answer(sampling, len(questions))
    _check_shared(params, cache, share)
    stops, ids = zip(*(stop_tokens_of(x.stop, tokenizer) for x in params), strict=True)
    params = [
        dataclasses.replace(x, stop_token_ids=(*x.stop_token_ids, *stop_ids))
        for x, stop_ids in zip(params, ids, strict=True)
    ]
    rows = [questions[prompt] for prompt in prompt_of]
    longest_answer = max(x.max_new_tokens for x in params)
    # the caller's code runs between the blocks, so no mesh may stay set there
    with use_mesh(model):
        compiled = (policy or Policy()).compile(model)
        host, order = compiled.host, list(range(len(rows)))
        if cache is None:
            current, after = read(
                model, compiled, rows, longest_answer, chunk, page_size=page_size, capacity=capacity
            )
            current = drop_observation_state(current, compiled.decode)
        else:
            if capacity is not None:
                raise UserError(
                    "capacity is stated where the cache is made (prefill), not where it is continued"
                )
            check_in_front("generate", cache)
            if share is not False:
                cache, order = forked(cache, share, params[0].n, len(rows))
                rows = _in_batch(rows, order, cache.seen.shape[0])
            current, after = extend(model, compiled, cache, rows, longest_answer, chunk)
        batch, vocabulary = current.seen.shape[0], model.config.vocab_size
        eos = model.config.eos_ids
        sampler = make_sampler(params, numbers, eos, vocabulary, order, batch)
        batch_rows = _in_batch(rows, order, batch) if share is False else rows
        counts = count_tokens(sampler, batch_rows, vocabulary)
        live = np.isin(np.arange(batch), order)
        token, logprobs_of_token, running, counts = first_tokens(sampler, after, put(live, BATCH), counts)
        ends = [x.stop_tokens(eos) for x in params]
        answers = Answers(params, ends, list(stops), order, tokenizer)
        new, logprobs = answers.block(jax.tree.map(lambda x: x[None], (token, logprobs_of_token)), live, 1)
        caches.check(current, host.name, longest_answer)
        running = answers.still(running)
        compaction = triggers.recurring(host, current)
    yield Block(new, current, order, logprobs)
    length = 1
    while length < longest_answer and (was_running := on_host(running)[: len(rows)]).any():
        with use_mesh(model):
            new_tokens = longest_answer - length
            count, size, current = triggers.next_block(
                host, current, was_running, length - 1, new_tokens, block
            )
            current, drawn, (token, running, counts), states = decode_block(
                model, compiled.decode, current, token, running, sampler, np.int32(length), counts,
                limit=np.int32(count), count=size, recurring=compaction,
            )  # fmt: skip
        caches.check(current, host.name, new_tokens - count)
        log_steps(states, current.origin, current.window, count=count, sequences=len(rows))
        length += count
        new, logprobs = answers.block(drawn, was_running, count)
        with use_mesh(model):
            running = answers.still(running)
            current = triggers.after_block(
                model, compiled, current, on_host(running)[: len(rows)], length - 1
            )
        yield Block(new, current, order, logprobs)


def _by_answer(
    sampling: SamplingParams | Sequence[SamplingParams], prompts: int
) -> tuple[list[SamplingParams], list[int], list[int]]:
    """Return each answer's parameters, the index of its prompt, and its index among the answers to its prompt. Raises
    UserError unless `sampling` is one for all prompts or one for each."""
    each = [sampling] * prompts if isinstance(sampling, SamplingParams) else sampling
    each = list(each) if isinstance(each, Sequence) else []
    if len(each) != prompts or not all(isinstance(x, SamplingParams) for x in each):
        raise UserError(
            f"generate: sampling must be one SamplingParams or one for each of {prompts} prompts, got "
            f"{shown(sampling)}"
        )
    answers = [(x, prompt, number) for prompt, x in enumerate(each) for number in range(x.n)]
    params, prompt_of, numbers = map(list, zip(*answers, strict=True))
    return params, prompt_of, numbers


def _check_shared(params: Sequence[SamplingParams], cache: Cache | None, share: Any) -> None:
    """Refuse sharing without a cache, and several answers from a cache that is not shared."""
    if share is not False and cache is None:
        raise UserError("generate: share is for questions of a cache: give cache=, from prefill")
    if share is not False and len({x.n for x in params}) > 1:
        raise UserError("generate: with share every prompt must have the same n")
    if cache is not None and share is False and any(x.n > 1 for x in params):
        raise UserError(
            "generate: n answers of a cache are forks of it, which share its pages: give share=True"
        )


def forked(cache: Cache, share: Any, samples: int, answers: int) -> tuple[Cache, list[int]]:
    """Return a cache with a fork of a context for each answer, and each answer's row in the batch.

    A fork shares its context's pages and stays on the context's devices, where empty rows follow. Nothing is copied yet
    (`kvjax.inference.allocation.copy_for_question`).

    Args:
        samples: answers to each question.
        answers: answers in all.
    """
    contexts = int((on_host(cache.seen) > 0).sum())
    context_of = np.repeat(_contexts(share, answers // samples, contexts), samples).tolist()
    shards = batch_shards()
    shard_batch = cache.seen.shape[0] // shards
    rows: list[list[int]] = [[] for _ in range(shards)]
    places = []
    for context in context_of:
        rows[context // shard_batch].append(context % shard_batch)
        places.append((context // shard_batch, len(rows[context // shard_batch]) - 1))
    shard_rows = max(map(len, rows))
    index = np.full((shards, shard_rows), -1, np.int32)
    for shard, contexts_of_shard in enumerate(rows):
        index[shard, : len(contexts_of_shard)] = contexts_of_shard
    order = [shard * shard_rows + place for shard, place in places]
    return caches.selected(cache, put(index.reshape(-1), BATCH)), order


def _contexts(share: Any, questions: int, contexts: int) -> list[int]:
    """Return the context of each question. Raises UserError if `share` does not fit."""
    if share is True:
        if questions % contexts:
            raise UserError(
                f"generate: share=True asks the same number of questions of each of the cache's {contexts} contexts, "
                f"got {questions}; share=[0, 0, 1, …] names the context of each question"
            )
        return [index // (questions // contexts) for index in range(questions)]
    if not isinstance(share, Sequence | np.ndarray) or isinstance(share, str):
        raise UserError(
            f"generate: share must be True, False or a list with each question's context, got {shown(share)}"
        )
    context_of = [whole_number("generate", "a context in share", x, 0, contexts - 1) for x in share]
    if len(context_of) != questions:
        raise UserError(
            f"generate: share must say the context of each of {questions} questions, got {len(context_of)}"
        )
    return context_of


def _in_batch(rows: Sequence[np.ndarray], order: Sequence[int], batch: int) -> list[np.ndarray]:
    """Return `batch` rows, with the given ones at the places in `order` and the others empty."""
    padded = [np.zeros(0, np.int32)] * batch
    for row, place in zip(rows, order, strict=True):
        padded[place] = row
    return padded


@named_arguments()
def generate(
    model: Decoder,
    prompts: Prompts,
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    *,
    tokenizer: Any = None,
    policy: Policy | None = None,
    cache: Cache | None = None,
    share: Any = False,
    capacity: int | str | None = None,
    page_size: int | None = None,
    chunk: int = CHUNK,
    block: int = BLOCK,
) -> Generation:
    """Answer prompts, as one batch.

    Args:
        prompts: token ids, one sequence a prompt, of any lengths; with a tokenizer also texts, and chats as lists of
            messages. If the tokenizer has a chat template, a text is the user's turn, or with a cache the end of that
            turn.
        sampling: one for all prompts or one for each.
        tokenizer: from `kvjax.load_tokenizer`, for text. Answers then have texts too.
        policy: from `make_policy`; None is the full cache.
        cache: from `prefill`. The prompts continue it. It is copied, so it can be used for the next question.
        share: True to ask the same number of questions of each of the cache's contexts, all of one context before those
            of the next; or a list with the context of each question, from 0. The questions are a batch of forks, which
            share the context's pages and copy only the pages that they write to. On a mesh a fork runs on the devices
            of its context.
        capacity, page_size, chunk: as in `prefill`. A cache that is continued keeps its capacity and page size.
        block: tokens that are decoded before the host looks at them.

    Returns:
        The answers. The n answers to a prompt follow one another.

    Raises:
        UserError, CapacityError: as in `prefill`, and for logits that are not finite. No wrong token is ever returned
            before.
    """
    asked, blocks = prompt_list(prompts), []
    for new in stream(
        model, asked, sampling, tokenizer=tokenizer, policy=policy, cache=cache, share=share, capacity=capacity,
        page_size=page_size, chunk=chunk, block=block,
    ):  # fmt: skip
        # before the cache is donated to the next block
        stats = caches.stats(new.cache)
        blocks.append(new)
    order = blocks[-1].order
    stats = dataclasses.replace(stats, entries=stats.entries[:, order], tokens=stats.tokens[order])
    params, prompt_of, _ = _by_answer(sampling, len(asked))
    return whole_answers(blocks, params, prompt_of, stats, model.config.eos_ids, tokenizer)
