"""Functions to find in source code, as records of SCBench's RepoQA (arXiv:2412.10319): each question describes a
function of the context, and the answer is the function, word for word.

The descriptions are the functions' names and the first paragraphs of their docstrings. A context is the functions and
classes of a module without docstrings. It has no other statements, because a small model that sees a file's imports
recites the file.
"""

import ast
import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

QUESTIONS = 5
"""The number of questions of a record."""
LINE_COUNTS = range(4, 21)
"""The number of lines that a function to find may have: shorter ones are hard to describe, longer ones slow to repeat.
"""
DESCRIPTION_LENGTHS = range(40, 400)
"""The number of characters that its description may have."""
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Function(NamedTuple):
    """A function of a module."""

    name: str
    code: str
    description: str


class Unit(NamedTuple):
    """A function or a class of a module, without docstrings."""

    code: str
    function: Function | None
    """The function if a question may ask for it, else None."""


def code_records(modules: Sequence[str], repo: str, characters: int) -> Iterator[str]:
    """Yield JSON lines for `kvjax.tasks.scbench`.

    A record's context is consecutive functions and classes of a module, of at most `characters` in all. A context with
    fewer than `QUESTIONS` functions to ask for is left out. The functions asked for are spread over the context.

    Args:
        modules: Python source.
        repo: the name of the package.
        characters: the most characters of a context.
    """
    for module in modules:
        for context in contexts(units(module), characters):
            functions = [unit.function for unit in context if unit.function is not None]
            if len(functions) < QUESTIONS:
                continue
            step = len(functions) / QUESTIONS
            asked = [functions[int((number + 0.5) * step)] for number in range(QUESTIONS)]
            yield json.dumps(
                {
                    "context": "\n\n\n".join(unit.code for unit in context) + "\n\n",
                    "repo": repo,
                    "lang": "python",
                    "multi_turns": [
                        {
                            "input": f"**Function Description:**\nThe function `{target.name}`. {target.description}\n",
                            "answer": target.code,
                            "name": target.name,
                        }
                        for target in asked
                    ],
                }
            )


def units(module: str) -> list[Unit]:
    """Return a module's functions and classes as written, without docstrings."""
    tree, lines = ast.parse(module), module.splitlines()
    dropped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, Definition) and ast.get_docstring(node) is not None and len(node.body) > 1:
            docstring = node.body[0]
            assert docstring.end_lineno is not None
            dropped |= set(range(docstring.lineno, docstring.end_lineno + 1))
    result = []
    for node in tree.body:
        if not isinstance(node, Definition):
            continue
        assert node.end_lineno is not None
        start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        kept_lines = [
            lines[number - 1] for number in range(start, node.end_lineno + 1) if number not in dropped
        ]
        if code := "\n".join(kept_lines).strip("\n"):
            result.append(Unit(code, _function(node, code)))
    return result


def _function(node: Definition, code: str) -> Function | None:
    if (
        not isinstance(node, ast.FunctionDef)
        or node.decorator_list
        or code.count("\n") + 1 not in LINE_COUNTS
    ):
        return None
    description = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    if len(description) not in DESCRIPTION_LENGTHS or ">>>" in description:
        return None
    return Function(node.name, code, description)


def contexts(units_: Sequence[Unit], characters: int) -> Iterator[list[Unit]]:
    """Yield runs of consecutive units of at most `characters` each; a longer unit is left out."""
    context: list[Unit] = []
    for unit in units_:
        if sum(len(other.code) + 3 for other in [*context, unit]) > characters:
            yield context
            context = []
        if len(unit.code) <= characters:
            context.append(unit)
    yield context
