"""How much attention every key gets: the transposed pass.

api: the op. passes: it as one or two passes of one kind. xla, tpu, gpu: that pass. reference: what the op means.
"""

from pallas_kernels.attention_mass.api import attention_mass, paged_attention_mass

__all__ = ["attention_mass", "paged_attention_mass"]
