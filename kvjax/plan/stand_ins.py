"""What methods need that a plan has not: gates as shapes alone, and token ids in place of texts."""

from collections.abc import Callable
from typing import Any

from kvjax.models.config import ModelConfig
from kvjax.policies.assignments import with_arguments
from kvjax.policies.eviction.fast_kvzip.files import Sizes, gate_sizes
from kvjax.policies.guidance import text
from kvjax.policies.registry import EVICTIONS

Make = Callable[[Callable[[], Any]], Any]
TEXT = (0,) * 16
"""In place of each of KVzip's texts, which usual tokenizers write in fewer tokens."""
LETTERS = 3
"""Of a token of guidance: fewer than usual tokenizers'."""


def completed(policy: str, given: dict[str, Any], config: ModelConfig, make: Make) -> dict[str, Any]:
    """The arguments `given` of a policy with what its eviction needs beside them, kvzip and guidance tokens for texts,
    and fast_kvzip gates: of the published sizes unless a folder or a file of gates is named, whose sizes are theirs.
    `make` makes them of a function without arguments. Raises UserError for files that are no gates."""
    name, told = with_arguments(given.get("eviction", ""), EVICTIONS)
    guidance = given.get("guidance", getattr(EVICTIONS.get(policy, EVICTIONS.get(name)), "guidance", ""))
    if isinstance(guidance, str) and guidance.strip():
        given = given | {"guidance": (0,) * -(-len(text(guidance)) // LETTERS)}
    if policy in BESIDE:
        return given | BESIDE[policy](given, config, make)
    if name not in BESIDE:
        return given
    told = told or {}
    return given | {"eviction": EVICTIONS[name](**(told | BESIDE[name](told, config, make)))}


def _texts(given: dict[str, Any], config: ModelConfig, make: Make) -> dict[str, Any]:
    return {name: TEXT for name in ("instruction", "resumption", "tail") if name not in given}


def _gates(given: dict[str, Any], config: ModelConfig, make: Make) -> dict[str, Any]:
    inputs, width = given.get("inputs", "hidden"), config.width
    heads = config.num_layers, config.num_kv_heads, config.num_heads // config.num_kv_heads
    sizes = Sizes(*heads, width if inputs == "hidden" else config.head_dim, 16, 16, "sink", inputs)
    if "gates" in given:
        sizes = gate_sizes(given["gates"])
    return {"gates": make(sizes.make), "inputs": given.get("inputs", sizes.inputs)}


BESIDE = {"kvzip": _texts, "fast_kvzip": _gates}
"""Methods that need more than numbers, and what makes it of the arguments that they are given."""
