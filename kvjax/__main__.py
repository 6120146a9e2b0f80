"""`kvjax COMMAND …`, also `python -m kvjax COMMAND …`: the commands, each of which is `python -m kvjax.COMMAND`."""

import runpy
import sys

from kvjax.cli.launch import run_command
from kvjax.errors import UserError, nearest

COMMANDS = {
    "generate": "continue a prompt with the cache that a policy keeps",
    "train": "train gates, scorers or masks for a model",
    "serve": "answer OpenAI's API over HTTP",
    "evaluate": "compare policies: scores against what their caches held",
    "plan": "what training or serving would take of chips that are not here",
    "export": "the trained parameters of a run's checkpoint",
    "convert": "weights from GGUF and Orbax to Hugging Face's format, and back",
    "policies": "the methods, a line each",
}
"""The commands, with a line about each."""


def main() -> None:
    """Run the command that is named, as a module; without one, list them."""
    run_command(_main)


def _main() -> None:
    name, *others = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        wide = max(map(len, COMMANDS))
        lines = "\n".join(f"  {command:{wide}}  {said}" for command, said in COMMANDS.items())
        print(f"usage: kvjax COMMAND …\n\n{lines}\n\nkvjax COMMAND --help says more.")
        return
    if name not in COMMANDS:
        near = nearest(name, COMMANDS) or COMMANDS
        raise UserError(f"unknown command {name!r}; the nearest known: {', '.join(near)}")
    sys.argv[1:] = others
    runpy.run_module(f"kvjax.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
