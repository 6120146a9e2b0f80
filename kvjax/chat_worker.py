"""The program that renders chat templates under limits, in a process of its own; it imports jinja2 alone.

A chat template comes with a model, so a stranger wrote it. jinja2's sandbox keeps it from the machine, and the limits
of the process from its memory and time: nothing that runs inside an interpreter bounds `'a' * 10**9`.

Each line of the standard input is a JSON object with `template` and `variables`, each line of the standard output one
with `text` or `error`.
"""

import contextlib
import datetime
import functools
import json
import resource
import sys
import time
from typing import Any

SECONDS = 2
"""The most seconds of processor time for one text."""
BYTES = 1 << 30
"""The most bytes of memory of the process."""
CHARACTERS = 1 << 20
"""The most characters of a text, in addition to four times those of the request."""


def main() -> None:
    sys.path += sys.argv[1:]
    limit(resource.RLIMIT_AS, BYTES)
    limit(resource.RLIMIT_CORE, 0)
    for line in sys.stdin.buffer:
        # the system ends the process at this limit, whatever it is at
        limit(resource.RLIMIT_CPU, int(time.process_time()) + SECONDS + 1)
        try:
            reply = {"text": rendered(**json.loads(line), most=CHARACTERS + 4 * len(line))}
        except Exception as error:
            reply = {"error": said(error)}
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()


def limit(kind: int, most: int) -> None:
    """Set a limit of this process, where the system has it."""
    _, hard = resource.getrlimit(kind)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def rendered(template: str, variables: dict[str, Any], most: int) -> str:
    """Return the text that the template makes of the variables."""
    parts, length = [], 0
    for part in compiled(template).generate(**variables):
        length += len(part)
        if length > most:
            raise ValueError(f"it writes more than {most:,} characters")
        parts.append(part)
    return "".join(parts)


def said(error: Exception) -> str:
    """Return the error in one line."""
    from jinja2 import TemplateError

    text = " ".join(str(error).split())[:300]
    return text if text and isinstance(error, TemplateError) else f"{type(error).__name__} {text}".strip()


@functools.lru_cache(maxsize=16)
def compiled(template: str) -> Any:
    """Return the template in transformers' environment: with its options, and the functions that it adds to
    jinja2's."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """The tag around the model's own text, which only a mask of an answer's tokens needs."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

        def _written(self, caller):
            return caller()

    def raise_exception(message):
        raise TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    class Dict:
        """Makes dicts, and shows nothing of the class."""

        def __call__(self, *args, **kwargs):
            return dict(*args, **kwargs)

        def fromkeys(self, *args, **kwargs):
            return dict.fromkeys(*args, **kwargs)

    class PublicNamespace(Namespace):
        """A namespace without names that begin with an underscore."""

        def __init__(*args, **kwargs):
            self, args = args[0], args[1:]
            names = dict(*args, **kwargs)
            for name in names:
                check(name)
            Namespace.__init__(self, names)

        def __setitem__(self, name, value):
            check(name)
            Namespace.__setitem__(self, name, value)

    def check(name):
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace cannot have the name {name!r}")

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda format: datetime.datetime.now().strftime(format),
        "dict": Dict(),
        "namespace": PublicNamespace,
    }
    return environment.from_string(template)


if __name__ == "__main__":
    main()
