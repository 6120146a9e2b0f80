"""Budgets that layers and heads share unevenly, over any method's scores: AdaKV and PyramidKV."""

from dataclasses import replace

from kvjax.errors import real_number
from kvjax.policies.budget import Shares
from kvjax.policies.eviction.wrapper import Wrapper
from kvjax.struct import assign, host, struct


@struct
class Adaptive(Wrapper):
    """A budget for which heads compete (AdaKV, Feng et al., 2024, arXiv:2407.11550).

    With `over` "layer" the heads of a layer compete, with "model" the heads of all layers (KVzip). With "head" each
    head has its own budget. `pinned` is the share of its average that every head keeps of its own best entries,
    whatever others have (AdaKV's α).
    """

    over: str = host(default="layer")
    """The scope of the competition: "head", "layer" or "model"."""
    pinned: float = host(default=0.2)
    """α, from 0 to 1."""
    name = "adakv"

    def __post_init__(self):
        super().__post_init__()
        assign(self, pinned=Shares(self.over, self.pinned).pinned)

    @property
    def shares(self) -> Shares:
        return replace(self.eviction.shares, over=self.over, pinned=self.pinned)


@struct
class Pyramid(Wrapper):
    """Budgets that fall linearly with depth (PyramidKV, Cai et al., 2024, arXiv:2406.02069): the last layer gets
    1/`beta` of the average. If that is fewer entries than must stay, all layers get the average."""

    beta: float = host(default=20.0)
    """β, above 1."""
    name = "pyramidkv"

    def __post_init__(self):
        super().__post_init__()
        assign(self, beta=real_number(self.name, "beta", self.beta, above=1.0))

    @property
    def shares(self) -> Shares:
        return replace(self.eviction.shares, pyramid=self.beta)
