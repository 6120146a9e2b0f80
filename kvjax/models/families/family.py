"""`Family`: what the code of a model family determines, so that `config.json` does not state it."""

from collections.abc import Mapping
from typing import Any, ClassVar

from kvjax.errors import UserError
from kvjax.models.families.windows import Windows
from kvjax.models.json_file import JsonObject
from kvjax.models.names import LAYER, MATRICES, SCALES, canonical
from kvjax.models.rope import RopeConfig
from kvjax.models.rope_json import read_rope


class Family:
    """A `model_type` of Hugging Face. Each family is a subclass."""

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    """The class that `config.json` names."""
    gguf: ClassVar[str | None] = None
    """The architecture in GGUF files; None: GGUF files of the family are not read."""
    gguf_windows: ClassVar[bool] = False
    """True if GGUF files may have a sliding window. In other families llama.cpp ignores it, so it is refused."""
    gguf_experts: ClassVar[bool] = False
    """True if the family has experts. GGUF files hold all experts of a layer in one tensor."""
    gguf_norm_offset: ClassVar[float] = 0.0
    """The number that GGUF files add to the weights of norms."""
    names: ClassVar[Mapping[str, str]] = {}
    """Hugging Face's names of a layer's unfused arrays, if they differ from `LAYER`. Arrays that share a name are
    stored one after another in the rows of one tensor."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Defaults of keys of `config.json`, if they differ from those of most families."""
    default_theta: ClassVar[float] = 10_000.0
    """The base of RoPE's wavelengths if `config.json` does not state it."""
    quantised: ClassVar[tuple[str, ...]] = ()
    """The quantisation methods whose weights are read, besides FP8."""
    multimodal: ClassVar[str | None] = None
    """The `model_type` of multimodal models whose `text_config` is of this family."""

    def fields(self, keys: JsonObject) -> dict[str, Any]:
        """Return the fields of `ModelConfig` that the family sets, or reads from `config.json` in a way of its own."""
        return {}

    def keys(self, config: Any) -> dict[str, Any]:
        """Return the keys of `config.json` that only this family reads, given a `ModelConfig`."""
        return {}

    def windows(self, keys: JsonObject) -> Windows:
        """Return the sliding window and its layers; by default there are none."""
        return None, ()

    def rope(self, keys: JsonObject, max_length: int | None) -> RopeConfig:
        """Read the rotary position embeddings."""
        return read_rope(keys, max_length, theta=self.default_theta)

    def text_tensors(self, stored: dict[str, Any]) -> dict[str, Any]:
        """Return a folder's tensors by their names in a causal language model, without those that only images need."""
        if self.multimodal is None:
            return stored
        prefix, image = "model.language_model.", ("model.vision_tower.", "model.multi_modal_projector.")
        text = {name: tensor for name, tensor in stored.items() if not name.startswith(image)}
        tensors = {
            canonical(name.removeprefix(prefix)) if name.startswith(prefix) else name: tensor
            for name, tensor in text.items()
        }
        if len(tensors) < len(text):
            file = next(iter(text.values())).file
            raise UserError(f"{file.parent}: tensors are stored twice, with and without {prefix}")
        return tensors

    def gguf_keys(self, file: Any) -> dict[str, Any]:
        """Return the keys of `config.json` that only this family has, given a `GgufFile`."""
        return {}

    @property
    def layer_names(self) -> dict[str, str]:
        """Hugging Face's names of all unfused arrays of a layer."""
        names = {**LAYER, **self.names}
        return names | {f"{part}_scale": names[part] + SCALES for part in MATRICES}
