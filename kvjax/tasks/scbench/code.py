"""Find the function in an answer with tree-sitter, as RepoQA's scorer does."""

import functools
import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from kvjax.errors import UserError

BLOCK = re.compile(r"^```\w*\s*\n(.*?)^```", re.DOTALL | re.MULTILINE)
"""A block of code, with its content as the group."""
LANGUAGES = {
    "python": ("python", "language", "function_definition"),
    "java": ("java", "language", "method_declaration"),
    "typescript": ("typescript", "language_typescript", "function_declaration"),
    "rust": ("rust", "language", "function_item"),
    "cpp": ("cpp", "language", "function_definition"),
    "go": ("go", "language", "function_declaration"),
}
"""Languages by SCBench's name: the end of the grammar's package tree_sitter_…, the function that returns the grammar,
and the node type of a function."""


def finder(language: str) -> Callable[[str], str]:
    """Return a function that finds the function in an answer.

    It is the first function in the first block of code that has one, or else the first block, or else the whole answer.
    language: a name in `LANGUAGES`. Raises UserError if tree-sitter or the grammar is not installed.
    """
    parser = _parser(language)

    def find(answer: str) -> str:
        answer = answer.strip()
        blocks = BLOCK.findall(answer)
        functions = (
            next(_functions(parser.parse(block.encode()).root_node, language), None) for block in blocks
        )
        first = next((function for function in functions if function is not None), None)
        return first or (blocks[0] if blocks else answer)

    return find


@functools.cache
def _parser(language: str) -> Any:
    package, grammar, _ = LANGUAGES[language]
    try:
        tree_sitter = importlib.import_module("tree_sitter")
        module = importlib.import_module(f"tree_sitter_{package}")
    except ImportError:
        raise UserError(
            "RepoQA's scores need tree-sitter, to find functions in answers: pip install 'kvjax[code]'"
        ) from None
    return tree_sitter.Parser(tree_sitter.Language(getattr(module, grammar)()))


def _functions(node: Any, language: str) -> Iterator[str]:
    """Yield the functions' texts, outer functions first. In C++ only functions with simple names count."""
    nodes = [node]
    while nodes:
        node = nodes.pop()
        if node.type == LANGUAGES[language][2] and (language != "cpp" or _has_simple_name(node)):
            yield node.text.decode()
        nodes += reversed(node.children)


def _has_simple_name(node: Any) -> bool:
    declarator = node.child_by_field_name("declarator")
    if declarator is None or declarator.type != "function_declarator":
        return False
    name = declarator.child_by_field_name("declarator")
    return name is not None and name.type == "identifier"
