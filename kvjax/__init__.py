"""kvjax decides which keys and values of a long context are worth keeping, on frozen Llama, Qwen and Mistral weights.

    model, tokenizer = kvjax.load(folder)
    policy = kvjax.make_policy("snapkv:ratio=0.25", model=model)
    out = kvjax.sample(model, ["Why …?"], tokenizer=tokenizer, policy=policy, max_new_tokens=64)
    print(out.texts[0])

Names are imported when first used, so that `import kvjax` and `--help` cost nothing.

Folders: cache, policies, models, inference, tasks, train, evaluate, plan, exported, command, builtin. Commands: train,
export, evaluate, generate, plan, convert, policies. Files: step: what a layer shows methods; top: selection of
the best scores; struct: dataclasses that are pytrees; mesh: devices; errors, files: a user's mistakes, writing whole
files; chat_template, chat_worker: what a chat template puts around a text; plugins: what other packages bring.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "load": "kvjax.models",
    "load_model": "kvjax.models",
    "load_tokenizer": "kvjax.models",
    "save_model": "kvjax.models",
    "Policy": "kvjax.policies",
    "make_policy": "kvjax.policies",
    "prefill": "kvjax.inference.sampling",
    "sample": "kvjax.inference.sampling",
    "stream": "kvjax.inference.sampling",
    "logits": "kvjax.inference.sampling",
    "warm_up": "kvjax.inference.warm_up",
    "Session": "kvjax.inference.session",
    "save_cache": "kvjax.inference.saving",
    "load_cache": "kvjax.inference.saving",
    "saved_bytes": "kvjax.inference.saving",
    "stats": "kvjax.cache",
    "make_mesh": "kvjax.mesh",
    "CapacityError": "kvjax.cache",
    "UserError": "kvjax.errors",
}
__all__ = [*_HOME]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from kvjax.cache import CapacityError, stats
    from kvjax.errors import UserError
    from kvjax.inference.sampling import logits, prefill, sample, stream
    from kvjax.inference.saving import load_cache, save_cache, saved_bytes
    from kvjax.inference.session import Session
    from kvjax.inference.warm_up import warm_up
    from kvjax.mesh import make_mesh
    from kvjax.models import load, load_model, load_tokenizer, save_model
    from kvjax.policies import Policy, make_policy


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kvjax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
