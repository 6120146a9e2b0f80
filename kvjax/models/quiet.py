"""Import of transformers without its advice to install other packages: kvjax uses only its tokenizers."""

import contextlib
import os
import warnings
from collections.abc import Iterator

_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Return a context in which transformers does not advise installing torch, and tqdm not ipywidgets in a
    notebook."""
    before = os.environ.get(_ADVICE)
    os.environ[_ADVICE] = "1"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="IProgress not found")
            yield
    finally:
        if before is None:
            del os.environ[_ADVICE]
        else:
            os.environ[_ADVICE] = before
