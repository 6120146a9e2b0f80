"""The engine: continuous batching, where requests come and go at any time and share slots and one pool of pages.

engine: requests and contexts. scheduler: the turns, and which requests begin. request: a prompt and its answer. reader:
the prompt that is being read. slots: the answers that are decoded. forks: contexts and ends of prompts that later
prompts continue. pool: pages and sequences on the devices; rows: the programs that move them. pages: page counts on the
host. samplers: how the slots' tokens are drawn.
"""

from kvjax.engine.engine import Engine, EngineStats
from kvjax.engine.request import Constraint, Request

__all__ = ["Constraint", "Engine", "EngineStats", "Request"]
