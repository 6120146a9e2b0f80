"""Policies: `make_policy("snapkv:ratio=0.25,adakv")`, or
`Policy(eviction=Adaptive(SnapKV()), schedule=Schedule(Ratio(0.25)))`.

admission, eviction, selection: the methods, one file each. registry: their names. base: their base classes.
policy: the composition of methods. schedule: how much a compaction keeps (budget), and when it runs (trigger). make:
policies from strings and mappings. numbers: checked arrays. chance: reproducible random numbers.
"""

from kvjax.policies.admission.full import Full
from kvjax.policies.admission.head_pattern import HeadPattern
from kvjax.policies.admission.kvzap import KVzap
from kvjax.policies.admission.random import Random
from kvjax.policies.admission.streaming_llm import StreamingLLM
from kvjax.policies.admission.wgkv import WGKV
from kvjax.policies.budget import Entries, Ratio, Size, Threshold
from kvjax.policies.eviction.adaptive import Adaptive, Pyramid
from kvjax.policies.eviction.critical_kv import CriticalKV
from kvjax.policies.eviction.defensive_kv import DefensiveKV
from kvjax.policies.eviction.dropkv import DropKV
from kvjax.policies.eviction.expected_attention import ExpectedAttention
from kvjax.policies.eviction.fast_kvzip import FastKVzip
from kvjax.policies.eviction.h2o import H2O
from kvjax.policies.eviction.keydiff import KeyDiff
from kvjax.policies.eviction.knorm import KNorm
from kvjax.policies.eviction.kvzap import KVzapEviction
from kvjax.policies.eviction.kvzip import KVzip
from kvjax.policies.eviction.oraclekv import OracleKV
from kvjax.policies.eviction.protected import Protected
from kvjax.policies.eviction.r_kv import RKV
from kvjax.policies.eviction.random import RandomEviction
from kvjax.policies.eviction.refit import Refit
from kvjax.policies.eviction.snapkv import SnapKV
from kvjax.policies.eviction.tova import TOVA
from kvjax.policies.eviction.triattention import TriAttention
from kvjax.policies.eviction.trimkv import TrimKV
from kvjax.policies.make import make_policy
from kvjax.policies.policy import Policy
from kvjax.policies.registry import POLICIES
from kvjax.policies.schedule import Schedule
from kvjax.policies.selection.quest import Quest
from kvjax.policies.trigger import Trigger

__all__ = [
    "H2O",
    "POLICIES",
    "RKV",
    "TOVA",
    "WGKV",
    "Adaptive",
    "CriticalKV",
    "DefensiveKV",
    "DropKV",
    "Entries",
    "ExpectedAttention",
    "FastKVzip",
    "Full",
    "HeadPattern",
    "KNorm",
    "KVzap",
    "KVzapEviction",
    "KVzip",
    "KeyDiff",
    "OracleKV",
    "Policy",
    "Protected",
    "Pyramid",
    "Quest",
    "Random",
    "RandomEviction",
    "Ratio",
    "Refit",
    "Schedule",
    "Size",
    "SnapKV",
    "StreamingLLM",
    "Threshold",
    "TriAttention",
    "Trigger",
    "TrimKV",
    "make_policy",
]
