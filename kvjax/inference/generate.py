"""Generating answers in blocks of tokens.

A block is one `lax.scan` over tokens with the cache as its carry. The host looks at tokens, at ended answers and at the
pool's free count only between blocks.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from kvjax import cache as caches
from kvjax.cache import Cache
from kvjax.errors import UserError, named_arguments, shown, whole_number
from kvjax.inference import eviction
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
"""Tokens that are decoded between two looks of the host at them."""
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
    implementation: str | None = None,
) -> Iterator[Block]:
    """Generate, block by block. Arguments and errors are those of `generate`.

    The first block is the single token that prefill gives; the next `block` tokens are computed only when asked for.
    The text that ends an answer is among its tokens, as a stop token is.
    """
    check_arguments("generate", model, policy, cache, implementation)
    page_size = None if page_size is None else whole_number("generate", "page_size", page_size)
    chunk, block = whole_number("generate", "chunk", chunk), whole_number("generate", "block", block)
    part = "whole" if cache is None else "end"
    asked = token_rows(prompts, model.config.vocab_size, tokenizer, part)
    params, prompt_of, numbers = _by_answer(sampling, len(asked))
    _check_shared(params, cache, share)
    stops, ids = zip(*(stop_tokens_of(one.stop, tokenizer) for one in params), strict=True)
    params = [
        dataclasses.replace(one, stop_token_ids=(*one.stop_token_ids, *own))
        for one, own in zip(params, ids, strict=True)
    ]
    rows = [asked[prompt] for prompt in prompt_of]
    longest_answer = max(one.max_new_tokens for one in params)
    # the caller's code runs between the blocks, so no mesh may stay set there
    with use_mesh(model):
        compiled = (policy or Policy()).compile(model)
        host, order = compiled.host, list(range(len(rows)))
        if cache is None:
            held, after = read(
                model, compiled, rows, longest_answer, chunk, implementation, page_size=page_size, capacity=capacity
            )  # fmt: skip
            held = drop_observation_state(held, compiled.decode)
        else:
            if capacity is not None:
                raise UserError(
                    "capacity is stated where the cache is made (prefill), not where it is continued"
                )
            check_in_front("generate", cache)
            if share is not False:
                cache, order = forked(cache, share, params[0].n, len(rows))
                rows = _in_batch(rows, order, cache.seen.shape[0])
            held, after = extend(model, compiled, cache, rows, longest_answer, chunk, implementation)
        batch, vocabulary = held.seen.shape[0], model.config.vocab_size
        eos = model.config.eos_ids
        sampler = make_sampler(params, numbers, eos, vocabulary, order, batch)
        of_rows = _in_batch(rows, order, batch) if share is False else rows
        counts = count_tokens(sampler, of_rows, vocabulary)
        live = np.isin(np.arange(batch), order)
        token, found, running, counts = first_tokens(sampler, after, put(live, BATCH), counts)
        ends = [(*(() if one.ignore_eos else eos), *one.stop_token_ids) for one in params]
        answers = Answers(params, ends, list(stops), order, tokenizer)
        new, logprobs = answers.block(jax.tree.map(lambda x: x[None], (token, found)), live, 1)
        caches.check(held, host.name, longest_answer)
        running = answers.still(running)
        again = eviction.recurring(host, held)
    yield Block(new, held, order, logprobs)
    made = 1
    while made < longest_answer and (before := on_host(running)[: len(rows)]).any():
        with use_mesh(model):
            left = longest_answer - made
            count, size, held = eviction.next_block(host, held, before, made - 1, left, block)
            held, drawn, (token, running, counts), fed = decode_block(
                model, compiled.decode, held, token, running, sampler, np.int32(made), counts,
                limit=np.int32(count), count=size, recurring=again, implementation=implementation,
            )  # fmt: skip
        caches.check(held, host.name, left - count)
        log_steps(fed, held.origin, held.window, count=count, sequences=len(rows))
        made += count
        new, logprobs = answers.block(drawn, before, count)
        with use_mesh(model):
            running = answers.still(running)
            held = eviction.after_block(model, compiled, held, on_host(running)[: len(rows)], made - 1)
        yield Block(new, held, order, logprobs)


def _by_answer(
    sampling: SamplingParams | Sequence[SamplingParams], prompts: int
) -> tuple[list[SamplingParams], list[int], list[int]]:
    """Return each answer's parameters, its prompt, and its number among the answers of its prompt. Raises UserError
    unless there is one for all prompts or one for each."""
    each = [sampling] * prompts if isinstance(sampling, SamplingParams) else sampling
    each = list(each) if isinstance(each, Sequence) else []
    if len(each) != prompts or not all(isinstance(one, SamplingParams) for one in each):
        raise UserError(
            f"generate: sampling must be one SamplingParams or one for each of {prompts} prompts, got "
            f"{shown(sampling)}"
        )
    answers = [(one, prompt, number) for prompt, one in enumerate(each) for number in range(one.n)]
    params, prompt_of, numbers = map(list, zip(*answers, strict=True))
    return params, prompt_of, numbers


def _check_shared(params: Sequence[SamplingParams], cache: Cache | None, share: Any) -> None:
    """Refuse sharing without a cache, and several answers of a cache that is not shared."""
    if share is not False and cache is None:
        raise UserError("generate: share is for questions of a cache: give cache=, from prefill")
    if share is not False and len({one.n for one in params}) > 1:
        raise UserError("generate: with share every prompt must have the same n")
    if cache is not None and share is False and any(one.n > 1 for one in params):
        raise UserError(
            "generate: n answers of a cache are forks of it, which share its pages: give share=True"
        )


def forked(cache: Cache, share: Any, samples: int, answers: int) -> tuple[Cache, list[int]]:
    """Return a cache with a sequence for each of so many answers, `samples` to each question, that shares its context's
    pages, and each answer's row in the batch. A fork stays on the devices of its context, where empty rows follow.
    Nothing is copied yet (`kvjax.inference.allocation.copy_for_question`)."""
    contexts = int((on_host(cache.seen) > 0).sum())
    context_of = np.repeat(_contexts(share, answers // samples, contexts), samples).tolist()
    shards = batch_shards()
    own = cache.seen.shape[0] // shards
    rows: list[list[int]] = [[] for _ in range(shards)]
    found = []
    for context in context_of:
        rows[context // own].append(context % own)
        found.append((context // own, len(rows[context // own]) - 1))
    most = max(map(len, rows))
    index = np.full((shards, most), -1, np.int32)
    for shard, of in enumerate(rows):
        index[shard, : len(of)] = of
    order = [shard * most + place for shard, place in found]
    return caches.selected(cache, put(index.reshape(-1), BATCH)), order


def _contexts(share: Any, questions: int, contexts: int) -> list[int]:
    """Return the context of each question. Raises UserError for a `share` that does not fit."""
    if share is True:
        if questions % contexts:
            raise UserError(
                f"generate: share=True asks of each of the cache's {contexts} contexts as many questions, one "
                f"context's after another's, got {questions}; share=[0, 0, 1, …] says whose each is"
            )
        return [index // (questions // contexts) for index in range(questions)]
    if not isinstance(share, Sequence | np.ndarray) or isinstance(share, str):
        raise UserError(
            f"generate: share must be True, False or a list with each question's context, got {shown(share)}"
        )
    found = [whole_number("generate", "a context in share", x, 0, contexts - 1) for x in share]
    if len(found) != questions:
        raise UserError(
            f"generate: share must say the context of each of {questions} questions, got {len(found)}"
        )
    return found


def _in_batch(rows: Sequence[np.ndarray], order: Sequence[int], batch: int) -> list[np.ndarray]:
    """Return a batch of `batch` rows with these in the places of `order`, the others empty."""
    found = [np.zeros(0, np.int32)] * batch
    for row, place in zip(rows, order, strict=True):
        found[place] = row
    return found


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
    implementation: str | None = None,
) -> Generation:
    """Answer prompts, as one batch.

    Args:
        prompts: token ids, one sequence a prompt, of any lengths; with a tokenizer also texts, and chats as lists of
            messages. A text is the user's turn where the tokenizer has a chat template, and with a cache the end of it.
        sampling: one for all prompts or one for each.
        tokenizer: from `kvjax.load_tokenizer`, for text; answers then come with theirs.
        policy: from `make_policy`; None is the full cache.
        cache: from `prefill`: the prompts continue it. It is copied, so it stays usable for the next question.
        share: True: several questions of each of the cache's contexts, as many of each, one context's after another's;
            or a list with the context of each question, from 0. They are a batch of forks which hold the context's
            pages together and copy only those that they write to; on a mesh a fork runs where its context is.
        capacity, page_size, chunk: as in `prefill`; a cache that is continued keeps its capacity and
            page size.
        block: tokens between two looks of the host.

    Returns:
        The answers, the n of a prompt one after another.

    Raises:
        UserError, CapacityError: as in `prefill`, and for logits that are not finite; never after a wrong token was
            returned.
    """
    asked, blocks = prompt_list(prompts), []
    for new in stream(
        model, asked, sampling, tokenizer=tokenizer, policy=policy, cache=cache, share=share, capacity=capacity,
        page_size=page_size, chunk=chunk, block=block, implementation=implementation,
    ):  # fmt: skip
        # now, since the cache is donated to the next block
        stats = caches.stats(new.cache)
        blocks.append(new)
    order = blocks[-1].order
    stats = dataclasses.replace(stats, entries=stats.entries[:, order], tokens=stats.tokens[order])
    params, prompt_of, _ = _by_answer(sampling, len(asked))
    return whole_answers(blocks, params, prompt_of, stats, model.config.eos_ids, tokenizer)
