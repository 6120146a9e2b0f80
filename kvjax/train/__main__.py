"""`python -m kvjax.train`: the command."""

from kvjax.launch import run_command
from kvjax.train.config import parse


def main() -> None:
    """Train, then report."""
    config = parse()

    # jax and the rest come only once the command line is known to be good
    from kvjax.train.loop import train

    train(config)


if __name__ == "__main__":
    run_command(main)
