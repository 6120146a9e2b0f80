"""Rendering by a tokenizer's chat template: messages, and the text that it puts before and after a turn."""

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

PLACE = "\N{OBJECT REPLACEMENT CHARACTER}"
"""The character that stands for the text in a rendered template."""
CONVERSATION = [{"role": role, "content": PLACE} for role in ("user", "assistant", "user")]
"""A conversation of three turns."""
LONGEST = 2**18
"""The most characters of a chat template; published ones have up to 30,000."""
_REASONING = "reasoning_content", "thinking", "reasoning"
"""The keys of a message's reasoning. Templates read the first."""


def templated(tokenizer: Any, messages: list[dict[str, Any]], /, **options: Any) -> str:
    """Return the text that the chat template makes of the messages, as `apply_chat_template` does. The model's turn is
    begun unless the options say otherwise.

    Raises UserError in one line for a template that fails in any way, that takes longer than 2 s of processor time or
    more than 1 GiB, or that writes more than a million characters beside four times what it was given.
    """
    variables = {
        "messages": [_plain_message(message) for message in messages],
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
    }
    own = getattr(tokenizer, "special_tokens_map", {})
    try:
        return render(default_template(tokenizer.chat_template), variables | own | options)
    except UserError as error:
        roles = ", ".join(str(one["role"]) for one in messages[:8]) + (", …" if len(messages) > 8 else "")
        raise UserError(
            f"the tokenizer's chat template does not take these messages (of {roles}): {error}"
        ) from None


def template_variables(where: str, given: Any) -> dict[str, Any]:
    """Return `chat_template_kwargs` as a dict. Raises UserError for values that cannot be passed on to a template, and
    for the variables that are set for each prompt. `where` begins the error message."""
    own = "messages", "add_generation_prompt"
    try:
        found = {} if given is None else given
        if isinstance(found, Mapping) and all(isinstance(name, str) and name not in own for name in found):
            return json.loads(json.dumps(dict(found)))
    except (TypeError, ValueError, RecursionError):
        pass
    raise UserError(
        f"{where}: chat_template_kwargs must be a mapping of names, other than {' and '.join(own)}, to JSON values, "
        f"got {shown(given)}"
    )


def default_template(named: Any) -> str:
    """Return the template of a tokenizer's `chat_template`: the only one, or the one that is named `default`.

    Raises UserError, which names them, if they have names and none is the default.
    """
    if isinstance(named, list | tuple) and all(isinstance(one, Mapping) for one in named):
        named = {str(one.get("name")): one.get("template") for one in named}
    if isinstance(named, Mapping) and "default" not in named:
        names = ", ".join(sorted(map(shown, named))[:8])
        raise UserError(
            f"none of the chat templates is called 'default', there are {names}: set tokenizer.chat_template to one"
        )
    template = named["default"] if isinstance(named, Mapping) else named
    if not isinstance(template, str):
        raise UserError(f"a chat template must be a text, got {shown(template)}")
    if len(template) > LONGEST:
        raise UserError(f"a chat template has {len(template):,} characters, expected at most {LONGEST:,}")
    return template


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message as transformers gives it to templates: without empty fields, and with its reasoning under both
    names."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    return message if reasoning is None else {"thinking": reasoning} | message | {_REASONING[0]: reasoning}


def around(
    tokenizer: Any, messages: list[dict[str, Any]] | None = None, /, **options: Any
) -> tuple[str, str]:
    """Return what the template shows before and after `PLACE` in these messages, by default in a user's only message.

    Raises UserError if it does not show it exactly once.
    """
    messages = [{"role": "user", "content": PLACE}] if messages is None else messages
    whole = templated(tokenizer, messages, **options)
    if whole.count(PLACE) != 1:
        raise UserError("the tokenizer's chat template does not show the user's text exactly once")
    before, _, after = whole.partition(PLACE)
    return before, after


def between(tokenizer: Any, **options: Any) -> str:
    """Return what the template shows between an assistant's text and the user's next.

    Raises UserError if it does not show three turns, each exactly once.
    """
    parts = templated(tokenizer, CONVERSATION, **options).split(PLACE)
    if len(parts) != len(CONVERSATION) + 1:
        raise UserError(
            "the tokenizer's chat template does not show the turns of a conversation exactly once"
        )
    return parts[2]


def keeps_turns(tokenizer: Any, /, **options: Any) -> bool:
    """Return True if a turn and its answer, thinking included, are still shown as they were rendered and generated once
    a later turn follows, apart from white space before the answer. It is True without a template, and False for one
    that does not take three turns."""
    if not getattr(tokenizer, "chat_template", None):
        return True
    user = {"role": "user", "content": PLACE}
    answer = f"<think>\n{PLACE}\n</think>\n\n{PLACE}"
    try:
        first = templated(tokenizer, [user], **options)
        later = templated(tokenizer, [user, {"role": "assistant", "content": answer}, user], **options)
    except UserError:
        return False
    return later.startswith(first) and later[len(first) :].lstrip().startswith(answer)


def opening(tokenizer: Any) -> tuple[int, ...]:
    """Return the token ids that come before a user's text: the template's own, or without one those that the tokenizer
    begins any text with."""
    if getattr(tokenizer, "chat_template", None):
        before, _ = around(tokenizer)
        return tuple(token_ids(tokenizer, before))
    whole, bare = (tokenizer("a", add_special_tokens=own)["input_ids"] for own in (True, False))
    return tuple(whole[: whole.index(bare[0])])


def token_ids(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """Return the tokens of a text, of which the tokenizer adds none of its own unless the options say otherwise.

    Raises UserError if it trips over the text, which a regex in a stranger's tokenizer.json may make it do.
    """
    try:
        ids = tokenizer(text, **{"add_special_tokens": False, "verbose": False} | options)["input_ids"]
    except BaseException as error:
        if not is_panic(error):
            raise
        raise UserError(f"the tokenizer cannot read the text ({shown(str(error))})") from None
    return list(ids)


def is_panic(error: BaseException) -> bool:
    """Return True for the exception of the tokenizers library that is no `Exception`."""
    return type(error).__name__ == "PanicException"


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Return the text that the template makes of the variables. `chat_worker` renders it, under limits of time and
    memory. Raises UserError for whatever fails."""
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
    """The process that renders templates. It is started by the first request, and again after a request that it did not
    survive."""

    def __init__(self):
        self._lock = threading.Lock()
        self._process: Any = None
        atexit.register(self._end)

    def ask(self, request: bytes) -> dict[str, str] | None:
        """Return the answer to a request in JSON; None if the process did not survive it."""
        with self._lock:
            process, self._process = self._process, None
            if process is not None and process.poll() is not None:
                _stop(process)
                process = None
            process = process or self._begun()
            try:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(request + b"\n")
                    process.stdin.flush()
                answer = process.stdout.readline()
            except BaseException:
                _stop(process)
                raise
            if not answer:
                _stop(process)
                return None
            self._process = process
            return json.loads(answer)

    def _begun(self) -> Any:
        packages = {str(Path(str(module.__file__)).parents[1]) for module in (jinja2, markupsafe)}
        program = str(Path(__file__).with_name("chat_worker.py"))
        try:
            # in a session of its own, so that Ctrl-C ends this process alone
            return subprocess.Popen(
                [sys.executable, "-I", program, *packages],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise UserError(f"no process could be begun to render it ({error.strerror})") from None

    def _end(self) -> None:
        if self._process is not None:
            _stop(self._process)


def _stop(process: Any) -> None:
    process.kill()
    process.communicate()


def _forked() -> None:
    """Give a forked process a worker of its own, since it must not speak to its parent's."""
    global _worker
    _parents.append(_worker._process)  # kept, as Python warns of a process whose end nobody waits for
    _worker._process = None
    _worker = _Worker()


_worker = _Worker()
_parents: list[Any] = []
os.register_at_fork(after_in_child=_forked)
