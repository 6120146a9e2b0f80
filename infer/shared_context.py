"""What many questions of one context cost: asked one by one, as a batch with a copy of the context's cache each, and as
branches that share its pages, with the full cache and a smaller one, in one run. And how soon the first token comes
from a saved cache, against reading the context again.

python infer/shared_context.py --model models/SmolLM2-135M-Instruct.Q4_1.gguf --policies full snapkv --ratio 0.25
"""

import dataclasses
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.command.launch import MeshShape, parse_command, run_command, start
from kvjax.errors import UserError
from kvjax.files import write_text


@dataclasses.dataclass(frozen=True)
class SharedContextConfig:
    """Questions per second and bytes of the cache, on a context and questions of random tokens. In turn, medians, the
    first run left out."""

    model: str = "builtin"
    """A Hugging Face folder, a GGUF file, or `builtin`."""
    policies: tuple[str, ...] = ("full", "snapkv")
    """What is compared, the first one's copies against all others; evictions keep --ratio."""
    ratio: float = 0.25
    """Of the context's entries."""
    tokens: int = 4096
    """Of the context."""
    questions: int = 64
    """About it."""
    question_tokens: int = 16
    """Of a question."""
    new_tokens: int = 16
    """Of an answer."""
    repeats: int = 3
    """Timings of each."""
    json: Path | None = None
    """Write the rows here as well."""

    def check(self) -> None:
        """Refuse what means nothing. Raises UserError."""
        for name in ("tokens", "questions", "question_tokens", "new_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")


def forms(config: SharedContextConfig, model: Any, policy: Any, cache: Any) -> dict[str, Callable[[], int]]:
    """How all questions are asked of a cache, each of which returns the bytes of what was then held."""
    import kvjax

    random = np.random.default_rng(1)
    size = config.questions, config.question_tokens
    questions = random.integers(1, model.config.vocab_size, size).tolist()
    options = {"policy": policy, "max_new_tokens": config.new_tokens, "eos": ()}

    def one_by_one() -> int:
        return max(kvjax.sample(model, [x], cache=cache, **options).stats.bytes for x in questions)

    def shared() -> int:
        return kvjax.sample(model, questions, cache=cache, share=True, **options).stats.bytes

    copies = copied(model, cache, config.questions)

    def with_copies() -> int:
        return kvjax.sample(model, questions, cache=copies, **options).stats.bytes

    return {"copies": with_copies, "one by one": one_by_one, "shared": shared}


def copied(model: Any, cache: Any, count: int) -> Any:
    """A cache of so many sequences that are all as the one of `cache`, each with pages of its own."""
    from kvjax.inference.room import grown, owned
    from kvjax.inference.sharing import branched
    from kvjax.mesh import use_mesh

    with use_mesh(model):
        more = cache.pages.pool.shape[0] * (count - 1)
        apart = owned(grown(branched(cache, True, 1, count)[0], more, 0), None)
    return dataclasses.replace(apart, pages=dataclasses.replace(apart.pages, others=None))


def first_token(model: Any, policy: Any, context: list[int]) -> dict[str, Any]:
    """Two ways to a question's first token: the context read, or its cache loaded from the disk."""
    import kvjax

    asked = {"policy": policy, "max_new_tokens": 1, "eos": ()}
    folder = tempfile.TemporaryDirectory()
    kvjax.save_cache(folder.name, kvjax.prefill(model, [context], policy=policy), model, policy)

    def read() -> int:
        cache = kvjax.prefill(model, [context], policy=policy)
        return kvjax.sample(model, [[1]], cache=cache, **asked).stats.bytes

    def loaded() -> int:
        with_it = kvjax.load_cache(folder.name, model, policy)
        return kvjax.sample(model, [[1]], cache=with_it, **asked).stats.bytes

    return {"context read": read, "cache loaded": loaded, "folder": folder}


def measure(config: SharedContextConfig, model: Any) -> list[dict[str, Any]]:
    """A row of each policy and way: seconds, and bytes of the cache."""
    import kvjax
    from kvjax.command.stopwatch import Stopwatch

    context = np.random.default_rng(0).integers(1, model.config.vocab_size, config.tokens).tolist()
    ways: dict[tuple[str, str], Callable[[], int]] = {}
    folders = []
    for name in config.policies:
        told: dict[str, Any] = {} if name == "full" else {"ratio": config.ratio}
        policy = kvjax.make_policy(name, model=model, **told)
        cache = kvjax.prefill(model, [context], policy=policy)
        found = forms(config, model, policy, cache) | first_token(model, policy, context)
        folders.append(found.pop("folder"))
        ways |= {(name, way): ask for way, ask in found.items()}
    seconds: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    held = {}
    for repeat in range(config.repeats + 1):
        for way, ask in ways.items():
            watch = Stopwatch()
            held[way] = ask()
            if repeat:
                seconds[way].append(watch.lap())
    for folder in folders:
        folder.cleanup()
    return [
        {"policy": policy, "way": way, "seconds": statistics.median(own), "bytes": held[policy, way]}
        for (policy, way), own in seconds.items()
    ]


def main(args: list[str] | None = None) -> None:
    """The command."""
    config = parse_command(SharedContextConfig, args)
    config.check()
    mesh = start(MeshShape())

    import jax

    import kvjax

    with jax.set_mesh(mesh):
        longest = config.tokens + config.question_tokens + config.new_tokens
        model = kvjax.load_model(config.model, max_length=longest)
        rows = measure(config, model)
    first = {way: next(x for x in rows if x["way"] == way) for way in ("copies", "context read")}
    for row in rows:
        asks = row["way"] not in ("context read", "cache loaded")
        beside = first["copies" if asks else "context read"]
        speed = (
            f"{config.questions / row['seconds']:8.2f} questions/s"
            if asks
            else f"{1000 * row['seconds']:8.0f} ms to a token"
        )
        print(
            f"{row['policy']:14} {row['way']:13}{speed} ({beside['seconds'] / row['seconds']:.2f}×), "
            f"{row['bytes'] / 2**20:8.2f} MiB ({row['bytes'] / beside['bytes']:.3f})"
        )
    if config.json is not None:
        write_text(config.json, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
