"""The base class of every algorithm: settings, networks, a pure `train_step` and a pure `select_action`.

Everything that an algorithm changes is in `TrainState`, a tree of tensors. `train_step` takes one and returns a new
one, so the runtime can compile it, capture it, run it for many seeds (`vmap`), save it and compare it.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.algorithms.acting import Expert
from rl_training.algorithms.hyper import H, Hyper, NetworkHyper, OffPolicyHyper, parse_hyper
from rl_training.algorithms.phases import ReplayPhase, RolloutPhase
from rl_training.algorithms.shell import Shell, UpdateResult
from rl_training.algorithms.state import Aux, Obs, TrainState, Tree
from rl_training.data.dataset import TransitionDataset
from rl_training.data.storage import Batch, Columns
from rl_training.errors import UserError
from rl_training.ops import rng
from rl_training.ops.nets import Net
from rl_training.ops.optim import Optimizer
from rl_training.ops.tree import tree_map
from rl_training.spec import ActionKind, EnvSpec

__all__ = ["Algorithm", "Aux", "Obs", "TrainState", "Tree", "UpdateResult"]

_INIT = 101  # random stream
_MANAGED = {"config", "algo", "env", "env_id", "env_fn", "total_timesteps"}  # arguments of the managed class


class Algorithm(Generic[H]):
    """An algorithm's file defines its settings (`Hyper`) and a subclass with `networks`, `train_step`, `select_action`
    and `value`. `H` is the type of the settings, `self.hp`."""

    Hyper: ClassVar[type[Hyper]]
    name: ClassVar[str]
    defaults: ClassVar[dict[str, Any]] = {}  # a variant is the same class with other defaults
    # The environments that it accepts.
    actions: ClassVar[tuple[ActionKind, ...]]
    bounded_actions: ClassVar[bool] = False  # a Box of actions must have bounds, which [-1, 1] is scaled to
    vector_observations: ClassVar[bool] = False  # observations must be plain vectors
    masks: ClassVar[bool] = False  # it obeys an environment's action mask
    # Its networks and its update.
    targets: tuple[str, ...] = ()  # networks that have a slow copy
    network_argument: ClassVar[str] = "model"  # the argument that takes a ready-made network
    compiled_as: ClassVar[Literal["graph", "unrolled", "pieces"]] = "graph"
    """The whole update as one graph, one graph with a recurrent loop written out (slow to compile), or only pieces."""
    batch_columns: ClassVar[tuple[str, ...]] = ()  # columns of a batch that is not made of transitions, rows first
    dataset_columns: ClassVar[tuple[str, ...]] = ()  # more columns to read from a dataset: returns, next_actions
    # Its policy.
    recurrent: ClassVar[bool] = False  # it remembers earlier observations; exploration noise does not count
    sees_rewards: ClassVar[bool] = False  # `observe` must be told the reward of each step

    dataset: TransitionDataset | None = None  # what the recipe in the settings stands for; set before training
    expert: Expert | None = None  # likewise

    def __init__(self, spec: EnvSpec | None = None, *, seed: int = 0, device: str | torch.device = "cpu",
                 num_envs: int = 1, **fields: Any) -> None:  # fmt: skip
        self._refuse_managed_arguments(spec, fields)
        given: nn.Module | None = fields.pop(self.network_argument, None)
        self.hp: H = parse_hyper(self.Hyper, {**self.defaults, **fields}, self.name)  # type: ignore[assignment]
        if spec is None:
            if given is None:
                raise UserError(f"{type(self).__name__} needs an environment spec or {self.network_argument}=...")
            spec = self.spec_of(given)
        self.spec, self.seed, self.device, self.num_envs = spec, seed, torch.device(device), num_envs
        self.check(spec)
        self.modules = self.named_networks(given) if given is not None else self._seeded_networks(seed)
        self.nets = {name: Net(module).to(self.device) for name, module in self.modules.items()}
        self._given = given is not None
        self.setup()

    # --- what an algorithm defines -----------------------------------------------------------------------------

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        """Freshly initialised networks."""
        raise NotImplementedError

    def setup(self) -> None:
        """Derive things from the settings once: optimisers, distributions, supports."""

    def init_extra(self) -> dict[str, Any]:
        """State beside networks and optimisers."""
        return {}

    def init_optimizers(self, params: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """One optimiser for each network; override for more."""
        return {name: self.optimizer().init(flat) for name, flat in params.items()}

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """One update, pure. `batch["discounts"]` already holds gamma^n x (1 - terminated)."""
        raise NotImplementedError

    def select_action(
        self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool
    ) -> tuple[Tree, Tensor, dict[str, Tensor]]:
        """(carry, actions [B, ...], extra columns to store), pure."""
        raise NotImplementedError

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        """The critic's estimate of the return from obs under the policy: [B]. Recurrent ones also take `carry=`."""
        raise UserError(f"{self.name} learns a policy only: it has no critic, so there is no value to return")

    def phases(self) -> tuple[ReplayPhase, ...]:
        """Off-policy and offline: what a turn of the loop does. Most algorithms have one phase; MBPO has five."""
        if isinstance(self.hp, OffPolicyHyper):
            every, times = self.hp.train_freq, self.hp.updates_per_block(self.num_envs)
            return (ReplayPhase("update", self.train_step, every=every, times=times),)
        return (ReplayPhase("update", self.train_step),)

    def sources(self, num_envs: int) -> dict[str, Any]:
        """Where batches come from, by the name that phases use. The usual replay (offline: the dataset) is there
        already; an entry `replay` takes its place. `prior` is the fixed data of an on-policy algorithm."""
        return {}

    def rollout_phases(self) -> tuple[RolloutPhase, ...]:
        """On-policy: what is learned from each rollout."""
        raise NotImplementedError

    def prepare(self, state: TrainState, rollout: Batch, key: Tensor) -> tuple[TrainState, Batch]:
        """On-policy: turn a rollout [T, N, ...] into the batch [T * N, ...] that minibatches are cut from."""
        raise NotImplementedError

    def init_carry(self, batch: int) -> Tree:
        """The carry at the start of an episode; () where a policy carries nothing from step to step."""
        return ()

    def observe(self, carry: Tree, rewards: Tensor) -> Tree:
        """The carry after a step that paid `rewards` [B]; called where `sees_rewards`."""
        return carry

    def replace_actions(self, carry: Tree, actions: Tensor) -> Tree:
        """The carry after `select_action`, if `actions` [B, ...] were taken instead of the ones it chose."""
        return carry

    def extra_columns(self) -> Columns:
        """Shape and type, by name, of what `select_action` wants stored with each transition."""
        return {}

    def spec_of(self, network: nn.Module) -> EnvSpec:
        """The spec that a ready-made network implies."""
        spec = getattr(network, "spec", None)
        if not isinstance(spec, EnvSpec):
            raise UserError(f"{type(self).__name__} cannot tell the spaces from this network; pass spec= as well")
        return spec

    def named_networks(self, network: nn.Module) -> dict[str, nn.Module]:
        """Networks of a ready-made model: its direct children."""
        return dict(network.named_children())

    # --- shared ------------------------------------------------------------------------------------------------

    def check(self, spec: EnvSpec) -> None:
        """Raise UserError for an environment that the algorithm does not accept."""
        if spec.action.kind not in self.actions:
            kinds = " or ".join(k.replace("_", "-") for k in self.actions)
            article = "a bounded" if kinds == "box" else "a"
            noun = "continuous (Box)" if kinds == "box" else kinds
            raise UserError(f"{self.name} needs {article} {noun} action space; {spec.env_id} has {spec.action}")
        if self.bounded_actions and spec.action.kind == "box" and not spec.action.bounded:
            raise UserError(f"{self.name} needs a bounded action space; {spec.env_id} has an unbounded {spec.action}")
        seen = spec.observation
        if self.vector_observations and (isinstance(seen, dict) or len(seen.shape) != 1):
            raise UserError(f"{self.name} needs vector observations; {spec.env_id} has {seen}")

    def optimizer(self, **changes: Any) -> Optimizer:
        """The optimiser of the settings."""
        hp = self.hp
        assert isinstance(hp, NetworkHyper), f"{self.name} has no settings for an optimiser"
        fields = {"kind": hp.optimizer, "eps": hp.adam_eps, "weight_decay": hp.weight_decay,
                  "max_grad_norm": hp.max_grad_norm or None}  # fmt: skip
        return Optimizer(**{**fields, **changes})

    def make_part(self, kind: type[A]) -> A:
        """An algorithm of another kind that this one is built around, with the settings that both have."""
        shared = {
            name: getattr(self.hp, name) for name in kind.Hyper.model_fields if name in type(self.hp).model_fields
        }
        return kind(self.spec, seed=self.seed, device=self.device, num_envs=self.num_envs, **shared)

    def init_state(self, seed: int) -> TrainState:
        modules = self.modules if self._given else self._seeded_networks(seed)
        params = {name: net.flatten(modules[name]).to(self.device) for name, net in self.nets.items()}
        return TrainState(
            params=params,
            target={name: params[name].clone() for name in self.targets},
            opt=self.init_optimizers(params),
            extra=tree_map(lambda x: x.to(self.device), self.init_extra()),
            step=torch.zeros((), dtype=torch.int64, device=self.device),
            progress=torch.zeros((), device=self.device),
        )

    def _seeded_networks(self, seed: int) -> dict[str, nn.Module]:
        """Networks whose initial weights depend on the seed alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng.key_from_seed(seed, _INIT)))
            return self.networks(self.spec)

    def _refuse_managed_arguments(self, spec: Any, fields: dict[str, Any]) -> None:
        name, managed = type(self).__name__, sorted(_MANAGED & set(fields))
        if managed or not (spec is None or isinstance(spec, EnvSpec)):
            given = managed[0] if managed else f"a {type(spec).__name__}"
            raise UserError(
                f"rl_training.algorithms.{name} is the bare algorithm and does not take {given}: it takes an EnvSpec or"
                f" {self.network_argument}=..., and settings by name; rl_training.{name} takes a TrainConfig"
            )

    # --- use without a run: see `Shell` ----------------------------------------------------------------------------

    @cached_property
    def shell(self) -> Shell:
        return Shell(self)

    @property
    def state(self) -> TrainState:
        return self.shell.state

    def update(self, batch: Batch, *, global_step: int = 0) -> UpdateResult:
        """One gradient step on a batch of arrays or tensors. Nothing depends on `global_step`."""
        return self.shell.update(batch)

    @property
    def last_td_errors(self) -> Tensor | None:
        """Absolute errors of the last update's samples: the priorities of prioritised replay."""
        return self.shell.last_td_errors

    def act(self, obs: Any, *, deterministic: bool = False, episode_start: Any = None) -> np.ndarray:
        """Actions for a batch of encoded observations (or one observation). A recurrent policy remembers from call to
        call, until `shell.episodes.reset()` or where `episode_start` is true."""
        return self.shell.act(obs, deterministic=deterministic, episode_start=episode_start)

    def state_dict(self) -> dict[str, Tensor]:
        """Every tensor of the state by name; the parameters of a network are one vector."""
        return self.shell.state_dict()

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        self.shell.load_state_dict(tensors)


A = TypeVar("A", bound=Algorithm[Any])
