"""`kvjax COMMAND …` or `python -m kvjax COMMAND …` runs `python -m kvjax.COMMAND …`."""

import runpy
import sys

from kvjax.cli.launch import run_command
from kvjax.errors import UserError, nearest

COMMANDS = {
    "generate": "continue a prompt with the cache that a policy keeps",
    "train": "train gates, scorers or masks for a model",
    "serve": "answer OpenAI's API over HTTP",
    "evaluate": "compare policies: scores against what their caches held",
    "plan": "estimate the memory and time that training or serving would take on other chips",
    "export": "export the trained parameters of a run's checkpoint",
    "convert": "convert weights between GGUF, Orbax and Hugging Face's format",
    "policies": "list the methods, one line each",
}
"""The commands with their descriptions."""


def main() -> None:
    """Run the named command as a module; without a name, list the commands."""
    run_command(_main)


def _main() -> None:
    name, *others = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        lines = "\n".join(f"  {command:{width}}  {text}" for command, text in COMMANDS.items())
        print(f"usage: kvjax COMMAND …\n\n{lines}\n\nkvjax COMMAND --help says more.")
        return
    if name not in COMMANDS:
        near = nearest(name, COMMANDS) or COMMANDS
        raise UserError(f"unknown command {name!r}; the nearest known: {', '.join(near)}")
    sys.argv[1:] = others
    runpy.run_module(f"kvjax.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
