"""Measure NVIDIA kvpress and kvjax on the same contexts of an evaluation.

    pip install '.[parity]'
    python -m kvjax.convert models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf models/qwen2.5-coder-0.5b
    python infer/kvpress_rival.py --config claims/qwen2.5-coder-0.5b --tasks niah_multikey_2 documents --chunk 2048 \
        --twin models/qwen2.5-coder-0.5b --out runs/kvpress

Both libraries run the same model. They read the same token ids one context at a time, compress each context to the same
share, and answer the same questions greedily. kvpress needs the model as a Hugging Face folder.
"""

import dataclasses
import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.cli.launch import run_command, start
from kvjax.errors import UserError
from kvjax.evaluate.config import EvaluateConfig, parse
from kvjax.files import write_text

METHODS = {
    "SnapKV": ("snapkv:observed={observed}", "SnapKVPress", {"window_size": "{observed}"}),
    "Expected Attention": ("expected_attention", "ExpectedAttentionPress", {}),
    "KeyDiff": ("keydiff", "KeyDiffPress", {}),
    # kvpress always keeps four tokens, which count towards the budget.
    "KVzip": ("kvzip:sink=4", "KVzipPress", {}),
}
"""Each method's policy in kvjax, its press in kvpress, and the arguments of the press."""


@dataclasses.dataclass(frozen=True)
class RivalConfig(EvaluateConfig):
    """Compare kvjax with kvpress. The options are those of kvjax.evaluate; --policies is not used."""

    twin: Path = Path()
    """The model as a Hugging Face folder."""


@dataclasses.dataclass
class Figures:
    """The figures of one method at one budget on one task, in one library."""

    score: float
    interval: tuple[float, float] | None
    reading: float | None
    """Context tokens per second, including compression."""
    decoding: float | None
    """Tokens per second that are read one by one."""
    bytes: int
    """Bytes of a context's keys and values after compression."""

    def __str__(self) -> str:
        low, high = self.interval or (0.0, 1.0)
        return (
            f"{100 * self.score:.0f} [{100 * low:.0f}–{100 * high:.0f}] | {_speed(self.reading)} | "
            f"{_speed(self.decoding)} | {self.bytes / 2**20:.1f}"
        )


def _speed(tokens: float | None) -> str:
    return "–" if tokens is None else f"{tokens:.0f}"


def measure_press(twin: Any, press: Any, samples: Sequence[Any], eos: Sequence[int]) -> Figures:
    """Measure a press on the CPU: read each sample and answer its questions, as kvpress's pipeline does."""
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))

    from kvjax.evaluate.interval import mean_interval

    correct, counts, size = [], [], 0
    reading, decoding = np.zeros(2), np.zeros(2)
    for sample in samples:
        cache, started = transformers.DynamicCache(), time.perf_counter()
        with torch.no_grad(), press(twin):
            twin.model(input_ids=torch.tensor(sample.context)[None], past_key_values=cache)
        reading += len(sample.context), time.perf_counter() - started
        size += sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
        scores = []
        for question in sample.questions:
            answer, decoded = _answer(twin, cache, len(sample.context), question, eos)
            decoding += decoded
            scores.append(question.score(answer))
        correct.append(float(sum(scores)))
        counts.append(len(scores))
    score, interval = sum(correct) / sum(counts), mean_interval(correct, counts)
    read_speed, decode_speed = (
        tokens / seconds if tokens else None for tokens, seconds in (reading, decoding)
    )
    return Figures(score, interval, read_speed, decode_speed, size // len(samples))


def _answer(
    twin: Any, cache: Any, seen: int, question: Any, eos: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the greedy answer, and the number of its tokens that were read one by one and their seconds. The cache is
    restored."""
    torch = importlib.import_module("torch")
    lengths = [layer.get_seq_length() for layer in cache.layers]
    fed, answer, next_position = list(map(int, question.prompt)), [], seen
    decoded = np.zeros(2)
    with torch.no_grad():
        while len(answer) < question.answer_tokens:
            position = torch.arange(next_position, next_position + len(fed))[None]
            started = time.perf_counter()
            out = twin(
                torch.tensor(fed)[None], past_key_values=cache, position_ids=position, logits_to_keep=1
            )
            next_position += len(fed)
            token = int(out.logits[0, -1].argmax())
            if answer:
                decoded += 1, time.perf_counter() - started
            if question.stops and token in eos:
                break
            answer.append(token)
            fed = [token]
    for layer, length in zip(cache.layers, lengths, strict=True):
        layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
    return np.array(answer, np.int32), decoded


def table(results: dict[tuple[str, str, float], tuple[Figures, Figures]]) -> str:
    """Return a Markdown table."""
    names = ["score", "read, tokens/s", "decode, tokens/s", "MiB"]
    head = ["task", "method", "kept", *(f"kvjax: {x}" for x in names), *(f"kvpress: {x}" for x in names)]
    rows = [
        f"| {task} | {method} | {budget:g} | {ours} | {theirs} |"
        for (task, method, budget), (ours, theirs) in results.items()
    ]
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows]) + "\n"


def compare(config: RivalConfig) -> str:
    """Measure both libraries on the CPU and return the table. It is written after every row."""
    import jax

    if jax.default_backend() != "cpu":
        raise UserError("kvpress runs on the CPU here: set JAX_PLATFORMS=cpu, so that kvjax does too")
    try:
        kvpress, torch, transformers = map(importlib.import_module, ("kvpress", "torch", "transformers"))
    except ImportError as error:
        raise UserError(f"kvpress and torch are needed: pip install '.[parity]' ({error})") from None

    from kvjax.evaluate.measuring import MeasureSettings, measure
    from kvjax.evaluate.sized_tasks import sized_tasks
    from kvjax.evaluate.sizing import tokenizer_of
    from kvjax.inference.generate import BLOCK
    from kvjax.models import load_model
    from kvjax.policies import make_policy

    assert config.chunk is not None
    tasks = sized_tasks(config)
    if any(
        question.teacher_forced for task in tasks for sample in task.samples for question in sample.questions
    ):
        raise UserError("--tasks: kvpress cannot measure tasks with given texts")
    model = load_model(config.model, dtype=config.dtype, max_length=max(config.context))
    dtype = getattr(torch, str(model.dtype))
    twin = transformers.AutoModelForCausalLM.from_pretrained(config.twin, dtype=dtype).eval()
    tokenizer, eos, results = tokenizer_of(config.model), model.config.eos_ids, {}
    for task in tasks:
        manner = MeasureSettings(1, config.chunk, 2 * (task.length + BLOCK), config.page_size)
        for name, (policy, press, options) in METHODS.items():
            for budget in config.budgets:
                text = policy.format(observed=config.observed)
                text += f"{',' if ':' in text else ':'}ratio={budget}"
                ours = measure(
                    model, make_policy(text, model=model, tokenizer=tokenizer), task.samples, manner
                )
                arguments = {
                    key: int(value.format(observed=config.observed)) for key, value in options.items()
                }
                theirs = measure_press(
                    twin, getattr(kvpress, press)(1 - budget, **arguments), task.samples, eos
                )
                results[task.name, name, budget] = (
                    Figures(ours.score, ours.interval, ours.prefill, ours.decode, ours.bytes), theirs,
                )  # fmt: skip
                config.out.mkdir(parents=True, exist_ok=True)
                write_text(config.out / "kvpress.md", table(results))
                print(
                    f"{task.name}, {name} at {budget:g}: kvjax {ours.score:.3f}, kvpress {theirs.score:.3f}"
                )
    return table(results)


def main(args: list[str] | None = None) -> None:
    """Run the command."""
    config = parse(args, RivalConfig)
    start(config.mesh)
    print(compare(config))


if __name__ == "__main__":
    run_command(main)
