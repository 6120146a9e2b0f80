"""The training methods, one file each, by their names for `--method`.

wgkv: write gates (WG-KV). fast_kvzip: gates on hidden states (Fast KVzip). kvzap: networks on hidden states (KVzap).
kvzip_scores: the base class of Fast KVzip and KVzap. kvpop: a whole model and its scorers (KVPOP).
prulong, duo_attention: the kv heads that need the whole context (PruLong, DuoAttention). head_masks: their base class.
"""

from kvjax.errors import UserError
from kvjax.plugins import METHODS, find, load, names
from kvjax.train.recipe import Recipe

RECIPES = {
    "wgkv": "kvjax.train.recipes.wgkv:WriteGates",
    "fast_kvzip": "kvjax.train.recipes.fast_kvzip:KVzipGates",
    "kvzap": "kvjax.train.recipes.kvzap:Surrogates",
    "kvpop": "kvjax.train.recipes.kvpop:ConstantCache",
    "prulong": "kvjax.train.recipes.prulong:PruLong",
    "duo_attention": "kvjax.train.recipes.duo_attention:DuoAttention",
}
DEFAULT = "wgkv"
"""The method if there is no --method."""


def find_recipe(method: str) -> type[Recipe]:
    """Return the recipe of a method: one of kvjax, one of an installed package, or the class at package.module:NAME.

    Raises:
        UserError: there is no such method, or it is not a recipe.
    """
    builtin = RECIPES.get(method)
    recipe = load(builtin, "--method") if builtin else find(method, METHODS, "--method")
    if recipe is None:
        known = ", ".join([*RECIPES, *names(METHODS)])
        raise UserError(f"--method {method}: known are {known}, and package.module:NAME")
    if not (isinstance(recipe, type) and issubclass(recipe, Recipe)):
        raise UserError(f"--method {method} is not a recipe (a subclass of kvjax.train.recipe.Recipe)")
    return recipe
