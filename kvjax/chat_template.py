"""Rendering of messages with a tokenizer's chat template, and the text that the template puts around turns."""

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from kvjax.chat_worker import BYTES, SECONDS
from kvjax.errors import UserError, check_unicode, shown

PLACEHOLDER = "\N{OBJECT REPLACEMENT CHARACTER}"
"""The character that stands for a message's content in a rendered template."""
CONVERSATION = [{"role": role, "content": PLACEHOLDER} for role in ("user", "assistant", "user")]
"""A conversation of three turns."""
MAX_CHARACTERS = 2**18
"""The maximum characters of a chat template. Published templates have up to 30,000."""
_REASONING = "reasoning_content", "thinking", "reasoning"
"""The keys under which messages have their reasoning. Templates read the first."""


def templated(tokenizer: Any, messages: list[dict[str, Any]], /, **options: Any) -> str:
    """Return the messages rendered with the chat template, as by `apply_chat_template`. By default the text ends with
    the beginning of the model's turn.

    Raises UserError for a template that fails in any way, takes longer than 2 s of processor time or more than 1 GiB,
    or writes more than a million characters plus four times the request's.
    """
    variables = {
        "messages": [_plain_message(message) for message in messages],
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
    }
    special_tokens = getattr(tokenizer, "special_tokens_map", {})
    try:
        return render(default_template(tokenizer.chat_template), variables | special_tokens | options)
    except UserError as error:
        roles = ", ".join(str(message["role"]) for message in messages[:8]) + (
            ", …" if len(messages) > 8 else ""
        )
        raise UserError(
            f"the tokenizer's chat template does not take these messages (of {roles}): {error}"
        ) from None


def template_variables(where: str, given: Any) -> dict[str, Any]:
    """Return `chat_template_kwargs` as a dict. Raises UserError for values that are not JSON, and for variables that
    kvjax sets for each prompt. `where` begins the error message."""
    reserved = "messages", "add_generation_prompt"
    try:
        options = {} if given is None else given
        if isinstance(options, Mapping) and all(
            isinstance(name, str) and name not in reserved for name in options
        ):
            return json.loads(json.dumps(dict(options)))
    except (TypeError, ValueError, RecursionError):
        pass
    raise UserError(
        f"{where}: chat_template_kwargs must be a mapping of names, other than {' and '.join(reserved)}, to JSON "
        f"values, got {shown(given)}"
    )


def default_template(templates: Any) -> str:
    """Return the template in a tokenizer's `chat_template`, which is one template or several with names. Of several,
    the one named `default` is returned.

    Raises UserError if none of several templates is named `default`.
    """
    if isinstance(templates, list | tuple) and all(isinstance(entry, Mapping) for entry in templates):
        templates = {str(entry.get("name")): entry.get("template") for entry in templates}
    if isinstance(templates, Mapping) and "default" not in templates:
        names = ", ".join(sorted(map(shown, templates))[:8])
        raise UserError(
            f"none of the chat templates is called 'default', there are {names}: set tokenizer.chat_template to one"
        )
    template = templates["default"] if isinstance(templates, Mapping) else templates
    if not isinstance(template, str):
        raise UserError(f"a chat template must be a text, got {shown(template)}")
    if len(template) > MAX_CHARACTERS:
        raise UserError(
            f"a chat template has {len(template):,} characters, expected at most {MAX_CHARACTERS:,}"
        )
    return template


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message as transformers passes it to templates: without null fields, and with its reasoning under both
    names that templates use."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    return message if reasoning is None else {"thinking": reasoning} | message | {_REASONING[0]: reasoning}


def text_around_placeholder(
    tokenizer: Any, messages: list[dict[str, Any]] | None = None, /, **options: Any
) -> tuple[str, str]:
    """Return the rendered text before and after `PLACEHOLDER` in these messages. By default they are one user's
    message.

    Raises UserError if the template does not show `PLACEHOLDER` exactly once.
    """
    messages = [{"role": "user", "content": PLACEHOLDER}] if messages is None else messages
    text = templated(tokenizer, messages, **options)
    if text.count(PLACEHOLDER) != 1:
        raise UserError("the tokenizer's chat template does not show the user's text exactly once")
    before, _, after = text.partition(PLACEHOLDER)
    return before, after


def between(tokenizer: Any, **options: Any) -> str:
    """Return the rendered text between an assistant's turn and the user's next turn.

    Raises UserError if the template does not show each of three turns exactly once.
    """
    parts = templated(tokenizer, CONVERSATION, **options).split(PLACEHOLDER)
    if len(parts) != len(CONVERSATION) + 1:
        raise UserError(
            "the tokenizer's chat template does not show the turns of a conversation exactly once"
        )
    return parts[2]


def keeps_turns(tokenizer: Any, /, **options: Any) -> bool:
    """Return True if the template renders a turn and its answer (with thinking) in the same way once a later turn
    follows. White space before the answer may differ. It is True without a template, and False for a template that does
    not accept three turns."""
    if not getattr(tokenizer, "chat_template", None):
        return True
    user = {"role": "user", "content": PLACEHOLDER}
    answer = f"<think>\n{PLACEHOLDER}\n</think>\n\n{PLACEHOLDER}"
    try:
        first = templated(tokenizer, [user], **options)
        later = templated(tokenizer, [user, {"role": "assistant", "content": answer}, user], **options)
    except UserError:
        return False
    return later.startswith(first) and later[len(first) :].lstrip().startswith(answer)


def opening(tokenizer: Any) -> tuple[int, ...]:
    """Return the token ids before a user's text. They come from the template, or without one from the tokenizer, if it
    begins every text with special tokens."""
    if getattr(tokenizer, "chat_template", None):
        before, _ = text_around_placeholder(tokenizer)
        return tuple(token_ids(tokenizer, before))
    ids = tokenizer("a", add_special_tokens=True)["input_ids"]
    first = tokenizer("a", add_special_tokens=False)["input_ids"][0]
    return tuple(ids[: ids.index(first)])


def token_ids(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """Return the tokens of a text. By default no special tokens are added. The options are those of the tokenizer.

    Raises UserError if the tokenizer panics, as it may with a faulty regex in tokenizer.json.
    """
    try:
        ids = tokenizer(text, **{"add_special_tokens": False, "verbose": False} | options)["input_ids"]
    except BaseException as error:
        if not is_panic(error):
            raise
        raise UserError(f"the tokenizer cannot read the text ({shown(str(error))})") from None
    return list(ids)


def is_panic(error: BaseException) -> bool:
    """Return True for a panic of the tokenizers library, which is not a subclass of `Exception`."""
    return type(error).__name__ == "PanicException"


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Return the template rendered with the variables by `chat_worker`, under limits of time and memory. Raises
    UserError for any failure."""
    try:
        request = json.dumps(
            {"template": template, "variables": variables}, default=lambda value: f"<{type(value).__name__}>"
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"the messages are no JSON ({shown(error)})") from None
    reply = _worker.ask(request.encode())
    if reply is None:
        raise UserError(f"it takes longer than {SECONDS} s, or more memory than {BYTES >> 20} MiB")
    if "error" in reply:
        raise UserError(reply["error"])
    check_unicode(reply["text"], "its text")
    return reply["text"]


class _Worker:
    """The process that renders templates. It is started by the first request, and restarted after a request that ended
    it."""

    def __init__(self):
        self._lock = threading.Lock()
        self._process: Any = None
        atexit.register(self._close)

    def ask(self, request: bytes) -> dict[str, str] | None:
        """Return the reply to a request in JSON; None if the request ended the process."""
        with self._lock:
            process, self._process = self._process, None
            if process is not None and process.poll() is not None:
                _stop(process)
                process = None
            process = process or self._start()
            try:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(request + b"\n")
                    process.stdin.flush()
                reply = process.stdout.readline()
            except BaseException:
                _stop(process)
                raise
            if not reply:
                _stop(process)
                return None
            self._process = process
            return json.loads(reply)

    def _start(self) -> Any:
        packages = {str(Path(str(module.__file__)).parents[1]) for module in (jinja2, markupsafe)}
        program = str(Path(__file__).with_name("chat_worker.py"))
        try:
            # in a new session, so that Ctrl-C does not reach it
            return subprocess.Popen(
                [sys.executable, "-I", program, *packages],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise UserError(f"no process could be begun to render it ({error.strerror})") from None

    def _close(self) -> None:
        if self._process is not None:
            _stop(self._process)


def _stop(process: Any) -> None:
    process.kill()
    process.communicate()


def _replace_worker() -> None:
    """Give a forked process a new worker, since it must not use its parent's."""
    global _worker
    _parent_processes.append(_worker._process)  # kept, since Python warns when a running Popen is deleted
    _worker._process = None
    _worker = _Worker()


_worker = _Worker()
_parent_processes: list[Any] = []
os.register_at_fork(after_in_child=_replace_worker)
