"""results.jsonl, with a line for each result, and settings.json, with the settings that they share."""

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvjax.cache import default_page_size
from kvjax.checkpoints.fingerprint import contents
from kvjax.checkpoints.folder import digest
from kvjax.errors import UserError
from kvjax.evaluate.calibrated import Candidate, wgkv_tau
from kvjax.evaluate.compared import Compared, compared_policies, parse_compared
from kvjax.evaluate.config import EvaluateConfig
from kvjax.evaluate.gates import describe_gates
from kvjax.evaluate.measuring import ContestStatistics, Measurement
from kvjax.evaluate.sized_tasks import SizedTask
from kvjax.files import write_text
from kvjax.inference.answers import decoded
from kvjax.models.decoder import Decoder
from kvjax.policies import HeadPattern
from kvjax.policies.admission.pattern_folder import pattern_digest
from kvjax.tasks.registry import suite_of
from kvjax.tasks.sample import Sample, Tokens

MEASURED_WITH = (
    *("samples", "chunk", "observed", "question_aware", "chat", "seed", "batch", "capacity", "page_size"),
    *("dtype", "weights", "kv_cache_dtype", "order_contexts", "order_length", "turns"),
)
"""Settings that all results of a folder share."""
DRAWN_WITH = "temperature", "top_p", "top_k"
"""Settings that only contests use; None in a folder of other tasks."""
HEADS_FOLDER = "heads"
"""The folder of the measured importance of heads."""
ANSWERS_FOLDER = "answers"
"""The folder of the answers."""
LAMBDA, BUDGET, NOTHING = "λ", "budget", "nothing"
"""The meanings of a budget, the values of `Result.sized_by`."""
FULL = "full"
"""The policy string of the full cache."""


@dataclass(frozen=True)
class Result:
    """One policy at one budget on one task at one length. A line of results.jsonl."""

    policy: str
    """The policy's label."""
    described: str
    """The policy string."""
    sized_by: str
    """Meaning of the budget: `budget` is a share of the full cache's entries, `λ` belongs to gates at their exported τ,
    and `nothing` stands for a policy that has its own size."""
    budget: float
    """The budget, or λ."""
    task: str
    """The task's name."""
    context: int
    """The length in tokens."""
    metric: str
    """Description of the score."""
    contexts: str
    """A digest of the contexts and questions."""
    samples: int
    """The number of answers."""
    score: float
    """The mean score, from 0 to 1."""
    perplexity: float | None
    """Perplexity of teacher-forced texts; None if there are none."""
    footprint: float
    """KV footprint relative to full attention, the mean over the answers."""
    footprint_held: float
    """The footprint with the tokens that were only read to observe and then removed."""
    peak_kv: float
    """The most entries at one time, relative to full attention."""
    kv_ratio: float
    """Share of the entries that is kept after the contexts (or the answers to contests) end."""
    bytes: int
    """Bytes of a context's pages in use at that time."""
    prefill_tok_s: int | None
    """Tokens read per second, without compilation; None if not timed."""
    decode_tok_s: int | None
    """Tokens decoded per second by a whole batch, without compilation; None if not timed."""
    by_kind: dict[str, float]
    """The score by kind of question."""
    question_aware: bool
    """True if questions were read with their contexts."""
    published: bool
    """True if its samples come from a published dataset."""
    seed: int
    kept: list[list[float]]
    """kv_ratio by layer and kv head."""
    gates: str | None
    """The folder of WG-KV's gates; None for other policies."""
    tau: float | None
    """The threshold of WG-KV's gates; None for other policies."""
    choice: str
    """Description of what was chosen on calibration contexts."""
    drawn: ContestStatistics | None = None
    """Statistics of a contest's sampled answers."""
    interval: tuple[float, float] | None = None
    """The score's 95% interval; None for contests, whose `drawn` has a standard error."""

    @property
    def key(self) -> tuple[str, float, str, int]:
        return self.policy, self.budget, self.task, self.context

    @property
    def at(self) -> str:
        """The budget as text, or the λ of gates at their exported τ."""
        return f"λ {self.budget:g}" if self.sized_by == LAMBDA else f"{self.budget:g}"

    @property
    def is_full(self) -> bool:
        """True if the policy is the full cache."""
        return self.described == FULL

    def __str__(self) -> str:
        tau = "" if self.tau is None else f", τ {self.tau:.9g}"
        return (
            f"{self.task} {self.context}, {self.policy} at {self.at}: {100 * self.score:.1f}%, "
            f"{self.kv_ratio:.3f} of the entries, footprint {self.footprint:.3f}{tau}"
        )


def result_of(
    compared: Compared,
    budget: float,
    candidate: Candidate,
    task: SizedTask,
    measured: Measurement,
    config: EvaluateConfig,
) -> Result:
    """Return the result of a measurement, with most figures rounded to 6 places and speeds to whole tokens."""

    sized_by = BUDGET if compared.takes_budget else NOTHING
    if (
        compared.at_exported_tau
        and candidate.gates is not None
        and "lambda" in describe_gates(candidate.gates)
    ):
        sized_by = LAMBDA

    def speed(x: float | None) -> int | None:
        return None if x is None else round(x)

    return Result(
        policy=compared.label,
        described=compared.text,
        sized_by=sized_by,
        budget=budget,
        task=task.name,
        context=task.length,
        metric=metric_of(config, task),
        contexts=task.digest,
        samples=measured.answers,
        score=round(measured.score, 6),
        perplexity=None if measured.perplexity is None else round(measured.perplexity, 6),
        footprint=round(measured.footprint, 6),
        footprint_held=round(measured.footprint_held, 6),
        peak_kv=round(measured.peak, 6),
        kv_ratio=round(measured.kv_ratio, 6),
        bytes=measured.bytes,
        prefill_tok_s=speed(measured.prefill),
        decode_tok_s=speed(measured.decode),
        by_kind={kind: round(score, 6) for kind, score in measured.by_kind.items()},
        question_aware=config.question_aware,
        published=task.published,
        seed=config.seed,
        kept=measured.kv_ratios.round(4).tolist(),
        gates=candidate.gates,
        tau=wgkv_tau(candidate.policy),
        choice=candidate.choice,
        drawn=measured.drawn,
        interval=None
        if measured.interval is None
        else (round(measured.interval[0], 6), round(measured.interval[1], 6)),
    )


def metric_of(config: EvaluateConfig, task: SizedTask) -> str:
    """Return the description of a task's score, with the sampling settings of a contest."""
    if not task.is_contest:
        return task.dataset.metric
    sampling = f"temperature {config.temperature:g}, top-p {config.top_p:g}, top-k {config.top_k}"
    return f"{task.dataset.metric}; drawn at {sampling}"


class Results:
    """The finished results of a folder. No result is written before `begin`.

    Raises:
        UserError: the folder holds results with other settings, an invalid line, or results of another policy under a
            label of this evaluation.
    """

    def __init__(self, config: EvaluateConfig):
        self._file, self._settings_file = config.out / "results.jsonl", config.out / "settings.json"
        self._settings = {name: getattr(config, name) for name in MEASURED_WITH}
        self._settings["page_size"] = _page_size(config)
        contests = all(suite_of(task).is_contest for task in config.tasks)
        self._settings |= {name: getattr(config, name) if contests else None for name in DRAWN_WITH}
        # gates are compared by their contents, not by their paths; data by the contexts of each result
        self._settings["gates"] = [[folder, digest(folder)] for folder in config.gates]
        # gates that policy strings name
        pairs = [pair for text in config.policies for pair in parse_compared(text).named_gates.items()]
        self._named = {
            path: (pattern_digest if method == HeadPattern.name else digest)(path) for path, method in pairs
        }
        self._check_settings()
        self._settings["model"] = [config.model, None]
        self.finished = self._read()
        check_labels(config, self.finished.values(), f"--out {config.out}")

    def check_model(self, model: Decoder) -> None:
        """Raise UserError if the folder's results were measured on a model with other weights."""
        self._settings["model"][1] = contents(model)
        self._check_settings()

    def begin(self) -> None:
        """Make the folder and write the settings into it. Raises UserError if it cannot be written."""
        folder = self._file.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_text(
                self._settings_file, json.dumps(self._settings | {"named": self._named}, indent=1) + "\n"
            )
        except OSError as error:
            raise UserError(f"--out {folder} cannot be written: {error.strerror or error}") from None

    def check_contexts(self, tasks: Sequence[SizedTask]) -> None:
        """Raise UserError if a finished result was measured on other contexts than those of `tasks`."""
        digests = {(task.name, task.length): task.digest for task in tasks}
        for result in self.finished.values():
            if digests.get((result.task, result.context), result.contexts) != result.contexts:
                raise UserError(
                    f"--out {self._file.parent} holds results of {result.task} at {result.context} tokens on other "
                    "contexts (their data has changed since): name another folder"
                )

    def _check_settings(self) -> None:
        """Raise UserError if the folder has results with settings other than those known so far."""
        file = self._settings_file
        if not (self._file.exists() or (file.parent / HEADS_FOLDER).exists()):
            return
        if not file.exists():
            raise UserError(f"--out {file.parent}: it has results but no {file.name}")
        try:
            before = dict(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{file}: cannot be read ({error})") from None
        gates = join_gates(before.get("gates", []), self._settings["gates"])
        for name, value in self._settings.items():
            # an option that did not exist yet had its default
            stored = before.get(name, getattr(EvaluateConfig, name, None))
            differs = gates is None if name == "gates" else comparable(stored) != comparable(value)
            if differs:
                option = name.replace("_", "-")
                digests = " (names, and digests of the contents)" if isinstance(value, list) else ""
                raise UserError(
                    f"--out {file.parent} holds results with --{option} {stored}, got {value}{digests}: name "
                    "another folder"
                )
        self._settings["gates"] = gates
        named = before.get("named", {})
        if changed := [path for path, digest in self._named.items() if named.get(path, digest) != digest]:
            raise UserError(
                f"--out {file.parent} holds results with other gates than {changed[0]} has now: name another folder"
            )
        self._named = named | self._named

    def _read(self) -> dict[tuple[str, float, str, int], Result]:
        """Return the results. An incomplete last line, which a killed run leaves, is removed from the file."""
        if not self._file.exists():
            return {}
        text = self._file.read_text(encoding="utf-8")
        complete = text[: text.rfind("\n") + 1]
        if complete != text:
            write_text(self._file, complete)
        return read_results(self._file)

    def add(self, result: Result) -> None:
        """Append a result's line. It is on disk when this returns."""
        with self._file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(dataclasses.asdict(result)) + "\n")
            out.flush()
            os.fsync(out.fileno())
        self.finished[result.key] = result


def write_answers(
    file: Path, samples: Sequence[Sample], outputs: Sequence[Sequence[Tokens]], tokenizer: Any
) -> None:
    """Write a JSON line for each answer of a measurement, for people to read. Makes the folder.

    A line has the index of the context, the question's kind, the true answer, the score, and the answer's text and
    number of tokens. Lines of contests also have the answer's index, its conclusion (`said`), and whether it was cut
    off.
    """
    draws, rows = len(outputs) // len(samples), []
    for index, answers in enumerate(outputs):
        context, draw = divmod(index, draws)
        for question, tokens in zip(samples[context].questions, answers, strict=True):
            row = {"context": context, "kind": question.kind, "true": decoded(tokenizer, question.answer)}
            cut = question.concluded is not None and len(tokens) == question.answer_tokens
            if question.concluded is not None:
                row |= {"draw": draw, "said": question.concluded(tokens), "cut": cut}
            row |= {"score": 0.0 if cut else question.score(tokens), "tokens": len(tokens)}
            rows.append(row | {"text": decoded(tokenizer, tokens)})
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_results(file: Path) -> dict[tuple[str, float, str, int], Result]:
    """Return the results of a results.jsonl by their keys. Raises UserError for an invalid line."""
    lines = enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
    results = [_result(line, f"{file}: line {number}") for number, line in lines]
    return {result.key: result for result in results}


def check_labels(config: EvaluateConfig, results: Iterable[Result], where: str) -> None:
    """Raise UserError if results of an evaluation's tasks were measured with other policies than its labels now have.

    where: the folder of the results, for the error.
    """
    texts = {compared.label: compared.text for compared in compared_policies(config)}
    for result in results:
        text = texts.get(result.policy, result.described)
        if result.task in config.tasks and result.context in config.context and text != result.described:
            raise UserError(
                f"{where} holds results of {result.policy} with the policy {result.described}, got {text}: name "
                "another label or another folder"
            )


def _result(line: str, at: str) -> Result:
    try:
        values = dict(json.loads(line))
    except (ValueError, TypeError):
        raise UserError(f"{at} is no JSON object, it starts {line[:60]}") from None
    needed = [field.name for field in dataclasses.fields(Result) if field.default is dataclasses.MISSING]
    missing = [name for name in needed if name not in values]
    if missing:
        raise UserError(f"{at} has no field `{missing[0]}`")
    drawn, interval = values.get("drawn"), values.get("interval")
    return Result(
        **{name: values[name] for name in needed},
        drawn=None if drawn is None else ContestStatistics(**drawn),
        interval=None if interval is None else tuple(interval),
    )


def _page_size(config: EvaluateConfig) -> int | str:
    """Return the tokens per page, or a description if policies with a selection have another page size."""
    if config.page_size is not None:
        return config.page_size
    int8 = config.kv_cache_dtype is not None
    usual, selected = (default_page_size(selects=selects, int8=int8) for selects in (False, True))
    return usual if usual == selected else f"{usual}, {selected} with a selection"


def comparable(value: Any) -> Any:
    """Return the part of a setting that must be equal. For [name, digest] it is the digest, if there is one."""
    return value[1] or value[0] if isinstance(value, list) else value


def join_gates(stored: Sequence[list[str]], gates: list[list[str]]) -> list[list[str]] | None:
    """Return gates and the stored gates of other methods, each as [folder, digest].

    Returns None if a method has other gates among the stored ones. The order counts, because a policy that takes one
    folder takes the first.
    """
    methods: dict[str, str | None] = {}
    for folder, key in [*gates, *stored]:
        if key not in methods:
            # gates that no longer exist may belong to any method
            methods[key] = describe_gates(folder).get("method") if Path(folder).exists() else None
    present = {methods[key] for _, key in gates}
    for method in present:
        ours, theirs = (
            [key for _, key in part if methods[key] in (method, None)] for part in (gates, stored)
        )
        if theirs and ours != theirs:
            return None
    return [*gates, *([folder, key] for folder, key in stored if methods[key] not in present)]
