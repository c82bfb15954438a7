"""The one table of algorithms. It imports nothing heavy: `rl-training --help` and `list` must answer at once.

Adding an algorithm is one line here. Other packages add theirs through the entry-point group `rl_training.algorithms`:
each entry point is named after the algorithm and points to an `Entry`, or to a function that returns one.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_training.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from rl_training.algorithms.base import Algorithm

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

    def load(self) -> type[Algorithm[Any]]:
        """The algorithm's class; a variant gets a subclass that differs in its defaults only."""
        return _load(self.name)


def _dqn(name: str, class_name: str, summary: str, **defaults: Any) -> Entry:
    return Entry(
        name, class_name, "rl_training.algorithms.dqn:DQN", "value-based", "off_policy", DISCRETE, summary, defaults
    )


def _continuous(name: str, class_name: str, target: str, summary: str, **defaults: Any) -> Entry:
    target = f"rl_training.algorithms.{target}"
    return Entry(name, class_name, target, "continuous control", "off_policy", BOX, summary, defaults)


def _on_policy(name: str, class_name: str, target: str, summary: str, **defaults: Any) -> Entry:
    target = f"rl_training.algorithms.{target}"
    return Entry(name, class_name, target, "on-policy", "on_policy", ANY, summary, defaults)


def _evolution(name: str, class_name: str, target: str, summary: str, **defaults: Any) -> Entry:
    target = f"rl_training.algorithms.{target}"
    return Entry(name, class_name, target, "evolution", "evolution", ANY, summary, defaults)


def _value(name: str, class_name: str, target: str, summary: str, **defaults: Any) -> Entry:
    return Entry(
        name, class_name, f"rl_training.algorithms.{target}", "value-based", "off_policy", DISCRETE, summary, defaults
    )


def _imitation(name: str, class_name: str, loop: str, summary: str) -> Entry:
    return Entry(name, class_name, f"rl_training.algorithms.{name}:{class_name}", "imitation", loop, ANY, summary)


def _offline(
    name: str, class_name: str, target: str, summary: str, actions: tuple[str, ...] = BOX, **defaults: Any
) -> Entry:
    target = f"rl_training.algorithms.{target}"
    return Entry(name, class_name, target, "offline", "offline", actions, summary, defaults)


def _online(name: str, class_name: str, target: str, summary: str) -> Entry:
    target = f"rl_training.algorithms.{target}"
    return Entry(name, class_name, target, "offline", "off_policy", BOX, summary)


_TABLE: tuple[Entry, ...] = (
    _dqn("dqn", "DQN", "Deep Q-learning (Mnih et al. 2015)"),
    _dqn("double_dqn", "DoubleDQN", "DQN with double Q-learning (van Hasselt et al. 2016)", double=True),
    _dqn("dueling_dqn", "DuelingDQN", "DQN with value and advantage streams (Wang et al. 2016)", dueling=True),
    _dqn("noisy_dqn", "NoisyDQN", "DQN that explores by noisy weights (Fortunato et al. 2018)", noisy=True),
    _dqn("prioritized_dqn", "PrioritizedDQN", "DQN with prioritised replay (Schaul et al. 2016)", prioritized=True),
    _dqn("n_step_dqn", "NStepDQN", "DQN with 3-step returns", n_step=3),
    _dqn("munchausen_dqn", "MunchausenDQN", "DQN with the log-policy added to the reward (Vieillard et al. 2020)",
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
    Entry("ppo", "PPO", "rl_training.algorithms.ppo:PPO", "on-policy", "on_policy", ANY,
          "Proximal policy optimisation (Schulman et al. 2017)"),
    Entry("recurrent_ppo", "RecurrentPPO", "rl_training.algorithms.recurrent_ppo:RecurrentPPO", "on-policy",
          "on_policy", ANY, "PPO whose actor and critic remember, by LSTM or GRU"),
    _on_policy("a2c", "A2C", "a2c:A2C", "Synchronous advantage actor-critic (Mnih et al. 2016)"),
    _on_policy("trpo", "TRPO", "trpo:TRPO", "Trust-region policy optimisation (Schulman et al. 2015)"),
    _on_policy("impala", "IMPALA", "impala:IMPALA", "Lagging actors corrected by V-trace (Espeholt et al. 2018)"),
    _on_policy("ppg", "PPG", "ppg:PPG", "PPO with auxiliary phases that share value features (Cobbe et al. 2021)"),
    _evolution("ars", "ARS", "ars:ARS", "Augmented random search over (linear) policies (Mania et al. 2018)"),
    _evolution("openai_es", "OpenAIES", "openai_es:OpenAIES", "Evolution strategies on ranks (Salimans et al. 2017)"),
    Entry("sac", "SAC", "rl_training.algorithms.sac:SAC", "continuous control", "off_policy", BOX,
          "Soft actor-critic with automatic temperature (Haarnoja et al. 2018)"),
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
    Entry("mbpo", "MBPO", "rl_training.algorithms.mbpo:MBPO", "model-based", "off_policy", BOX,
          "SAC on short rollouts of a learned model (Janner et al. 2019)"),
    Entry("pets", "PETS", "rl_training.algorithms.pets:PETS", "model-based", "off_policy", BOX,
          "Planning on trajectories sampled from a learned ensemble (Chua et al. 2018)"),
    _imitation("gail", "GAIL", "on_policy", "Generative adversarial imitation with PPO (Ho & Ermon 2016)"),
    _imitation("airl", "AIRL", "on_policy", "GAIL whose discriminator contains a reward (Fu et al. 2018)"),
    _imitation("dagger", "DAgger", "off_policy", "Cloning what an expert would do where the learner goes"),
    Entry("dreamer", "Dreamer", "rl_training.algorithms.dreamer:Dreamer", "model-based", "off_policy",
          ("discrete", "box"), "Actor-critic inside a learned world model: DreamerV3 (Hafner et al. 2023)"),
    _offline("mopo", "MOPO", "mopo:MOPO", "MBPO on a dataset, paid less where its model is unsure (Yu et al. 2020)"),
    _offline("combo", "COMBO", "combo:COMBO",
             "MOPO with critics that are conservative where its model goes (Yu et al. 2021)"),
    _offline("bc", "BC", "bc:BC", "Behavioural cloning: regression on the actions of a dataset", ANY),
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
             "Imitation weighted by the advantage of each action (Wang et al. 2018)", ANY),
    _offline("discrete_cql", "DiscreteCQL", "discrete_cql:DiscreteCQL",
             "Conservative Q-learning for discrete actions (Kumar et al. 2020)", DISCRETE),
    _offline("discrete_iql", "DiscreteIQL", "discrete_iql:DiscreteIQL",
             "Implicit Q-learning for discrete actions (Kostrikov et al. 2022)", DISCRETE),
    _offline("decision_transformer", "DecisionTransformer", "decision_transformer:DecisionTransformer",
             "Actions as a transformer's answer to a wanted return (Chen et al. 2021)", ("box", "discrete")),
    _online("iql_online", "IQLOnline", "iql:IQLOnline", "IQL that goes on in the environment"),
    _online("awac_online", "AWACOnline", "awac:AWACOnline", "AWAC that goes on in the environment"),
    _online("cal_ql_online", "CalQLOnline", "cql:CalQLOnline", "Cal-QL that goes on in the environment"),
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


@cache
def _load(name: str) -> type[Algorithm[Any]]:
    found = entry(name)
    module, _, attribute = found.target.partition(":")
    cls: type[Algorithm[Any]] = getattr(importlib.import_module(module), attribute)
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
    package = Path(__file__).parents[1]
    places = [folder] if folder else [Path("results"), package / "assets/results", package.parents[1] / "results"]
    found: dict[str, list[dict[str, Any]]] = {}
    for path in next(filter(None, (sorted(place.glob("*__*.json")) for place in places)), []):
        try:
            row = json.loads(path.read_text())
            found.setdefault(row["algo"], []).append(row)
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found
