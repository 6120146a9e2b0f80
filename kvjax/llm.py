"""`LLM`: a model, its tokenizer and a policy, for reading contexts and generating text."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, overload

import jax
import numpy as np
from jaxtyping import Float

from kvjax.cache import Cache, check_capacity
from kvjax.chat_template import template_variables
from kvjax.checkpoints.published import find_gates
from kvjax.engine.engine import Engine
from kvjax.engine.request import FinishReason, Request
from kvjax.errors import UserError, named_arguments, shown, whole_number
from kvjax.inference.answers import Generation, LiveText
from kvjax.inference.generate import GREEDY, generate, stream
from kvjax.inference.placement import with_placed_heads
from kvjax.inference.prefill import CHUNK, prefill
from kvjax.mesh import use_mesh
from kvjax.models import load_model, load_tokenizer, read_config
from kvjax.models.chat import Part, is_chat, is_token_ids, token_rows
from kvjax.models.decoder import Decoder, check_mesh
from kvjax.models.folder import find_model
from kvjax.policies import Policy, make_policy
from kvjax.policies.make import check_policy
from kvjax.sampling_params import SamplingParams

SLOTS = 64
"""The default number of answers that are generated at the same time."""
Prompt = str | Sequence[int] | np.ndarray | Sequence[Mapping[str, str]]
"""A text, token ids, or the messages of a chat."""


@dataclasses.dataclass(frozen=True)
class Output:
    """One answer."""

    prompt: int
    """The index of its prompt."""
    text: str
    tokens: list[int]
    """The tokens of the answer, without the stop token."""
    finish_reason: FinishReason
    """`stop`: the model generated a stop token or a stop text. `length`: the answer has `max_new_tokens` tokens.
    `capacity`: the pool, whose capacity is fixed, had no free page."""
    kv_ratio: float
    """The entries in the cache at the end, as a share of a full cache's."""
    logprobs: Float[np.ndarray, " t"] | None = None
    """The log-probability of each token in the model's distribution."""
    top_logprobs: list[dict[int, float]] | None = None
    """The most likely tokens at each position, with their log-probabilities."""


class LLM:
    """A model, its tokenizer and the policy that decides what its cache keeps.

        llm = kvjax.LLM("Qwen/Qwen3-8B", policy="snapkv:ratio=0.25")
        for out in llm.generate(["Why is the sky blue?"]):
            print(out.text)

    Args:
        model: a Hugging Face folder or hub id, a GGUF file, `builtin`, or what `kvjax.load_model` returned.
        policy: a policy's text (`snapkv:ratio=0.25`), mapping or object, as `kvjax.make_policy` takes it.
        gates: the policy's trained parameters: a folder, a file of the method's authors, or the hub id of either
            (`Jang-Hyun/Fast-KVzip`).
        tokenizer: by default the model's tokenizer; required with a loaded model.
        mesh: from `kvjax.make_mesh`; by default one device. If it splits kv heads that keep different numbers of
            entries, heads are placed so that devices hold about the same number. A loaded model already has its mesh,
            dtype, weights, kv_cache_dtype and max_length, so these are refused with it.
        dtype: float32, bfloat16 or float16; by default the dtype of the weights.
        weights: "int8" or "fp8" to keep the layers' matrices in 8 bits, as in `kvjax.load_model`.
        kv_cache_dtype: "int8" to keep entries in 8 bits.
        max_length: the longest sequence that will be run, for models with "dynamic" or "longrope" rope, whose angles
            depend on it. Longer ones are not refused. By default the context that the model declares.
        capacity: the fixed size of the page pool: entries per KV head on average (4096), bytes (`2GiB`) or a share of
            each device's memory (`30%`). By default the pool follows the policy's expected need.
        page_size: tokens per page; by default 64 on a TPU (128 for int8 entries), and 16 elsewhere or for a policy
            with a selection.
        chunk: the number of prompt tokens that are read in one call.
        slots: the number of answers generated at the same time. Further answers begin as soon as others have ended.
        chat_template_kwargs: variables of the tokenizer's chat template, such as `{"enable_thinking": False}`.
        force: accept gates and patterns that were made for another model of the same shape.

    Raises:
        UserError: the model, the policy or gates cannot be read or do not fit each other. If possible it is raised
            before weights are read.
    """

    @named_arguments(where="LLM")
    def __init__(
        self,
        model: str | os.PathLike[str] | Decoder,
        policy: str | Mapping[str, Any] | Policy = "full",
        *,
        gates: Any = None,
        tokenizer: Any = None,
        mesh: jax.sharding.Mesh | None = None,
        dtype: Any = None,
        weights: str | None = None,
        kv_cache_dtype: str | None = None,
        max_length: int | None = None,
        capacity: int | str | None = None,
        page_size: int | None = None,
        chunk: int = CHUNK,
        slots: int = SLOTS,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        force: bool = False,
    ):
        if capacity is not None:
            check_capacity(capacity)
        self.capacity = capacity
        self.page_size = None if page_size is None else whole_number("LLM", "page_size", page_size)
        self.chunk, self.slots = whole_number("LLM", "chunk", chunk), whole_number("LLM", "slots", slots)
        self.chat_template_kwargs = template_variables("LLM", chat_template_kwargs)
        if isinstance(model, Decoder):
            loading = {"mesh": mesh, "dtype": dtype, "weights": weights, "kv_cache_dtype": kv_cache_dtype}
            loading |= {"max_length": max_length}
            if refused := [name for name, value in loading.items() if value is not None]:
                raise UserError(
                    f"LLM: got {refused[0]} with a loaded model, expected it where the model is loaded"
                )
            if tokenizer is None:
                raise UserError("LLM: a loaded model needs tokenizer=, from kvjax.load_tokenizer")
            self.model, self.tokenizer = model, tokenizer
            with use_mesh(model):
                self.policy = make_policy(policy, model=model, gates=gates, tokenizer=tokenizer, force=force)
            return
        gates = find_gates(gates, str(model))
        with use_mesh() if mesh is None else jax.set_mesh(mesh):
            self.tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
            config = read_config(find_model(model), max_length, weights, kv_cache_dtype)
            check_mesh(config)
            check_policy(policy, config, gates=gates, tokenizer=self.tokenizer, force=force)
            stored = {"dtype": dtype, "weights": weights, "kv_cache_dtype": kv_cache_dtype}
            self.model = load_model(model, **stored, max_length=max_length)
            self.policy = make_policy(
                policy, model=self.model, gates=gates, tokenizer=self.tokenizer, force=force
            )
            self.model = with_placed_heads(self.model, self.policy)

    @property
    def _options(self) -> dict[str, Any]:
        return {"policy": self.policy, "tokenizer": self.tokenizer, "chunk": self.chunk}

    def _rows(self, prompts: Any, part: Part) -> list[np.ndarray]:
        """Return the token ids of prompts, rendered with `chat_template_kwargs`."""
        size = self.model.config.vocab_size
        return token_rows(as_list(prompts), size, self.tokenizer, part, **self.chat_template_kwargs)

    @named_arguments(where="LLM.prefill")
    def prefill(self, prompts: Prompt | Sequence[Prompt], *, max_new_tokens: int = 0) -> Cache:
        """Read contexts and return their compressed cache.

        Args:
            prompts: one prompt or a list of them. The user's turn of a text or a chat is left open for the question.
            max_new_tokens: reserve space for a question with its answer of this many tokens. The pool also grows
                without it.

        Returns:
            The cache, for any number of calls of `generate(…, context=cache)`.

        Raises:
            UserError: a prompt is empty or not a prompt.
            CapacityError: `capacity` is too small.
        """
        return prefill(
            self.model,
            self._rows(prompts, "beginning"),
            max_new_tokens=max_new_tokens,
            capacity=self.capacity,
            page_size=self.page_size,
            **self._options,
        )

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] = ...,
        *,
        context: Cache | None = ...,
        stream: Literal[False] = ...,
    ) -> list[Output]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] = ...,
        *,
        context: Cache | None = ...,
        stream: Literal[True],
    ) -> Iterator[str]: ...

    @named_arguments(where="LLM.generate")
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
        *,
        context: Cache | None = None,
        stream: bool = False,
    ) -> list[Output] | Iterator[str]:
        """Answer prompts, in one batch if `slots` are enough for all answers.

        Args:
            prompts: one prompt or a list of them.
            sampling: the parameters of all prompts, or one for each.
            context: a cache from `prefill`, which each prompt continues. If it has several contexts, each is continued
                by the same number of prompts, and prompts are ordered by context.
            stream: yield the text of one answer in pieces, as it is generated.

        Returns:
            The answers in the order of prompts, with all n answers of a prompt together; with `stream` an iterator of
            pieces of text.

        Raises:
            UserError: a prompt is empty or not a prompt, a token id is outside the vocabulary, or `stream` is used for
                several answers.
            CapacityError: `capacity` is too small.
        """
        rows = self._rows(prompts, "whole" if context is None else "end")
        options = self._options
        if context is None:
            options |= {"capacity": self.capacity, "page_size": self.page_size}
        else:
            options |= {"cache": context, "share": True}
        params = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(rows)
        if stream:
            answers = sum(getattr(x, "n", 1) for x in params)
            if len(rows) != 1 or answers != 1:
                raise UserError(
                    f"LLM.generate: stream=True is for one answer, got {len(rows)} prompts with {answers} answers"
                )
            return self._pieces(rows, params[0], options)
        if context is None and len(params) == len(rows) and self._needs_engine(params):
            return self._generate_in_engine(rows, params)
        return outputs(generate(self.model, rows, sampling, **options))

    def _needs_engine(self, params: Sequence[Any]) -> bool:
        """Return True for more answers than slots, unless the policy compacts all sequences together in decoding."""
        if not all(isinstance(sampling, SamplingParams) for sampling in params):
            return False
        schedule = self.policy.schedule
        together = (
            self.policy.compacts_answers and schedule is not None and schedule.trigger.when != "position"
        )
        return sum(sampling.n for sampling in params) > self.slots and not together

    def _generate_in_engine(self, rows: list[np.ndarray], params: list[SamplingParams]) -> list[Output]:
        pairs = list(zip(rows, params, strict=True))
        max_length = max(row.size + sampling.max_new_tokens for row, sampling in pairs)
        engine = Engine(
            self.model, self.policy, tokenizer=self.tokenizer, slots=self.slots, max_length=max_length,
            capacity=self.capacity, page_size=self.page_size, chunk=self.chunk,
        )  # fmt: skip
        submitted = [engine.submit(row, sampling) for row, sampling in pairs]
        while engine.busy:
            engine.step()
        return [output_of(i, request) for i, requests in enumerate(submitted) for request in requests]

    def _pieces(
        self, rows: list[np.ndarray], sampling: SamplingParams, options: dict[str, Any]
    ) -> Iterator[str]:
        live = LiveText(self.tokenizer, sampling.stop)
        for block in stream(self.model, rows, sampling, **options):
            if piece := live.more(block.tokens[0].tolist()):
                yield piece
        if piece := live.end():
            yield piece


def as_list(prompts: Any) -> list[Any]:
    """Return a list of prompts, given one prompt or several."""
    if isinstance(prompts, str) or is_chat(prompts) or is_token_ids(prompts):
        return [prompts]
    if isinstance(prompts, Mapping) or not hasattr(prompts, "__iter__"):
        raise UserError(f"prompts must be a text, token ids, a chat or a list of these, got {shown(prompts)}")
    return list(prompts)


def output_of(prompt: int, request: Request) -> Output:
    """Return the answer of a finished request."""
    tokens, logprobs, alternatives = request.answer(), None, None
    if request.sampling.logprobs is not None:
        chosen = [part.chosen for part in request.logprobs]
        logprobs = np.concatenate([np.zeros(0, np.float32), *chosen])[: len(tokens)]
        alternatives = [top for part in request.logprobs for top in part.alternatives][: len(tokens)]
    assert request.finish_reason is not None
    return Output(
        prompt, request.text, tokens, request.finish_reason, request.kv_ratio, logprobs, alternatives
    )


def outputs(generation: Generation) -> list[Output]:
    """Return the answers of a batch."""
    layers, _, heads = generation.stats.entries.shape
    shares = generation.stats.entries.sum((0, 2)) / np.maximum(1, layers * heads * generation.stats.tokens)
    return [
        Output(
            prompt=generation.prompts[i],
            text="" if generation.texts is None else generation.texts[i],
            tokens=generation.tokens[i].tolist(),
            finish_reason=generation.finish_reasons[i],
            kv_ratio=float(shares[i]),
            logprobs=None if generation.logprobs is None else generation.logprobs[i].chosen,
            top_logprobs=None if generation.logprobs is None else generation.logprobs[i].alternatives,
        )
        for i in range(len(generation.tokens))
    ]
