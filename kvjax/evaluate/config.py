"""The options of an evaluation. This module does not import jax, so that wrong values are refused at once."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from kvjax.builtin import BUILTIN, GATES
from kvjax.cli.launch import MeshShape, parse_command
from kvjax.cli.options import find_value, load_config
from kvjax.cli.shards import Shard
from kvjax.errors import LARGEST_INT, UserError
from kvjax.tasks.suite import TURNS

UNTRAINED = {"KeyDiff": "keydiff", "H2O": "h2o", "Expected Attention": "expected_attention"}
"""The best untrained evictions on the built-in model, by their names in training's report."""
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
"""Policies compared by default, together with head_pattern:gates=… for each pattern among --gates."""
ANSWERING = (
    *("full", "streaming_llm", "h2o:when=position", "r_kv:when=position", "fast_kvzip:when=position"),
    *("kvpop", "wgkv"),
)
"""Policies compared by default on contests, where the cache grows with the answer."""
DTYPES = "float32", "bfloat16", "float16"


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """Compare policies: the score of each at each budget, and the entries that its cache held.

    With --out alone, the methods are compared on the built-in model at four budgets. Finished results are kept: the
    same command continues a run that was stopped, and later commands may add policies, budgets, tasks and lengths.
    """

    out: Path
    """Folder of results.jsonl, report.md and the pictures."""
    config: str | None = None
    """A YAML file of these options, or the name of one that comes with kvjax (papers/kvpop). Options on the command
    line take precedence."""
    model: str = BUILTIN
    """A model folder, a GGUF file, a hub id, or `builtin`."""
    policies: tuple[str, ...] = POLICIES
    """Policies to compare, written as in kvjax.generate --policy: snapkv, wgkv+quest, snapkv:when=chunk,adakv. A policy
    without its own budget (ratio, entries, …) is measured at each of --budgets, a policy with a budget once.
    streaming_llm:calibrated, head_pattern:calibrated and wgkv:calibrated are fitted for each budget on contexts that
    are not compared. A --config file may also map labels to policies. By default, policies whose gates are missing are
    left out."""
    budgets: tuple[float, ...] = (0.1, 0.2, 0.4, 0.7)
    """Budgets to compare: shares of the full cache's entries that a policy keeps, or that quest reads."""
    tasks: tuple[str, ...] = ("needle", "copy", "text")
    """Tasks to compare on. needle: a needle by depth. documents: questions about your own documents. text: predict how
    they continue. recall and copy: only for the built-in model, which also has its own text. RULER's thirteen tasks:
    niah_single_1, …, vt, cwe, fwe, qa_1, qa_2. The tasks of LongBench, SCBench, HELMET and LongProc: longbench_qasper,
    …, scbench_kv, …, helmet_kilt_nq, …, longproc_countdown_0.5k, …. Or contests, which are answered at length:
    aime_2024, aime_2025, hmmt_feb_2025, hmmt_nov_2025."""
    context: tuple[int, ...] = (1024,)
    """Lengths to compare, in tokens: of a context with a question and its answer, or of a contest's problem with its
    answer."""
    samples: int = 192
    """The least number of answers for a result. A text whose last eighth is predicted counts as 12 answers. All
    problems of a contest are answered equally often, each time with another random seed."""
    chunk: int | None = None
    """Tokens per call while a context is read, and per chunk for methods that evict after each chunk. By default a
    quarter of the shortest context, at most 32768."""
    observed: int | None = None
    """The number of last tokens that SnapKV observes. By default 64, at most a sixteenth of a chunk."""
    question_aware: bool = False
    """Read each question with its context and compress both. By default contexts are compressed before any question is
    read."""
    gates: tuple[str, ...] = ()
    """Trained gates: folders, .pt files of the methods' authors, or `builtin` for the gates that come with the built-in
    model (its default). wgkv is compared with each of the WG-KV gates at their exported τ; its budget is then
    their λ. wgkv:calibrated searches τ for each budget, for the two gates whose size is nearest to the budget, and uses
    the gates with the better score on calibration contexts. wgkv+NAME uses the most selective gates that admit at least
    the budget, at their exported τ. head_pattern:calibrated also tries the order of heads by the rates of the first
    WG-KV gates. Other methods use the first gates that were trained for them."""
    order_contexts: int | None = None
    """The number of contexts on which heads are ordered. By default 2 to 10: fewer for more heads or longer contexts.
    The order, sinks and windows are then chosen on 10 contexts."""
    order_length: int = 1024
    """The most tokens of the contexts on which heads are ordered. They are never longer than --context. Published
    samples keep the length of --context."""
    data: tuple[str, ...] = ()
    """Data for tasks, as NAME=PATH. documents (for documents and text): a text file, or a folder of .txt files.
    essays: a text file as the haystack of RULER and needle; by default the packaged text. squad, hotpotqa (for
    qa_1, qa_2): the datasets' JSON files. ruler: RULER's published samples instead of generated ones; a folder with a
    .jsonl or .parquet file for each task or for all, or a hub dataset with a configuration for each length
    (simonjegou/ruler). longbench, scbench, contests: a folder of files named like the tasks, or a hub dataset; also
    data.zip for longbench and a single file for contests; by default their datasets on the hub. helmet: the folder
    of HELMET's unpacked data.tar.gz. longproc: the folder data of princeton-pli/LongProc."""
    turns: str = TURNS[0]
    """SCBench: ask each question about a context by itself (`each`), or after the earlier questions with their true
    answers (`golden`) or the model's answers (`own`)."""
    temperature: float = 0.7
    """Contests: the sampling temperature. The sampling defaults are those published with Qwen3-4B-Instruct-2507; for
    Qwen3's thinking models use 0.6 and a top-p of 0.95."""
    top_p: float = 0.8
    """Contests: sample from the fewest most likely tokens whose probabilities sum to at least this."""
    top_k: int = 20
    """Contests: the number of most likely tokens to sample from; 0 means all."""
    dense: Path | None = None
    """Contests: the --out folder of another evaluation, whose full cache is the reference for relative recovery. By
    default it is the full cache of this evaluation."""
    chat: bool = True
    """Use the tokenizer's chat template, if it has one and the task allows it."""
    seed: int = 0
    """Seed of the contexts and of all random choices."""
    batch: int = 16
    """The most contexts, or answers to contests, in a batch."""
    capacity: str | None = None
    """The pool's size: entries per kv head (4096), bytes (2GiB) or a share of device memory (30%). By default it holds
    the full cache, so that all budgets run one program; for contests, the entries that the policy should need."""
    page_size: int | None = None
    """Tokens per page. By default 16; on a TPU 64, or 128 of int8 entries, for policies without a selection."""
    dry_run: bool = False
    """Only check the options against the model's shape and print how much would be measured. This takes seconds and
    needs no weights, data or network. The model's shape must be known (as in kvjax.plan), or the model must be a folder
    with a config.json."""
    force: bool = False
    """Accept gates that were made for another model of the same shape."""
    dtype: str | None = None
    """The model's data type: float32, bfloat16 or float16. By default that of the weights."""
    weights: str | None = None
    """int8 or fp8: keep the layers' matrices in 8 bits, rounded on loading. By default as in the files."""
    kv_cache_dtype: str | None = None
    """int8: keep entries in 8 bits. By default in the model's dtype."""
    mesh: MeshShape = MeshShape()
    """Devices: 8 (fsdp), 4x2 (fsdp × tensor) or fsdp=4,tensor=2."""
    shard: str | None = None
    """Measure one of several shares of the results, into a folder in --out: 0/8 is the first of eight. With 8 alone,
    the index comes from a Slurm array, an indexed job of Kubernetes or SkyPilot's rank."""
    merge: bool = False
    """Join the shares that the same command with --shard measured, and write the report."""

    @property
    def files(self) -> dict[str, Path]:
        """The paths of `data` by name. Raises UserError for an entry without name or path, and for a repeated name."""
        files: dict[str, Path] = {}
        for text in self.data:
            name, _, path = text.partition("=")
            if not name or not path:
                raise UserError(f"--data {text}: expected NAME=PATH")
            if name in files:
                raise UserError(f"--data names {name} twice")
            files[name] = Path(path)
        return files

    def check(self) -> None:
        """Raise UserError if a value is invalid."""
        _ = self.files
        for name in ("policies", "budgets", "tasks", "context"):
            values = getattr(self, name)
            if not values:
                raise UserError(f"--{name} needs at least one value")
        for name in ("policies", "budgets", "tasks", "context", "gates"):
            values = getattr(self, name)
            repeated = [value for index, value in enumerate(values) if value in values[:index]]
            if repeated:
                raise UserError(f"--{name} names {repeated[0]} twice")
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
                "--turns own depends on the model's answers, so questions are not known in advance: use each or golden "
                "with --question-aware"
            )
        if self.dtype not in (None, *DTYPES):
            raise UserError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype}")


Config = TypeVar("Config", bound=EvaluateConfig)


def default_chunk(context: int) -> int:
    """Return the tokens of a chunk, for contexts of `context` tokens."""
    return max(1, min(32768, context // 4))


def default_observed(chunk: int) -> int:
    """Return the number of last tokens that SnapKV observes, for chunks of `chunk` tokens."""
    return max(1, min(64, chunk // 16))


def parse(args: Sequence[str] | None = None, kind: type[Config] = EvaluateConfig) -> Config:
    """Return the options from the command line, with defaults that follow from other options filled in.

    kind: EvaluateConfig, or a subclass for a program with more options. Raises UserError for invalid options.
    """
    arguments = sys.argv[1:] if args is None else args
    name, out = find_value(arguments, "--config"), find_value(arguments, "--out")
    base = None if out is None else kind(Path(out))
    config = parse_command(kind, args, default=load_config(kind, name, base) if name else None)
    config.check()
    if config.shard is not None:
        if config.merge or config.dry_run:
            raise UserError("--shard is for measuring: expected no --merge or --dry-run with it")
        config = dataclasses.replace(config, out=config.out / Shard.parse(config.shard).folder)
    chunk = config.chunk or default_chunk(min(config.context))
    observed = config.observed or default_observed(chunk)
    names = config.gates or ((BUILTIN,) if config.model == BUILTIN else ())
    gates = tuple(x for name in names for x in (GATES if name == BUILTIN else [name]))
    return dataclasses.replace(config, chunk=chunk, observed=observed, gates=gates)
