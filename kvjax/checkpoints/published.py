"""Published gates on the Hugging Face hub: finding the file of a repository that is for a model.

Jang-Hyun/Fast-KVzip has a folder for each model, named like the model in lower case, with one .pt file. TrimKV's
repositories have one file, always of the same name. Other repositories have an export of kvjax or KVzap's folder at
their root, or files whose names begin with the model's name.
"""

import os
from pathlib import Path
from typing import Any

from kvjax.builtin import GATES
from kvjax.checkpoints.folder import DESCRIPTION, PUBLISHED, TABLE, WEIGHTS, is_exported
from kvjax.errors import UserError
from kvjax.hub import HUB_ID, fetch

TRIMKV = "trimkv_weights.pth"
"""The file with the gates in a repository of TrimKV's authors, which is for one model."""


def find_gates(gates: Any, model: str) -> Any:
    """Return the folder or file of gates that a hub id names; anything else is returned unchanged.

    Args:
        gates: `owner/name`, or `owner/name/path` for one file or folder of the repository.
        model: the name, path or hub id of the model that they are for.

    Raises:
        UserError: the hub id cannot be fetched, or has no gates or several for the model.
    """
    if not isinstance(gates, str) or gates in GATES or os.path.exists(os.path.expanduser(gates)):
        return gates
    owner, _, rest = gates.partition("/")
    name, _, path = rest.partition("/")
    hub_id = f"{owner}/{name}"
    if not HUB_ID.fullmatch(hub_id) or ".." in path.split("/"):
        return gates
    if os.path.exists(owner):
        raise UserError(f"gates {gates}: no such file or folder")
    model_name = Path(model).name.lower().removesuffix(".gguf")
    patterns = f"{model_name}/*", f"{model_name}*.pt", TRIMKV, WEIGHTS, TABLE, DESCRIPTION
    if "kvzap" in name.lower():  # in other repositories this may be the weights of a whole model
        patterns = *patterns, PUBLISHED
    if path:
        patterns = path, f"{path}/*"
    root = fetch(hub_id, patterns, "a folder or a file of gates")
    if path:
        if not (root / path).exists():
            raise UserError(f"gates {gates}: {hub_id} has no {path}")
        return str(root / path)
    if (root / TRIMKV).is_file():
        return str(root / TRIMKV)
    if is_exported(root):
        return str(root)
    folder = root / model_name
    if folder.is_dir() and is_exported(folder):
        return str(folder)
    files = sorted(folder.glob("*.pt")) or sorted(root.glob(f"{model_name}*.pt"))
    if not files:
        raise UserError(f"gates {gates}: it has none for the model {model_name}")
    if len(files) > 1:
        names = ", ".join(str(file.relative_to(root)) for file in files[:8])
        raise UserError(f"gates {gates}: it has several for {model_name}: name one, {hub_id}/FILE ({names})")
    return str(files[0])
