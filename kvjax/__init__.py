"""kvjax compresses KV caches: it decides which keys and values of a long context are worth keeping. Models are used
unchanged.

    llm = kvjax.LLM("Qwen/Qwen3-4B", policy="snapkv:ratio=0.25")
    for out in llm.generate(["Why is the sky blue?"]):
        print(out.text)

Names are imported when first used, so that `import kvjax` and `--help` cost nothing.

Folders: cache, policies, models, inference, engine, tasks, train, serve, evaluate, plan, checkpoints, cli, builtin.
Commands: train, export, evaluate, serve, generate, plan, convert, policies. Files: llm: `LLM`; session: conversations;
sampling_params: `SamplingParams`; topk: selection of the best scores; struct: dataclasses that are pytrees; mesh:
the device mesh; errors: errors that a user can fix; files: reading and writing of files; hub: files of the Hugging
Face hub; chat_template, chat_worker: rendering of chat templates; plugins: methods of other packages.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_MODULES = {
    "LLM": "kvjax.llm",
    "Output": "kvjax.llm",
    "SamplingParams": "kvjax.sampling_params",
    "Session": "kvjax.session",
    "Policy": "kvjax.policies",
    "make_policy": "kvjax.policies",
    "load": "kvjax.models",
    "load_model": "kvjax.models",
    "load_tokenizer": "kvjax.models",
    "save_model": "kvjax.models",
    "save_cache": "kvjax.inference",
    "load_cache": "kvjax.inference",
    "stats": "kvjax.cache",
    "make_mesh": "kvjax.mesh",
    "CapacityError": "kvjax.cache",
    "UserError": "kvjax.errors",
}
__all__ = [*_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from kvjax.cache import CapacityError, stats
    from kvjax.errors import UserError
    from kvjax.inference import load_cache, save_cache
    from kvjax.llm import LLM, Output
    from kvjax.mesh import make_mesh
    from kvjax.models import load, load_model, load_tokenizer, save_model
    from kvjax.policies import Policy, make_policy
    from kvjax.sampling_params import SamplingParams
    from kvjax.session import Session


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'kvjax' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
