"""The matrix memory of an xLSTM: what each query reads of all tokens so far, decayed by their gates.

api: the op. xla: its chunkwise form; tpu: that in kernels. reference: what the op means.
"""

from pallas_kernels.mlstm.api import Memory, Normaliser, empty_memory, mlstm

__all__ = ["Memory", "Normaliser", "empty_memory", "mlstm"]
