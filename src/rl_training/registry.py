"""The one table of algorithms. It imports nothing heavy: `rl-training --help` and `list` must answer at once.

Adding an algorithm is one line here. Other packages add theirs through the entry-point group `rl_training.algorithms`:
each entry point is named after the algorithm and points to an `Entry`, or to a function that returns one.
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
from typing import TYPE_CHECKING, Any

from rl_training.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["Entry", "entries", "entry", "entry_of_class", "presets", "results"]

DISCRETE = ("discrete",)
BOX = ("box",)
ANY = ("discrete", "multi_discrete", "multi_binary", "box")


@dataclass(frozen=True)
class Entry:
    name: str  # as in configs and on the command line
    class_name: str  # as in Python
    target: str  # module:Class
    family: str
    loop: str
    actions: tuple[str, ...]
    summary: str
    defaults: Mapping[str, Any] = field(default_factory=dict)  # a variant is the same class with other defaults

    def load(self) -> type[Any]:
        """The algorithm's class; a variant gets a subclass that differs in its defaults only."""
        return _load(self.name)


def _family(family: str, folder: str, loop: str, actions: tuple[str, ...]) -> Callable[..., Entry]:
    """Entries of one family: `target` is module:Class in the family's folder; other keywords are defaults."""

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
           "DQN that explores by noisy weights (Fortunato et al. 2018)", noisy=True),
    _value("prioritized_dqn", "PrioritizedDQN", "dqn:DQN",
           "DQN with prioritised replay (Schaul et al. 2016)", prioritized=True),
    _value("n_step_dqn", "NStepDQN", "dqn:DQN", "DQN with 3-step returns", n_step=3),
    _value("munchausen_dqn", "MunchausenDQN", "dqn:DQN",
           "DQN with the log-policy added to the reward (Vieillard et al. 2020)",
           target_rule="munchausen"),
    _value("c51_dqn", "C51DQN", "c51:C51DQN", "Categorical distribution of the return (Bellemare et al. 2017)"),
    _value("rainbow_dqn", "RainbowDQN", "c51:C51DQN",
           "C51, double, dueling, noisy, prioritised and 3-step together (Hessel et al. 2018)",
           double=True, dueling=True, noisy=True, prioritized=True, n_step=3),
    _value("qr_dqn", "QRDQN", "qr_dqn:QRDQN", "Quantile regression of the return (Dabney et al. 2018)"),
    _value("iqn", "IQN", "iqn:IQN", "Implicit quantile networks (Dabney et al. 2018)"),
    _value("fqf", "FQF", "fqf:FQF", "Quantiles at learned fractions (Yang et al. 2019)"),
    _value("discrete_sac", "DiscreteSAC", "discrete_sac:DiscreteSAC",
           "Soft actor-critic with exact expectations over discrete actions (Christodoulou 2019)"),
    _value("drqn", "DRQN", "drqn:DRQN", "Deep Q-learning with a recurrent network (Hausknecht & Stone 2015)"),
    _value("r2d2", "R2D2", "drqn:DRQN",
           "DRQN with stored states, burn-in, rescaled values and prioritised sequences (Kapturowski et al. 2019)",
           stored_state=True, burn_in=10, sequence_length=20, overlap=10, value_rescaling=True, double=True,
           dueling=True, prioritized=True, prioritized_alpha=0.9, prioritized_beta=0.6, n_step=5),
    _on_policy("ppo", "PPO", "ppo:PPO", "Proximal policy optimisation (Schulman et al. 2017)"),
    _on_policy("recurrent_ppo", "RecurrentPPO", "recurrent_ppo:RecurrentPPO",
               "PPO whose actor and critic remember, by LSTM or GRU"),
    _on_policy("a2c", "A2C", "a2c:A2C", "Synchronous advantage actor-critic (Mnih et al. 2016)"),
    _on_policy("trpo", "TRPO", "trpo:TRPO", "Trust-region policy optimisation (Schulman et al. 2015)"),
    _on_policy("impala", "IMPALA", "impala:IMPALA", "Lagging actors corrected by V-trace (Espeholt et al. 2018)"),
    _on_policy("ppg", "PPG", "ppg:PPG", "PPO with auxiliary phases that share value features (Cobbe et al. 2021)"),
    _evolution("ars", "ARS", "ars:ARS", "Augmented random search over (linear) policies (Mania et al. 2018)"),
    _evolution("openai_es", "OpenAIES", "openai_es:OpenAIES", "Evolution strategies on ranks (Salimans et al. 2017)"),
    _continuous("sac", "SAC", "sac:SAC", "Soft actor-critic with automatic temperature (Haarnoja et al. 2018)"),
    _continuous("ddpg", "DDPG", "td3:TD3", "Deep deterministic policy gradient (Lillicrap et al. 2016)",
                num_critics=1, policy_delay=1, target_policy_noise=0.0),
    _continuous("td3", "TD3", "td3:TD3", "Twin delayed deterministic policy gradient (Fujimoto et al. 2018)"),
    _continuous("naf", "NAF", "naf:NAF", "Q-learning with normalised advantage functions (Gu et al. 2016)"),
    _continuous("d4pg", "D4PG", "d4pg:D4PG", "Distributional deterministic policy gradient (Barth-Maron et al. 2018)"),
    _continuous("redq", "REDQ", "redq:REDQ", "SAC with randomised ensembles of critics (Chen et al. 2021)"),
    _continuous("droq", "DroQ", "redq:REDQ", "SAC with dropout and LayerNorm critics (Hiraoka et al. 2022)",
                num_critics=2, dropout=0.01, layer_norm=True),
    _continuous("tqc", "TQC", "tqc:TQC", "SAC with truncated quantile critics (Kuznetsov et al. 2020)"),
    _continuous("crossq", "CrossQ", "crossq:CrossQ", "SAC with batch normalisation, no targets (Bhatt et al. 2024)"),
    _continuous("rlpd", "RLPD", "rlpd:RLPD", "SAC on half prior data, half fresh replay (Ball et al. 2023)"),
    _continuous("mpo", "MPO", "mpo:MPO", "Maximum a posteriori policy optimisation (Abdolmaleki et al. 2018)"),
    _model_based("mbpo", "MBPO", "mbpo:MBPO", "SAC on short rollouts of a learned model (Janner et al. 2019)"),
    _model_based("pets", "PETS", "pets:PETS",
                 "Planning on trajectories sampled from a learned ensemble (Chua et al. 2018)"),
    _imitation("gail", "GAIL", "gail:GAIL", "Generative adversarial imitation with PPO (Ho & Ermon 2016)"),
    _imitation("airl", "AIRL", "airl:AIRL", "GAIL whose discriminator contains a reward (Fu et al. 2018)"),
    _imitation("dagger", "DAgger", "dagger:DAgger", "Cloning what an expert would do where the learner goes",
               loop="off_policy"),
    _world_model("dreamer", "Dreamer", "dreamer:Dreamer",
                 "Actor-critic inside a learned world model: DreamerV3 (Hafner et al. 2023)"),
    _offline("mopo", "MOPO", "mopo:MOPO", "MBPO on a dataset, paid less where its model is unsure (Yu et al. 2020)"),
    _offline("combo", "COMBO", "combo:COMBO",
             "MOPO with critics that are conservative where its model goes (Yu et al. 2021)"),
    _offline("bc", "BC", "bc:BC", "Behavioural cloning: regression on the actions of a dataset", actions=ANY),
    _offline("td3_bc", "TD3BC", "td3_bc:TD3BC", "TD3 drawn to the actions of a dataset (Fujimoto & Gu 2021)"),
    _offline("iql", "IQL", "iql:IQL", "Implicit Q-learning by expectile regression (Kostrikov et al. 2022)"),
    _offline("cql", "CQL", "cql:CQL", "Conservative Q-learning (Kumar et al. 2020)"),
    _offline("xql", "XQL", "xql:XQL", "IQL with Gumbel regression of the value (Garg et al. 2023)"),
    _offline("awac", "AWAC", "awac:AWAC", "Actor-critic by advantage-weighted regression (Nair et al. 2020)"),
    _offline("crr", "CRR", "awac:AWAC", "Critic-regularised regression (Wang et al. 2020)",
             weighting="binary", num_actions=4),
    _offline("edac", "EDAC", "edac:EDAC", "SAC with an ensemble of diversified critics (An et al. 2021)"),
    _offline("rebrac", "ReBRAC", "rebrac:ReBRAC", "TD3+BC with penalties in actor and critic (Tarasov et al. 2023)"),
    _offline("cal_ql", "CalQL", "cql:CalQL", "CQL whose values stay above the data's returns (Nakamoto et al. 2023)"),
    _offline("bcq", "BCQ", "bcq:BCQ", "Q-learning over actions the data could contain (Fujimoto et al. 2019)"),
    _offline("marwil", "MARWIL", "marwil:MARWIL",
             "Imitation weighted by the advantage of each action (Wang et al. 2018)", actions=ANY),
    _offline("discrete_cql", "DiscreteCQL", "discrete_cql:DiscreteCQL",
             "Conservative Q-learning for discrete actions (Kumar et al. 2020)", actions=DISCRETE),
    _offline("discrete_iql", "DiscreteIQL", "discrete_iql:DiscreteIQL",
             "Implicit Q-learning for discrete actions (Kostrikov et al. 2022)", actions=DISCRETE),
    _offline("decision_transformer", "DecisionTransformer", "decision_transformer:DecisionTransformer",
             "Actions as a transformer's answer to a wanted return (Chen et al. 2021)", actions=("box", "discrete")),
    _offline("iql_online", "IQLOnline", "iql:IQLOnline", "IQL that goes on in the environment", loop="off_policy"),
    _offline("awac_online", "AWACOnline", "awac:AWACOnline", "AWAC that goes on in the environment", loop="off_policy"),
    _offline("cal_ql_online", "CalQLOnline", "cql:CalQLOnline",
             "Cal-QL that goes on in the environment", loop="off_policy"),
)  # fmt: skip


@lru_cache(maxsize=1)
def entries() -> dict[str, Entry]:
    """Every algorithm by name: ours, then those of installed plug-ins (which cannot replace ours)."""
    table = {entry.name: entry for entry in _TABLE}
    from importlib.metadata import entry_points

    for point in entry_points(group="rl_training.algorithms"):
        try:
            found = _plug_in(point)
            if found.name in table:
                raise UserError(f"the name '{found.name}' is taken")
        except Exception as error:  # a stranger's package must not take the whole command line with it
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            reason = reason.removeprefix("UserError: ")
            warnings.warn(f"the plug-in {point.name} ({point.value}) is left out: {reason}", stacklevel=2)
        else:
            table[found.name] = found
    return table


def _plug_in(point: EntryPoint) -> Entry:
    found = point.load()
    found = found if isinstance(found, Entry) else found()
    if not isinstance(found, Entry) or found.name != point.name:
        raise UserError(f"it must be, or return, a registry Entry named '{point.name}'")
    return found


def entry(name: str) -> Entry:
    table = entries()
    if name not in table:
        raise UserError(f"unknown algorithm '{name}'.{did_you_mean(name, table)} `rl-training list` shows all of them")
    return table[name]


def entry_of_class(class_name: str) -> Entry | None:
    return next((e for e in entries().values() if e.class_name == class_name), None)


def resolve(target: str) -> Any:
    """What a table names as `module:attribute`, imported when it is asked for."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def train_function(name: str) -> Any:
    """`train_<name>(config)`, a public name of the algorithms whose code belongs to the API."""
    return resolve("rl_training.api.managed:train_function")(name)


def load_transition_dataset(*arguments: Any, **fields: Any) -> Any:
    """A public name of the data package whose code belongs to the experiments: recipes may train agents."""
    return resolve("rl_training.experiment.run.transition_data:load_transition_dataset")(*arguments, **fields)


@cache
def _load(name: str) -> type[Any]:
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
    """Packaged presets, as `algo/env`."""
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
    """What `rl-training verify` has written, by algorithm: in `folder`, or else in this directory, or else what came
    with the package (in a clone it is beside it)."""
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
