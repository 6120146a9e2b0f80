"""The engine: requests that come and go at any time share slots and one pool of pages.

engine: the turns. request: a prompt and its answer. rows: a sequence put into a slot and taken out of it, on the
devices. pages: how many pages sequences take, on the host.
"""

from kvjax.engine.engine import Engine, EngineStats
from kvjax.engine.request import Request

__all__ = ["Engine", "EngineStats", "Request"]
