"""Which implementations every op has."""

from pallas_kernels.attention_mass import api as attention_mass
from pallas_kernels.mlstm import api as mlstm
from pallas_kernels.paged_decode import api as paged_decode
from pallas_kernels.running_topk import api as running_topk
from pallas_kernels.vertical_slash import api as vertical_slash

OFFERED = {
    "vertical_slash": frozenset(vertical_slash.IMPLEMENTATIONS),
    "paged_decode": frozenset(paged_decode.IMPLEMENTATIONS),
    "running_topk": frozenset(running_topk.IMPLEMENTATIONS),
    "attention_mass": frozenset(attention_mass.IMPLEMENTATIONS),
    "mlstm": frozenset(mlstm.IMPLEMENTATIONS),
}
