"""Published gates on the Hugging Face hub: which file of a repository is for a model.

Jang-Hyun/Fast-KVzip has a folder a model, named as the model is in lower case, with one .pt file. TrimKV's repositories
have a file of one name each. Other repositories have an export of kvjax or KVzap's folder at their root, or files whose
names begin with the model's.
"""

import os
from pathlib import Path
from typing import Any

from kvjax.builtin import GATES
from kvjax.checkpoints.folder import DESCRIPTION, PUBLISHED, TABLE, WEIGHTS, is_exported
from kvjax.errors import UserError
from kvjax.hub import HUB_ID, fetch

TRIMKV = "trimkv_weights.pth"
"""The file with TrimKV's gates in its authors' repositories, which have one a model."""


def find_gates(gates: Any, model: str) -> Any:
    """Return the folder or file that a hub id of gates stands for; anything else as it is.

    Args:
        gates: `owner/name`, or `owner/name/path` for one file or folder of it.
        model: the name, path or hub id of the model that they are for.

    Raises:
        UserError: a hub id that cannot be fetched, or that has no gates or several for the model.
    """
    if not isinstance(gates, str) or gates in GATES or os.path.exists(os.path.expanduser(gates)):
        return gates
    owner, _, rest = gates.partition("/")
    name, _, inside = rest.partition("/")
    hub_id = f"{owner}/{name}"
    if not HUB_ID.fullmatch(hub_id) or ".." in inside.split("/"):
        return gates
    own = Path(model).name.lower().removesuffix(".gguf")
    whole = f"{own}/*", f"{own}*.pt", TRIMKV, WEIGHTS, TABLE, DESCRIPTION
    if "kvzap" in name.lower():  # a model's weights have the same name
        whole = *whole, PUBLISHED
    patterns = (inside, f"{inside}/*") if inside else whole
    root = fetch(hub_id, patterns, "a folder or a file of gates")
    if inside:
        if not (root / inside).exists():
            raise UserError(f"gates {gates}: {hub_id} has no {inside}")
        return str(root / inside)
    if (root / TRIMKV).is_file():
        return str(root / TRIMKV)
    if is_exported(root):
        return str(root)
    folder = root / own
    if folder.is_dir() and is_exported(folder):
        return str(folder)
    found = sorted(folder.glob("*.pt")) or sorted(root.glob(f"{own}*.pt"))
    if len(found) != 1:
        names = ", ".join(str(file.relative_to(root)) for file in found[:8])
        why = (
            f"several for {own}: name one, {hub_id}/FILE ({names})" if found else f"none for the model {own}"
        )
        raise UserError(f"gates {gates}: it has {why}")
    return str(found[0])
