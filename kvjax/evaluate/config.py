"""The options of an evaluation. Imports no jax: a wrong value is refused before anything starts."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from kvjax.builtin import BUILTIN, GATES
from kvjax.cli.launch import MeshShape, parse_command
from kvjax.cli.options import find_value, load_config
from kvjax.errors import LARGEST_INT, UserError
from kvjax.tasks.suite import TURNS

UNTRAINED = {"KeyDiff": "keydiff", "H2O": "h2o", "Expected Attention": "expected_attention"}
"""The evictions that do best on the built-in model without training, as training's report calls them."""
POLICIES = (
    *("full", "streaming_llm:calibrated", "head_pattern:calibrated"),
    *("snapkv", "snapkv:when=chunk", "snapkv:when=chunk,observers=prompt"),
    *(
        "snapkv:when=chunk,pyramidkv",
        "snapkv:when=chunk,observers=prompt,pyramidkv",
        "snapkv:when=chunk,adakv",
    ),
    *(
        "expected_attention",
        "expected_attention:when=chunk",
        "keydiff",
        "keydiff:when=chunk",
        "h2o:when=chunk",
    ),
    *("r_kv", "oraclekv", "kvzip", "fast_kvzip", "kvpop", "quest", "wgkv:calibrated", "wgkv"),
    *("wgkv+snapkv:group=max,pooling=max,adakv.over=model,adakv.pinned=0.0", "wgkv+quest"),
)
"""Compared where no others are named, and head_pattern:gates=… for each pattern among --gates."""
ANSWERING = (
    *("full", "streaming_llm", "h2o:when=position", "r_kv:when=position", "fast_kvzip:when=position"),
    *("kvpop", "wgkv"),
)
"""Policies compared on contests, where the cache grows with the answer."""
DTYPES = "float32", "bfloat16", "float16"


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """Compare policies: what each answers right at each budget, and what its cache held for it.

    With nothing but --out: the methods on the built-in model at four budgets. Finished results are kept: the same
    command continues a run that was stopped, and others may be added.
    """

    out: Path
    """Folder of results.jsonl, report.md and the pictures."""
    config: str | None = None
    """A YAML file of these options, or the name of one that comes with kvjax (papers/kvpop), under the command line."""
    model: str = BUILTIN
    """A model folder, a GGUF file, a hub id, or `builtin`."""
    policies: tuple[str, ...] = POLICIES
    """Policies to compare, as in kvjax.generate --policy: snapkv, wgkv+quest, snapkv:when=chunk,adakv. One that names
    no ratio, entries, … gets each of --budgets, one that does is measured once. streaming_llm:calibrated,
    head_pattern:calibrated and wgkv:calibrated are fitted on other contexts for each budget. In a --config file also a
    mapping of labels to policies. By default those that there are gates for."""
    budgets: tuple[float, ...] = (0.1, 0.2, 0.4, 0.7)
    """Shares of the full cache's entries."""
    tasks: tuple[str, ...] = ("needle", "copy", "text")
    """needle, by depth; documents: questions about a text of one's own; text: how it goes on; recall and copy (built-in
    model, which has a text of its own, too); RULER's thirteen by name: niah_single_1, …, vt, cwe, fwe, qa_1, qa_2;
    those of LongBench, SCBench, HELMET and LongProc: longbench_qasper, …, scbench_kv, …, helmet_kilt_nq, …,
    longproc_countdown_0.5k, …. Or contests, answered at length: aime_2024, aime_2025, hmmt_feb_2025, hmmt_nov_2025."""
    context: tuple[int, ...] = (1024,)
    """Tokens of a context with a question and its answer, of a contest's problem with its answer."""
    samples: int = 192
    """Answers of each result, at least. A text of which the last eighth is predicted counts for 12; every problem of a
    contest is answered equally often, each time by draws of its own."""
    chunk: int | None = None
    """Tokens of a call while a context is read, and of a chunk where a method evicts after each; by default a quarter
    of the shortest context, at most 32768."""
    observed: int | None = None
    """Last tokens that SnapKV looks back at; by default 64, at most a sixteenth of a chunk."""
    question_aware: bool = False
    """Read each question with its context and compress both; by default contexts are compressed before any question."""
    gates: tuple[str, ...] = ()
    """Folders with trained gates, .pt files of the methods' authors, or `builtin`, those that come with the built-in
    model, its default. wgkv is compared with all of WG-KV's at their own τ, its budget being λ; wgkv:calibrated
    searches the τ for each budget, with the two whose own size is nearest to it, and takes those that answer more of
    calibration contexts; wgkv+NAME takes at their own τ the most selective that let in as much as the budget;
    head_pattern:calibrated tries the rates of the first. Other methods take the first of their own."""
    order_contexts: int | None = None
    """Contexts that heads are ordered on; by default 2 to 10, the fewer the more heads there are to measure. Which
    order, how many sinks and which windows are then chosen on 10."""
    order_length: int = 1024
    """Tokens of the contexts that heads are ordered on, at most; shorter where --context is."""
    data: tuple[str, ...] = ()
    """Data that tasks read, as NAME=PATH. documents (for documents and text): a text file, or a folder of .txt files.
    essays: the haystack of RULER and of needles, a text file; by default the packaged text. squad, hotpotqa (for qa_1,
    qa_2): the datasets' JSON files. ruler: RULER's own samples instead of samples made here, a folder with a .jsonl or
    .parquet file for each task or for all, or a hub dataset with a configuration for each length (simonjegou/ruler).
    longbench, scbench, contests: a folder of files named like the tasks, or a hub dataset; longbench also its data.zip,
    contests also a file; by default their own on the hub. helmet: the folder of HELMET's unpacked data.tar.gz.
    longproc: the folder data of princeton-pli/LongProc."""
    turns: str = TURNS[0]
    """SCBench's questions of a context: each by itself (`each`), or after those before it, with their true answers
    (`golden`) or what the model said (`own`)."""
    temperature: float = 0.7
    """Contests: what answers are drawn at. The defaults are those that Qwen3-4B-Instruct-2507 is published with; for
    Qwen3's thinking models 0.6, and a top-p of 0.95."""
    top_p: float = 0.8
    """Contests: of the most likely tokens the fewest whose probability reaches it."""
    top_k: int = 20
    """Contests: the most likely tokens that are drawn from; 0: all."""
    dense: Path | None = None
    """Contests: the folder of another evaluation, whose full cache pass@1 is held against; by default that of this
    one."""
    chat: bool = True
    """RULER, documents and contests: use the tokenizer's chat template if it has one."""
    seed: int = 0
    """Seed of the contexts and of all random choices."""
    batch: int = 16
    """Contexts at a time."""
    capacity: str | None = None
    """The pool's size: entries per kv head (4096), bytes (2GiB) or a share of device memory (30%). By default it holds
    the full cache, so that all budgets run one program."""
    page_size: int | None = None
    """Tokens per page; by default 64 on a TPU and 16 elsewhere and with a selection."""
    dry_run: bool = False
    """Only check the options against the model's shape, and say how much would be measured: without weights, data or
    network, in seconds. For a model of a known shape (as in kvjax.plan) or a folder with its config.json."""
    force: bool = False
    """Take gates that were made for another model of the same shape."""
    dtype: str | None = None
    """float32, bfloat16 or float16; by default that of the weights."""
    mesh: MeshShape = MeshShape()
    """Devices: 8 (fsdp), 4x2 (fsdp × tensor) or fsdp=4,tensor=2."""

    @property
    def files(self) -> dict[str, Path]:
        """The paths of `data` by name. Raises UserError for one without a name or a path, and for a name twice."""
        found: dict[str, Path] = {}
        for text in self.data:
            name, _, path = text.partition("=")
            if not name or not path:
                raise UserError(f"--data {text}: expected NAME=PATH")
            if name in found:
                raise UserError(f"--data names {name} twice")
            found[name] = Path(path)
        return found

    def check(self) -> None:
        """Refuse values that mean nothing. Raises UserError."""
        _ = self.files
        for name in ("policies", "budgets", "tasks", "context"):
            values = getattr(self, name)
            if not values:
                raise UserError(f"--{name} needs at least one value")
        for name in ("policies", "budgets", "tasks", "context", "gates"):
            values = getattr(self, name)
            twice = [value for index, value in enumerate(values) if value in values[:index]]
            if twice:
                raise UserError(f"--{name} names {twice[0]} twice")
        for budget in self.budgets:
            if not 0 < budget <= 1:
                raise UserError(f"--budgets are shares above 0 and at most 1, got {budget:g}")
        numbers = {
            "context": min(self.context), "samples": self.samples, "chunk": self.chunk, "observed": self.observed,
            "batch": self.batch, "page-size": self.page_size, "order-contexts": self.order_contexts,
            "order-length": self.order_length,
        }  # fmt: skip
        for name, value in numbers.items():
            if value is not None and value < 1:
                raise UserError(f"--{name} must be at least 1, got {value}")
        if not self.temperature > 0:
            raise UserError(f"--temperature must be above 0, got {self.temperature:g}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p must be above 0 and at most 1, got {self.top_p:g}")
        if self.top_k < 0:
            raise UserError(f"--top-k must be at least 0, got {self.top_k}")
        if not 0 <= self.seed <= LARGEST_INT:
            raise UserError(f"--seed must be from 0 to {LARGEST_INT}, got {self.seed}")
        if self.page_size is not None and self.page_size > min(self.context):
            raise UserError(
                f"--page-size must be at most the shortest --context, {min(self.context)}, got {self.page_size}"
            )
        if self.turns not in TURNS:
            raise UserError(f"--turns must be one of {', '.join(TURNS)}, got {self.turns}")
        if self.turns == "own" and self.question_aware:
            raise UserError(
                "--turns own feeds back what is said, so that later questions are not known ahead: --question-aware "
                "takes each or golden"
            )
        if self.dtype not in (None, *DTYPES):
            raise UserError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype}")


Config = TypeVar("Config", bound=EvaluateConfig)


def default_chunk(context: int) -> int:
    """Tokens of a chunk of contexts of `context` tokens."""
    return max(1, min(32768, context // 4))


def default_observed(chunk: int) -> int:
    """Last tokens that methods look back at, in chunks of `chunk` tokens."""
    return max(1, min(64, chunk // 16))


def parse(args: Sequence[str] | None = None, kind: type[Config] = EvaluateConfig) -> Config:
    """Return the settings from the command line, as the evaluation's or as those of a program that adds to them, with
    what follows from others filled in. Raises UserError."""
    arguments = sys.argv[1:] if args is None else args
    name, out = find_value(arguments, "--config"), find_value(arguments, "--out")
    base = None if out is None else kind(Path(out))
    config = parse_command(kind, args, default=load_config(kind, name, base) if name else None)
    config.check()
    chunk = config.chunk or default_chunk(min(config.context))
    observed = config.observed or default_observed(chunk)
    named = config.gates or ((BUILTIN,) if config.model == BUILTIN else ())
    gates = tuple(x for name in named for x in (GATES if name == BUILTIN else [name]))
    return dataclasses.replace(config, chunk=chunk, observed=observed, gates=gates)
