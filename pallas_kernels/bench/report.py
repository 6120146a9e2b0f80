"""Rows as a table in GitHub's Markdown and as JSON."""

import datetime
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

STATIC = {
    "op": "op",
    "chip": "chip",
    "bundles": "bundles of its arithmetic",
    "whole": "in all",
    "rival": "rival",
    "rival_bundles": "rival's",
    "rival_whole": "in all",
    "temp_bytes": "temporaries (bytes)",
    "spills": "spills",
    "rival_spills": "rival's",
    "registers": "registers",
}
TIMES = {
    "op": "op",
    "shape": "shape",
    "milliseconds": "ms",
    "rate": "rate",
    "unit": "",
    "bound": "bound",
    "bound_name": "bound by",
    "fraction": "of the bound",
    "rival": "best rival",
    "rival_milliseconds": "its ms",
    "speed_up": "speed-up",
    "others": "all rivals (ms)",
}


def where(device: str) -> dict[str, str]:
    """The device, the day and the versions."""
    packages = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "torch")
    found = {x.metadata["Name"].lower(): x.version for x in metadata.distributions() if x.metadata["Name"]}
    versions = {name: found[name] for name in packages if name in found}
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"device": device, "date": day, "python": platform.python_version()} | versions


def heading(where: dict[str, str]) -> str:
    names = [f"{name} {version}" for name, version in where.items() if name not in ("device", "date")]
    return f"{where['device']}, {', '.join(names)}, {where['date']}."


def checks(rows: list[dict]) -> str:
    """The worst error of each implementation."""
    names = dict.fromkeys(name for row in rows for name in row["errors"])
    columns = {"case": "worst error", **{name: name for name in names}, "limit": "allowed"}
    return table(columns, [row | row["errors"] for row in rows])


def times(rows: list[dict]) -> str:
    return table(TIMES, list(map(_shown, rows)))


def table(columns: dict[str, str], rows: list[dict]) -> str:
    lines = [list(columns.values()), ["---"] * len(columns)]
    lines += [[_cell(row.get(name)) for name in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(row: dict) -> dict:
    shown = row | {
        "milliseconds": row["error"] or _times(row["seconds"]),
        "rival_milliseconds": None if row["rival_seconds"] is None else _times(row["rival_seconds"]),
        "others": "; ".join(f"{name}: {_times(x)}" for name, x in row["others"].items()),
    }
    if row["fraction"] is not None:
        shown["fraction"] = f"{row['fraction']:.0%}"
    if row["speed_up"] is not None:
        shown["speed_up"] = f"{row['speed_up']:.2f}×"
    return shown


def _times(x: Any) -> str:
    return x if isinstance(x, str) else f"{1e3 * x:.4g}"


def _cell(x: Any) -> str:
    if x is None:
        return ""
    return f"{x:.3g}" if isinstance(x, float) else str(x).replace("|", "\\|")


def write(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def device() -> str:
    return jax.devices()[0].device_kind
