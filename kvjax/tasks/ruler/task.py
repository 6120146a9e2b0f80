"""Fitting a recipe to a length in tokens."""

from collections.abc import Callable

from kvjax.errors import UserError
from kvjax.tasks.prompt import Example, PromptEncoder, prompt_size
from kvjax.tasks.ruler.writer import ExampleWriter
from kvjax.tasks.sample import Sample


class RulerTask:
    """One of RULER's tasks for a tokenizer: samples of any length, deterministic from a seed and the length.

    Each sample has the largest number of haystack units with which its prompt and its reserved answer tokens fit.

    Args:
        recipe: the task's recipe for a length and the tokens of the chat template.
    """

    def __init__(self, name: str, recipe: Callable[[int, int], ExampleWriter], encode: PromptEncoder):
        self.name = name
        self._recipe, self._encode = recipe, encode
        self._usual: dict[int, int] = {}

    def recipe(self, length: int) -> ExampleWriter:
        """Return the writer of samples of a length."""
        return self._recipe(length, self._encode.template_size)

    def sample(self, seed: int, length: int) -> Sample:
        """Return the example of that seed and length as token ids."""
        return self._encode(self.example(seed, length))

    def example(self, seed: int, length: int) -> Example:
        """Return a sample's text, whose prompt and reserved answer take at most `length` tokens.

        Raises `UserError` if `length` is too short for the task, or needs more different words than there are.
        """
        return self.recipe(length).write(seed, self.units(seed, length))

    def units(self, seed: int, length: int) -> int:
        """Return the number of haystack units of that example. Raises `UserError` as `example` does."""
        recipe = self.recipe(length)
        if length not in self._usual:
            self._usual[length] = self._most(recipe, 0, length, recipe.fewest)
        # the example of seed 0 is a good guess; where the search begins depends on nothing but the length
        return self._usual[length] if seed == 0 else self._most(recipe, seed, length, self._usual[length])

    def _most(self, recipe: ExampleWriter, seed: int, length: int, guess: int) -> int:
        """Return a number of units that fits while the next one does not, searched from a guess in growing steps."""

        def fits(units: int) -> bool:
            return prompt_size(recipe.write(seed, units), self._encode) <= length

        step = 1 + guess // 256
        if fits(guess):
            low, high = guess, self._next(recipe, length, guess, step)
            while fits(high):
                step *= 2
                low, high = high, self._next(recipe, length, high, step)
            return _bisect(fits, low, high)
        high = guess
        while high > recipe.fewest:
            low = max(recipe.fewest, high - step)
            if fits(low):
                return _bisect(fits, low, high)
            high, step = low, 2 * step
        least = prompt_size(recipe.write(seed, recipe.fewest), self._encode)
        raise UserError(
            f"{self.name}: {length} tokens are too few, the shortest prompt and its reserved answer take {least}"
        )

    def _next(self, recipe: ExampleWriter, length: int, units: int, step: int) -> int:
        """Return `step` units more, or as many as there are."""
        if recipe.supply is None:
            return units + step
        if units == recipe.supply.most:
            raise UserError(
                f"{self.name}: {length} tokens are too many, there are only {units} {recipe.supply.of}"
            )
        return min(units + step, recipe.supply.most)


def _bisect(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return a number that fits while the next one does not, given that `low` fits and `high` does not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
