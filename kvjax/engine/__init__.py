"""The engine: requests that come and go at any time share slots and one pool of pages.

engine: the turns. request: a prompt and its answer. pool: pages, slots and sequences, on the devices; rows: the
programs that move them. pages: how many pages sequences take, on the host. drawing: how tokens are drawn.
"""

from kvjax.engine.engine import Engine, EngineStats
from kvjax.engine.request import Request

__all__ = ["Engine", "EngineStats", "Request"]
