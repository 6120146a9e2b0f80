"""The choice of an op's implementation."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax

BY_PLATFORM = {"cpu": "xla", "tpu": "tpu", "gpu": "gpu"}


class Target(NamedTuple):
    """The target of a traced computation. `platform` is "cpu", "tpu" or "gpu", and `kind` is the chip's name."""

    platform: str
    kind: str


def target() -> Target:
    """Return the target of the current mesh, whose devices may be abstract, or else of the default backend."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        local = jax.local_devices()[0]
        return Target(local.platform, local.device_kind)
    return Target(device.platform, device.device_kind)


def choose(
    implementations: Mapping[str, Callable],
    name: str | None,
    op: str,
    by_platform: Mapping[str, str] = BY_PLATFORM,
) -> Callable:
    """Return the implementation called `name`. None: the platform's default, without a fallback."""
    if name is None:
        platform = target().platform
        if platform not in by_platform:
            known = ", ".join(by_platform)
            raise ValueError(f"{op}: no implementation for platform {platform!r}, only for {known}")
        name = by_platform[platform]
    if name not in implementations:
        known = ", ".join(implementations)
        raise ValueError(f"{op}: there is no implementation {name!r}, only {known}")
    return implementations[name]
