"""The attention that every key receives.

api: the op. passes: the op as one or two passes. xla, tpu, gpu: implementations of a pass. reference: the definition.
"""

from pallas_kernels.attention_mass.api import attention_mass, paged_attention_mass

__all__ = ["attention_mass", "paged_attention_mass"]
