"""The admission: a cache of constant size, in which a token that leaves the window replaces the lowest score."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.errors import UserError, shown, whole_number
from kvjax.exported.fingerprint import MadeFor
from kvjax.policies.admission.kvpop.files import check_made_for, load_scorers
from kvjax.policies.admission.kvpop.scorer import Scorer
from kvjax.policies.interfaces import Admission, Keep
from kvjax.policies.numbers import whole_array
from kvjax.step import Shape, Step
from kvjax.struct import assign, host, remembered, static, struct
from pallas_kernels.mlstm import Memory, empty_memory


@struct
class KVPOP(Admission):
    """A kv head holds the first `sink` tokens, the last of the window, and of those between the best by their scores,
    `entries` in all, whatever comes (KVPOP, Sec. 3; App. C).

    A token's score is what its query reads from the memory of all tokens until it is about to leave the window
    (`delayed`, w − 1 tokens later) or at once; it falls with each position by the head's log γ (`decay`), so that the
    order of two tokens never changes and what is out stays out. `scorers`: the scorers themselves or a folder that
    training exported. What else is not given is the folder's.
    """

    scorers: Any = dataclasses.field(repr=False)
    """The scorers, or where they are."""
    entries: int | None = host(default=None)
    """Entries of a kv head: sinks, window and the others. By default those that the model was trained with, else
    512."""
    sink: Any = None
    """First tokens that always stay; by default the folder's, else 4."""
    window: int | None = host(default=None)
    """The last tokens, the query's own included; by default the folder's, else 64."""
    delayed: bool | None = static(default=None)
    """Whether a token is scored as late as can be; by default as in training, else so."""
    decay: bool | None = static(default=None)
    """Whether scores fall with positions; by default as in training, else so."""
    capacity: Any = dataclasses.field(default=None, init=False, repr=False)
    """Entries behind the window: sinks and the others."""
    delay: int = static(default=0)
    made_for: MadeFor | None = remembered()
    """What the folder says."""
    name = "kvpop"
