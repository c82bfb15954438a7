"""The table of all algorithms. It imports nothing heavy, so that `rl-training --help` and `list` answer at once.

To add an algorithm, add one line here. Other packages use the entry-point group `rl_training.algorithms`: each entry
point has the algorithm's name and refers to an `Entry`, or to a function that returns one.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rl_training.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["Entry", "entries", "entry", "entry_of_class", "presets", "register", "results"]

DISCRETE = ("discrete",)
BOX = ("box",)
ANY = ("discrete", "multi_discrete", "multi_binary", "box")


@dataclass(frozen=True)
class Entry:
    name: str  # in configs and on the command line
    class_name: str  # in Python
    target: str  # module:Class
    family: str
    loop: str
    actions: tuple[str, ...]
    summary: str
    defaults: Mapping[str, Any] = field(default_factory=dict)  # a variant is the same class with different defaults

    def load(self) -> type[Any]:
        """The algorithm's class. A variant is a subclass that differs only in its defaults."""
        return _load(self.name)


def _family(family: str, folder: str, loop: str, actions: tuple[str, ...]) -> Callable[..., Entry]:
    """Makes entries of one family. `target` is module:Class in the family's folder; other keywords are defaults."""

    def make(
        name: str, class_name: str, target: str, summary: str, *, loop: str = loop, actions: tuple[str, ...] = actions,
        **defaults: Any,
    ) -> Entry:  # fmt: skip
        target = f"rl_training.algorithms.{folder}.{target}"
        return Entry(name, class_name, target, family, loop, actions, summary, defaults)

    return make


_value = _family("value-based", "value", "off_policy", DISCRETE)
_on_policy = _family("on-policy", "policy_gradient", "on_policy", ANY)
_evolution = _family("evolution", "evolution", "evolution", ANY)
_continuous = _family("continuous control", "continuous", "off_policy", BOX)
_model_based = _family("model-based", "model_based", "off_policy", BOX)
_world_model = _family("model-based", "world_model", "off_policy", ("discrete", "box"))
_imitation = _family("imitation", "imitation", "on_policy", ANY)
_offline = _family("offline", "offline", "offline", BOX)


_TABLE: tuple[Entry, ...] = (
    _value("dqn", "DQN", "dqn:DQN", "Deep Q-learning (Mnih et al. 2015)"),
    _value("double_dqn", "DoubleDQN", "dqn:DQN", "DQN with double Q-learning (van Hasselt et al. 2016)", double=True),
    _value("dueling_dqn", "DuelingDQN", "dqn:DQN",
           "DQN with value and advantage streams (Wang et al. 2016)", dueling=True),
    _value("noisy_dqn", "NoisyDQN", "dqn:DQN",
           "DQN with noisy weights for exploration (Fortunato et al. 2018)", noisy=True),
    _value("prioritized_dqn", "PrioritizedDQN", "dqn:DQN",
           "DQN with prioritised replay (Schaul et al. 2016)", prioritized=True),
    _value("n_step_dqn", "NStepDQN", "dqn:DQN", "DQN with 3-step returns", n_step=3),
    _value("munchausen_dqn", "MunchausenDQN", "dqn:DQN",
           "DQN with the log-policy added to the reward (Vieillard et al. 2020)",
           target_rule="munchausen"),
    _value("c51_dqn", "C51DQN", "c51:C51DQN", "Categorical distribution of the return (Bellemare et al. 2017)"),
    _value("rainbow_dqn", "RainbowDQN", "c51:C51DQN",
           "C51 with double, dueling, noisy, prioritised and 3-step learning (Hessel et al. 2018)",
           double=True, dueling=True, noisy=True, prioritized=True, n_step=3),
    _value("apex_dqn", "ApexDQN", "dqn:DQN",
           "Double, dueling, prioritised 3-step DQN with a ladder of exploration rates (Horgan et al. 2018)",
           double=True, dueling=True, prioritized=True, n_step=3, exploration_initial_eps=0.4,
           exploration_final_eps=0.4, exploration_ladder=7.0),
    _value("bootstrapped_dqn", "BootstrappedDQN", "bootstrapped:BootstrappedDQN",
           "DQN with heads that take turns to explore for whole episodes (Osband et al. 2016)"),
    _value("rnd_dqn", "RNDDQN", "curious_dqn:CuriousDQN",
           "DQN with a bonus for what a random network's imitator cannot predict (Burda et al. 2019)"),
    _value("icm_dqn", "ICMDQN", "curious_dqn:CuriousDQN",
           "DQN with a bonus for transitions that a learned model cannot predict (Pathak et al. 2017)",
           bonus="icm", normalize_bonus=False),
    _value("bbf", "BBF", "bbf:BBF",
           "Rainbow with a wide network, self-prediction and resets (Schwarzer et al. 2023)"),
    _value("qr_dqn", "QRDQN", "qr_dqn:QRDQN", "Quantile regression of the return (Dabney et al. 2018)"),
    _value("iqn", "IQN", "iqn:IQN", "Implicit quantile networks (Dabney et al. 2018)"),
    _value("fqf", "FQF", "fqf:FQF", "Quantiles at learned fractions (Yang et al. 2019)"),
    _value("discrete_sac", "DiscreteSAC", "discrete_sac:DiscreteSAC",
           "Soft actor-critic with exact expectations over discrete actions (Christodoulou 2019)"),
    _value("pqn", "PQN", "pqn:PQN",
           "Q-learning from rollouts, without replay and target network (Gallici et al. 2024)", loop="on_policy"),
    _value("drqn", "DRQN", "drqn:DRQN", "Deep Q-learning with a recurrent network (Hausknecht & Stone 2015)"),
    _value("r2d2", "R2D2", "drqn:DRQN",
           "DRQN with stored states, burn-in, rescaled values and prioritised sequences (Kapturowski et al. 2019)",
           stored_state=True, burn_in=10, sequence_length=20, overlap=10, value_rescaling=True, double=True,
           dueling=True, prioritized=True, prioritized_alpha=0.9, prioritized_beta=0.6, n_step=5),
    _value("acer", "ACER", "acer:ACER",
           "Actor-critic with replayed rollouts, Retrace and a trust region (Wang et al. 2017)"),
    _on_policy("ppo", "PPO", "ppo:PPO", "Proximal policy optimisation (Schulman et al. 2017)"),
    _on_policy("recurrent_ppo", "RecurrentPPO", "recurrent_ppo:RecurrentPPO",
               "PPO with a recurrent actor and critic (LSTM or GRU)"),
    _on_policy("a2c", "A2C", "a2c:A2C", "Synchronous advantage actor-critic (Mnih et al. 2016)"),
    _on_policy("a3c", "A3C", "a2c:A2C",
               "Actors send asynchronous gradients; in one process it is a2c (Mnih et al. 2016)"),
    _on_policy("trpo", "TRPO", "trpo:TRPO", "Trust-region policy optimisation (Schulman et al. 2015)"),
    _on_policy("acktr", "ACKTR", "acktr:ACKTR",
               "A2C with Kronecker-factored natural gradients in a trust region (Wu et al. 2017)"),
    _on_policy("impala", "IMPALA", "impala:IMPALA", "Lagging actors with V-trace correction (Espeholt et al. 2018)"),
    _on_policy("appo", "APPO", "appo:APPO", "PPO on rollouts of lagging actors, with V-trace correction"),
    _on_policy("ppg", "PPG", "ppg:PPG", "PPO with auxiliary phases that distil value features (Cobbe et al. 2021)"),
    _on_policy("rnd", "RND", "curious:CuriousPPO",
               "PPO with a bonus for what a random network's imitator cannot predict (Burda et al. 2019)"),
    _on_policy("icm", "ICM", "curious:CuriousPPO",
               "PPO with a bonus for transitions that a learned model cannot predict (Pathak et al. 2017)",
               bonus="icm", gamma=0.99, extrinsic_coef=1.0, episodic_bonus=True, normalize_bonus=False),
    _evolution("ars", "ARS", "ars:ARS", "Augmented random search over (linear) policies (Mania et al. 2018)"),
    _evolution("openai_es", "OpenAIES", "openai_es:OpenAIES", "Rank-based evolution strategies (Salimans et al. 2017)"),
    _continuous("sac", "SAC", "sac:SAC", "Soft actor-critic with automatic temperature (Haarnoja et al. 2018)"),
    _continuous("simba", "SimBa", "sac:SAC",
                "SAC with residual LayerNorm networks, normalised observations and weight decay (Lee et al. 2024)",
                network="simba", hidden_sizes=(128,), critic_hidden_sizes=(512, 512), normalize_observations=True,
                learning_rate=1e-4, optimizer="adamw", weight_decay=0.01, gradient_steps=2, learning_starts=5_000,
                ent_coef_init=0.01, entropy_per_action=-0.5),
    _continuous("ddpg", "DDPG", "td3:TD3", "Deep deterministic policy gradient (Lillicrap et al. 2016)",
                num_critics=1, policy_delay=1, target_policy_noise=0.0),
    _continuous("apex_ddpg", "ApexDDPG", "td3:TD3",
                "Prioritised 5-step DDPG for many actors (Horgan et al. 2018)",
                num_critics=1, policy_delay=1, target_policy_noise=0.0, prioritized=True, n_step=5,
                exploration_noise=0.3),
    _continuous("td3", "TD3", "td3:TD3", "Twin delayed deterministic policy gradient (Fujimoto et al. 2018)"),
    _continuous("fast_td3", "FastTD3", "fast_td3:FastTD3",
                "TD3 with many environments, large batches and categorical critics (Seo et al. 2025)"),
    _continuous("drq_v2", "DrQV2", "drq_v2:DrQV2",
                "DDPG with shifted images, one encoder and 3-step returns (Yarats et al. 2021)"),
    _continuous("naf", "NAF", "naf:NAF", "Q-learning with normalised advantage functions (Gu et al. 2016)"),
    _continuous("d4pg", "D4PG", "d4pg:D4PG", "Distributional deterministic policy gradient (Barth-Maron et al. 2018)"),
    _continuous("redq", "REDQ", "redq:REDQ", "SAC with randomised ensembles of critics (Chen et al. 2021)"),
    _continuous("droq", "DroQ", "redq:REDQ", "SAC with dropout and LayerNorm critics (Hiraoka et al. 2022)",
                num_critics=2, dropout=0.01, layer_norm=True),
    _continuous("tqc", "TQC", "tqc:TQC", "SAC with truncated quantile critics (Kuznetsov et al. 2020)"),
    _continuous("crossq", "CrossQ", "crossq:CrossQ", "SAC with batch norm and no target networks (Bhatt et al. 2024)"),
    _continuous("bro", "BRO", "bro:BRO",
                "SAC with large quantile critics, resets and an optimistic policy that explores (Nauman et al. 2024)"),
    _continuous("rlpd", "RLPD", "rlpd:RLPD", "SAC on batches of half prior, half new data (Ball et al. 2023)"),
    _continuous("mpo", "MPO", "mpo:MPO", "Maximum a posteriori policy optimisation (Abdolmaleki et al. 2018)"),
    _model_based("mbpo", "MBPO", "mbpo:MBPO", "SAC on short rollouts of a learned model (Janner et al. 2019)"),
    _model_based("pets", "PETS", "pets:PETS",
                 "Planning with trajectories sampled from a learned ensemble (Chua et al. 2018)"),
    _imitation("gail", "GAIL", "gail:GAIL", "Generative adversarial imitation with PPO (Ho & Ermon 2016)"),
    _imitation("airl", "AIRL", "airl:AIRL", "GAIL with a discriminator that learns a reward (Fu et al. 2018)"),
    _imitation("dagger", "DAgger", "dagger:DAgger",
               "Cloning of an expert's actions in the states that the learner visits", loop="off_policy"),
    _imitation("dac", "DAC", "dac:DAC",
               "GAIL off-policy: TD3 with a penalised discriminator (Kostrikov et al. 2019)",
               loop="off_policy", actions=BOX),
    _imitation("sqil", "SQIL", "sqil:SQIL",
               "SAC with reward 1 on an expert's transitions and 0 on its own (Reddy et al. 2020)",
               loop="off_policy", actions=BOX),
    _imitation("discrete_sqil", "DiscreteSQIL", "sqil:DiscreteSQIL",
               "Soft Q-learning with reward 1 on an expert's transitions and 0 on its own (Reddy et al. 2020)",
               loop="off_policy", actions=DISCRETE),
    _imitation("iq_learn", "IQLearn", "iq_learn:IQLearn",
               "Inverse soft Q-learning from an expert's and its own transitions (Garg et al. 2021)",
               loop="off_policy", actions=BOX),
    _imitation("iq_learn_offline", "IQLearnOffline", "iq_learn:IQLearnOffline",
               "Inverse soft Q-learning from an expert's transitions alone (Garg et al. 2021)",
               loop="offline", actions=BOX),
    _imitation("discrete_iq_learn", "DiscreteIQLearn", "iq_learn:DiscreteIQLearn",
               "IQ-Learn for discrete actions (Garg et al. 2021)", loop="off_policy", actions=DISCRETE),
    _imitation("discrete_iq_learn_offline", "DiscreteIQLearnOffline", "iq_learn:DiscreteIQLearnOffline",
               "IQ-Learn for discrete actions from an expert's transitions alone (Garg et al. 2021)",
               loop="offline", actions=DISCRETE),
    _world_model("dreamer", "Dreamer", "dreamer:Dreamer",
                 "Actor-critic inside a learned world model: DreamerV3 (Hafner et al. 2023)"),
    _world_model("td_mpc2", "TDMPC2", "td_mpc2:TDMPC2",
                 "Planning in a learned latent space with a terminal value (Hansen et al. 2024)", actions=BOX),
    _offline("mopo", "MOPO", "mopo:MOPO", "MBPO on a dataset, penalised for model uncertainty (Yu et al. 2020)"),
    _offline("combo", "COMBO", "combo:COMBO",
             "Offline MBPO with critics that are conservative on model rollouts (Yu et al. 2021)"),
    _offline("bc", "BC", "bc:BC", "Behavioural cloning: regression on the actions of a dataset", actions=ANY),
    _offline("td3_bc", "TD3BC", "td3_bc:TD3BC", "TD3 with a behavioural-cloning term (Fujimoto & Gu 2021)"),
    _offline("iql", "IQL", "iql:IQL", "Implicit Q-learning by expectile regression (Kostrikov et al. 2022)"),
    _offline("cql", "CQL", "cql:CQL", "Conservative Q-learning (Kumar et al. 2020)"),
    _offline("xql", "XQL", "xql:XQL", "IQL with Gumbel regression of the value (Garg et al. 2023)"),
    _offline("awac", "AWAC", "awac:AWAC", "Actor-critic with advantage-weighted regression (Nair et al. 2020)"),
    _offline("crr", "CRR", "awac:AWAC", "Critic-regularised regression (Wang et al. 2020)",
             weighting="binary", num_actions=4),
    _offline("edac", "EDAC", "edac:EDAC", "SAC with an ensemble of diversified critics (An et al. 2021)"),
    _offline("rebrac", "ReBRAC", "rebrac:ReBRAC", "TD3+BC with penalties in actor and critic (Tarasov et al. 2023)"),
    _offline("cal_ql", "CalQL", "cql:CalQL", "CQL bounded below by the data's returns (Nakamoto et al. 2023)"),
    _offline("bcq", "BCQ", "bcq:BCQ", "Q-learning limited to actions likely under the dataset (Fujimoto et al. 2019)"),
    _offline("fql", "FQL", "fql:FQL",
             "A one-step policy distilled from a flow that clones the data (Park et al. 2025)"),
    _offline("marwil", "MARWIL", "marwil:MARWIL", "Advantage-weighted imitation (Wang et al. 2018)", actions=ANY),
    _offline("discrete_cql", "DiscreteCQL", "discrete_cql:DiscreteCQL",
             "Conservative Q-learning for discrete actions (Kumar et al. 2020)", actions=DISCRETE),
    _offline("discrete_iql", "DiscreteIQL", "discrete_iql:DiscreteIQL",
             "Implicit Q-learning for discrete actions (Kostrikov et al. 2022)", actions=DISCRETE),
    _offline("decision_transformer", "DecisionTransformer", "decision_transformer:DecisionTransformer",
             "Transformer that predicts actions from a desired return (Chen et al. 2021)", actions=("box", "discrete")),
    _offline("iql_online", "IQLOnline", "iql:IQLOnline", "IQL fine-tuned in the environment", loop="off_policy"),
    _offline("awac_online", "AWACOnline", "awac:AWACOnline", "AWAC fine-tuned in the environment", loop="off_policy"),
    _offline("cal_ql_online", "CalQLOnline", "cql:CalQLOnline", "Cal-QL fine-tuned in the environment",
             loop="off_policy"),
)  # fmt: skip


@lru_cache(maxsize=1)
def entries() -> dict[str, Entry]:
    """All algorithms by name: the built-in ones, then those of installed plug-ins, which cannot replace them."""
    table = {entry.name: entry for entry in _TABLE}
    from importlib.metadata import entry_points

    for point in entry_points(group="rl_training.algorithms"):
        try:
            found = _plug_in(point)
            if found.name in table:
                raise UserError(f"the name '{found.name}' is taken")
        except (Exception, SystemExit) as error:  # a faulty plug-in must not break the command line
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            reason = reason.removeprefix("UserError: ")
            warnings.warn(f"the plug-in {point.name} ({point.value}) was not loaded: {reason}", stacklevel=2)
        else:
            table[found.name] = found
    return table


def _plug_in(point: EntryPoint) -> Entry:
    found = point.load()
    found = found if isinstance(found, Entry) else found()
    if not isinstance(found, Entry) or found.name != point.name:
        raise UserError(f"the entry point must be, or return, a registry Entry named '{point.name}'")
    return found


C = TypeVar("C", bound=type[Any])


def register(cls: C) -> C:
    """Add an algorithm of this process, as an installed plug-in would. Use it as a decorator; `algorithm_class(name)`
    is then its managed class. The loop is that of the algorithm it derives from."""
    bases = [f"{base.__module__}:{base.__name__}" for base in cls.__mro__[1:]]
    like = next((known for target in bases for known in _TABLE if known.target == target), None)
    if like is None:
        raise UserError(f"{cls.__name__} derives from no algorithm in `rl-training list`, so its loop is not known")
    if cls.name in entries() and cls.name not in _REGISTERED:
        raise UserError(f"the name '{cls.name}' is taken: give {cls.__name__} another `name`")
    summary = (cls.__doc__ or f"{cls.__name__}, like {like.name}").strip().splitlines()[0]
    target = f"{cls.__module__}:{cls.__qualname__}"
    entries()[cls.name] = Entry(cls.name, cls.__name__, target, like.family, like.loop, cls.actions, summary)
    _REGISTERED[cls.name] = cls
    return cls


_REGISTERED: dict[str, type[Any]] = {}


def entry(name: str) -> Entry:
    table = entries()
    if name not in table:
        raise UserError(f"unknown algorithm '{name}'.{did_you_mean(name, table)} See `rl-training list`")
    return table[name]


def entry_of_class(class_name: str) -> Entry | None:
    return next((e for e in entries().values() if e.class_name == class_name), None)


def resolve(target: str) -> Any:
    """Import the object that `target` names as `module:attribute`."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def train_function(name: str) -> Any:
    """The function `train_<name>(config)`. The algorithms package exports it, but its code is in the API."""
    return resolve("rl_training.api.managed:train_function")(name)


def load_transition_dataset(*arguments: Any, **fields: Any) -> Any:
    """Load or make a dataset. Exported by the data package; its code is in experiment, as recipes may train agents."""
    return resolve("rl_training.experiment.run.transition_data:load_transition_dataset")(*arguments, **fields)


def _load(name: str) -> type[Any]:
    return _REGISTERED.get(name) or _import(name)


@cache
def _import(name: str) -> type[Any]:
    found = entry(name)
    cls: type[Any] = resolve(found.target)
    if found.defaults or cls.name != name:
        members = {
            "name": name,
            "defaults": dict(found.defaults),
            "__doc__": found.summary,
            "__module__": cls.__module__,
        }
        cls = type(found.class_name, (cls,), members)
    return cls


def presets(name: str | None = None) -> list[str]:
    """Names of the packaged presets, `algo/env`."""
    root = resources.files("rl_training") / "assets" / "configs"
    found = [
        f"{folder.name}/{file.name.removesuffix('.yaml')}"
        for folder in root.iterdir()
        if folder.is_dir() and name in (None, folder.name)
        for file in folder.iterdir()
        if file.name.endswith(".yaml")
    ]
    return sorted(found)


def results(folder: Path | None = None) -> dict[str, list[dict[str, Any]]]:
    """The results that `rl-training verify` has written, by algorithm. They are read from `folder`, or else from
    `results` in the working directory, or else from the copy shipped with the package or its repository."""
    package = Path(__file__).parent
    places = [folder] if folder else [Path("results"), package / "assets/results", package.parents[1] / "results"]
    found: dict[str, list[dict[str, Any]]] = {}
    for path in next(filter(None, (sorted(place.glob("*__*.json")) for place in places)), []):
        try:
            row = json.loads(path.read_text())
            found.setdefault(row["algo"], []).append(row)
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found
