"""Where a model's files are: a folder, a GGUF file, the package, or a Hugging Face hub id that is fetched."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

from kvjax.builtin import BUILTIN, builtin_model
from kvjax.errors import UserError, named_arguments, shown
from kvjax.models.gguf_file import GgufFile, is_gguf
from kvjax.models.gguf_tokenizer import gguf_tokenizer, save_gguf_tokenizer
from kvjax.models.json_file import JsonObject
from kvjax.models.kinds import few, kind_of_folder
from kvjax.models.quiet import quiet
from kvjax.models.tensor_files import ADAPTER, INDEX, SINGLE

_FETCHED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_TOKENIZER_FILES = (
    *_VOCABULARIES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def find_model(path_or_hub_id: str | os.PathLike[str]) -> Path:
    """Return the built-in model's folder for its name, an existing folder or GGUF file as it is, and otherwise the
    snapshot of the hub id, downloaded if it is not in the local cache.

    Raises:
        UserError: no such folder or file, or a hub id that cannot be fetched; says what to pass.
    """
    if not isinstance(path_or_hub_id, str | os.PathLike) or path_or_hub_id == "":
        raise UserError(
            f"a model is the path of a folder or a GGUF file, a hub id or {BUILTIN!r}, got {shown(path_or_hub_id)}"
        )
    if path_or_hub_id == BUILTIN:
        return builtin_model()
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir() or (is_gguf(path) and path.is_file()):
        return _checked(path)
    if path.exists():
        raise UserError(
            f"{path}: is a file; pass the folder that holds config.json and the weights, or a .gguf file"
        )
    if is_gguf(path):
        raise UserError(f"{path_or_hub_id}: no such file")
    if not isinstance(path_or_hub_id, str) or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", path_or_hub_id):
        raise UserError(f"{path_or_hub_id}: no such folder")
    return _checked(_fetch(path_or_hub_id))


def _checked(folder: Path) -> Path:
    """Return a folder or GGUF file, unless it is an adapter or a folder of another kind without a config."""
    if folder.is_file():
        return folder
    if (folder / ADAPTER).exists() and not any((folder / name).exists() for name in (SINGLE, INDEX)):
        base = JsonObject.read(folder / ADAPTER).get("base_model_name_or_path", str, "its base model")
        raise UserError(
            f"{folder}: a PEFT adapter ({ADAPTER}), not a model: merge it into {few([base])} first (peft's "
            "merge_and_unload), and pass what that saves"
        )
    inside = sorted(file.name for file in folder.glob("*.gguf"))
    if inside and not (folder / "config.json").exists():
        raise UserError(f"{folder}: has no config.json; pass one of its GGUF files: {few(inside)}")
    own = "config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json"
    if not any((folder / name).exists() for name in own) and (kind := kind_of_folder(folder)):
        raise UserError(f"{folder}: not a model folder, it has no config.json{kind}")
    return folder


def _fetch(hub_id: str) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=list(_FETCHED)))
    except errors.GatedRepoError:
        why = "the hub lets only accepted and logged-in users have it"
    except errors.RepositoryNotFoundError:
        why = "the hub has no such model, or it is private"
    except errors.HfHubHTTPError as error:
        why = f"the hub answered: {str(error).splitlines()[0]}"
    # no network, and not in the local cache either
    except (OSError, errors.OfflineModeIsEnabled, errors.HFValidationError):
        why = "the hub cannot be reached"
    raise UserError(
        f"{hub_id}: no such folder here, and as a Hugging Face hub id it could not be fetched ({why}); without a "
        "network pass the path of a folder with config.json and *.safetensors"
    )


@named_arguments()
def load_tokenizer(path_or_hub_id: str | os.PathLike[str]) -> Any:
    """The Hugging Face tokenizer of a model.

    Raises:
        UserError: no such model, or one without a tokenizer that can be read, or with another model's.
    """
    folder = find_model(path_or_hub_id)
    if is_gguf(folder):
        return gguf_tokenizer(GgufFile.read(folder))
    # without a vocabulary transformers may make an empty tokenizer up
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        raise UserError(f"{folder}: no tokenizer, expected {' or '.join(_VOCABULARIES)}")

    with quiet():
        from transformers import AutoTokenizer

    # what is wrong with config.json is not said of the tokenizer
    config = JsonObject.read(folder / "config.json") if (folder / "config.json").is_file() else None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the libraries raise whatever a damaged file makes them trip over
        raise UserError(f"{folder}: its tokenizer cannot be read ({_why(folder, error)})") from None
    if config is not None:
        _check_vocabulary(folder, tokenizer, config.get("vocab_size", int, None))
    return tokenizer


def _why(folder: Path, error: Exception) -> str:
    """What tokenizer.json is not, else what the libraries tripped over."""
    file = folder / "tokenizer.json"
    try:
        if file.is_file():
            parts = JsonObject.read(file)
            parts.get("added_tokens", list)
            parts.get("model", dict)
    except UserError as wrong:
        return str(wrong)
    return str(error).strip().splitlines()[0] if isinstance(error, OSError | ValueError) else repr(error)


def _check_vocabulary(folder: Path, tokenizer: Any, rows: int | None) -> None:
    """Refuse the tokenizer of another model: one with ordinary tokens beyond the model's, or with less than half of
    them. Many models pad their vocabulary, and some have a token added for padding that they have no row for."""
    if rows is not None and not (tokenizer.vocab_size <= rows <= 2 * len(tokenizer)):
        raise UserError(
            f"{folder}: its tokenizer is of another model: it has {len(tokenizer):,} tokens, the model's vocabulary "
            f"(vocab_size) {rows:,}"
        )


def speaks_builtin(path_or_hub_id: str | os.PathLike[str]) -> bool:
    """Whether a model has the built-in model's vocabulary, so that the built-in tasks mean something to it."""
    own, ours = find_model(path_or_hub_id) / "tokenizer.json", builtin_model() / "tokenizer.json"
    return own.is_file() and own.read_bytes() == ours.read_bytes()


def copy_tokenizer(path_or_hub_id: str | os.PathLike[str], to: Path) -> None:
    """Copy what makes a tokenizer, and the generation defaults, from another model."""
    folder = find_model(path_or_hub_id)
    if is_gguf(folder):
        save_gguf_tokenizer(GgufFile.read(folder), to)
        return
    for name in _TOKENIZER_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, to / name)
