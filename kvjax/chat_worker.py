"""The program that renders chat templates, in a separate process with limits of time and memory. It imports only
jinja2.

A chat template comes with a model and is not trusted. jinja2's sandbox denies it access to the machine, and the limits
of the process bound its memory and time, since nothing within an interpreter bounds `'a' * 10**9`.

Each line of standard input is a JSON object with `template` and `variables`. Each line of standard output is a JSON
object with `text` or `error`.
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
"""The maximum processor time for one text, in seconds."""
BYTES = 1 << 30
"""The maximum memory of the process, in bytes."""
CHARACTERS = 1 << 20
"""The maximum characters of a text, in addition to four times those of the request."""


def main() -> None:
    sys.path += sys.argv[1:]
    set_limit(resource.RLIMIT_AS, BYTES)
    set_limit(resource.RLIMIT_CORE, 0)
    for line in sys.stdin.buffer:
        # at this limit the system ends the process, whatever it is doing
        set_limit(resource.RLIMIT_CPU, int(time.process_time()) + SECONDS + 1)
        try:
            reply = {"text": render(**json.loads(line), max_length=CHARACTERS + 4 * len(line))}
        except Exception as error:
            reply = {"error": message(error)}
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()


def set_limit(kind: int, value: int) -> None:
    """Set a limit of this process, if the system supports it."""
    _, hard = resource.getrlimit(kind)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def render(template: str, variables: dict[str, Any], max_length: int) -> str:
    """Return the template rendered with the variables."""
    parts, length = [], 0
    for part in compile_template(template).generate(**variables):
        length += len(part)
        if length > max_length:
            raise ValueError(f"it writes more than {max_length:,} characters")
        parts.append(part)
    return "".join(parts)


def message(error: Exception) -> str:
    """Return the message of an error in one line."""
    from jinja2 import TemplateError

    text = " ".join(str(error).split())[:300]
    return text if text and isinstance(error, TemplateError) else f"{type(error).__name__} {text}".strip()


@functools.lru_cache(maxsize=16)
def compile_template(template: str) -> Any:
    """Compile a template in an environment like transformers', with its options and additional functions."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """The tag around the model's text. It has no effect, since it is only for masks of an answer's tokens."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller):
            return caller()

    def raise_exception(message):
        raise TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    class Dict:
        """The function `dict`, without access to the class."""

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
