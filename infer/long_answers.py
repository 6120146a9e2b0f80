"""Recall after a long answer: what a cache of stated size still knows of a prompt once the model has written for long.

    python infer/long_answers.py --entries 192 --new-tokens 1024

The built-in model reads records hidden in text, writes on by itself, and is then asked for the records. Every eviction
keeps as many entries of each kv head, on average, whenever 128 tokens have come; StreamingLLM holds as many at any time
as they do just before.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvjax.command.launch import MeshShape, parse_command, run_command, start
from kvjax.errors import UserError
from kvjax.files import write_text

EVERY = 128
"""Tokens between two compactions."""
QUESTIONS = 8
"""Of each prompt, and prompts of a batch."""


@dataclasses.dataclass(frozen=True)
class LongAnswersConfig:
    """Ask for what a prompt said, after a long answer under a fixed budget."""

    gates: str = "builtin"
    """fast_kvzip: a folder with its gates, or `builtin`, the built-in model's."""
    policies: tuple[str, ...] = ("full", "fast_kvzip", "r_kv", "snapkv", "streaming_llm")
    """What is compared: full, streaming_llm or an eviction; a name may be followed by arguments."""
    entries: int = 192
    """Entries of a kv head, on average over the model."""
    prompt_tokens: int = 512
    """Tokens of a prompt, a record in 64 of them."""
    new_tokens: int = 1024
    """Tokens that are written before anything is asked."""
    samples: int = 192
    """Answers of each policy, at least."""
    temperature: float = 0.8
    """Of the drawing."""
    seed: int = 0
    """Of the prompts and of the drawing."""
    json: Path | None = None
    """Write the rows here as well."""

    def check(self) -> None:
        """Refuse what means nothing. Raises UserError."""
        for name, least in {"entries": 5, "prompt_tokens": 128, "new_tokens": 1, "samples": 1}.items():
            if getattr(self, name) < least:
                raise UserError(
                    f"--{name.replace('_', '-')} must be at least {least}, got {getattr(self, name)}"
                )


def policy_of(text: str, config: LongAnswersConfig, model: Any) -> Any:
    """The policy of a name with arguments, with the budget."""
    import kvjax
    from kvjax.policies import POLICIES
    from kvjax.policies.assignments import with_arguments

    name, arguments = with_arguments(text, POLICIES, "--policies")
    told = dict(arguments or {})
    if name == "full":
        return kvjax.make_policy("full", model=model)
    if name == "streaming_llm":
        told = {"sink": 4, **told}
        return kvjax.make_policy(name, model=model, window=config.entries + EVERY - told["sink"], **told)
    if name == "fast_kvzip":
        told = {"gates": config.gates, "when": "position", **told}
    return kvjax.make_policy(
        name, model=model, entries=config.entries, **{"when": "every", "every": EVERY, **told}
    )


def recalled(config: LongAnswersConfig, model: Any, policy: Any, samples: Sequence[Any]) -> dict[str, float]:
    """Of a policy: the share of answers that are right, and entries of a kv head, on average over the model, that were
    held at most while the answer was written, and when the questions came."""
    import jax
    import numpy as np

    import kvjax
    from kvjax.command.stopwatch import Pace, Stopwatch
    from kvjax.evaluate.answering import answer
    from kvjax.evaluate.measuring import for_answers, groups
    from kvjax.inference.record import Calls

    right, most, last = [], 0.0, []
    for index, group in enumerate(groups(samples, QUESTIONS)):
        calls, tokens = Calls(), 0
        written = kvjax.stream(
            model, [sample.context for sample in group], policy=policy, temperature=config.temperature,
            key=jax.random.fold_in(jax.random.key(config.seed), index), eos=(), calls=calls, block=64,
            max_new_tokens=config.new_tokens + group[0].room,
        )  # fmt: skip
        while tokens < config.new_tokens:
            blocks, cache = next(written)
            tokens += len(blocks[0])
        held = np.stack(calls.held)[:, : len(group)]
        most, last = max(most, float(held[1:].max())), [*last, float(held[-1].mean())]
        policy_then, cache = for_answers(policy, cache)
        for questions in zip(*(sample.questions for sample in group), strict=True):
            records = {"stop": (), "calls": Calls(), "pace": Pace(), "watch": Stopwatch()}
            said, cache = answer(model, policy_then, cache, questions, **records)
            right += [q.score(one.tokens) for q, one in zip(questions, said, strict=True)]
    return {"right": float(np.mean(right)), "answers": len(right), "most": most, "last": float(np.mean(last))}


def prompts(config: LongAnswersConfig) -> list[Any]:
    """Contexts with records, which end in text that can be gone on with: the mark before the questions is moved to
    each question."""
    import numpy as np

    from kvjax.tasks import Recall, builtin_text, builtin_vocabulary

    task = Recall(builtin_vocabulary(), builtin_text("evaluate"), questions=QUESTIONS)
    count = -(-config.samples // QUESTIONS**2) * QUESTIONS
    made = []
    for index in range(count):
        sample = task.sample(1000 * config.seed + index, config.prompt_tokens)
        before, mark = sample.context[:-1], sample.context[-1:]
        questions = tuple(
            dataclasses.replace(q, prompt=np.concatenate([mark, q.prompt])) for q in sample.questions
        )
        made.append(dataclasses.replace(sample, context=before, questions=questions))
    return made


def main(args: list[str] | None = None) -> None:
    """The command."""
    config = parse_command(LongAnswersConfig, args)
    config.check()
    mesh = start(MeshShape())

    import jax

    import kvjax

    rows = {}
    with jax.set_mesh(mesh):
        model = kvjax.load_model("builtin")
        policies = {name: policy_of(name, config, model) for name in config.policies}
        samples = prompts(config)
        for name, policy in policies.items():
            rows[name] = row = recalled(config, model, policy, samples)
            print(
                f"{name:16} {100 * row['right']:5.1f}% of {row['answers']} right, "
                f"{row['last']:.0f} entries held in the end, {row['most']:.0f} at most",
                flush=True,
            )
    if config.json is not None:
        write_text(config.json, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
