"""Ways of training, a file each, by the names that `--method` knows. wgkv: write gates (WG-KV).
fast_kvzip: gates on hidden states (Fast KVzip). kvpop: a whole model and its scorers (KVPOP).
prulong, duo_attention: which kv heads need the whole context (PruLong, DuoAttention; head_masks: what they share)."""

from kvjax.errors import UserError
from kvjax.plugins import METHODS, find, load, names
from kvjax.train.recipe import Recipe

RECIPES = {
    "wgkv": "kvjax.train.recipes.wgkv:WriteGates",
    "fast_kvzip": "kvjax.train.recipes.fast_kvzip:KVzipGates",
    "kvpop": "kvjax.train.recipes.kvpop:ConstantCache",
    "prulong": "kvjax.train.recipes.prulong:PruLong",
    "duo_attention": "kvjax.train.recipes.duo_attention:DuoAttention",
}
DEFAULT = "wgkv"
"""What is trained where no --method is named."""


def find_recipe(method: str) -> type[Recipe]:
    """Return the recipe called so: kvjax's, an installed package's, or the class at package.module:NAME.

    Raises:
        UserError: there is none, or it is no recipe.
    """
    own = RECIPES.get(method)
    found = load(own, "--method") if own else find(method, METHODS, "--method")
    if found is None:
        known = ", ".join([*RECIPES, *names(METHODS)])
        raise UserError(f"--method {method}: known are {known}, and package.module:NAME")
    if not (isinstance(found, type) and issubclass(found, Recipe)):
        raise UserError(f"--method {method} is no recipe, a subclass of kvjax.train.recipe.Recipe")
    return found
