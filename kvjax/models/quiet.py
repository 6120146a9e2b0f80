"""Import of transformers for its tokenizers alone, without its advice about everything else."""

import contextlib
import os
import warnings
from collections.abc import Iterator

_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Return a context in which transformers does not advise to install torch, nor tqdm ipywidgets in a notebook."""
    told = os.environ.get(_ADVICE)
    os.environ[_ADVICE] = "1"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="IProgress not found")
            yield
    finally:
        if told is None:
            del os.environ[_ADVICE]
        else:
            os.environ[_ADVICE] = told
