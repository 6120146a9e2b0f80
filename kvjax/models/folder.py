"""The places of a model's files: a folder, a GGUF file, the package, or a Hugging Face hub id that is fetched."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from kvjax.builtin import BUILTIN, builtin_model
from kvjax.chat_template import is_panic
from kvjax.errors import UserError, named_arguments, shown
from kvjax.hub import HUB_ID, fetch
from kvjax.models.adapter import base_of, is_adapter
from kvjax.models.config import ModelConfig, read_config
from kvjax.models.gguf_file import GgufFile, is_gguf
from kvjax.models.gguf_tokenizer import gguf_tokenizer, save_gguf_tokenizer
from kvjax.models.json_file import JsonObject, write_json
from kvjax.models.kinds import few, kind_of_folder
from kvjax.models.quiet import quiet
from kvjax.models.tokenizer_files import TOKENIZER_FILES, VOCABULARIES, copy_tokenizer_files

_FETCHED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")


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
    # unlike those of Path, these functions raise nothing for a name that is too long or an unknown user's home
    path = Path(os.path.expanduser(path_or_hub_id))
    if os.path.isdir(path) or (is_gguf(path) and os.path.isfile(path)):
        inside = sorted(file.name for file in path.glob("*.gguf"))
        if not (path / "config.json").exists() and not is_adapter(path):
            if inside:
                raise UserError(f"{path}: has no config.json; pass one of its GGUF files: {few(inside)}")
            if kind := kind_of_folder(path):
                raise UserError(f"{path}: not a model folder, it has no config.json{kind}")
        return path
    if os.path.exists(path):
        raise UserError(
            f"{path}: is a file; pass the folder that holds config.json and the weights, or a .gguf file"
        )
    if is_gguf(path):
        raise UserError(f"{path_or_hub_id}: no such file")
    if not isinstance(path_or_hub_id, str) or not HUB_ID.fullmatch(path_or_hub_id):
        raise UserError(f"{path_or_hub_id}: no such folder")
    return fetch(path_or_hub_id, _FETCHED, "the path of a folder with config.json and *.safetensors")


@named_arguments()
def load_tokenizer(path_or_hub_id: str | os.PathLike[str]) -> Any:
    """Return the Hugging Face tokenizer of a model.

    Raises:
        UserError: no such model, or one without a tokenizer that can be read, or with another model's.
    """
    model = find_model(path_or_hub_id)
    folder = _tokenizer_folder(model)
    if is_gguf(folder):
        return gguf_tokenizer(GgufFile.read(folder))
    # without a vocabulary transformers may make an empty tokenizer up
    if not any((folder / name).exists() for name in VOCABULARIES):
        raise UserError(f"{folder}: no tokenizer, expected {' or '.join(VOCABULARIES)}")
    # read outside `_read_tokenizer`, so that faults of config.json are not reported as the tokenizer's
    config = read_config(model) if (base_of(model) / "config.json").exists() else None
    tokenizer = _read_tokenizer(folder, config)
    if config is not None:
        _check_vocabulary(folder, tokenizer, config.vocab_size)
    return tokenizer


def _tokenizer_folder(model: Path) -> Path:
    """Return where a model's tokenizer is: an adapter without one has that of its base."""
    return model if any((model / name).is_file() for name in VOCABULARIES) else base_of(model)


def _read_tokenizer(folder: Path, config: ModelConfig | None) -> Any:
    """Return the tokenizer, as transformers reads it from copies of the files that make one.

    Nothing else of the folder is within reach of transformers: no code, and no other file that one of these names.
    `auto_map`, which names code, is not copied either.
    """
    with quiet():
        from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

    own = {} if config is None else JsonObject.read(base_of(folder) / "config.json").data
    with tempfile.TemporaryDirectory(prefix="kvjax-tokenizer-") as copies:
        try:
            told = copy_tokenizer_files(folder, Path(copies))
            if config is None and "auto_map" in told.data:
                raise told.error("it needs code of its own (auto_map), and such code is never run")
            # of the model's own configuration transformers looks at these two
            known = {key: own[key] for key in ("model_type", "transformers_version") if key in own}
            write_json(Path(copies) / "config.json", known)
            kind = {"name_or_path": str(folder), "tokenizer_class": own.get("tokenizer_class")}
            for keys in (JsonObject(own, str(folder / "config.json")), told):
                _check_class(keys)
            tokenizer = AutoTokenizer.from_pretrained(
                copies,
                config=AutoConfig.for_model(config.model_type, **kind)
                if config
                else PreTrainedConfig(**kind),
                local_files_only=True,
                trust_remote_code=False,
            )
            tokenizer("a")  # what the library trips over is often seen at the first text
        except BaseException as error:  # the libraries raise whatever a damaged file makes them trip over
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            lines = str(error).strip().splitlines() or [""]
            why = lines[0].replace(copies, str(folder))[:300]
            why = why if isinstance(error, OSError | ValueError) else f"{type(error).__name__} {why}".strip()
            raise UserError(f"{folder}: its tokenizer cannot be read ({why})") from None
    tokenizer.name_or_path = tokenizer.init_kwargs["name_or_path"] = str(folder)
    return tokenizer


def _check_class(keys: JsonObject) -> None:
    """Raise UserError if `tokenizer_class` is a class of transformers that is no tokenizer, such as AutoModel."""
    from transformers import PreTrainedTokenizerBase
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    name = keys.get("tokenizer_class", str, None)
    for spelled in (name, name.removesuffix("Fast"), f"{name}Fast") if name else ():
        found = tokenizer_class_from_name(spelled)
        if found is not None and not (isinstance(found, type) and issubclass(found, PreTrainedTokenizerBase)):
            raise keys.error(f"tokenizer_class must be a tokenizer, got {shown(name)}")


def _check_vocabulary(folder: Path, tokenizer: Any, rows: int) -> None:
    """Refuse the tokenizer of another model: one with ordinary tokens beyond the model's, or with less than half of
    them. Many models pad their vocabulary, and some have a token added for padding that they have no row for."""
    if not (tokenizer.vocab_size <= rows <= 2 * len(tokenizer)):
        raise UserError(
            f"{folder}: its tokenizer is of another model: it has {len(tokenizer):,} tokens, the model's vocabulary "
            f"(vocab_size) {rows:,}"
        )


def speaks_builtin(path_or_hub_id: str | os.PathLike[str]) -> bool:
    """Return True if a model has the built-in model's vocabulary, so that the built-in tasks mean something to it."""
    own, ours = find_model(path_or_hub_id) / "tokenizer.json", builtin_model() / "tokenizer.json"
    return own.is_file() and own.read_bytes() == ours.read_bytes()


def copy_tokenizer(path_or_hub_id: str | os.PathLike[str], to: Path) -> None:
    """Copy the files that make a tokenizer, and the generation defaults, from another model."""
    folder = _tokenizer_folder(find_model(path_or_hub_id))
    if is_gguf(folder):
        save_gguf_tokenizer(GgufFile.read(folder), to)
        return
    for name in (*TOKENIZER_FILES, "chat_template.json", "generation_config.json"):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, to / name)
