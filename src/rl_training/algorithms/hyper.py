"""Settings that several algorithms share. Every default is defined once, here or in the algorithm's own file."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from rl_training.data.recipes import DatasetRecipe
from rl_training.errors import MismatchError, UserError, explain
from rl_training.models.torsos import Cnn
from rl_training.ops.schedules import Fraction as Fraction
from rl_training.ops.schedules import Positive as Positive
from rl_training.ops.schedules import Schedule

Widths = tuple[Annotated[int, Field(ge=1, le=65536)], ...]


def _not_negative(value: float | str) -> float | str:
    if not isinstance(value, str) and not value >= 0.0:
        raise ValueError("must be 'auto' or at least 0")
    return value


Temperature = Annotated[float | Literal["auto"], AfterValidator(_not_negative)]


def constant(value: float) -> Any:
    """The default of a field that may be a schedule."""
    return Field(default_factory=lambda: Schedule(start=value))


class Settings(BaseModel):
    """Unknown names are errors. A field that a subclass declares again, with another default, keeps its description."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        bases = [base.model_fields for base in cls.__mro__[1:] if issubclass(base, BaseModel)]
        for name, field in cls.model_fields.items():
            inherited = (fields[name].description for fields in bases if name in fields)
            field.description = field.description or next(inherited, None)


class Hyper(Settings):
    """Fields of every algorithm."""

    num_envs: ClassVar[int] = 1
    random_warmup: ClassVar[bool] = True  # actions before `learning_starts` are random, not the policy's
    sequence_settings: ClassVar[tuple[str, ...]] = ()  # settings whose sum is the length of a replayed sequence
    unused: ClassVar[tuple[str, ...]] = ()  # inherited settings that this algorithm does not read

    learning_rate: Positive = constant(3e-4)
    """Step size of the optimiser; a number or a schedule."""
    gamma: float = Field(0.99, ge=0.0, le=1.0)
    """Discount factor."""

    @model_validator(mode="after")
    def _only_what_is_read(self) -> Hyper:
        """Saved configurations name every setting, so the default is accepted."""
        for name in self.unused:
            value = getattr(self, name)
            if value != type(self).model_fields[name].get_default(call_default_factory=True):
                raise ValueError(f"{name} has no effect here: leave it out")
        return self

    @property
    def replay_length(self) -> int:
        """Steps of one environment in a row of a batch: 1, or the length of a sequence."""
        return sum(getattr(self, name) for name in self.sequence_settings) or 1


class NetworkHyper(Hyper):
    """Settings of networks and optimiser."""

    hidden_sizes: Widths = (64, 64)
    """Widths of the hidden layers."""
    activation: Literal["relu", "tanh", "silu", "elu", "gelu"] = "relu"
    """Non-linearity of the hidden layers."""
    max_grad_norm: float = Field(0.0, ge=0.0)
    """Gradients are scaled down to this norm; 0 switches it off."""
    optimizer: Literal["adam", "adamw", "rmsprop", "sgd"] = "adam"
    """Rule that turns gradients into steps."""
    adam_eps: float = Field(1e-8, gt=0.0)
    """Term added to the denominator of the optimiser."""
    weight_decay: float = Field(0.0, ge=0.0)
    """Decay of the weights (decoupled for adamw)."""


class ObservationFields(BaseModel):
    """Settings of how networks read observations."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    normalize_observations: bool = False
    """Subtract the running mean and divide by the running deviation; part of the policy, saved with it."""


class AugmentFields(BaseModel):
    """Settings of how the images of a replayed batch are changed before an update learns from them."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    augment: Literal["none", "shift", "shift_intensity"] = "none"
    """Random changes of images: shift moves each by up to `augment_pad` pixels (Yarats et al. 2021); shift_intensity
    also makes each up to 10 % brighter or darker (Schwarzer et al. 2021)."""
    augment_pad: int = Field(4, ge=1, le=64)
    """Pixels that shift moves an image by, at most, in each direction."""


class OffPolicyHyper(NetworkHyper):
    """Settings of replay, and how often an update is made."""

    batch_size: int = Field(256, ge=1)
    """Transitions in one update."""
    buffer_size: int = Field(1_000_000, ge=1)
    """Transitions kept for each seed."""
    learning_starts: int = Field(1_000, ge=0)
    """Environment steps with random actions before the first update."""
    train_freq: int = Field(1, ge=1)
    """Steps of the vector environment between two blocks of updates."""
    gradient_steps: int = Field(1, ge=-1)
    """Updates in a block; -1: one for each transition collected since the last block."""
    n_step: int = Field(1, ge=1)
    """Rewards summed before bootstrapping."""
    prioritized: bool = False
    """Sample transitions in proportion to their last error (prioritised replay)."""
    prioritized_alpha: float = Field(0.6, ge=0.0, le=1.0)
    """Exponent of the priorities; 0 is uniform."""
    prioritized_beta: float = Field(0.4, ge=0.0, le=1.0)
    """Exponent of the importance weights at the start; it rises to 1."""
    reset_interval: int = Field(0, ge=0)
    """Gradient steps between resets of networks and optimisers; replay is kept (Nikishin et al. 2022); 0: no resets."""
    reset_at: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Gradient steps after which to reset, in addition to the resets of `reset_interval`."""
    reset_share: float = Field(1.0, gt=0.0, le=1.0)
    """Share of fresh weights in a reset; below 1 the old weights are shrunk and perturbed instead of replaced."""
    frame_stack: int = Field(1, ge=1)
    """Observations are images of this many stacked frames, newest last: replay then holds each frame once. 1: off."""

    def updates_per_block(self, num_envs: int) -> int:
        """Gradient steps every `train_freq` steps of the vector environment."""
        return self.train_freq * num_envs if self.gradient_steps == -1 else self.gradient_steps

    def planned_updates(self, turns: int, num_envs: int) -> int:
        """Gradient steps in that many steps (turns) of the vector environment."""
        return turns // self.train_freq * self.updates_per_block(num_envs)


class OfflineHyper(NetworkHyper):
    """Settings of learning from a fixed dataset."""

    dataset: DatasetRecipe = Field(default_factory=DatasetRecipe)
    """Where the transitions come from: a recipe (docs/offline.md)."""
    batch_size: int = Field(256, ge=1)
    """Transitions in one update."""
    updates_per_call: int = Field(1, ge=1, le=1024)
    """Updates in one call of the update graph: more of them save calls and cost time to compile."""


class CollectHyper(NetworkHyper):
    """Settings of learning from the last rollout of several environments."""

    num_envs: ClassVar[int] = 8
    n_steps: int = Field(128, ge=1)
    """Steps of each environment in one rollout."""

    @property
    def chunk(self) -> int:
        """Consecutive steps of one environment that a minibatch keeps together."""
        return 1

    def updates_per_rollout(self, num_envs: int) -> int:
        """Gradient steps for each rollout, on average; `execution: auto` decides by it."""
        return 1

    def check_rollout(self, num_envs: int) -> None:
        """Raise UserError for settings that do not fit a rollout of that many environments."""
        batch_size = getattr(self, "batch_size", 1)
        if self.n_steps * num_envs % batch_size:
            raise UserError(f"batch_size = {batch_size} must divide n_steps x num_envs = {self.n_steps} x {num_envs}")


class RolloutHyper(CollectHyper, ObservationFields):
    """Settings of rollouts, and of the policy that collects them."""

    activation: Literal["relu", "tanh", "silu", "elu", "gelu"] = "tanh"
    max_grad_norm: float = Field(0.5, ge=0.0)
    adam_eps: float = Field(1e-5, gt=0.0)
    gae_lambda: float = Field(0.95, ge=0.0, le=1.0)
    """Bias-variance trade-off of the advantage estimate."""
    normalize_rewards: bool = False
    """Divide rewards by the running deviation of the discounted return."""
    log_std_init: float = -1.0
    """Initial log standard deviation of continuous actions, in units of half the distance between their bounds."""
    cnn: Cnn = "nature"
    """Network for images: nature (Mnih et al. 2015) or impala (Espeholt et al. 2018, residual)."""


class SharedTrunkFields(Hyper):
    """For algorithms that move actor and critic in one gradient step."""

    shared_trunk: bool | None = None
    """Actor and critic are two heads on the same layers; empty: for images, but not for vectors."""


class OnPolicyHyper(RolloutHyper):
    """Settings of learning from a rollout in epochs of minibatches."""

    batch_size: int = Field(256, ge=1)
    """Transitions in one update; must divide n_steps x num_envs."""
    n_epochs: int = Field(10, ge=1)
    """Passes over each rollout."""

    def updates_per_rollout(self, num_envs: int) -> int:
        return self.n_epochs * (self.n_steps * num_envs // self.batch_size)


H = TypeVar("H", bound=Hyper)


def parse_hyper(model: type[H], values: dict[str, Any], owner: str) -> H:
    """Validate settings. The error says in one sentence what is wrong, where, and what was probably meant."""
    try:
        return model(**values)
    except ValidationError as error:
        raise MismatchError(f"{owner}: {explain(error, model)}") from None
