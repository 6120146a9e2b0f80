"""The properties of a model family that its code fixes, and that `config.json` therefore does not state."""

from collections.abc import Mapping
from typing import Any, ClassVar

from kvjax.errors import UserError
from kvjax.models.families.windows import Windows
from kvjax.models.json_file import JsonObject
from kvjax.models.names import LAYER, MATRICES, SCALES, canonical
from kvjax.models.rope import RopeConfig
from kvjax.models.rope_json import read_rope


class Family:
    """A `model_type` of Hugging Face. A family is a subclass, in a file of its own."""

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    """The family's class in `config.json`."""
    gguf: ClassVar[str | None] = None
    """The family's name in GGUF files; None: such files are not read."""
    gguf_windows: ClassVar[bool] = False
    """True if GGUF files may name a sliding window, which llama.cpp ignores in the others."""
    gguf_experts: ClassVar[bool] = False
    """True if the family has experts, of which GGUF files hold all of a layer's in one tensor."""
    gguf_norm_offset: ClassVar[float] = 0.0
    """The number that GGUF files add to the weights of norms."""
    names: ClassVar[Mapping[str, str]] = {}
    """Hugging Face's names of a layer's own arrays, where they are not those of `LAYER`. Arrays of one name follow one
    another in the rows of one tensor."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Values of keys that `config.json` may leave out, where they are not those of most families."""
    default_theta: ClassVar[float] = 10_000.0
    """The base of RoPE's wavelengths, where `config.json` does not have the key."""
    quantised: ClassVar[tuple[str, ...]] = ()
    """The methods of quantisation whose weights are read."""
    multimodal: ClassVar[str | None] = None
    """The `model_type` of models that have one of this family in their `text_config`."""

    def fields(self, keys: JsonObject) -> dict[str, Any]:
        """Return the fields of `ModelConfig` that the family, or `config.json` in its own way, sets."""
        return {}

    def keys(self, config: Any) -> dict[str, Any]:
        """Return the keys of `config.json` that this family alone reads, given a `ModelConfig`."""
        return {}

    def windows(self, keys: JsonObject) -> Windows:
        """Return the sliding windows; by default there are none."""
        return None, ()

    def rope(self, keys: JsonObject, max_length: int | None) -> RopeConfig:
        """Read the rotary position embeddings."""
        return read_rope(keys, max_length, theta=self.default_theta)

    def text_tensors(self, stored: dict[str, Any]) -> dict[str, Any]:
        """Return a folder's tensors by the names of a causal model, without those that only images need."""
        if self.multimodal is None:
            return stored
        inside, beside = "model.language_model.", ("model.vision_tower.", "model.multi_modal_projector.")
        own = {name: tensor for name, tensor in stored.items() if not name.startswith(beside)}
        found = {
            canonical(name.removeprefix(inside)) if name.startswith(inside) else name: tensor
            for name, tensor in own.items()
        }
        if len(found) < len(own):
            file = next(iter(own.values())).file
            raise UserError(f"{file.parent}: tensors are stored twice, with and without {inside}")
        return found

    def gguf_keys(self, file: Any) -> dict[str, Any]:
        """Return the keys of `config.json` that are this family's own, given a `GgufFile`."""
        return {}

    @property
    def layer_names(self) -> dict[str, str]:
        """Hugging Face's names of a layer's own arrays."""
        names = {**LAYER, **self.names}
        return names | {f"{part}_scale": names[part] + SCALES for part in MATRICES}
