"""The families of models that kvjax runs, one per file."""

from kvjax.models.families.family import Family
from kvjax.models.families.gemma3 import Gemma3
from kvjax.models.families.gpt_oss import GptOss
from kvjax.models.families.llama import Llama
from kvjax.models.families.mistral import Ministral, Mistral
from kvjax.models.families.phi3 import Phi3
from kvjax.models.families.qwen2 import Qwen2
from kvjax.models.families.qwen3 import Qwen3
from kvjax.models.families.qwen3_moe import Qwen3Moe
from kvjax.models.families.smollm3 import SmolLM3

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Gemma3(),
        GptOss(),
        Llama(),
        Ministral(),
        Mistral(),
        Phi3(),
        Qwen2(),
        Qwen3(),
        Qwen3Moe(),
        SmolLM3(),
    )
}
"""Families by Hugging Face's `model_type`."""
MULTIMODAL = {family.multimodal: family for family in FAMILIES.values() if family.multimodal is not None}
"""Families by the `model_type` of multimodal models whose text model is of the family."""
GGUF = {family.gguf: family for family in FAMILIES.values() if family.gguf is not None}
"""Families by their architecture in GGUF files."""
