"""The attacks of the campaign, in the order in which they run."""

from __future__ import annotations

from attacks.base import Attack
from attacks.datasets import DATASETS
from attacks.disks import DISK
from attacks.environments import FAULTS
from attacks.files import CORRUPT
from attacks.inputs import FUZZ, TRAIN
from attacks.runs import DAY, KILL

ATTACKS: tuple[Attack, ...] = (CORRUPT, FUZZ, DATASETS, FAULTS, DISK, TRAIN, KILL, DAY)

__all__ = ["ATTACKS", "Attack"]
