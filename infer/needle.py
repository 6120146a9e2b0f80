"""Draw recall by depth and length of the text: a needle is hidden in a long text, which is read into a small cache.

python infer/needle.py --policy wgkv --gates GATES --lengths 512 1024 --out needle.png
"""

import dataclasses
from pathlib import Path

import numpy as np

from kvjax.cli.launch import MeshShape, parse_command, run_command, start
from kvjax.errors import UserError


@dataclasses.dataclass(frozen=True)
class NeedleConfig:
    """Hide a record at several depths of texts of several lengths, and ask the built-in model for it."""

    policy: str = "full"
    """Policy, as in kvjax.generate: wgkv, streaming_llm:window=64, snapkv:ratio=0.25."""
    gates: Path | None = None
    """Gates, scorers or a head pattern for the policy."""
    lengths: tuple[int, ...] = (256, 512, 768, 1024)
    """Context lengths in tokens."""
    depths: int = 10
    """The number of needle depths, spaced evenly from the start of the text to its end."""
    samples: int = 8
    """Needles for each length and depth. Each is asked for in three ways."""
    out: Path = Path("needle.png")
    """The file for the picture."""
    mesh: MeshShape = MeshShape()
    """Devices: 8 (fsdp), 4x2 (fsdp × tensor) or fsdp=4,tensor=2."""


def main() -> None:
    """Run the command."""
    config = parse_command(NeedleConfig)
    if min(config.depths, config.samples, *config.lengths) < 1:
        raise UserError("--depths, --samples and --lengths must be at least 1")
    mesh = start(config.mesh)

    import jax

    import kvjax
    from kvjax.evaluate.measuring import MeasureSettings, measure
    from kvjax.evaluate.pictures import draw_depths
    from kvjax.tasks import Needle, builtin_text, builtin_vocabulary

    depths = np.linspace(0, 1, config.depths)
    task = Needle(builtin_vocabulary(), builtin_text("evaluate"), tuple(depths))
    grid = np.zeros((len(config.lengths), config.depths))
    sizes = []
    with jax.set_mesh(mesh):
        model = kvjax.load_model("builtin")
        policy = kvjax.make_policy(config.policy, model=model, gates=config.gates)
        for row, length in enumerate(config.lengths):
            samples = [task.sample(seed, length) for seed in range(config.depths * config.samples)]
            result = measure(model, policy, samples, MeasureSettings())
            grid[row] = [result.by_kind[f"{depth:g}"] for depth in depths]
            sizes.append(result.kv_ratio)
            print(f"{length} tokens: {100 * result.score:.1f}% right with {result.kv_ratio:.3f} of the cache")
    rows = [f"{length} ({size:.2f})" for length, size in zip(config.lengths, sizes, strict=True)]
    draw_depths(config.out, config.policy, grid, rows, list(depths))
    print(f"picture: {config.out}")


if __name__ == "__main__":
    run_command(main)
