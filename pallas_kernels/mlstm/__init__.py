"""The mLSTM cell of xLSTM: each query reads all tokens so far, weighted and decayed by gates.

api: the op. xla: the chunkwise form. tpu: the chunkwise form in kernels. reference: the definition.
"""

from pallas_kernels.mlstm.api import Memory, Normaliser, empty_memory, mlstm

__all__ = ["Memory", "Normaliser", "empty_memory", "mlstm"]
