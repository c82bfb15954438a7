"""The base class of every algorithm: settings, networks, a pure `train_step` and a pure `select_action`.

Everything that an algorithm changes is in `TrainState`, a tree of tensors. `train_step` takes one and returns a new
one, so the runtime can compile it, capture it, run it for many seeds (`vmap`), save it and compare it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.algorithms.acting import Expert, RunningEpisodes
from rl_training.algorithms.hyper import H, Hyper, NetworkHyper, OffPolicyHyper, parse_hyper
from rl_training.algorithms.phases import ReplayPhase, RolloutPhase, Step
from rl_training.algorithms.resets import Resets
from rl_training.algorithms.state import Aux, Choice, Obs, TrainState, Tree, count_rows
from rl_training.data.dataset import TransitionDataset
from rl_training.data.storage import Batch, Columns
from rl_training.errors import UserError
from rl_training.models.torsos import OwnFeatures
from rl_training.ops import rng
from rl_training.ops.grad import value_and_grad
from rl_training.ops.nets import Net
from rl_training.ops.optim import Optimizer
from rl_training.ops.tree import tree_items, tree_map
from rl_training.spec import ActionKind, EnvSpec, Kind

__all__ = ["Algorithm", "Aux", "Choice", "Obs", "TrainState", "Tree", "UpdateResult", "count_rows"]

Loss = Callable[[Tensor], tuple[Tensor, Any]]  # parameters -> the value to lower, and anything else

_INIT, _UPDATE, _ACT = 101, 102, 103  # random streams
_MANAGED = {"config", "algo", "env", "env_id", "env_fn", "total_timesteps"}  # arguments of the managed class


class UpdateResult(NamedTuple):
    metrics: dict[str, float]
    num_gradient_steps: int


class Algorithm(Generic[H]):
    """An algorithm's file defines its settings (`Hyper`) and a subclass with `networks`, `train_step`, `select_action`
    and `value`. `H` is the type of the settings, `self.hp`."""

    Hyper: ClassVar[type[Hyper]]
    name: ClassVar[str]
    defaults: ClassVar[dict[str, Any]] = {}  # a variant is the same class with other defaults
    kind_defaults: ClassVar[dict[Kind, dict[str, Any]]] = {}  # of runs in environments of a kind
    # The environments that it accepts.
    actions: ClassVar[tuple[ActionKind, ...]]
    bounded_actions: ClassVar[bool] = False  # a Box of actions must have bounds, which [-1, 1] is scaled to
    vector_observations: ClassVar[bool] = False  # observations must be plain vectors
    masks: ClassVar[bool] = False  # it obeys an environment's action mask
    # Its networks and its update.
    targets: tuple[str, ...] = ()  # networks that have a slow copy
    network_argument: ClassVar[str] = "model"  # the argument that takes a ready-made network
    only_network: ClassVar[str] = ""  # the name of the network, where there is only one
    compiled_as: ClassVar[Literal["graph", "unrolled", "pieces"]] = "graph"
    """The whole update as one graph, one graph with a recurrent loop written out (slow to compile), or only pieces."""
    kept_by_resets: ClassVar[tuple[str, ...]] = ("observations", "support")
    """Entries of `extra` that describe the data, not the networks, and that a reset therefore keeps."""
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
        self.given = given is not None  # were the networks handed in?
        self.setup()

    # --- what an algorithm defines -----------------------------------------------------------------------------

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        """Freshly initialised networks."""
        raise NotImplementedError

    def setup(self) -> None:
        """Derive things from the settings once: distributions, supports, more optimisers."""

    def init_extra(self) -> dict[str, Any]:
        """State beside networks and optimisers."""
        return {}

    def init_optimizers(self, params: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """One optimiser for each network; override for more."""
        return {name: self.optim.init(flat) for name, flat in params.items()}

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """One update, pure. `batch["discounts"]` already holds gamma^n x (1 - terminated)."""
        raise NotImplementedError

    def select_action(self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool) -> Choice:
        """(carry, actions [B, ...], extra columns to store), pure."""
        raise NotImplementedError

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        """The critic's estimate of the return from obs under the policy: [B]. Recurrent ones also take `carry=`."""
        raise UserError(f"{self.name} learns a policy only: it has no critic, so there is no value to return")

    def action_values(self, state: TrainState, obs: Obs, **carry: Any) -> Tensor:
        """Value of every action: [B, A]. Discrete value-based algorithms only; recurrent ones also take `carry=`."""
        raise UserError(f"{self.name} has no values per action; use value(obs)")

    def advice(self, metrics: dict[str, float]) -> str | None:
        """What the user should be told, given the metrics of an update; said once in a run."""
        return None

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

    def rollout_metrics(self, batch: Batch) -> dict[str, Tensor]:
        """On-policy: metrics of a prepared rollout, beside those of the updates."""
        return {}

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
        """Networks of a ready-made model: its direct children, or itself."""
        return {self.only_network: network} if self.only_network else dict(network.named_children())

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

    @cached_property
    def optim(self) -> Optimizer:
        return self.optimizer()

    def descend(
        self, state: TrainState, name: str, loss: Loss, rate: Tensor | float | None = None,
        optim: Optimizer | None = None,
    ) -> tuple[TrainState, Tensor, Any]:  # fmt: skip
        """(the state after one optimiser step of a network, its loss, what the loss returned beside it)"""
        return self._descend(state, name, loss, rate, optim)[:3]

    def descend_with_norm(self, state: TrainState, name: str, loss: Loss) -> tuple[TrainState, Tensor, Any, Tensor]:
        """As `descend`, and the norm of the gradient."""
        *after, grads = self._descend(state, name, loss, None, None)
        return (*after, torch.linalg.vector_norm(grads))

    def _descend(
        self, state: TrainState, name: str, loss: Loss, rate: Tensor | float | None, optim: Optimizer | None
    ) -> tuple[TrainState, Tensor, Any, Tensor]:
        value, aux, grads = value_and_grad(loss, state.params[name])
        rate = self.hp.learning_rate(state.progress) if rate is None else rate
        params, opt = (optim or self.optim).update(grads, state.opt[name], state.params[name], rate)
        after = state._replace(params={**state.params, name: params}, opt={**state.opt, name: opt})
        return after, value, aux, grads

    def make_part(self, kind: type[A]) -> A:
        """An algorithm of another kind that this one is built around, with the settings that both have."""
        shared = {
            name: getattr(self.hp, name) for name in kind.Hyper.model_fields if name in type(self.hp).model_fields
        }
        return kind(self.spec, seed=self.seed, device=self.device, num_envs=self.num_envs, **shared)

    def init_state(self, seed: int) -> TrainState:
        modules = self.modules if self.given else self._seeded_networks(seed)
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
            modules = self.networks(self.spec)
        own = (isinstance(part, OwnFeatures) for module in modules.values() for part in module.modules())
        if self.spec.features is not None and not any(own):
            raise UserError(f"{self.name} does not accept a features network")
        return modules

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


class Shell:
    """An algorithm used on its own, without a run. The algorithm is pure: what is remembered between calls of `update`
    and `act` is here."""

    def __init__(self, algorithm: Algorithm[Any]) -> None:
        self.algorithm = algorithm
        self.state = algorithm.init_state(algorithm.seed)
        self.episodes, self.resets = RunningEpisodes(algorithm), Resets(algorithm)
        self.last_td_errors: Tensor | None = None
        self._calls = 0  # of `act`

    @torch.no_grad()
    def update(self, batch: Batch, step: Step | None = None) -> UpdateResult:
        """One gradient step on a batch of arrays or tensors, by `train_step` or by another step of the algorithm."""
        algorithm = self.algorithm
        key = rng.fold(rng.key_from_seed(algorithm.seed, _UPDATE).to(algorithm.device), self.state.step)
        self.state, aux = (step or algorithm.train_step)(self.state, self.standard_batch(batch), key)
        if self.resets.wanted and self.resets.due(int(self.state.step)):
            self.state = self.resets.apply(self.state, algorithm.seed)
        self.last_td_errors = aux.priority
        self._write_modules()
        return UpdateResult({k: float(v) for k, v in aux.metrics.items()}, 1)

    @torch.no_grad()
    def act(self, obs: Any, *, deterministic: bool = False, episode_start: Any = None) -> np.ndarray:
        """Actions for a batch of encoded observations (or one observation)."""
        algorithm = self.algorithm
        x, seen = self._observation(obs), algorithm.spec.observation
        part, like = next((x[name], like) for name, like in seen.items()) if isinstance(seen, dict) else (x, seen)
        single = part.ndim == len(like.shape)
        key = rng.fold(rng.key_from_seed(algorithm.seed, _ACT).to(algorithm.device), self._calls)
        self._calls += 1
        x = tree_map(lambda one: one.unsqueeze(0), x) if single else x
        carry = self.episodes.read(count_rows(x), episode_start)
        carry, action, _ = algorithm.select_action(self.state, carry, x, key, explore=not deterministic)
        self.episodes.write(carry)
        return (action[0] if single else action).cpu().numpy()

    def state_dict(self) -> dict[str, Tensor]:
        """Every tensor of the state by name; the parameters of a network are one vector."""
        return {name: leaf.clone() for name, leaf in tree_items(self.state)}

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        names = dict(tree_items(self.state))
        wrong = set(names) ^ set(tensors) or {n for n, x in names.items() if tensors[n].numel() != x.numel()}
        if wrong:
            raise UserError(f"the state does not fit {type(self.algorithm).__name__}: {', '.join(sorted(wrong)[:5])}")
        items = iter([tensors[name] for name in names])
        self.state = tree_map(lambda old: next(items).to(old.device, old.dtype).reshape(old.shape).clone(), self.state)
        self._write_modules()

    def _write_modules(self) -> None:
        """Copy the parameters back into the networks that the user may hold."""
        for name, net in self.algorithm.nets.items():
            net.write_to(self.algorithm.modules[name], self.state.params[name])

    # --- a user's arrays as `train_step` reads them ----------------------------------------------------------------

    def standard_batch(self, batch: Batch) -> Batch:
        """The batch in the form that `train_step` reads: `dones` become discounts, weights default to 1."""
        out: Batch = self._tensor(batch)
        out |= {name: self._observation(out[name]) for name in ("obs", "next_obs") if name in out}
        columns, name = self.algorithm.batch_columns, self.algorithm.name
        if missing := sorted(set(columns) - set(out)):
            raise UserError(f"{name}: the batch needs {', '.join(missing)}; it has {', '.join(sorted(out))}")
        if not columns and "advantages" not in out:  # transitions; a batch that `prepare` made is complete
            out = self._standard_transitions(out)
        if "weights" not in out:
            out["weights"] = torch.ones(len(out[(*columns, "actions")[0]]), device=self.algorithm.device)
        return out

    def _standard_transitions(self, out: Batch) -> Batch:
        done = out.pop("dones", out.pop("terminated", None))
        rows = {name: count_rows(out[name]) for name in ("obs", "actions", "rewards") if name in out}
        if len(rows) < 3 or len(set(rows.values())) > 1:
            counted = ", ".join(f"{n} {name}" for name, n in rows.items())
            raise UserError(f"the batch needs as many obs as actions and rewards; it has {counted or 'none'}")
        if "discounts" not in out:
            if done is None:
                raise UserError("the batch needs 'discounts', or 'dones' (true where the episode terminated)")
            out["discounts"] = self.algorithm.hp.gamma * (1.0 - done.to(torch.float32))
        return {**out, "rewards": out["rewards"].to(torch.float32)}

    def _observation(self, x: Any) -> Obs:
        """On the device, as float32; images stay bytes."""

        def read(part: Tensor) -> Tensor:
            return part if part.dtype == torch.uint8 and part.ndim > 2 else part.to(torch.float32)

        return tree_map(read, self._tensor(x))

    def _tensor(self, x: Any) -> Any:
        """On the device; a dict part by part."""
        if isinstance(x, dict):
            return {name: self._tensor(part) for name, part in x.items()}
        tensor = torch.as_tensor(x, device=self.algorithm.device)
        return tensor.to(torch.float32) if tensor.dtype == torch.float64 else tensor
