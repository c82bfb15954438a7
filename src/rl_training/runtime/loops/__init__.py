"""Training loops by name, as the registry refers to them."""

from __future__ import annotations

from rl_training.errors import UserError
from rl_training.runtime.loops.base import Loop
from rl_training.runtime.loops.evolution import EvolutionLoop
from rl_training.runtime.loops.off_policy import OffPolicyLoop
from rl_training.runtime.loops.offline import OfflineLoop
from rl_training.runtime.loops.on_device import DeviceOffPolicyLoop, DeviceOnPolicyLoop
from rl_training.runtime.loops.on_policy import OnPolicyLoop

LOOPS: dict[str, type[Loop]] = {
    "off_policy": OffPolicyLoop,
    "on_policy": OnPolicyLoop,
    "offline": OfflineLoop,
    "evolution": EvolutionLoop,
}


ON_DEVICE: dict[str, type[Loop]] = {"off_policy": DeviceOffPolicyLoop, "on_policy": DeviceOnPolicyLoop}


def loop_class(name: str, vectorization: str = "auto") -> type[Loop]:
    if vectorization == "device":
        if name not in ON_DEVICE:
            raise UserError(
                f"vectorization: device needs a training loop of kind {' or '.join(ON_DEVICE)}; this one is {name}"
            )
        return ON_DEVICE[name]
    if name not in LOOPS:
        raise UserError(f"there is no training loop '{name}'; known: {', '.join(LOOPS)}")
    return LOOPS[name]
