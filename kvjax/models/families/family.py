"""The properties of a model family that its code fixes, and that `config.json` therefore does not state."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from kvjax.models.json_file import JsonObject
from kvjax.models.names import LAYER
from kvjax.models.rope import RopeConfig
from kvjax.models.rope_json import read_rope


class Family:
    """A `model_type` of Hugging Face. A family is a subclass, in a file of its own."""

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    """The family's class in `config.json`."""
    gguf: ClassVar[str | None] = None
    """The family's name in GGUF files; None: such files are not read."""
    names: ClassVar[Mapping[str, str]] = {}
    """Hugging Face's names of a layer's own arrays, where they are not those of `LAYER`. Arrays of one name follow one
    another in the rows of one tensor."""
    sliding_window: ClassVar[Literal["no layer", "upper layers", "all layers"]] = "no layer"
    """The layers that may have a sliding window."""
    default_window: ClassVar[int | None] = None
    """The window's tokens where `config.json` does not have the key."""

    default_theta: ClassVar[float] = 10_000.0
    """The base of RoPE's wavelengths, where `config.json` does not have the key."""

    default_tied: ClassVar[bool] = False
    """True if the output head is the embedding table where `config.json` does not have the key."""

    def fields(self, keys: JsonObject) -> dict[str, Any]:
        """Return the fields of `ModelConfig` that the family, or `config.json` in its own way, sets."""
        return {}

    def keys(self, config: Any) -> dict[str, Any]:
        """Return the keys of `config.json` that this family alone reads, given a `ModelConfig`."""
        return {}

    def rope(self, keys: JsonObject, max_length: int | None) -> RopeConfig:
        """Read the rotary position embeddings."""
        return read_rope(keys, max_length, theta=self.default_theta)

    @property
    def layer_names(self) -> dict[str, str]:
        """Hugging Face's names of a layer's own arrays."""
        return {**LAYER, **self.names}
