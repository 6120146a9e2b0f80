"""Publish a run's gates: in bfloat16, which halves the size, and without the Orbax export.

    python train/publish_gates.py --run runs/smollm2 --out gates/smollm2-135m/lambda-0.15 \
        --model HuggingFaceTB/SmolLM2-135M-Instruct --data "novels and manuals (train/real_text.py)"
"""

import dataclasses
from pathlib import Path

from kvjax.cli.launch import parse_command, run_command
from kvjax.errors import UserError


@dataclasses.dataclass(frozen=True)
class PublishConfig:
    """Write a run's gates in bfloat16."""

    run: Path
    """The --out folder of a training run that has ended."""
    out: Path
    """A new folder for gates.safetensors and config.json."""
    model: str
    """The public name of the model for the description, not a local path."""
    data: str
    """The public name of the training data for the description."""


def main(args: list[str] | None = None) -> None:
    """Run the command."""
    config = parse_command(PublishConfig, args)
    if config.out.exists():
        raise UserError(f"--out {config.out} already exists")

    import jax.numpy as jnp

    from kvjax.checkpoints.fingerprint import MadeFor
    from kvjax.checkpoints.folder import describe, load_arrays, save_exported

    arrays, description = load_arrays(config.run / "gates"), describe(config.run / "gates")
    local_paths = {name: None for name in ("targets", "init", "init_", "uptrained") if name in description}
    changes = {"model": config.model, "data": config.data} | local_paths
    if (made_for := MadeFor.described(description)) is not None:
        changes |= dataclasses.replace(made_for, model=config.model).description
    halved = {name: x.astype(jnp.bfloat16) for name, x in arrays.items()}
    save_exported(config.out, halved, description | changes)
    size = (config.out / "gates.safetensors").stat().st_size / 2**20
    print(f"{config.out}: {description['method']}, {size:.1f} MiB")


if __name__ == "__main__":
    run_command(main)
