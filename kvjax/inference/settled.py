"""Drop state that only future compactions would need."""

import dataclasses

from kvjax.cache import CAPACITY_PLANES, Cache
from kvjax.policies.compiled import View
from kvjax.policies.interfaces import BIAS


def drop_observation_state(cache: Cache, later: View) -> Cache:
    """Return the cache (donated) without the memories and entry metadata of methods that `later`, which goes on with
    it, does not have. They would miss the tokens to come, and a method that had them again could not tell. Policies
    that only differ in an eviction whose work is done then run one program."""
    lasting = {*later.planes, *CAPACITY_PLANES, BIAS}
    numbers, planes = (
        {name: plane for name, plane in x.items() if name in lasting}
        for x in (cache.layers.numbers, cache.pages.planes)
    )
    layers, pages = cache.layers, dataclasses.replace(cache.pages, planes=planes)
    layers = dataclasses.replace(layers, numbers=numbers)
    if later.eviction is not None:
        return dataclasses.replace(cache, pages=pages, layers=layers)
    layers = dataclasses.replace(layers, state=dataclasses.replace(layers.state, eviction=()))
    return dataclasses.replace(cache, pages=pages, layers=layers, trail=())
