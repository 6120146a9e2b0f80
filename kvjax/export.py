"""`python -m kvjax.export RUN`: measure a training run's checkpoint and export its parameters, at any time."""

import dataclasses
from pathlib import Path

import tyro

from kvjax.cli.launch import MeshShape, parse_command, run_command


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """Export the trained parameters of a checkpoint of a run, as the run does at its end.

    The held-out sequences are measured again, so the run's model and data must still be there.
    """

    run: tyro.conf.Positional[Path]
    """The run's folder, kvjax.train's --out."""
    step: int | None = None
    """The checkpoint of so many updates; by default the last one."""
    out: Path | None = None
    """A new folder for the export; by default the run's own, as `gates`, where an export that is there is replaced."""
    mesh: str | None = None
    """Devices, as in kvjax.train; by default those of the run."""
    method: str | None = None
    """The run's method, if it is package.module:NAME. Such a module is imported only if it is named here."""


def main(args: list[str] | None = None) -> None:
    """Export, then print the step, its validation scores and the folder."""
    told = parse_command(ExportConfig, args)

    from kvjax.train.config import read_run

    mesh = None if told.mesh is None else MeshShape.parse(told.mesh)
    config = read_run(told.run, mesh, told.method)

    import jax

    from kvjax.train.loop import export_checkpoint

    found, step, folder = export_checkpoint(config, told.step, told.out)
    if jax.process_index() == 0:
        print(f"step {step}: {found.validation}\n{config.exports}: {folder}")


if __name__ == "__main__":
    run_command(main)
