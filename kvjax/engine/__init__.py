"""The engine: requests that come and go at any time share slots and one pool of pages.

engine: the turns, and who is let in. request: a prompt and its answer. reader: the prompt that is being read. slots:
the answers that are decoded. forks: contexts and ends of prompts that later prompts go on from. pool: pages and
sequences, on the devices; rows: the programs that move them. pages: how many pages sequences take, on the host.
drawing: how tokens are drawn.
"""

from kvjax.engine.engine import Engine, EngineStats
from kvjax.engine.request import Constraint, Request

__all__ = ["Constraint", "Engine", "EngineStats", "Request"]
