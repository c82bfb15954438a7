"""The setting `critic` of `sac` and `td3`: a kind of critic, by name or with options."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rl_training.algorithms.continuous.critics.base import one_of
from rl_training.algorithms.continuous.critics.hl_gauss import HLGaussOptions
from rl_training.algorithms.continuous.critics.penalised import BaseKinds, ConservativeOptions, DiverseOptions
from rl_training.algorithms.continuous.critics.renorm import RenormOptions

Kinds = BaseKinds | RenormOptions | HLGaussOptions | ConservativeOptions | DiverseOptions
CriticSetting = Annotated[Kinds, Field(discriminator="kind"), one_of(Kinds)]
