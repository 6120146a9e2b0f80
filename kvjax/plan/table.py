"""A table of what fits: models × chips, each cell a program that was compiled. What is kept of cells is a file of JSON
lines; the next call goes on with it."""

import dataclasses
import json
import time
from pathlib import Path

from kvjax.errors import UserError, one_of, real_number, whole_number
from kvjax.files import read_text
from kvjax.plan.ahead import Job, compiled
from kvjax.plan.chips import Topology
from kvjax.plan.search import fits
from kvjax.plan.shapes import find_shape

STAGES = "train", "decode", "prefill"
SHORT = {4096: "4K", 8192: "8K", 16384: "16K", 32768: "32K", 131072: "128K"}


@dataclasses.dataclass(frozen=True)
class TableConfig:
    """Compile cells that are not there yet, then print all as tables in Markdown, in GiB a device."""

    models: tuple[str, ...] = ("llama-3.1-8b", "llama-3.2-1b", "qwen3-4b", "qwen3-14b", "llama-3.1-70b")
    """By name, or folders."""
    topologies: tuple[str, ...] = ("v5e:2x4", "v6e:2x4", "v5p:2x2x1", "h100:8")
    """As in train and serve. Heads are split over all chips (tensor)."""
    stages: tuple[str, ...] = STAGES
    """What is compiled now, in this order."""
    lengths: tuple[int, ...] = (4096, 8192, 16384, 32768)
    """Of training's sequences, one an update."""
    contexts: tuple[int, ...] = (32768, 131072)
    """Of prompts."""
    batches: tuple[int, ...] = (1, 8, 32)
    """Prompts at a time; prefill takes the smallest."""
    kept: tuple[float, ...] = (1.0, 0.25)
    """Shares of the tokens that stay, by gates; 1 is the full cache."""
    out: Path = Path("memory.jsonl")
    """Where cells are kept."""
    minutes: float = 60.0
    """No cell is begun later than that."""

    def check(self) -> None:
        """Refuse what is not there or means nothing. Raises UserError."""
        for name in ("models", "topologies", "stages", "lengths", "contexts", "batches", "kept"):
            if not getattr(self, name):
                raise UserError(f"table: --{name} must have one value at least")
        for name in ("lengths", "contexts", "batches"):
            for value in getattr(self, name):
                whole_number("table", f"--{name}", value)
        for share in self.kept:
            real_number("table", "--kept", share, most=1.0, above=0.0)
        for stage in self.stages:
            one_of("table", "--stages", stage, STAGES)
        real_number("table", "--minutes", self.minutes, 0.0)
        for topology in self.topologies:
            Topology.parse(topology)
        for model in self.models:
            find_shape(model)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One place of the table."""

    model: str
    """A name of `kvjax.plan.shapes`."""
    stage: str
    """train, prefill or decode."""
    topology: str
    """Of one host."""
    length: int
    """Tokens of a sequence, or of a context."""
    batch: int = 1
    """Sequences."""
    kept: float = 1.0
    """The share of the entries that stay."""

    def job(self) -> Job:
        """What is compiled for it."""
        mesh = f"tensor={Topology.parse(self.topology).count}"
        if self.stage == "train":
            arguments = (
                "--model",
                self.model,
                "--lengths",
                str(self.length),
                "--shares",
                "1",
                "--dtype",
                "bfloat16",
            )
        else:
            arguments = "--topology", self.topology, "--model", self.model
            if self.kept < 1:
                arguments += "--policy", "wgkv", "--ratio", str(self.kept)
        return Job(self.stage, self.topology, arguments, mesh, self.length, batch=self.batch)


@dataclasses.dataclass(frozen=True)
class Known:
    """What a cell is known to take."""

    total: int
    """Bytes a device."""
    fits: bool
    """Whether it does."""
    refused: bool
    """By the compiler, whose need is then its own estimate."""


def cells(config: TableConfig, stage: str) -> list[Cell]:
    """The cells of a stage, the largest training length and the smallest batch of each model and chip first."""
    places: list[tuple[int, int, float]]
    if stage == "train":
        places = [(length, 1, 1.0) for length in sorted(config.lengths, reverse=True)]
    else:
        batches = (min(config.batches),) if stage == "prefill" else config.batches
        places = [(c, b, k) for b in batches for c in config.contexts for k in config.kept]
    return [
        Cell(model, stage, topology, *place)
        for place in places
        for model in config.models
        for topology in config.topologies
    ]


def read(file: Path) -> dict[Cell, Known]:
    """The cells of a file. Raises UserError for one that holds something else."""
    if not file.exists():
        return {}
    try:
        lines = [json.loads(line) for line in read_text(file, "--out").splitlines()]
        return {Cell(**line["cell"]): Known(**line["known"]) for line in lines}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--out {file}: holds something else than cells ({error})") from None


def write(config: TableConfig) -> None:
    """Compile what is missing, then print. A cell that cannot be compiled is said and left out. Raises UserError for
    options that are no cells."""
    config.check()
    end, found = time.monotonic() + 60 * config.minutes, read(config.out)
    for cell in (cell for stage in config.stages for cell in cells(config, stage)):
        if cell in found or time.monotonic() > end:
            continue
        topology = Topology.parse(cell.topology)
        try:
            topology.check_compiler()
            made = compiled(cell.job())
        except UserError as error:
            print(f"left out: {cell}: {error}", flush=True)
            continue
        known = Known(made.total, fits(made, topology.chip.usable), bool(made.refused))
        found[cell] = known
        config.out.parent.mkdir(parents=True, exist_ok=True)
        with config.out.open("a", encoding="utf-8") as file:
            file.write(
                json.dumps({"cell": dataclasses.asdict(cell), "known": dataclasses.asdict(known)}) + "\n"
            )
        print(f"{cell}: {made.total / 2**30:.2f} GiB in {made.seconds:.0f} s", flush=True)
    print(markdown(config, read(config.out)))


def markdown(config: TableConfig, found: dict[Cell, Known]) -> str:
    """A table for each stage that has a cell: GiB a device, struck out where that does not fit."""
    parts = []
    for stage in ("train", "prefill", "decode"):
        own = [cell for cell in cells(config, stage) if cell in found]
        if not own:
            continue
        columns = sorted({(cell.batch, cell.length, -cell.kept) for cell in own})
        heads = [_head(stage, *column) for column in columns]
        lines = [f"| {stage} | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
        for model in config.models:
            for topology in config.topologies:
                row = [found.get(Cell(model, stage, topology, c, b, -k)) for b, c, k in columns]
                if any(row):
                    lines.append(f"| {model}, {topology} | {' | '.join(map(shown, row))} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _head(stage: str, batch: int, length: int, kept: float) -> str:
    tokens = SHORT.get(length, str(length))
    if stage == "train":
        return tokens
    share = "all" if kept == -1 else f"{-kept:g}"
    return f"{tokens}, {share}" if stage == "prefill" else f"{batch} × {tokens}, {share}"


def shown(known: Known | None) -> str:
    """A cell as tables have it."""
    if known is None:
        return "·"
    number = f"{known.total / 2**30:.1f}"
    return number if known.fits else f"~~{number}~~"
