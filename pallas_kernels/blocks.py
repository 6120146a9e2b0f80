"""Sizes of blocks, from shapes."""


def even(length: int, largest: int) -> tuple[int, int]:
    """The number and the size of the equal blocks, none above `largest`, that cover `length` with least excess."""
    count = max(1, -(-length // largest))
    return count, max(1, -(-length // count))


def divisor(length: int, largest: int) -> int:
    """The largest divisor of `length` that is at most `largest`, and at least 1."""
    return next(d for d in range(max(1, min(length, largest)), 0, -1) if length % d == 0)
