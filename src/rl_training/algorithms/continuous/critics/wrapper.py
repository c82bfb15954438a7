"""Critics that are wrapped around another one and add a term to its loss."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

from rl_training.algorithms.base import Obs
from rl_training.algorithms.continuous.critics.base import Critic, CriticOptions, Extra, one_of
from rl_training.algorithms.continuous.critics.ensemble import DropoutOptions, SubsetOptions, TwinOptions
from rl_training.algorithms.continuous.critics.quantile import QuantileOptions

BaseCritic = Annotated[
    TwinOptions | SubsetOptions | DropoutOptions | QuantileOptions,
    Field(discriminator="kind"),
    one_of(TwinOptions, SubsetOptions, DropoutOptions, QuantileOptions),
]


class WrapperOptions(CriticOptions):
    base: BaseCritic = TwinOptions()
    """The critics that the term is added to: twin, subset, dropout or quantile, with their own options."""

    def network(self) -> dict[str, Any]:
        return self.base.network()


class Wrapper(Critic):
    """All but `loss` is the wrapped critic's."""

    def __init__(self, base: Critic) -> None:
        super().__init__(base.owner)
        self.base, self.draws = base, base.draws

    def values(self, params: Tensor, obs: Obs, actions: Tensor) -> Tensor:
        return self.base.values(params, obs, actions)

    def policy_value(self, params: Tensor, extra: Extra, obs: Obs, action: Tensor, key: Tensor | None) -> Tensor:
        return self.base.policy_value(params, extra, obs, action, key)

    def value(self, params: Tensor, extra: Extra, obs: Obs, action: Tensor) -> Tensor:
        return self.base.value(params, extra, obs, action)
