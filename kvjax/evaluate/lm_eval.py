"""Adapter for EleutherAI's lm-evaluation-harness. It compacts contexts and scores continuations from the cache.

    python -m kvjax.evaluate.lm_eval --model kvjax --model_args model=Qwen/Qwen3-4B,policy=snapkv:ratio=0.5 \\
        --tasks hellaswag --batch_size 16

The command is that of lm-eval, with the model `kvjax` registered. In Python, use
`lm_eval.simple_evaluate(model=KVJaxLM(llm), tasks=…)`.
"""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
    get_rolling_token_windows,
    make_disjoint_window,
)
from tqdm import tqdm

from kvjax.chat_template import PLACEHOLDER, templated, text_around_placeholder, token_ids
from kvjax.cli.launch import MeshShape, run_command, start
from kvjax.cli.stopwatch import Pace, Stopwatch
from kvjax.errors import UserError, warn
from kvjax.evaluate.answering import Answer, answer
from kvjax.evaluate.measuring import MeasureSettings, for_answers, groups, read
from kvjax.inference.allocation import new_cache
from kvjax.llm import LLM
from kvjax.mesh import use_mesh
from kvjax.sampling_params import SamplingParams
from kvjax.tasks.sample import NO_QUESTION, Question, Sample, as_tokens

Context = tuple[int, ...]
"""Token ids of a context."""
BATCH_SIZE = 16
MAX_NEW_TOKENS = 256
"""The most tokens of an answer if a task states no length, as in lm-eval's own models."""


@register_model("kvjax")
class KVJaxLM(TemplateLM):
    """A kvjax model under a policy, for lm-eval.

    Log-likelihoods: each context is read and compacted once, and shared by its continuations, which are decoded token
    by token (teacher-forced). The context's last token is left out of the compaction and decoded first, so that all
    tokens of a continuation are predicted from the compacted cache. Evictions that observe the last tokens also observe
    this one. lm-eval's contexts end with the question, so the compaction knows it; kvpress's evaluation compacts the
    context before it reads the question. A context of a single token is not compacted.

    Answers come from `LLM.generate`. As in kvpress, the first token is predicted before the compaction.

    Args:
        model: an `LLM`, or the model for a new one.
        batch_size: contexts (or answers) in a batch; `auto` is 16.
        device, max_batch_size: ignored. lm-eval's command passes them; JAX chooses the device.
        options: the other arguments of the new LLM, such as `policy`.

    Raises:
        UserError: an error of `LLM`; later, `loglikelihood_rolling` with an eviction, or log-likelihoods with a policy
            that compacts while decoding.
    """

    def __init__(
        self,
        model: Any,
        *,
        batch_size: int | str = BATCH_SIZE,
        device: Any = None,
        max_batch_size: Any = None,
        **options: Any,
    ):
        super().__init__()
        if isinstance(model, LLM) and options:
            raise UserError(f"kvjax: got an LLM with {', '.join(options)}, expected these in the LLM")
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self.tokenizer = self.llm.tokenizer
        self.batch_size = BATCH_SIZE if batch_size == "auto" else int(batch_size)

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: the tokenizer's BOS, or its EOS if it has no BOS."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        return self.llm.model.config.longest

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a chat. Without a generation prompt it ends within the last message."""
        if add_generation_prompt:
            return templated(self.tokenizer, chat_history)
        *before, last = chat_history
        opened = [*before, last | {"content": last["content"] + PLACEHOLDER}]
        return text_around_placeholder(self.tokenizer, opened, add_generation_prompt=False)[0]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
        """Return the tokens of a text. By default special tokens are added unless the text begins with one."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode([self.prefix_token_id]))
        return token_ids(self.tokenizer, string, add_special_tokens=add_special_tokens)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **unused: Any,
    ) -> list[tuple[float, bool]]:
        if self.llm.policy.compacts_answers:
            raise UserError(
                f"kvjax: {self.llm.policy.name} compacts while decoding, which log-likelihoods do not measure"
            )
        requests_of: dict[Context, list[int]] = defaultdict(list)
        for index, (_, context, continuation) in enumerate(requests):
            # the last token of a continuation is not fed
            requests_of[tuple(self._shortened(context, len(continuation) - 1))].append(index)
        singles = [context for context in requests_of if len(context) == 1]
        others = sorted((context for context in requests_of if len(context) > 1), key=len, reverse=True)
        batches = [*groups(others, self.batch_size), *groups(singles, self.batch_size)]
        scores: dict[int, tuple[float, bool]] = {}
        for batch in tqdm(batches, disable=disable_tqdm, desc="Batches of contexts"):
            indices = [requests_of[context] for context in batch]
            answers = self._answers(batch, [[requests[i][2] for i in of_context] for of_context in indices])
            for index, scored in zip(itertools.chain(*indices), answers, strict=True):
                text, _, continuation = requests[index]
                scores[index] = scored.log_likelihood, scored.tokens.tolist() == continuation
                if text is not None:
                    self.cache_hook.add_partial("loglikelihood", text, scores[index])
        return [scores[index] for index in range(len(requests))]

    def _answers(self, contexts: Sequence[Context], continuations: Sequence[list[list[int]]]) -> list[Answer]:
        """Score the continuations of each context, context after context.

        Either all contexts have a single token, or none has.
        """
        model, policy, watch = self.llm.model, self.llm.policy, Stopwatch()
        guided = policy.schedule is not None and bool(policy.schedule.trigger.guidance)
        samples = [
            Sample(
                as_tokens(context[:-1]),
                tuple(
                    Question(as_tokens(context[-1:]), as_tokens(x), "", teacher_forced=True)
                    for x in of_context
                ),
                question_known=not guided,
            )
            for context, of_context in zip(contexts, continuations, strict=True)
        ]
        sizes = {"page_size": self.llm.page_size, "capacity": self.llm.capacity}
        if len(contexts[0]) > 1:
            settings = MeasureSettings(chunk=self.llm.chunk, watch=watch, **sizes)
            cache = read(model, policy, samples, settings).cache
        else:
            with use_mesh(model):
                empty, tokens = [x.context for x in samples], max(x.tokens_after_context for x in samples)
                cache = new_cache(model, policy.compile(model), empty, tokens, **sizes)
        decoding, cache = for_answers(model, policy, cache)
        rounds = []
        for questions in itertools.zip_longest(*(x.questions for x in samples), fillvalue=NO_QUESTION):
            scored, cache = answer(model, decoding, cache, questions, stop=(), pace=Pace(), watch=watch)
            rounds.append(scored)
        return [rounds[n][row] for row, x in enumerate(samples) for n in range(len(x.questions))]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihoods of whole texts, decoded token by token.

        Raises UserError for a policy with an eviction, which would never run: such a text has no prompt.
        """
        if self.llm.policy.schedule is not None:
            raise UserError(
                f"kvjax: {self.llm.policy.name} evicts from prompts, and loglikelihood_rolling has none: it would "
                "measure the full cache"
            )
        owners, windows = [], []
        for owner, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for pair in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1):
                owners.append(owner)
                windows.append((None, *make_disjoint_window(pair)))
        totals = [0.0] * len(requests)
        scored = self._loglikelihood_tokens(windows, disable_tqdm)
        for owner, (log_likelihood, _) in zip(owners, scored, strict=True):
            totals[owner] += log_likelihood
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the answers to prompts, each cut before its first stop string (`until`)."""
        longest_first = sorted(range(len(requests)), key=lambda i: len(requests[i].args[0]), reverse=True)
        texts: dict[int, str] = {}
        for batch in tqdm(groups(longest_first, self.batch_size), disable=disable_tqdm, desc="Batches"):
            prompts, sampling = [], []
            for text, arguments in (requests[index].args for index in batch):
                sampling.append(_sampling(arguments))
                prompt = self.tok_encode(text) or [self.prefix_token_id]
                prompts.append(self._shortened(prompt, sampling[-1].max_new_tokens))
            for index, output in zip(batch, self.llm.generate(prompts, sampling), strict=True):
                texts[index] = output.text
                self.cache_hook.add_partial("generate_until", requests[index].args, output.text)
        return [texts[index] for index in range(len(requests))]

    def _shortened(self, context: list[int], following: int) -> list[int]:
        """Return the end of a context that fits into the model's length together with the `following` tokens."""
        capacity = max(1, self.max_length - following)
        if len(context) > capacity:
            warn(f"contexts longer than the model's {self.max_length:,} tokens lose their beginning")
        return context[-capacity:]


def _sampling(arguments: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters for a task's generation arguments. Sampling has temperature 1 by default."""
    options = {"max_new_tokens": MAX_NEW_TOKENS, "until": None, "do_sample": None, **arguments}
    options["max_new_tokens"] = options.pop("max_gen_toks", options["max_new_tokens"])
    until, sampled = options.pop("until") or (), options.pop("do_sample")
    options.setdefault("temperature", 1.0 if sampled else 0.0)
    if sampled is False:
        options["temperature"] = 0.0
    stop = (until,) if isinstance(until, str) else until
    return SamplingParams(stop=tuple(text for text in stop if text), **options)


def main() -> None:
    """Run lm-eval's command with the model `kvjax`."""
    start(MeshShape())
    cli_evaluate()


if __name__ == "__main__":
    run_command(main)
