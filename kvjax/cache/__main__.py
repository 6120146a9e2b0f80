"""`python -m kvjax.cache show PATH`: what a saved cache holds, by layer and kv head."""

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

import tyro

from kvjax.cache.saved import describe_cache
from kvjax.command.launch import parse_command, run_command
from kvjax.errors import one_line


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Show what a saved cache holds, by layer and kv head."""

    what: tyro.conf.Positional[Literal["show"]]
    """What to do."""
    path: tyro.conf.Positional[Path]
    """A folder that `kvjax.save_cache` or `kvjax.generate --save-cache` wrote."""


def shown(found: dict[str, Any]) -> str:
    """A table of what `describe_cache` found: entries and bytes of their keys and values, by layer and kv head."""
    arrays, held = found["arrays"], found["held"]
    width = arrays["entries"]["shape"][1] * itemsize(found["dtype"])
    tokens, heads = sum(found["tokens"]), len(held[0])
    full = tokens * len(held) * heads
    kept = sum(map(sum, held))
    lines = [
        one_line(f"{found['made_for']['model']}, policy {found['policy']}, kvjax {found['kvjax']}"),
        f"{len(found['tokens'])} sequence{'s' * (len(found['tokens']) != 1)} of {', '.join(map(str, found['tokens']))} "
        f"tokens, window {found['window']}, entries {found['dtype']}",
        f"{kept:,} of {full:,} entries ({100 * kept / full:.0f}%), {size(kept * width)}; in all {size(found['bytes'])}",
        "",
        "layer " + "".join(f"{f'head {k}':>20}" for k in range(heads)) + f"{'all':>12}",
    ]
    for layer, row in enumerate(held):
        cells = "".join(f"{f'{n:,} · {size(n * width)}':>20}" for n in row)
        lines.append(f"{layer:5} {cells}{size(sum(row) * width):>12}")
    return "\n".join(lines)


def itemsize(dtype: str) -> int:
    """Bytes of a number: of "float32", "bfloat16" or "float16"."""
    return int(dtype.removeprefix("b").removeprefix("float")) // 8


def size(count: int) -> str:
    """Bytes as people read them."""
    power = min(3, int(math.log(max(count, 1), 1024)))
    return f"{count / 1024**power:.{0 if power == 0 else 2}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def main(args: list[str] | None = None) -> None:
    """The command."""
    print(shown(describe_cache(parse_command(CacheConfig, args).path)))


if __name__ == "__main__":
    run_command(main)
