"""`python -m kvjax.export RUN`: measure a training run's checkpoint and export its parameters, at any time."""

import dataclasses
from pathlib import Path

import tyro

from kvjax.cli.launch import MeshShape, parse_command, run_command


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """Export the trained parameters of a run's checkpoint, as the run does at its end.

    The held-out sequences are measured again, so the run's model and data must still be available.
    """

    run: tyro.conf.Positional[Path]
    """The run's folder (--out of kvjax.train)."""
    step: int | None = None
    """The number of updates of the checkpoint; by default the last one."""
    out: Path | None = None
    """A new folder for the export; by default the run's own (`gates`, `parameters` or `pattern` in its folder), where
    an earlier export is replaced."""
    mesh: str | None = None
    """Devices, as in kvjax.train; by default the same as in the run."""
    method: str | None = None
    """The run's method, if it is package.module:NAME. Such a module is imported only if it is named here."""


def main(args: list[str] | None = None) -> None:
    """Export, then print the step, its validation scores and the folder."""
    arguments = parse_command(ExportConfig, args)

    from kvjax.train.config import read_run

    mesh = None if arguments.mesh is None else MeshShape.parse(arguments.mesh)
    recipe = read_run(arguments.run.expanduser(), mesh, arguments.method)
    out = None if arguments.out is None else arguments.out.expanduser()

    import jax

    from kvjax.train.run import export_checkpoint

    result, step, folder = export_checkpoint(recipe, arguments.step, out)
    if jax.process_index() == 0:
        print(f"step {step}: {result.validation}\n{recipe.exports}: {folder}")


if __name__ == "__main__":
    run_command(main)
