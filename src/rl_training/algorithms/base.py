"""What an algorithm is: networks, a pure `train_step`, a pure `select_action`; and, written once, its stateful shell.

Everything an algorithm changes is in `TrainState`, a tree of tensors. `train_step` takes one and returns a new one, so
the runtime can compile it, capture it, run it for many seeds (`vmap`), save it and compare it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from fractions import Fraction
from typing import Any, ClassVar, Generic, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.algorithms.hyper import H, Hyper, OfflineHyper, parse_hyper
from rl_training.data.dataset import DatasetSource, TransitionDataset
from rl_training.data.source import Source
from rl_training.data.storage import Batch, Columns
from rl_training.errors import UserError
from rl_training.ops import rng
from rl_training.ops.nets import Net
from rl_training.ops.optim import Optimizer
from rl_training.ops.tree import tree_items, tree_leaves, tree_map
from rl_training.spec import ActionKind, ArraySpec, EnvSpec

Obs = Any  # a tensor, or a dict of tensors
Tree = Any

_INIT, _SHELL_UPDATE, _SHELL_ACT = 101, 102, 103  # random streams of this module


class TrainState(NamedTuple):
    """All that learning changes; every leaf a tensor, with a leading seed axis inside a study."""

    params: dict[str, Tensor]  # network -> flat vector
    target: dict[str, Tensor]  # the slow copies
    opt: dict[str, dict[str, Tensor]]  # optimiser moments
    extra: dict[str, Any]  # normalisers, temperatures, ...
    step: Tensor  # gradient steps taken, int64
    progress: Tensor  # share of the planned environment steps taken, for schedules


class Aux(NamedTuple):
    metrics: dict[str, Tensor]
    priority: Tensor | None = None  # per sample, for prioritised replay
    rows: Batch | None = None  # what the step gives to the sink of its phase


class Again(NamedTuple):
    """Go back to the phase `phase`, until `done(state)` holds for every seed."""

    phase: str
    done: Callable[[TrainState], Tensor]


class Phase(NamedTuple):
    """One kind of update in a training loop: `times` calls of `step` on batches of `source`, every `every` turns.

    On-policy, a turn is a rollout and `times` are epochs of shuffled minibatches of `batch_size` rows (none: the
    whole rollout at once, in order); `also: ("prior", n)` adds n rows of the algorithm's fixed data to each, and the
    source `prior` reads such rows alone, `times` batches of them. A `window` of more than one rollout keeps `columns`
    of that many for the phase, and `begin` may add columns to them before the first epoch.
    """

    name: str
    step: Callable[[TrainState, Batch, Tensor], tuple[TrainState, Aux]]
    source: str | None = "replay"  # none: the step needs no batch
    every: int = 1
    times: int | Callable[[int], int] = 1  # or a function of the environment steps taken
    rate: Fraction | None = None  # instead of `times`: calls a turn, on average; exact over any number of turns
    batch_size: int | None = None  # rows of a batch; none: the algorithm's own, and the whole rollout on-policy
    also: tuple[str, int] | None = None  # a second source, and the rows from it that follow in each batch
    sink: str | None = None  # a source that takes `aux.rows`; the step finds its "frontier", if any, in the batch
    at_start: bool = False  # also at the first turn that learns
    clock: Callable[[TrainState], Tensor] | None = None  # what batches change with; none: the step counter
    again: Again | None = None
    between: Callable[[TrainState, Batch, Tensor], tuple[TrainState, Aux]] | None = None
    period: int = 1  # `step` at the first of so many calls, `between` at the others: two graphs, none with idle work
    learns: bool = True  # its calls count as gradient steps
    window: int = 1
    columns: tuple[str, ...] = ()
    begin: Callable[[TrainState, Batch], Batch] | None = None

    def calls(self, env_steps: int, turn: int) -> int:
        if self.rate is not None:  # whole calls by the end of this turn, less those by the end of the last
            return turn * self.rate.numerator // self.rate.denominator - (
                (turn - 1) * self.rate.numerator // self.rate.denominator
            )
        return self.times(env_steps) if callable(self.times) else self.times

    @property
    def kinds(self) -> dict[str, Phase]:
        """The functions of a phase, by name, as phases of one function each."""
        if self.between is None:
            return {self.name: self}
        return {self.name: self, f"{self.name}/between": self._replace(step=self.between)}

    @property
    def sources(self) -> tuple[str, ...]:
        """Where its batches come from, and where its rows go."""
        names = (self.source, self.also[0] if self.also else None, self.sink)
        return tuple(dict.fromkeys(name for name in names if name is not None))


class Memory:
    """The carry of a policy that is used outside a run, where nobody else keeps it: one row for each observation of a
    batch. Feed-forward policies have none to keep."""

    def __init__(self, algorithm: Algorithm[Any]) -> None:
        self.algorithm = algorithm
        self.carry: Tree = None

    def reset(self) -> None:
        """Forget everything: the next observations are the first of their episodes."""
        self.carry = None

    def read(self, rows: int, episode_start: Any = None) -> Tree:
        """The carry to act on `rows` observations with; rows that begin an episode start anew."""
        device = self.algorithm.device
        fresh = tree_map(lambda x: x.to(device), self.algorithm.init_carry(rows))
        if not self.algorithm.recurrent or self.carry is None:
            return fresh
        held = len(tree_leaves(self.carry)[0])
        starts = None if episode_start is None else torch.as_tensor(np.asarray(episode_start, np.bool_)).to(device)
        if starts is not None and starts.numel() not in (1, rows):
            raise UserError(f"episode_start has {starts.numel()} entries for {rows} observations")
        if starts is not None and bool(starts.all()):
            return fresh
        if held != rows:
            raise UserError(
                f"{self.algorithm.name} remembers {held} running episode{'s' * (held > 1)}, and these are {rows}"
                f" observation{'s' * (rows > 1)}; call reset() where new episodes begin"
            )
        if starts is None:
            return self.carry
        return tree_map(lambda new, old: torch.where(rows_like(starts.expand(rows), old), new, old), fresh, self.carry)

    def write(self, carry: Tree) -> None:
        if self.algorithm.recurrent:
            self.carry = carry


def count_rows(obs: Obs) -> int:
    """Observations in a batch."""
    return tree_leaves(obs)[0].shape[0]  # not len(): that would fix the number in an exported graph


def rows_like(mask: Tensor, x: Tensor) -> Tensor:
    """A mask [N] that broadcasts against [N, ...]."""
    return mask.view(-1, *([1] * (x.ndim - 1)))


def check_normalisable(spec: EnvSpec, asked: bool) -> None:
    """Running statistics of observations are kept for vectors only."""
    observation = spec.unmasked.observation
    if asked and not (isinstance(observation, ArraySpec) and len(observation.shape) == 1):
        raise UserError(
            "normalize_observations needs a vector observation (images are scaled by the network): set it to false"
        )


class Expert(NamedTuple):
    """A trained policy that does not change."""

    algorithm: Algorithm[Any]
    state: TrainState

    def content_hash(self) -> str:
        """SHA-256 over the name of its algorithm and all tensors that it acts with."""
        digest = hashlib.sha256(self.algorithm.name.encode())
        for name, x in tree_items({"params": self.state.params, "extra": self.state.extra}):
            digest.update(f"{name} {x.dtype} {tuple(x.shape)};".encode() + x.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()


class UpdateResult(NamedTuple):
    metrics: dict[str, float]
    num_gradient_steps: int


class Algorithm(Generic[H]):
    """Base class. An algorithm's file defines `Hyper`, `networks`, `train_step` and `select_action`."""

    Hyper: ClassVar[type[Hyper]]
    name: ClassVar[str]
    actions: ClassVar[tuple[ActionKind, ...]]  # action spaces it can handle
    bounded_actions: ClassVar[bool] = False  # must a Box of actions have bounds, which [-1, 1] is scaled to?
    vector_observations: ClassVar[bool] = False  # must observations be plain vectors?
    masks: ClassVar[bool] = False  # does it keep to an environment's action mask?
    targets: tuple[str, ...] = ()  # networks that have a slow copy
    recurrent: ClassVar[bool] = False  # does the policy remember? Its carry is then more than exploration noise
    compiled_whole: ClassVar[bool] = True  # is its update compiled as one graph? If not, pieces of it are
    unrolled: ClassVar[bool] = False  # does that graph hold a recurrent loop written out? It then takes long to compile
    network_argument: ClassVar[str] = "model"  # name under which a ready-made network is handed in
    defaults: ClassVar[dict[str, Any]] = {}  # a variant is the same class with other defaults
    sees_rewards: ClassVar[bool] = False  # must its carry be told the reward of each step?
    reads: ClassVar[tuple[str, ...]] = ()  # columns of a dataset beside the usual ones: returns, next_actions
    takes: ClassVar[tuple[str, ...]] = ()  # columns of batches that are no transitions; the first has a row each
    dataset: TransitionDataset | None = None  # what the recipe in the settings stands for; set before training
    expert: Expert | None = None  # likewise

    def __init__(self, spec: EnvSpec | None = None, *, seed: int = 0, device: str | torch.device = "cpu",
                 num_envs: int = 1, **fields: Any) -> None:  # fmt: skip
        given: nn.Module | None = fields.pop(self.network_argument, None)
        self.hp: H = parse_hyper(self.Hyper, {**self.defaults, **fields}, self.name)  # type: ignore[assignment]
        if spec is None:
            if given is None:
                raise UserError(f"{type(self).__name__} needs an environment spec or {self.network_argument}=...")
            spec = self.spec_of(given)
        self.spec, self.seed, self.device, self.num_envs = spec, seed, torch.device(device), num_envs
        self.check(spec)
        self.modules = self.named_networks(given) if given is not None else self.seeded_networks(seed)
        self.nets = {name: Net(module).to(self.device) for name, module in self.modules.items()}
        self._given = given is not None
        self._state: TrainState | None = None
        self._acted = 0
        self.memory = Memory(self)
        self._td_errors: Tensor | None = None
        self.setup()

    # --- what an algorithm defines -----------------------------------------------------------------------------

    def networks(self, spec: EnvSpec) -> dict[str, nn.Module]:
        """Freshly initialised networks."""
        raise NotImplementedError

    def setup(self) -> None:
        """Things derived from the hyper-parameters once: optimisers, distributions, supports."""

    def init_extra(self) -> dict[str, Any]:
        """State beside networks and optimisers."""
        return {}

    def init_optimizers(self, params: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """One optimiser a network; override for more."""
        return {name: self.optimizer().init(flat) for name, flat in params.items()}

    def train_step(self, state: TrainState, batch: Batch, key: Tensor) -> tuple[TrainState, Aux]:
        """One update, pure. `batch["discounts"]` already holds gamma^n x (1 - terminated)."""
        raise NotImplementedError

    def select_action(
        self, state: TrainState, carry: Tree, obs: Obs, key: Tensor, *, explore: bool
    ) -> tuple[Tree, Tensor, dict[str, Tensor]]:
        """(carry, actions [B, ...], extra columns to store), pure."""
        raise NotImplementedError

    def prepare(self, state: TrainState, rollout: Batch, key: Tensor) -> tuple[TrainState, Batch]:
        """On-policy: turn a rollout [T, N, ...] into the batch [T * N, ...] that minibatches are cut from."""
        raise NotImplementedError

    def phases(self) -> tuple[Phase, ...]:
        """What a turn of the off-policy loop does. Most algorithms have one phase on replay; MBPO has three."""
        hp: Any = self.hp
        if isinstance(hp, OfflineHyper):
            return (Phase("update", self.train_step),)
        return (Phase("update", self.train_step, every=hp.train_freq, times=hp.updates_per_block(self.num_envs)),)

    def sources(self) -> dict[str, Source]:
        """Batches for phases beside the replay of the run, by the name that phases use."""
        return {}

    def prior(self) -> tuple[Source, float] | None:
        """Fixed data that the phases on `mixed` see beside the replay, and its share of each batch. On-policy phases
        name it `prior`, with a number of rows."""
        return None

    def offline_source(self) -> Source:
        """Offline: how batches are cut from the dataset."""
        assert self.dataset is not None
        return DatasetSource(self.dataset, self.hp.gamma, self.reads)

    def beside_prior(self, replay: Any) -> Source:
        """The replay as the phases on `mixed` see it."""
        return replay  # type: ignore[no-any-return]

    def init_carry(self, batch: int) -> Tree:
        """Recurrent state at the start of an episode; () for feed-forward policies."""
        return ()

    def observe(self, carry: Tree, rewards: Tensor) -> Tree:
        """The carry after a step that paid `rewards` [B]; called where `sees_rewards`."""
        return carry

    def acted(self, carry: Tree, actions: Tensor) -> Tree:
        """The carry after `select_action` when other actions [B, ...] were taken than those it chose."""
        return carry

    def extra_columns(self) -> Columns:
        """What `select_action` gives beside the actions, to be stored with each transition: shape and type by name."""
        return {}

    def replay(self, num_envs: int) -> Any:
        """Off-policy: a store of its own kind (sequences); None for transitions, as the hyper-parameters say."""
        return None

    def value(self, state: TrainState, obs: Obs) -> Tensor:
        """The critic's estimate of the return from obs under the policy: [B]. Recurrent ones also take `carry=`."""
        raise NotImplementedError

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
        """Fail at construction, in the user's words."""
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
        hp: Any = self.hp
        fields = {"kind": hp.optimizer, "eps": hp.adam_eps, "weight_decay": hp.weight_decay,
                  "max_grad_norm": hp.max_grad_norm or None}  # fmt: skip
        return Optimizer(**{**fields, **changes})

    def seeded_networks(self, seed: int) -> dict[str, nn.Module]:
        """Networks whose initial weights depend on the seed alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng.key_from_seed(seed, _INIT)))
            return self.networks(self.spec)

    def init_state(self, seed: int) -> TrainState:
        modules = self.modules if self._given else self.seeded_networks(seed)
        params = {name: net.flatten(modules[name]).to(self.device) for name, net in self.nets.items()}
        return TrainState(
            params=params,
            target={name: params[name].clone() for name in self.targets},
            opt=self.init_optimizers(params),
            extra=tree_map(lambda x: x.to(self.device), self.init_extra()),
            step=torch.zeros((), dtype=torch.int64, device=self.device),
            progress=torch.zeros((), device=self.device),
        )

    # --- the stateful shell: an algorithm object used on its own -------------------------------------------------

    @property
    def state(self) -> TrainState:
        if self._state is None:
            self._state = self.init_state(self.seed)
        return self._state

    @state.setter
    def state(self, value: TrainState) -> None:
        self._state = value

    def _observation(self, x: Any) -> Obs:
        """On the device, and numbers of any kind as the float32 that networks read; images stay bytes."""

        def read(part: Tensor) -> Tensor:
            return part if part.dtype == torch.uint8 and part.ndim > 2 else part.to(torch.float32)

        return tree_map(read, self._tensor(x))

    def _tensor(self, x: Any) -> Any:
        """On the device; a dict (mixed observations) part by part."""
        if isinstance(x, dict):
            return {name: self._tensor(part) for name, part in x.items()}
        tensor = torch.as_tensor(x, device=self.device)
        return tensor.to(torch.float32) if tensor.dtype == torch.float64 else tensor

    def standard_batch(self, batch: Batch) -> Batch:
        """A user's batch in the form that `train_step` reads: `dones` become discounts, weights default to 1."""
        out: Batch = self._tensor(batch)
        out |= {name: self._observation(out[name]) for name in ("obs", "next_obs") if name in out}
        if missing := sorted(set(self.takes) - set(out)):
            raise UserError(f"{self.name}: the batch needs {', '.join(missing)}; it has {', '.join(sorted(out))}")
        if not self.takes and "advantages" not in out:  # raw transitions; what `prepare` made of a rollout is complete
            done = out.pop("dones", out.pop("terminated", None))
            rows = {name: count_rows(out[name]) for name in ("obs", "actions", "rewards") if name in out}
            if len(rows) < 3 or len(set(rows.values())) > 1:
                counted = ", ".join(f"{n} {name}" for name, n in rows.items())
                raise UserError(f"the batch needs as many obs as actions and rewards; it has {counted or 'none'}")
            if "discounts" not in out:
                if done is None:
                    raise UserError("the batch needs 'discounts', or 'dones' (true where the episode terminated)")
                out["discounts"] = self.hp.gamma * (1.0 - done.to(torch.float32))
            out["rewards"] = out["rewards"].to(torch.float32)
        if "weights" not in out:
            out["weights"] = torch.ones(len(out[(*self.takes, "actions")[0]]), device=self.device)
        return out

    @torch.no_grad()
    def update(self, batch: Batch, *, global_step: int = 0) -> UpdateResult:
        """One gradient step on a batch of arrays or tensors; returns plain numbers."""
        key = rng.fold(rng.key_from_seed(self.seed, _SHELL_UPDATE).to(self.device), self.state.step)
        self.state, aux = self.train_step(self.state, self.standard_batch(batch), key)
        self._td_errors = aux.priority
        for name, net in self.nets.items():
            net.write_to(self.modules[name], self.state.params[name])
        return UpdateResult({k: float(v) for k, v in aux.metrics.items()}, 1)

    @property
    def last_td_errors(self) -> Tensor | None:
        """Absolute errors of the last update's samples: the priorities of prioritised replay."""
        return self._td_errors

    @torch.no_grad()
    def act(self, obs: Any, *, deterministic: bool = False, episode_start: Any = None) -> np.ndarray:
        """Actions for a batch of encoded observations (or one observation). Recurrent policies remember from call to
        call, until `memory.reset()` or where `episode_start` is true."""
        x, seen = self._observation(obs), self.spec.observation
        part, like = next((x[name], like) for name, like in seen.items()) if isinstance(seen, dict) else (x, seen)
        single = part.ndim == len(like.shape)
        key = rng.fold(rng.key_from_seed(self.seed, _SHELL_ACT).to(self.device), self._acted)
        self._acted += 1
        x = tree_map(lambda one: one.unsqueeze(0), x) if single else x
        carry = self.memory.read(count_rows(x), episode_start)
        carry, action, _ = self.select_action(self.state, carry, x, key, explore=not deterministic)
        self.memory.write(carry)
        return (action[0] if single else action).cpu().numpy()

    def state_dict(self) -> dict[str, Tensor]:
        """Every tensor of the state by name; the parameters of a network are one vector."""
        return {name: leaf.clone() for name, leaf in tree_items(self.state)}

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        names = dict(tree_items(self.state))
        wrong = set(names) ^ set(tensors) or {n for n, x in names.items() if tensors[n].numel() != x.numel()}
        if wrong:
            raise UserError(f"the state does not fit {type(self).__name__}: {', '.join(sorted(wrong)[:5])}")
        items = iter([tensors[name] for name in names])
        self.state = tree_map(lambda old: next(items).to(old.device, old.dtype).reshape(old.shape).clone(), self.state)
        for name, net in self.nets.items():
            net.write_to(self.modules[name], self.state.params[name])
