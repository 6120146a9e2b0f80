"""Options of a training run and its folder. The command line overrides a YAML file, which overrides the defaults."""

import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from kvjax.builtin import BUILTIN
from kvjax.cli.launch import MeshShape, parse_command
from kvjax.cli.options import find_config, find_value, load_config, read_values, write_values
from kvjax.errors import UserError
from kvjax.files import is_there
from kvjax.models.folder import has_builtin_vocabulary
from kvjax.train.recipe import Recipe, option
from kvjax.train.recipes import DEFAULT, find_recipe

RUNS = Path("runs")
"""The folder of runs without --out."""
SAVED = "config.yaml"
"""The file of a run's options in its folder."""
MAY_CHANGE = {
    *("mesh", "batch", "accumulate", "checkpoint_every", "validate_every", "keep", "report", "tasks"),
    *("tensorboard", "out", "resume", "dry_run", "shard"),
}
"""Options that a resumed run may change. A change of batch or mesh must keep the number of sequences of an update."""


def parse(args: Sequence[str] | None = None) -> Recipe:
    """Return the run's recipe: the command line over its --config, or over the options of the run to resume.

    `out` is chosen, but nothing is written. Raises UserError for anything wrong.
    """
    arguments = sys.argv[1:] if args is None else args
    if "--resume" in arguments:
        return _parse_resume(args, arguments)
    model = find_value(arguments, "--model")
    config_name = find_value(arguments, "--config")
    recipe_class = _choose_recipe(
        find_value(arguments, "--method"), find_config(config_name) if config_name else None
    )
    for_builtin = config_name is None and model in (None, BUILTIN)
    if for_builtin:
        config_name = recipe_class.builtin
    recipe = parse_command(
        recipe_class, args, default=_from_file(recipe_class, config_name, arguments) if config_name else None
    )
    fields = [field.name for field in dataclasses.fields(recipe_class)]
    given = {field for field in fields if find_value(arguments, option(field)) is not None}
    recipe = recipe.with_derived_defaults(given)
    if for_builtin and _is_another_model(recipe.model):
        raise UserError(
            f"--uptrained {recipe.model}: needs --config or --model, since without them the options are those for the "
            "built-in model"
        )
    if recipe.resume:
        raise UserError(f"--config {config_name}: resume belongs on the command line, as --resume")
    recipe.check()
    _check_tasks(recipe, arguments)
    if find_value(arguments, "--out") == "":
        raise UserError("--out is empty, expected a folder")
    out = (recipe.out or RUNS / f"train-{_newest_run() + 1}").expanduser()
    if _out_exists(out) and not out.is_dir():
        raise UserError(f"--out {out} is a file, expected a folder")
    if (out / SAVED).is_file():
        raise UserError(f"--out {out} already holds a run: pass --resume to go on with it, or another --out")
    if (out / recipe.exports).exists():
        raise UserError(
            f"--out {out} has {recipe.exports} in it, which the run would replace: name another folder"
        )
    return dataclasses.replace(recipe, out=out)


def _parse_resume(args: Sequence[str] | None, arguments: Sequence[str]) -> Recipe:
    if config_name := find_value(arguments, "--config"):
        raise UserError(
            f"--config {config_name}: --resume goes on with the run's own options, so leave it out"
        )
    out_option, newest = find_value(arguments, "--out"), _newest_run()
    if out_option is None and not newest:
        raise UserError(f"--resume: there is no run in {RUNS}/; name its folder with --out")
    out = RUNS / f"train-{newest}" if out_option is None else Path(out_option).expanduser()
    recipe_class, saved = _load_saved(out, find_value(arguments, "--method"), "--resume: ")
    recipe = parse_command(recipe_class, args, default=saved)
    if recipe.rows != saved.batch:
        raise UserError(
            f"--resume goes on with the run's own {saved.batch} sequences an update, got {recipe.rows}, by --batch "
            f"or rounded up to --mesh {recipe.mesh}"
        )
    for field in dataclasses.fields(recipe_class):
        saved_value, value = getattr(saved, field.name), getattr(recipe, field.name)
        if field.name not in MAY_CHANGE and saved_value != value:
            raise UserError(
                f"--resume goes on with the run's own {option(field.name)} {saved_value}, got {value}: start another "
                "run for it"
            )
    recipe.check()
    _check_tasks(recipe, arguments)
    return dataclasses.replace(recipe, out=out, resume=True)


def read_run(out: Path, mesh: MeshShape | None = None, method: str | None = None) -> Recipe:
    """Return the recipe of the run in a folder, for its own mesh or another.

    Args:
        method: the run's method. A method package.module:NAME is imported only if the caller names it.

    Raises:
        UserError: there is no run, it cannot run on that mesh, or it is of another method.
    """
    _, saved = _load_saved(out, method)
    if method not in (None, saved.method):
        raise UserError(f"--method {method}: the run in {out} is of --method {saved.method}")
    recipe = dataclasses.replace(saved, out=out, resume=True, mesh=mesh or saved.mesh)
    if recipe.rows != saved.batch:
        raise UserError(
            f"--mesh {mesh}: the run in {out} has {saved.batch} sequences an update, which this mesh would round up "
            f"to {recipe.rows}"
        )
    recipe.check()
    return recipe


def _load_saved(out: Path, method: str | None, where: str = "") -> tuple[type[Recipe], Recipe]:
    """Return the recipe class and the recipe of the run in a folder. `method`: the method that the command line
    names."""
    file = out / SAVED
    if not is_there(file, where):
        raise UserError(f"{where}{out} holds no run (it has no {SAVED})")
    recipe_class = _choose_recipe(method if method == _method_of(file) else None, file)
    return recipe_class, load_config(recipe_class, str(file))


def _check_tasks(recipe: Recipe, arguments: Sequence[str]) -> None:
    if recipe.report == "none" and find_value(arguments, "--tasks"):
        raise UserError(
            f"--tasks {' '.join(recipe.tasks)} are for the report, which --report none leaves out"
        )


def _from_file(recipe_class: type[Recipe], name: str, arguments: Sequence[str]) -> Recipe:
    """Return the options of a YAML file. Raises UserError for unknown options, and says if the file is for another
    method."""
    try:
        loaded = load_config(recipe_class, name)
    except UserError as error:
        file_method = _method_of(find_config(name))
        requested = find_value(arguments, "--method")
        if requested in (None, file_method):
            raise
        raise UserError(f"{error}. The file is for --method {file_method}, not {requested}") from None
    keys = {f"--{key}".replace("_", "-") for key in read_values(find_config(name))}
    return loaded.with_derived_defaults(
        {x.name for x in dataclasses.fields(recipe_class) if option(x.name) in keys}
    )


def _choose_recipe(method: str | None, file: Path | None) -> type[Recipe]:
    """Return the recipe class that the command line names, else the one of the file, else the default.

    A file may come from a stranger, so a module is not imported if only a file names it.
    """
    file_method = _method_of(file) if file else DEFAULT
    if method is None and ":" in file_method:
        raise UserError(
            f"{file}: its method {file_method} is a module, which is imported only if the command line names it, too: "
            f"add --method {file_method}"
        )
    return find_recipe(method or file_method)


def _method_of(file: Path) -> str:
    """Return the method that a file names."""
    return str(read_values(file).get("method", DEFAULT))


def _is_another_model(model: str) -> bool:
    """Return True for a hub id, and for a folder of a model that does not have the built-in model's vocabulary."""
    if Path(model).expanduser().is_dir():
        return model != BUILTIN and not has_builtin_vocabulary(model)
    return "/" in model


def _out_exists(out: Path) -> bool:
    try:
        return out.exists()
    except OSError as error:  # such as a name that is too long
        raise UserError(f"--out {out} cannot be written: {error.strerror or error}") from None


def _newest_run() -> int:
    """Return the highest number of a run in `RUNS`, 0 if there is none."""
    matches = [re.fullmatch(r"train-(\d+)", file.parent.name) for file in RUNS.glob(f"*/{SAVED}")]
    return max((int(match[1]) for match in matches if match), default=0)


def prepare_folder(recipe: Recipe, *, write: bool = True) -> Path:
    """Make the run's folder and, if `write`, save the options in it. Raises UserError if it cannot be written."""
    assert recipe.out is not None, "parse chose it"
    try:
        recipe.out.mkdir(parents=True, exist_ok=True)
        saved = dataclasses.replace(recipe, batch=recipe.rows)  # another mesh must not change what is trained
        if write:
            write_values(
                recipe.out / SAVED,
                saved,
                omit=("config", "out", "resume", "dry_run", "shard"),
                new=not recipe.resume,
            )
    except FileExistsError:
        raise UserError(f"--out {recipe.out} already holds a run, started just now: start again") from None
    except OSError as error:
        raise UserError(f"--out {recipe.out} cannot be written: {error.strerror or error}") from None
    return recipe.out


def release_folder(folder: Path) -> None:
    """Release the folder of a run that left no checkpoint, so that another run can use it."""
    (folder / SAVED).unlink(missing_ok=True)
