"""Fit a task's samples to a length in tokens."""

from collections.abc import Callable

from kvjax.errors import UserError
from kvjax.tasks.prompt import Example, PromptEncoder, prompt_size
from kvjax.tasks.ruler.writer import ExampleWriter
from kvjax.tasks.sample import Sample


class RulerTask:
    """One of RULER's tasks for a tokenizer: samples of any length, deterministic from a seed and the length.

    Each sample has the largest number of haystack units with which its prompt and its reserved answer tokens fit.

    Args:
        writers: returns the task's writer for a length and the number of tokens of the chat template.
    """

    def __init__(self, name: str, writers: Callable[[int, int], ExampleWriter], encode: PromptEncoder):
        self.name = name
        self._writers, self._encode = writers, encode
        self._first_units: dict[int, int] = {}
        """The number of units of the example with seed 0, by length."""

    def writer(self, length: int) -> ExampleWriter:
        """Return the writer of samples of a length."""
        return self._writers(length, self._encode.template_size)

    def sample(self, seed: int, length: int) -> Sample:
        """Return the example of a seed and a length as token ids."""
        return self._encode(self.example(seed, length))

    def example(self, seed: int, length: int) -> Example:
        """Return the text of a sample, whose prompt and reserved answer take at most `length` tokens.

        Raises UserError if `length` is too short for the task, or needs more distinct words than there are.
        """
        return self.writer(length).write(seed, self.units(seed, length))

    def units(self, seed: int, length: int) -> int:
        """Return the number of haystack units of an example. Raises UserError as `example` does."""
        writer = self.writer(length)
        if length not in self._first_units:
            self._first_units[length] = self._most(writer, 0, length, writer.fewest)
        # the search starts at the number for seed 0, so that it does not depend on earlier calls
        return (
            self._first_units[length]
            if seed == 0
            else self._most(writer, seed, length, self._first_units[length])
        )

    def _most(self, writer: ExampleWriter, seed: int, length: int, guess: int) -> int:
        """Return a number of units n that fits while n + 1 does not. The search takes growing steps from a guess."""

        def fits(units: int) -> bool:
            return prompt_size(writer.write(seed, units), self._encode) <= length

        step = 1 + guess // 256
        if fits(guess):
            low, high = guess, self._next(writer, length, guess, step)
            while fits(high):
                step *= 2
                low, high = high, self._next(writer, length, high, step)
            return _bisect(fits, low, high)
        high = guess
        while high > writer.fewest:
            low = max(writer.fewest, high - step)
            if fits(low):
                return _bisect(fits, low, high)
            high, step = low, 2 * step
        least = prompt_size(writer.write(seed, writer.fewest), self._encode)
        raise UserError(
            f"{self.name}: {length} tokens are too few, the shortest prompt and its reserved answer take {least}"
        )

    def _next(self, writer: ExampleWriter, length: int, units: int, step: int) -> int:
        """Return the number of units plus `step`, at most the number of units that exist."""
        if writer.supply is None:
            return units + step
        if units == writer.supply.most:
            raise UserError(
                f"{self.name}: {length} tokens are too many, there are only {units} {writer.supply.unit}"
            )
        return min(units + step, writer.supply.most)


def _bisect(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return a number n that fits while n + 1 does not, given that `low` fits and `high` does not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
