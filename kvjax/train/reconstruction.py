"""KVzip's teacher for Fast KVzip: what a context's own repetition pays to its keys."""
from typing import Any
def repetition(tokenizer: Any, prefix: int): ...
def reconstruction(model: Any, contexts: Any, which: str, into: Any, *, policy) -> None:
    raise NotImplementedError
