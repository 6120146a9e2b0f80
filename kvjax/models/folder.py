"""Finding the files of a model (a folder, a GGUF file, the built-in model or a Hugging Face hub id) and its
tokenizer."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from kvjax.builtin import BUILTIN, builtin_model
from kvjax.chat_template import is_panic
from kvjax.errors import UserError, named_arguments, shown
from kvjax.hub import HUB_ID, fetch
from kvjax.models.adapter import base_path, is_adapter
from kvjax.models.config import ModelConfig, read_config
from kvjax.models.gguf_file import GgufFile, is_gguf
from kvjax.models.gguf_tokenizer import gguf_tokenizer, save_gguf_tokenizer
from kvjax.models.json_file import JsonObject, write_json
from kvjax.models.kinds import few, kind_of_folder
from kvjax.models.quiet import quiet
from kvjax.models.tokenizer_files import TOKENIZER_FILES, VOCABULARIES, copy_tokenizer_files

_FETCHED_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")


def find_model(path_or_hub_id: str | os.PathLike[str]) -> Path:
    """Return the folder or the GGUF file of a model. The name of the built-in model gives its folder, and a hub id
    gives its snapshot, downloaded if it is not in the local cache.

    Raises:
        UserError: there is no such folder or file, or the hub id cannot be fetched.
    """
    if not isinstance(path_or_hub_id, str | os.PathLike) or path_or_hub_id == "":
        raise UserError(
            f"a model is the path of a folder or a GGUF file, a hub id or {BUILTIN!r}, got {shown(path_or_hub_id)}"
        )
    if path_or_hub_id == BUILTIN:
        return builtin_model()
    # unlike the methods of Path, these functions do not raise for a name that is too long or an unknown user's home
    path = Path(os.path.expanduser(path_or_hub_id))
    if os.path.isdir(path) or (is_gguf(path) and os.path.isfile(path)):
        gguf_files = sorted(file.name for file in path.glob("*.gguf"))
        if not (path / "config.json").exists() and not is_adapter(path):
            if gguf_files:
                raise UserError(f"{path}: has no config.json; pass one of its GGUF files: {few(gguf_files)}")
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
    return fetch(path_or_hub_id, _FETCHED_FILES, "the path of a folder with config.json and *.safetensors")


@named_arguments()
def load_tokenizer(path_or_hub_id: str | os.PathLike[str]) -> Any:
    """Return the Hugging Face tokenizer of a model.

    Raises:
        UserError: there is no such model, or its tokenizer is missing, cannot be read or is another model's.
    """
    model = find_model(path_or_hub_id)
    folder = _tokenizer_folder(model)
    if is_gguf(folder):
        return gguf_tokenizer(GgufFile.read(folder))
    # without a vocabulary, transformers may return an empty tokenizer
    if not any((folder / name).exists() for name in VOCABULARIES):
        raise UserError(f"{folder}: no tokenizer, expected {' or '.join(VOCABULARIES)}")
    # read here and not in `_read_tokenizer`, which reports all errors as errors of the tokenizer
    config = read_config(model) if (base_path(model) / "config.json").exists() else None
    tokenizer = _read_tokenizer(folder, config)
    if config is not None:
        _check_vocabulary(folder, tokenizer, config.vocab_size)
    return tokenizer


def _tokenizer_folder(model: Path) -> Path:
    """Return the path of a model's tokenizer. An adapter without one uses its base model's."""
    return model if any((model / name).is_file() for name in VOCABULARIES) else base_path(model)


def _read_tokenizer(folder: Path, config: ModelConfig | None) -> Any:
    """Return the tokenizer that transformers reads from copies of the tokenizer's files.

    Because of the copies, transformers cannot reach anything else in the folder, neither code nor files that these
    files name. `auto_map`, which names code, is not copied either.
    """
    with quiet():
        from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

    config_keys = {} if config is None else JsonObject.read(base_path(folder) / "config.json").data
    with tempfile.TemporaryDirectory(prefix="kvjax-tokenizer-") as copies:
        try:
            tokenizer_keys = copy_tokenizer_files(folder, Path(copies))
            if config is None and "auto_map" in tokenizer_keys.data:
                raise tokenizer_keys.error("it needs code of its own (auto_map), and such code is never run")
            # transformers reads only these two keys of the model's configuration
            needed = {
                key: config_keys[key] for key in ("model_type", "transformers_version") if key in config_keys
            }
            write_json(Path(copies) / "config.json", needed)
            arguments = {"name_or_path": str(folder), "tokenizer_class": config_keys.get("tokenizer_class")}
            for keys in (JsonObject(config_keys, str(folder / "config.json")), tokenizer_keys):
                _check_class(keys)
            tokenizer = AutoTokenizer.from_pretrained(
                copies,
                config=AutoConfig.for_model(config.model_type, **arguments)
                if config
                else PreTrainedConfig(**arguments),
                local_files_only=True,
                trust_remote_code=False,
            )
            tokenizer("a")  # some faults of the files show only with the first text
        except BaseException as error:  # damaged files make the libraries raise exceptions of any kind
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            lines = str(error).strip().splitlines() or [""]
            why = lines[0].replace(copies, str(folder))[:300]
            why = why if isinstance(error, OSError | ValueError) else f"{type(error).__name__} {why}".strip()
            raise UserError(f"{folder}: its tokenizer cannot be read ({why})") from None
    tokenizer.name_or_path = tokenizer.init_kwargs["name_or_path"] = str(folder)
    return tokenizer


def _check_class(keys: JsonObject) -> None:
    """Raise UserError if `tokenizer_class` names a class of transformers that is not a tokenizer, such as AutoModel."""
    from transformers import PreTrainedTokenizerBase
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    name = keys.get("tokenizer_class", str, None)
    for variant in (name, name.removesuffix("Fast"), f"{name}Fast") if name else ():
        cls = tokenizer_class_from_name(variant)
        if cls is not None and not (isinstance(cls, type) and issubclass(cls, PreTrainedTokenizerBase)):
            raise keys.error(f"tokenizer_class must be a tokenizer, got {shown(name)}")


def _check_vocabulary(folder: Path, tokenizer: Any, rows: int) -> None:
    """Refuse the tokenizer of another model: one with more ordinary tokens than the model's vocabulary, or with less
    than half as many. Many models pad their vocabulary, and some tokenizers add a padding token without a row."""
    if not (tokenizer.vocab_size <= rows <= 2 * len(tokenizer)):
        raise UserError(
            f"{folder}: its tokenizer is of another model: it has {len(tokenizer):,} tokens, the model's vocabulary "
            f"(vocab_size) {rows:,}"
        )


def has_builtin_vocabulary(path_or_hub_id: str | os.PathLike[str]) -> bool:
    """Return True if a model has the built-in model's vocabulary, so that it can do the built-in tasks."""
    file, builtin_file = find_model(path_or_hub_id) / "tokenizer.json", builtin_model() / "tokenizer.json"
    return file.is_file() and file.read_bytes() == builtin_file.read_bytes()


def copy_tokenizer(path_or_hub_id: str | os.PathLike[str], to: Path) -> None:
    """Copy the tokenizer's files and the generation defaults of a model."""
    folder = _tokenizer_folder(find_model(path_or_hub_id))
    if is_gguf(folder):
        save_gguf_tokenizer(GgufFile.read(folder), to)
        return
    for name in (*TOKENIZER_FILES, "chat_template.json", "generation_config.json"):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, to / name)
