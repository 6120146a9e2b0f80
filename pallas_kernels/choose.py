"""Which implementation of an op runs."""

from collections.abc import Callable, Mapping


def choose(implementations: Mapping[str, Callable], name: str | None, op: str) -> Callable:
    """The implementation called `name`; None is the backend's own, which today is XLA's on every backend."""
    try:
        return implementations[name or "xla"]
    except KeyError:
        known = ", ".join(implementations)
        raise ValueError(f"{op}: there is no implementation {name!r}, only {known}") from None
