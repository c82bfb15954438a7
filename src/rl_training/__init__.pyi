"""Types of the public names. Written by docs/generate_stub.py (`make docs`): change that script, not this file."""

# fmt: off
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypedDict

from typing_extensions import Unpack

from rl_training.api.managed import ManagedAlgorithm as ManagedAlgorithm
from rl_training.api.managed import algorithm_class as algorithm_class
from rl_training.api.managed import load as load
from rl_training.envs.given import EnvInput as _EnvInput
from rl_training.errors import UserError as UserError
from rl_training.experiment.run.callbacks import Callback as Callback
from rl_training.experiment.run.callbacks import EarlyStopping as EarlyStopping
from rl_training.experiment.run.config import TrainConfig as TrainConfig
from rl_training.experiment.run.config import make_config as make_config
from rl_training.experiment.run.manager import ExperimentManager as ExperimentManager
from rl_training.experiment.run.result import TrainResult as TrainResult
from rl_training.imports import allow_import as allow_import

_Env = _EnvInput | TrainConfig | None
_Make = Callable[..., Any] | None
_Schedule = float | str | dict[str, Any] | Callable[[float], float]  # 1e-3, "lin_1e-3" or {"kind": "linear", ...}

__version__: str

def list_algorithms(family: str | None = None) -> list[str]: ...

class _Train(Protocol):
    def __call__(
        self, config: TrainConfig, *, env: _EnvInput | None = None, callbacks: Sequence[Callback] = (),
        progress: bool = True,
    ) -> TrainResult: ...

_TargetRule = Literal["max", "expected_sarsa", "boltzmann", "soft", "mellowmax", "advantage_learning", "clipped_double",
    "munchausen"]

class _Run(TypedDict, total=False):
    env_id: str
    total_timesteps: int
    seed: int
    seeds: Sequence[int] | None
    output_dir: str
    device: str
    execution: Literal["auto", "eager", "recorded", "compile", "cudagraph"]
    num_envs: int | None
    vectorization: Literal["auto", "sync", "threads", "async", "vector", "envpool", "device"]
    cluster: dict[str, Any] | None
    eval_episodes: int
    eval_deterministic: bool
    eval_interval: int | None
    eval_video: bool
    log_interval: int
    checkpoint_interval: int | None
    keep_checkpoints: int
    stop_at_return: float | None
    init_from: str | None
    trackers: Sequence[Literal["wandb", "mlflow", "trackio"]]
    tags: dict[str, str]
    env_kwargs: dict[str, Any]
    env_wrappers: Sequence[str | dict[str, Any]]
    algo_kwargs: dict[str, Any]

class _Hyper(_Run, total=False):
    learning_rate: _Schedule
    gamma: float

class _NetworkHyper(_Hyper, total=False):
    hidden_sizes: Sequence[int]
    activation: Literal["relu", "tanh", "silu", "elu", "gelu"]
    max_grad_norm: float
    optimizer: Literal["adam", "adamw", "rmsprop", "sgd"]
    adam_eps: float
    weight_decay: float

class _SharedTrunkFields(_Hyper, total=False):
    shared_trunk: bool | None

class _CollectHyper(_NetworkHyper, total=False):
    n_steps: int

class _OffPolicyHyper(_NetworkHyper, total=False):
    batch_size: int
    buffer_size: int
    learning_starts: int
    train_freq: int
    gradient_steps: int
    n_step: int
    prioritized: bool
    prioritized_alpha: float
    prioritized_beta: float
    reset_interval: int
    reset_at: Sequence[int]
    reset_share: float
    frame_stack: int

class _OfflineHyper(_NetworkHyper, total=False):
    dataset: dict[str, Any]
    batch_size: int
    updates_per_call: int

class _RolloutHyper(_CollectHyper, total=False):
    normalize_observations: bool
    gae_lambda: float
    normalize_rewards: bool
    log_std_init: float
    cnn: Literal["nature", "impala"]

class _OnPolicyHyper(_RolloutHyper, total=False):
    batch_size: int
    n_epochs: int

class A2C(ManagedAlgorithm):
    """Synchronous advantage actor-critic (Mnih et al. 2016)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        normalize_observations: bool = ..., hidden_sizes: Sequence[int] = ...,
        activation: Literal["relu", "tanh", "silu", "elu", "gelu"] = ..., max_grad_norm: float = ...,
        optimizer: Literal["adam", "adamw", "rmsprop", "sgd"] = ..., adam_eps: float = ..., weight_decay: float = ...,
        n_steps: int = ..., gae_lambda: float = ..., normalize_rewards: bool = ..., log_std_init: float = ...,
        cnn: Literal["nature", "impala"] = ..., ent_coef: _Schedule = ..., vf_coef: float = ...,
        rmsprop_alpha: float = ..., normalize_advantage: bool = ..., **settings: Unpack[_SharedTrunkFields],
    ) -> None: ...

class A3C(ManagedAlgorithm):
    """Actors send asynchronous gradients; in one process it is a2c (Mnih et al. 2016)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        normalize_observations: bool = ..., hidden_sizes: Sequence[int] = ...,
        activation: Literal["relu", "tanh", "silu", "elu", "gelu"] = ..., max_grad_norm: float = ...,
        optimizer: Literal["adam", "adamw", "rmsprop", "sgd"] = ..., adam_eps: float = ..., weight_decay: float = ...,
        n_steps: int = ..., gae_lambda: float = ..., normalize_rewards: bool = ..., log_std_init: float = ...,
        cnn: Literal["nature", "impala"] = ..., ent_coef: _Schedule = ..., vf_coef: float = ...,
        rmsprop_alpha: float = ..., normalize_advantage: bool = ..., **settings: Unpack[_SharedTrunkFields],
    ) -> None: ...

class ACER(ManagedAlgorithm):
    """Actor-critic with replayed rollouts, Retrace and a trust region (Wang et al. 2017)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        normalize_observations: bool = ..., hidden_sizes: Sequence[int] = ...,
        activation: Literal["relu", "tanh", "silu", "elu", "gelu"] = ..., max_grad_norm: float = ...,
        optimizer: Literal["adam", "adamw", "rmsprop", "sgd"] = ..., adam_eps: float = ..., weight_decay: float = ...,
        rmsprop_alpha: float = ..., n_steps: int = ..., replay_ratio: int = ..., batch_size: int = ...,
        buffer_size: int = ..., learning_starts: int = ..., q_coef: float = ..., ent_coef: _Schedule = ...,
        correction_term: float = ..., trust_region: bool = ..., alpha: float = ..., delta: float = ...,
        cnn: Literal["nature", "impala"] = ..., **settings: Unpack[_SharedTrunkFields],
    ) -> None: ...

class ACKTR(ManagedAlgorithm):
    """A2C with Kronecker-factored natural gradients in a trust region (Wu et al. 2017)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        normalize_observations: bool = ..., hidden_sizes: Sequence[int] = ...,
        activation: Literal["relu", "tanh", "silu", "elu", "gelu"] = ..., max_grad_norm: float = ...,
        optimizer: Literal["adam", "adamw", "rmsprop", "sgd"] = ..., adam_eps: float = ..., weight_decay: float = ...,
        n_steps: int = ..., gae_lambda: float = ..., normalize_rewards: bool = ..., log_std_init: float = ...,
        cnn: Literal["nature", "impala"] = ..., ent_coef: _Schedule = ..., vf_coef: float = ..., kfac_clip: float = ...,
        kfac_damping: float = ..., kfac_decay: float = ..., kfac_update: int = ..., kfac_momentum: float = ...,
        vf_fisher_coef: float = ..., **settings: Unpack[_SharedTrunkFields],
    ) -> None: ...

class AIRL(ManagedAlgorithm):
    """GAIL with a discriminator that learns a reward (Fu et al. 2018)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        dataset: dict[str, Any] = ...,
        expert_dataset_kind: Literal["random", "policy", "replay", "npz", "hdf5", "minari"] | None = ...,
        expert_dataset_path: str | None = ..., normalize_observations: bool = ...,
        discriminator_hidden_sizes: Sequence[int] = ..., discriminator_learning_rate: _Schedule = ...,
        gradient_penalty: float = ..., absorbing_states: bool = ..., hidden_sizes: Sequence[int] = ...,
        activation: Literal["relu", "tanh", "silu", "elu", "gelu"] = ..., max_grad_norm: float = ...,
        optimizer: Literal["adam", "adamw", "rmsprop", "sgd"] = ..., adam_eps: float = ..., weight_decay: float = ...,
        n_steps: int = ..., gae_lambda: float = ..., normalize_rewards: bool = ..., log_std_init: float = ...,
        cnn: Literal["nature", "impala"] = ..., batch_size: int = ..., n_epochs: int = ..., clip_range: _Schedule = ...,
        ent_coef: _Schedule = ..., vf_coef: float = ..., clip_range_vf: _Schedule | None = ...,
        target_kl: float | None = ..., normalize_advantage: bool = ..., discriminator_batch_size: int = ...,
        n_discriminator_epochs: int = ..., bc_steps: int = ..., state_only: bool = ..., reward_clip: float = ...,
        **settings: Unpack[_SharedTrunkFields],
    ) -> None: ...

class APPO(ManagedAlgorithm):
    """PPO on rollouts of lagging actors, with V-trace correction"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        normalize_observations: bool = ..., hidden_sizes: Sequence[int] = ...,
        activation: Literal["relu", "tanh", "silu", "elu", "gelu"] = ..., max_grad_norm: float = ...,
        optimizer: Literal["adam", "adamw", "rmsprop", "sgd"] = ..., adam_eps: float = ..., weight_decay: float = ...,
        n_steps: int = ..., gae_lambda: float = ..., normalize_rewards: bool = ..., log_std_init: float = ...,
        cnn: Literal["nature", "impala"] = ..., batch_size: int = ..., n_epochs: int = ..., clip_range: _Schedule = ...,
        ent_coef: _Schedule = ..., vf_coef: float = ..., clip_range_vf: _Schedule | None = ...,
        target_kl: float | None = ..., normalize_advantage: bool = ..., policy_lag: int = ...,
        store_log_probs: bool = ..., rho_bar: float = ..., c_bar: float = ..., **settings: Unpack[_SharedTrunkFields],
    ) -> None: ...

class ARS(ManagedAlgorithm):
    """Augmented random search over (linear) policies (Mania et al. 2018)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        n_delta: int = ..., delta_std: float = ..., n_eval_episodes: int = ..., normalize_observations: bool = ...,
        alive_bonus_offset: float = ..., n_top: int | None = ..., zero_policy: bool = ...,
        **settings: Unpack[_NetworkHyper],
    ) -> None: ...

class AWAC(ManagedAlgorithm):
    """Actor-critic with advantage-weighted regression (Nair et al. 2020)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ...,
        sde_sample_freq: int = ..., her: dict[str, Any] | None = ..., weighting: Literal["exp", "binary"] = ...,
        baseline: Literal["mean", "max"] = ..., num_actions: int = ..., temperature: float = ...,
        max_weight: float = ..., num_critics: int = ..., **settings: Unpack[_OfflineHyper],
    ) -> None: ...

class AWACOnline(ManagedAlgorithm):
    """AWAC fine-tuned in the environment"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        dataset: dict[str, Any] = ..., prior_share: float = ..., tau: float = ...,
        exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ..., sde_sample_freq: int = ...,
        her: dict[str, Any] | None = ..., weighting: Literal["exp", "binary"] = ...,
        baseline: Literal["mean", "max"] = ..., num_actions: int = ..., temperature: float = ...,
        max_weight: float = ..., num_critics: int = ..., **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class ApexDDPG(ManagedAlgorithm):
    """Prioritised 5-step DDPG for many actors (Horgan et al. 2018)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ...,
        sde_sample_freq: int = ..., her: dict[str, Any] | None = ...,
        augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., network: Literal["mlp", "simba", "bro"] = ...,
        critic_hidden_sizes: Sequence[int] | None = ..., exploration_noise: _Schedule = ...,
        shared_encoder: Literal["none", "drq", "nature", "impala"] = ..., feature_dim: int = ...,
        num_critics: int = ..., policy_delay: int = ..., target_policy_noise: float = ...,
        target_noise_clip: float = ..., critic: str | dict[str, Any] = ..., layer_norm: bool = ...,
        **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class ApexDQN(ManagedAlgorithm):
    """Double, dueling, prioritised 3-step DQN with a ladder of exploration rates (Horgan et al. 2018)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., target_update_interval: int = ..., exploration_fraction: float = ...,
        exploration_initial_eps: float = ..., exploration_final_eps: float = ..., exploration_ladder: float = ...,
        double: bool = ..., dueling: bool = ..., noisy: bool = ..., noisy_sigma: float = ...,
        target_rule: _TargetRule = ..., rule_temperature: float = ..., rule_alpha: float = ...,
        munchausen_clip: float = ..., hysteretic: float = ..., cnn: Literal["nature", "impala"] = ...,
        cnn_width: int = ..., augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., layer_norm: bool = ..., network: Literal["mlp", "simba", "bro"] = ...,
        **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class BBF(ManagedAlgorithm):
    """Rainbow with a wide network, self-prediction and resets (Schwarzer et al. 2023)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., target_update_interval: int = ..., exploration_fraction: float = ...,
        exploration_initial_eps: float = ..., exploration_final_eps: float = ..., exploration_ladder: float = ...,
        double: bool = ..., dueling: bool = ..., noisy: bool = ..., noisy_sigma: float = ...,
        target_rule: _TargetRule = ..., rule_temperature: float = ..., rule_alpha: float = ...,
        munchausen_clip: float = ..., hysteretic: float = ..., cnn: Literal["nature", "impala"] = ...,
        cnn_width: int = ..., augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., layer_norm: bool = ..., network: Literal["mlp", "simba", "bro"] = ...,
        num_atoms: int = ..., v_min: float | Literal["auto"] = ..., v_max: float | Literal["auto"] = ...,
        n_step_start: int = ..., gamma_start: float = ..., cycle_steps: int = ..., jumps: int = ...,
        spr_weight: float = ..., reset_every: int = ..., reset_until: float = ..., shrink_factor: float = ...,
        **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class BC(ManagedAlgorithm):
    """Behavioural cloning: regression on the actions of a dataset"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        stochastic: bool = ..., **settings: Unpack[_OfflineHyper],
    ) -> None: ...

class BCQ(ManagedAlgorithm):
    """Q-learning limited to actions likely under the dataset (Fujimoto et al. 2019)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        vae_hidden_sizes: Sequence[int] = ..., tau: float = ..., phi: float = ..., lmbda: float = ...,
        num_actions: int = ..., num_actions_act: int = ..., kl_coef: float = ..., latent_clip: float = ...,
        **settings: Unpack[_OfflineHyper],
    ) -> None: ...

class BRO(ManagedAlgorithm):
    """SAC with large quantile critics, resets and an optimistic policy that explores (Nauman et al. 2024)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ...,
        sde_sample_freq: int = ..., her: dict[str, Any] | None = ...,
        augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., shared_encoder: Literal["none", "drq", "nature", "impala"] = ...,
        feature_dim: int = ..., network: Literal["mlp", "simba", "bro"] = ...,
        critic_hidden_sizes: Sequence[int] | None = ..., target_update_interval: int = ..., policy_delay: int = ...,
        ent_coef: float | Literal["auto"] = ..., ent_coef_init: float = ...,
        target_entropy: float | Literal["auto"] = ..., entropy_per_action: float = ..., num_critics: int = ...,
        num_quantiles: int = ..., top_quantiles_to_drop_per_net: int = ..., average_critics: bool = ...,
        layer_norm: bool = ..., kl_target: float = ..., std_multiplier: float = ..., optimism_init: float = ...,
        kl_weight_init: float = ..., dual_learning_rate: float = ..., **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class BootstrappedDQN(ManagedAlgorithm):
    """DQN with heads that take turns to explore for whole episodes (Osband et al. 2016)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., target_update_interval: int = ..., exploration_fraction: float = ...,
        exploration_initial_eps: float = ..., exploration_final_eps: float = ..., exploration_ladder: float = ...,
        double: bool = ..., dueling: bool = ..., noisy: bool = ..., noisy_sigma: float = ...,
        target_rule: _TargetRule = ..., rule_temperature: float = ..., rule_alpha: float = ...,
        munchausen_clip: float = ..., hysteretic: float = ..., cnn: Literal["nature", "impala"] = ...,
        cnn_width: int = ..., augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., layer_norm: bool = ..., network: Literal["mlp", "simba", "bro"] = ...,
        num_heads: int = ..., mask_probability: float = ..., prior_scale: float = ...,
        **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class C51DQN(ManagedAlgorithm):
    """Categorical distribution of the return (Bellemare et al. 2017)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., target_update_interval: int = ..., exploration_fraction: float = ...,
        exploration_initial_eps: float = ..., exploration_final_eps: float = ..., exploration_ladder: float = ...,
        double: bool = ..., dueling: bool = ..., noisy: bool = ..., noisy_sigma: float = ...,
        target_rule: _TargetRule = ..., rule_temperature: float = ..., rule_alpha: float = ...,
        munchausen_clip: float = ..., hysteretic: float = ..., cnn: Literal["nature", "impala"] = ...,
        cnn_width: int = ..., augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., layer_norm: bool = ..., network: Literal["mlp", "simba", "bro"] = ...,
        num_atoms: int = ..., v_min: float | Literal["auto"] = ..., v_max: float | Literal["auto"] = ...,
        **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class COMBO(ManagedAlgorithm):
    """Offline MBPO with critics that are conservative on model rollouts (Yu et al. 2021)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        model_hidden_sizes: Sequence[int] = ..., num_members: int = ..., num_elites: int = ...,
        model_learning_rate: float = ..., model_batch_size: int = ..., model_weight_decay: Sequence[float] = ...,
        model_beta: float = ..., model_patience: int = ..., model_max_epochs: int = ..., model_holdout: float = ...,
        model_holdout_size: int = ..., termination: str = ..., tau: float = ...,
        exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ..., sde_sample_freq: int = ...,
        her: dict[str, Any] | None = ..., network: Literal["mlp", "simba", "bro"] = ...,
        critic_hidden_sizes: Sequence[int] | None = ..., target_update_interval: int = ..., policy_delay: int = ...,
        ent_coef: float | Literal["auto"] = ..., ent_coef_init: float = ...,
        target_entropy: float | Literal["auto"] = ..., entropy_per_action: float = ..., real_ratio: float = ...,
        rollout_batch: int = ..., rollout_length: int = ..., rollout_length_final: int | None = ...,
        rollout_schedule: Sequence[int] = ..., model_retain_epochs: float = ..., penalty_coef: float = ...,
        rollout_freq: int = ..., cql_alpha: float = ..., num_actions: int = ..., backup_entropy: bool = ...,
        actor_learning_rate: _Schedule = ..., **settings: Unpack[_OfflineHyper],
    ) -> None: ...

class CQL(ManagedAlgorithm):
    """Conservative Q-learning (Kumar et al. 2020)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ...,
        sde_sample_freq: int = ..., her: dict[str, Any] | None = ..., network: Literal["mlp", "simba", "bro"] = ...,
        critic_hidden_sizes: Sequence[int] | None = ..., target_update_interval: int = ..., policy_delay: int = ...,
        ent_coef: float | Literal["auto"] = ..., ent_coef_init: float = ...,
        target_entropy: float | Literal["auto"] = ..., entropy_per_action: float = ..., cql_alpha: float = ...,
        num_actions: int = ..., backup_entropy: bool = ..., actor_learning_rate: _Schedule = ...,
        **settings: Unpack[_OfflineHyper],
    ) -> None: ...

class CRR(ManagedAlgorithm):
    """Critic-regularised regression (Wang et al. 2020)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ...,
        sde_sample_freq: int = ..., her: dict[str, Any] | None = ..., weighting: Literal["exp", "binary"] = ...,
        baseline: Literal["mean", "max"] = ..., num_actions: int = ..., temperature: float = ...,
        max_weight: float = ..., num_critics: int = ..., **settings: Unpack[_OfflineHyper],
    ) -> None: ...

class CalQL(ManagedAlgorithm):
    """CQL bounded below by the data's returns (Nakamoto et al. 2023)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ...,
        sde_sample_freq: int = ..., her: dict[str, Any] | None = ..., network: Literal["mlp", "simba", "bro"] = ...,
        critic_hidden_sizes: Sequence[int] | None = ..., target_update_interval: int = ..., policy_delay: int = ...,
        ent_coef: float | Literal["auto"] = ..., ent_coef_init: float = ...,
        target_entropy: float | Literal["auto"] = ..., entropy_per_action: float = ..., cql_alpha: float = ...,
        num_actions: int = ..., backup_entropy: bool = ..., actor_learning_rate: _Schedule = ...,
        **settings: Unpack[_OfflineHyper],
    ) -> None: ...

class CalQLOnline(ManagedAlgorithm):
    """Cal-QL fine-tuned in the environment"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        dataset: dict[str, Any] = ..., prior_share: float = ..., tau: float = ...,
        exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ..., sde_sample_freq: int = ...,
        her: dict[str, Any] | None = ..., network: Literal["mlp", "simba", "bro"] = ...,
        critic_hidden_sizes: Sequence[int] | None = ..., target_update_interval: int = ..., policy_delay: int = ...,
        ent_coef: float | Literal["auto"] = ..., ent_coef_init: float = ...,
        target_entropy: float | Literal["auto"] = ..., entropy_per_action: float = ..., cql_alpha: float = ...,
        num_actions: int = ..., backup_entropy: bool = ..., actor_learning_rate: _Schedule = ...,
        **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class CrossQ(ManagedAlgorithm):
    """SAC with batch norm and no target networks (Bhatt et al. 2024)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ...,
        sde_sample_freq: int = ..., her: dict[str, Any] | None = ...,
        augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., shared_encoder: Literal["none", "drq", "nature", "impala"] = ...,
        feature_dim: int = ..., network: Literal["mlp", "simba", "bro"] = ...,
        critic_hidden_sizes: Sequence[int] | None = ..., target_update_interval: int = ..., policy_delay: int = ...,
        ent_coef: float | Literal["auto"] = ..., ent_coef_init: float = ...,
        target_entropy: float | Literal["auto"] = ..., entropy_per_action: float = ..., num_critics: int = ...,
        renorm_warmup: int = ..., adam_beta1: float = ..., **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class D4PG(ManagedAlgorithm):
    """Distributional deterministic policy gradient (Barth-Maron et al. 2018)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ...,
        sde_sample_freq: int = ..., her: dict[str, Any] | None = ...,
        augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., exploration_noise: _Schedule = ..., num_atoms: int = ...,
        v_min: float | Literal["auto"] = ..., v_max: float | Literal["auto"] = ..., layer_norm: bool = ...,
        **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class DAC(ManagedAlgorithm):
    """GAIL off-policy: TD3 with a penalised discriminator (Kostrikov et al. 2019)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        dataset: dict[str, Any] = ...,
        expert_dataset_kind: Literal["random", "policy", "replay", "npz", "hdf5", "minari"] | None = ...,
        expert_dataset_path: str | None = ..., discriminator_hidden_sizes: Sequence[int] = ...,
        discriminator_learning_rate: _Schedule = ..., gradient_penalty: float = ..., absorbing_states: bool = ...,
        tau: float = ..., exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ...,
        sde_sample_freq: int = ..., her: dict[str, Any] | None = ...,
        augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., network: Literal["mlp", "simba", "bro"] = ...,
        critic_hidden_sizes: Sequence[int] | None = ..., exploration_noise: _Schedule = ...,
        shared_encoder: Literal["none", "drq", "nature", "impala"] = ..., feature_dim: int = ...,
        num_critics: int = ..., policy_delay: int = ..., target_policy_noise: float = ...,
        target_noise_clip: float = ..., critic: str | dict[str, Any] = ..., layer_norm: bool = ...,
        discriminator_batch_size: int = ..., **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class DAgger(ManagedAlgorithm):
    """Cloning of an expert's actions in the states that the learner visits"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        expert: dict[str, Any] = ..., beta: _Schedule = ..., **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class DDPG(ManagedAlgorithm):
    """Deep deterministic policy gradient (Lillicrap et al. 2016)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ...,
        sde_sample_freq: int = ..., her: dict[str, Any] | None = ...,
        augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., network: Literal["mlp", "simba", "bro"] = ...,
        critic_hidden_sizes: Sequence[int] | None = ..., exploration_noise: _Schedule = ...,
        shared_encoder: Literal["none", "drq", "nature", "impala"] = ..., feature_dim: int = ...,
        num_critics: int = ..., policy_delay: int = ..., target_policy_noise: float = ...,
        target_noise_clip: float = ..., critic: str | dict[str, Any] = ..., layer_norm: bool = ...,
        **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class DQN(ManagedAlgorithm):
    """Deep Q-learning (Mnih et al. 2015)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., target_update_interval: int = ..., exploration_fraction: float = ...,
        exploration_initial_eps: float = ..., exploration_final_eps: float = ..., exploration_ladder: float = ...,
        double: bool = ..., dueling: bool = ..., noisy: bool = ..., noisy_sigma: float = ...,
        target_rule: _TargetRule = ..., rule_temperature: float = ..., rule_alpha: float = ...,
        munchausen_clip: float = ..., hysteretic: float = ..., cnn: Literal["nature", "impala"] = ...,
        cnn_width: int = ..., augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., layer_norm: bool = ..., network: Literal["mlp", "simba", "bro"] = ...,
        **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class DRQN(ManagedAlgorithm):
    """Deep Q-learning with a recurrent network (Hausknecht & Stone 2015)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., target_update_interval: int = ..., exploration_fraction: float = ...,
        exploration_initial_eps: float = ..., exploration_final_eps: float = ..., exploration_ladder: float = ...,
        double: bool = ..., dueling: bool = ..., noisy: bool = ..., noisy_sigma: float = ...,
        target_rule: _TargetRule = ..., rule_temperature: float = ..., rule_alpha: float = ...,
        munchausen_clip: float = ..., hysteretic: float = ..., cnn: Literal["nature", "impala"] = ...,
        cnn_width: int = ..., augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., layer_norm: bool = ..., network: Literal["mlp", "simba", "bro"] = ...,
        cell: Literal["lstm", "gru"] = ..., cell_size: int = ..., sequence_length: int = ..., burn_in: int = ...,
        overlap: int = ..., stored_state: bool = ..., value_rescaling: bool = ..., priority_eta: float = ...,
        **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class DecisionTransformer(ManagedAlgorithm):
    """Transformer that predicts actions from a desired return (Chen et al. 2021)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        context_length: int = ..., num_heads: int = ..., dropout: float = ..., target_return: float | None = ...,
        return_scale: float = ..., normalize_observations: bool = ..., **settings: Unpack[_OfflineHyper],
    ) -> None: ...

class DiscreteCQL(ManagedAlgorithm):
    """Conservative Q-learning for discrete actions (Kumar et al. 2020)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., target_update_interval: int = ..., exploration_fraction: float = ...,
        exploration_initial_eps: float = ..., exploration_final_eps: float = ..., exploration_ladder: float = ...,
        double: bool = ..., dueling: bool = ..., noisy: bool = ..., noisy_sigma: float = ...,
        target_rule: _TargetRule = ..., rule_temperature: float = ..., rule_alpha: float = ...,
        munchausen_clip: float = ..., hysteretic: float = ..., cnn: Literal["nature", "impala"] = ...,
        cnn_width: int = ..., cql_alpha: float = ..., **settings: Unpack[_OfflineHyper],
    ) -> None: ...

class DiscreteIQL(ManagedAlgorithm):
    """Implicit Q-learning for discrete actions (Kostrikov et al. 2022)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        actor_learning_rate: _Schedule = ..., expectile: float = ..., beta: float = ..., max_weight: float = ...,
        num_critics: int = ..., tau: float = ..., **settings: Unpack[_OfflineHyper],
    ) -> None: ...

class DiscreteIQLearn(ManagedAlgorithm):
    """IQ-Learn for discrete actions (Garg et al. 2021)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        dataset: dict[str, Any] = ..., prior_share: float = ...,
        expert_dataset_kind: Literal["random", "policy", "replay", "npz", "hdf5", "minari"] | None = ...,
        expert_dataset_path: str | None = ..., tau: float = ..., target_update_interval: int = ...,
        exploration_fraction: float = ..., exploration_initial_eps: float = ..., exploration_final_eps: float = ...,
        exploration_ladder: float = ..., double: bool = ..., dueling: bool = ..., noisy: bool = ...,
        noisy_sigma: float = ..., target_rule: _TargetRule = ..., rule_temperature: float = ...,
        rule_alpha: float = ..., munchausen_clip: float = ..., hysteretic: float = ...,
        cnn: Literal["nature", "impala"] = ..., cnn_width: int = ...,
        augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., layer_norm: bool = ..., network: Literal["mlp", "simba", "bro"] = ...,
        chi2_alpha: float = ..., value_term: Literal["value", "value_expert", "v0"] = ...,
        regularize_policy: bool = ..., use_target: bool = ..., **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class DiscreteIQLearnOffline(ManagedAlgorithm):
    """IQ-Learn for discrete actions from an expert's transitions alone (Garg et al. 2021)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., target_update_interval: int = ..., exploration_fraction: float = ...,
        exploration_initial_eps: float = ..., exploration_final_eps: float = ..., exploration_ladder: float = ...,
        double: bool = ..., dueling: bool = ..., noisy: bool = ..., noisy_sigma: float = ...,
        target_rule: _TargetRule = ..., rule_temperature: float = ..., rule_alpha: float = ...,
        munchausen_clip: float = ..., hysteretic: float = ..., cnn: Literal["nature", "impala"] = ...,
        cnn_width: int = ..., chi2_alpha: float = ..., value_term: Literal["value", "value_expert", "v0"] = ...,
        regularize_policy: bool = ..., use_target: bool = ..., **settings: Unpack[_OfflineHyper],
    ) -> None: ...

class DiscreteSAC(ManagedAlgorithm):
    """Soft actor-critic with exact expectations over discrete actions (Christodoulou 2019)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., tau: float = ..., target_update_interval: int = ..., layer_norm: bool = ...,
        num_critics: int = ..., ent_coef: float | Literal["auto"] = ..., ent_coef_init: float = ...,
        target_entropy_scale: float = ..., **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class DiscreteSQIL(ManagedAlgorithm):
    """Soft Q-learning with reward 1 on an expert's transitions and 0 on its own (Reddy et al. 2020)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        dataset: dict[str, Any] = ..., prior_share: float = ...,
        expert_dataset_kind: Literal["random", "policy", "replay", "npz", "hdf5", "minari"] | None = ...,
        expert_dataset_path: str | None = ..., tau: float = ..., target_update_interval: int = ...,
        exploration_fraction: float = ..., exploration_initial_eps: float = ..., exploration_final_eps: float = ...,
        exploration_ladder: float = ..., double: bool = ..., dueling: bool = ..., noisy: bool = ...,
        noisy_sigma: float = ..., target_rule: _TargetRule = ..., rule_temperature: float = ...,
        rule_alpha: float = ..., munchausen_clip: float = ..., hysteretic: float = ...,
        cnn: Literal["nature", "impala"] = ..., cnn_width: int = ...,
        augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., layer_norm: bool = ..., network: Literal["mlp", "simba", "bro"] = ...,
        **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class DoubleDQN(ManagedAlgorithm):
    """DQN with double Q-learning (van Hasselt et al. 2016)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., target_update_interval: int = ..., exploration_fraction: float = ...,
        exploration_initial_eps: float = ..., exploration_final_eps: float = ..., exploration_ladder: float = ...,
        double: bool = ..., dueling: bool = ..., noisy: bool = ..., noisy_sigma: float = ...,
        target_rule: _TargetRule = ..., rule_temperature: float = ..., rule_alpha: float = ...,
        munchausen_clip: float = ..., hysteretic: float = ..., cnn: Literal["nature", "impala"] = ...,
        cnn_width: int = ..., augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., layer_norm: bool = ..., network: Literal["mlp", "simba", "bro"] = ...,
        **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class DrQV2(ManagedAlgorithm):
    """DDPG with shifted images, one encoder and 3-step returns (Yarats et al. 2021)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ...,
        sde_sample_freq: int = ..., her: dict[str, Any] | None = ...,
        augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., exploration_noise: _Schedule = ...,
        shared_encoder: Literal["none", "drq", "nature", "impala"] = ..., feature_dim: int = ...,
        noise_clip: float = ..., **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class Dreamer(ManagedAlgorithm):
    """Actor-critic inside a learned world model: DreamerV3 (Hafner et al. 2023)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        size: Literal["tiny", "200k", "1m", "12m", "25m", "50m", "100m", "200m"] = ..., batch_size: int = ...,
        batch_length: int = ..., train_ratio: float = ..., buffer_size: int = ..., learning_starts: int = ...,
        replay_period: int = ..., online: bool = ..., recent: float = ..., imagination_length: int = ...,
        gae_lambda: float = ..., ent_coef: float = ..., unimix: float = ..., free_nats: float = ...,
        dynamics_scale: float = ..., representation_scale: float = ..., replay_value_scale: float = ...,
        slow_critic_rate: float = ..., slow_critic_scale: float = ..., return_rate: float = ...,
        warmup_updates: int = ..., adaptive_clip: float = ..., adam_eps: float = ..., **settings: Unpack[_Hyper],
    ) -> None: ...

class DroQ(ManagedAlgorithm):
    """SAC with dropout and LayerNorm critics (Hiraoka et al. 2022)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ...,
        sde_sample_freq: int = ..., her: dict[str, Any] | None = ...,
        augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., shared_encoder: Literal["none", "drq", "nature", "impala"] = ...,
        feature_dim: int = ..., network: Literal["mlp", "simba", "bro"] = ...,
        critic_hidden_sizes: Sequence[int] | None = ..., target_update_interval: int = ..., policy_delay: int = ...,
        ent_coef: float | Literal["auto"] = ..., ent_coef_init: float = ...,
        target_entropy: float | Literal["auto"] = ..., entropy_per_action: float = ..., num_critics: int = ...,
        num_target_critics: int = ..., layer_norm: bool = ..., dropout: float = ...,
        **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class DuelingDQN(ManagedAlgorithm):
    """DQN with value and advantage streams (Wang et al. 2016)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., target_update_interval: int = ..., exploration_fraction: float = ...,
        exploration_initial_eps: float = ..., exploration_final_eps: float = ..., exploration_ladder: float = ...,
        double: bool = ..., dueling: bool = ..., noisy: bool = ..., noisy_sigma: float = ...,
        target_rule: _TargetRule = ..., rule_temperature: float = ..., rule_alpha: float = ...,
        munchausen_clip: float = ..., hysteretic: float = ..., cnn: Literal["nature", "impala"] = ...,
        cnn_width: int = ..., augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., layer_norm: bool = ..., network: Literal["mlp", "simba", "bro"] = ...,
        **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class EDAC(ManagedAlgorithm):
    """SAC with an ensemble of diversified critics (An et al. 2021)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ...,
        sde_sample_freq: int = ..., her: dict[str, Any] | None = ..., network: Literal["mlp", "simba", "bro"] = ...,
        critic_hidden_sizes: Sequence[int] | None = ..., target_update_interval: int = ..., policy_delay: int = ...,
        ent_coef: float | Literal["auto"] = ..., ent_coef_init: float = ...,
        target_entropy: float | Literal["auto"] = ..., entropy_per_action: float = ..., eta: float = ...,
        num_critics: int = ..., **settings: Unpack[_OfflineHyper],
    ) -> None: ...

class FQF(ManagedAlgorithm):
    """Quantiles at learned fractions (Yang et al. 2019)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., target_update_interval: int = ..., exploration_fraction: float = ...,
        exploration_initial_eps: float = ..., exploration_final_eps: float = ..., exploration_ladder: float = ...,
        double: bool = ..., dueling: bool = ..., noisy: bool = ..., noisy_sigma: float = ...,
        target_rule: _TargetRule = ..., rule_temperature: float = ..., rule_alpha: float = ...,
        munchausen_clip: float = ..., hysteretic: float = ..., cnn: Literal["nature", "impala"] = ...,
        cnn_width: int = ..., augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., layer_norm: bool = ..., network: Literal["mlp", "simba", "bro"] = ...,
        num_quantiles: int = ..., kappa: float = ..., num_cosines: int = ..., fraction_learning_rate: _Schedule = ...,
        fraction_ent_coef: float = ..., **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class FQL(ManagedAlgorithm):
    """A one-step policy distilled from a flow that clones the data (Park et al. 2025)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        layer_norm: bool = ..., num_critics: int = ..., q_agg: Literal["mean", "min"] = ..., tau: float = ...,
        alpha: float = ..., normalize_q: bool = ..., flow_steps: int = ..., **settings: Unpack[_OfflineHyper],
    ) -> None: ...

class FastTD3(ManagedAlgorithm):
    """TD3 with many environments, large batches and categorical critics (Seo et al. 2025)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ...,
        sde_sample_freq: int = ..., her: dict[str, Any] | None = ...,
        augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., network: Literal["mlp", "simba", "bro"] = ...,
        critic_hidden_sizes: Sequence[int] = ..., exploration_noise: _Schedule = ..., num_critics: int = ...,
        policy_delay: int = ..., target_policy_noise: float = ..., target_noise_clip: float = ..., num_atoms: int = ...,
        v_min: float | Literal["auto"] = ..., v_max: float | Literal["auto"] = ..., batch_per_env: int = ...,
        exploration_noise_min: float = ..., **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class GAIL(ManagedAlgorithm):
    """Generative adversarial imitation with PPO (Ho & Ermon 2016)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        dataset: dict[str, Any] = ...,
        expert_dataset_kind: Literal["random", "policy", "replay", "npz", "hdf5", "minari"] | None = ...,
        expert_dataset_path: str | None = ..., normalize_observations: bool = ...,
        discriminator_hidden_sizes: Sequence[int] = ..., discriminator_learning_rate: _Schedule = ...,
        gradient_penalty: float = ..., absorbing_states: bool = ..., hidden_sizes: Sequence[int] = ...,
        activation: Literal["relu", "tanh", "silu", "elu", "gelu"] = ..., max_grad_norm: float = ...,
        optimizer: Literal["adam", "adamw", "rmsprop", "sgd"] = ..., adam_eps: float = ..., weight_decay: float = ...,
        n_steps: int = ..., gae_lambda: float = ..., normalize_rewards: bool = ..., log_std_init: float = ...,
        cnn: Literal["nature", "impala"] = ..., batch_size: int = ..., n_epochs: int = ..., clip_range: _Schedule = ...,
        ent_coef: _Schedule = ..., vf_coef: float = ..., clip_range_vf: _Schedule | None = ...,
        target_kl: float | None = ..., normalize_advantage: bool = ..., discriminator_batch_size: int = ...,
        n_discriminator_epochs: int = ..., bc_steps: int = ..., **settings: Unpack[_SharedTrunkFields],
    ) -> None: ...

class ICM(ManagedAlgorithm):
    """PPO with a bonus for transitions that a learned model cannot predict (Pathak et al. 2017)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        normalize_observations: bool = ..., hidden_sizes: Sequence[int] = ...,
        activation: Literal["relu", "tanh", "silu", "elu", "gelu"] = ..., max_grad_norm: float = ...,
        optimizer: Literal["adam", "adamw", "rmsprop", "sgd"] = ..., adam_eps: float = ..., weight_decay: float = ...,
        n_steps: int = ..., gae_lambda: float = ..., normalize_rewards: bool = ..., log_std_init: float = ...,
        cnn: Literal["nature", "impala"] = ..., batch_size: int = ..., n_epochs: int = ..., clip_range: _Schedule = ...,
        ent_coef: _Schedule = ..., vf_coef: float = ..., clip_range_vf: _Schedule | None = ...,
        target_kl: float | None = ..., normalize_advantage: bool = ..., bonus: Literal["rnd", "icm"] = ...,
        bonus_hidden_sizes: Sequence[int] = ..., bonus_features: int = ..., bonus_learning_rate: _Schedule = ...,
        bonus_update_share: float = ..., beta: float = ..., eta: float = ..., intrinsic_gamma: float = ...,
        extrinsic_coef: float = ..., intrinsic_coef: float = ..., episodic_bonus: bool = ...,
        normalize_bonus: bool = ..., **settings: Unpack[_SharedTrunkFields],
    ) -> None: ...

class ICMDQN(ManagedAlgorithm):
    """DQN with a bonus for transitions that a learned model cannot predict (Pathak et al. 2017)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., target_update_interval: int = ..., exploration_fraction: float = ...,
        exploration_initial_eps: float = ..., exploration_final_eps: float = ..., exploration_ladder: float = ...,
        double: bool = ..., dueling: bool = ..., noisy: bool = ..., noisy_sigma: float = ...,
        target_rule: _TargetRule = ..., rule_temperature: float = ..., rule_alpha: float = ...,
        munchausen_clip: float = ..., hysteretic: float = ..., cnn: Literal["nature", "impala"] = ...,
        cnn_width: int = ..., augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., layer_norm: bool = ..., network: Literal["mlp", "simba", "bro"] = ...,
        bonus: Literal["rnd", "icm"] = ..., bonus_hidden_sizes: Sequence[int] = ..., bonus_features: int = ...,
        bonus_learning_rate: _Schedule = ..., bonus_update_share: float = ..., beta: float = ..., eta: float = ...,
        intrinsic_gamma: float = ..., intrinsic_coef: float = ..., normalize_bonus: bool = ...,
        **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class IMPALA(ManagedAlgorithm):
    """Lagging actors with V-trace correction (Espeholt et al. 2018)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        normalize_observations: bool = ..., hidden_sizes: Sequence[int] = ...,
        activation: Literal["relu", "tanh", "silu", "elu", "gelu"] = ..., max_grad_norm: float = ...,
        optimizer: Literal["adam", "adamw", "rmsprop", "sgd"] = ..., adam_eps: float = ..., weight_decay: float = ...,
        n_steps: int = ..., gae_lambda: float = ..., normalize_rewards: bool = ..., log_std_init: float = ...,
        cnn: Literal["nature", "impala"] = ..., ent_coef: _Schedule = ..., vf_coef: float = ...,
        rmsprop_alpha: float = ..., policy_lag: int = ..., store_log_probs: bool = ..., rho_bar: float = ...,
        c_bar: float = ..., reduction: Literal["mean", "sum"] = ..., **settings: Unpack[_SharedTrunkFields],
    ) -> None: ...

class IQL(ManagedAlgorithm):
    """Implicit Q-learning by expectile regression (Kostrikov et al. 2022)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ...,
        sde_sample_freq: int = ..., her: dict[str, Any] | None = ..., actor_learning_rate: _Schedule = ...,
        expectile: float = ..., beta: float = ..., max_weight: float = ..., num_critics: int = ...,
        layer_norm: bool = ..., **settings: Unpack[_OfflineHyper],
    ) -> None: ...

class IQLOnline(ManagedAlgorithm):
    """IQL fine-tuned in the environment"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        dataset: dict[str, Any] = ..., prior_share: float = ..., tau: float = ...,
        exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ..., sde_sample_freq: int = ...,
        her: dict[str, Any] | None = ..., actor_learning_rate: _Schedule = ..., expectile: float = ...,
        beta: float = ..., max_weight: float = ..., num_critics: int = ..., layer_norm: bool = ...,
        **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class IQLearn(ManagedAlgorithm):
    """Inverse soft Q-learning from an expert's and its own transitions (Garg et al. 2021)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        dataset: dict[str, Any] = ..., prior_share: float = ...,
        expert_dataset_kind: Literal["random", "policy", "replay", "npz", "hdf5", "minari"] | None = ...,
        expert_dataset_path: str | None = ..., tau: float = ..., exploration: Literal["gaussian", "ou", "gsde"] = ...,
        ou_theta: float = ..., sde_sample_freq: int = ..., her: dict[str, Any] | None = ...,
        augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., network: Literal["mlp", "simba", "bro"] = ...,
        critic_hidden_sizes: Sequence[int] | None = ..., target_update_interval: int = ..., policy_delay: int = ...,
        ent_coef: float | Literal["auto"] = ..., ent_coef_init: float = ...,
        target_entropy: float | Literal["auto"] = ..., entropy_per_action: float = ..., chi2_alpha: float = ...,
        value_term: Literal["value", "value_expert", "v0"] = ..., regularize_policy: bool = ..., use_target: bool = ...,
        actor_learning_rate: _Schedule = ..., num_critics: int = ..., layer_norm: bool = ...,
        **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class IQLearnOffline(ManagedAlgorithm):
    """Inverse soft Q-learning from an expert's transitions alone (Garg et al. 2021)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ...,
        sde_sample_freq: int = ..., her: dict[str, Any] | None = ..., network: Literal["mlp", "simba", "bro"] = ...,
        critic_hidden_sizes: Sequence[int] | None = ..., target_update_interval: int = ..., policy_delay: int = ...,
        ent_coef: float | Literal["auto"] = ..., ent_coef_init: float = ...,
        target_entropy: float | Literal["auto"] = ..., entropy_per_action: float = ..., chi2_alpha: float = ...,
        value_term: Literal["value", "value_expert", "v0"] = ..., regularize_policy: bool = ..., use_target: bool = ...,
        actor_learning_rate: _Schedule = ..., num_critics: int = ..., layer_norm: bool = ...,
        **settings: Unpack[_OfflineHyper],
    ) -> None: ...

class IQN(ManagedAlgorithm):
    """Implicit quantile networks (Dabney et al. 2018)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., target_update_interval: int = ..., exploration_fraction: float = ...,
        exploration_initial_eps: float = ..., exploration_final_eps: float = ..., exploration_ladder: float = ...,
        double: bool = ..., dueling: bool = ..., noisy: bool = ..., noisy_sigma: float = ...,
        target_rule: _TargetRule = ..., rule_temperature: float = ..., rule_alpha: float = ...,
        munchausen_clip: float = ..., hysteretic: float = ..., cnn: Literal["nature", "impala"] = ...,
        cnn_width: int = ..., augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., layer_norm: bool = ..., network: Literal["mlp", "simba", "bro"] = ...,
        num_quantiles: int = ..., kappa: float = ..., num_tau_samples: int = ..., num_target_tau_samples: int = ...,
        num_cosines: int = ..., **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class MARWIL(ManagedAlgorithm):
    """Advantage-weighted imitation (Wang et al. 2018)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        beta: float = ..., max_weight: float = ..., norm_rate: float = ..., **settings: Unpack[_OfflineHyper],
    ) -> None: ...

class MBPO(ManagedAlgorithm):
    """SAC on short rollouts of a learned model (Janner et al. 2019)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        model_hidden_sizes: Sequence[int] = ..., num_members: int = ..., num_elites: int = ...,
        model_learning_rate: float = ..., model_batch_size: int = ..., model_weight_decay: Sequence[float] = ...,
        model_beta: float = ..., model_patience: int = ..., model_max_epochs: int = ..., model_holdout: float = ...,
        model_holdout_size: int = ..., termination: str = ..., model_train_freq: int = ..., tau: float = ...,
        exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ..., sde_sample_freq: int = ...,
        her: dict[str, Any] | None = ..., network: Literal["mlp", "simba", "bro"] = ...,
        critic_hidden_sizes: Sequence[int] | None = ..., target_update_interval: int = ..., policy_delay: int = ...,
        ent_coef: float | Literal["auto"] = ..., ent_coef_init: float = ...,
        target_entropy: float | Literal["auto"] = ..., entropy_per_action: float = ..., real_ratio: float = ...,
        rollout_batch: int = ..., rollout_length: int = ..., rollout_length_final: int | None = ...,
        rollout_schedule: Sequence[int] = ..., model_retain_epochs: float = ..., **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class MOPO(ManagedAlgorithm):
    """MBPO on a dataset, penalised for model uncertainty (Yu et al. 2020)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        model_hidden_sizes: Sequence[int] = ..., num_members: int = ..., num_elites: int = ...,
        model_learning_rate: float = ..., model_batch_size: int = ..., model_weight_decay: Sequence[float] = ...,
        model_beta: float = ..., model_patience: int = ..., model_max_epochs: int = ..., model_holdout: float = ...,
        model_holdout_size: int = ..., termination: str = ..., tau: float = ...,
        exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ..., sde_sample_freq: int = ...,
        her: dict[str, Any] | None = ..., network: Literal["mlp", "simba", "bro"] = ...,
        critic_hidden_sizes: Sequence[int] | None = ..., target_update_interval: int = ..., policy_delay: int = ...,
        ent_coef: float | Literal["auto"] = ..., ent_coef_init: float = ...,
        target_entropy: float | Literal["auto"] = ..., entropy_per_action: float = ..., real_ratio: float = ...,
        rollout_batch: int = ..., rollout_length: int = ..., rollout_length_final: int | None = ...,
        rollout_schedule: Sequence[int] = ..., model_retain_epochs: float = ..., penalty_coef: float = ...,
        rollout_freq: int = ..., **settings: Unpack[_OfflineHyper],
    ) -> None: ...

class MPO(ManagedAlgorithm):
    """Maximum a posteriori policy optimisation (Abdolmaleki et al. 2018)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ...,
        sde_sample_freq: int = ..., her: dict[str, Any] | None = ...,
        augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., target_update_interval: int = ..., num_critics: int = ...,
        num_samples: int = ..., epsilon: float = ..., epsilon_mean: float = ..., epsilon_std: float = ...,
        dual_learning_rate: float = ..., init_temperature: float = ..., init_alpha_mean: float = ...,
        init_alpha_std: float = ..., **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class MunchausenDQN(ManagedAlgorithm):
    """DQN with the log-policy added to the reward (Vieillard et al. 2020)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., target_update_interval: int = ..., exploration_fraction: float = ...,
        exploration_initial_eps: float = ..., exploration_final_eps: float = ..., exploration_ladder: float = ...,
        double: bool = ..., dueling: bool = ..., noisy: bool = ..., noisy_sigma: float = ...,
        target_rule: _TargetRule = ..., rule_temperature: float = ..., rule_alpha: float = ...,
        munchausen_clip: float = ..., hysteretic: float = ..., cnn: Literal["nature", "impala"] = ...,
        cnn_width: int = ..., augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., layer_norm: bool = ..., network: Literal["mlp", "simba", "bro"] = ...,
        **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class NAF(ManagedAlgorithm):
    """Q-learning with normalised advantage functions (Gu et al. 2016)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ...,
        sde_sample_freq: int = ..., her: dict[str, Any] | None = ...,
        augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., exploration_noise: _Schedule = ..., reward_scale: float = ...,
        saturation_penalty: float = ..., **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class NStepDQN(ManagedAlgorithm):
    """DQN with 3-step returns"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., target_update_interval: int = ..., exploration_fraction: float = ...,
        exploration_initial_eps: float = ..., exploration_final_eps: float = ..., exploration_ladder: float = ...,
        double: bool = ..., dueling: bool = ..., noisy: bool = ..., noisy_sigma: float = ...,
        target_rule: _TargetRule = ..., rule_temperature: float = ..., rule_alpha: float = ...,
        munchausen_clip: float = ..., hysteretic: float = ..., cnn: Literal["nature", "impala"] = ...,
        cnn_width: int = ..., augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., layer_norm: bool = ..., network: Literal["mlp", "simba", "bro"] = ...,
        **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class NoisyDQN(ManagedAlgorithm):
    """DQN with noisy weights for exploration (Fortunato et al. 2018)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., target_update_interval: int = ..., exploration_fraction: float = ...,
        exploration_initial_eps: float = ..., exploration_final_eps: float = ..., exploration_ladder: float = ...,
        double: bool = ..., dueling: bool = ..., noisy: bool = ..., noisy_sigma: float = ...,
        target_rule: _TargetRule = ..., rule_temperature: float = ..., rule_alpha: float = ...,
        munchausen_clip: float = ..., hysteretic: float = ..., cnn: Literal["nature", "impala"] = ...,
        cnn_width: int = ..., augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., layer_norm: bool = ..., network: Literal["mlp", "simba", "bro"] = ...,
        **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class OpenAIES(ManagedAlgorithm):
    """Rank-based evolution strategies (Salimans et al. 2017)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        n_delta: int = ..., delta_std: float = ..., n_eval_episodes: int = ..., normalize_observations: bool = ...,
        alive_bonus_offset: float = ..., **settings: Unpack[_NetworkHyper],
    ) -> None: ...

class PETS(ManagedAlgorithm):
    """Planning with trajectories sampled from a learned ensemble (Chua et al. 2018)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        model_hidden_sizes: Sequence[int] = ..., num_members: int = ..., num_elites: int = ...,
        model_learning_rate: float = ..., model_batch_size: int = ..., model_weight_decay: Sequence[float] = ...,
        model_beta: float = ..., model_patience: int = ..., model_max_epochs: int = ..., model_holdout: float = ...,
        model_holdout_size: int = ..., termination: str = ..., model_train_freq: int = ...,
        planner: Literal["cem", "icem"] = ..., plan_horizon: int = ..., plan_population: int = ...,
        plan_elites: int = ..., plan_iterations: int = ..., plan_momentum: float = ..., plan_deviation: float = ...,
        noise_beta: float = ..., trajectory_sampling: Literal["ts1", "tsinf"] = ...,
        **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class PPG(ManagedAlgorithm):
    """PPO with auxiliary phases that distil value features (Cobbe et al. 2021)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        n_policy_phases: int = ..., n_aux_epochs: int = ..., aux_batch_size: int = ..., beta_clone: float = ...,
        clip_range: _Schedule = ..., ent_coef: _Schedule = ..., normalize_advantage: bool = ...,
        **settings: Unpack[_OnPolicyHyper],
    ) -> None: ...

class PPO(ManagedAlgorithm):
    """Proximal policy optimisation (Schulman et al. 2017)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        normalize_observations: bool = ..., hidden_sizes: Sequence[int] = ...,
        activation: Literal["relu", "tanh", "silu", "elu", "gelu"] = ..., max_grad_norm: float = ...,
        optimizer: Literal["adam", "adamw", "rmsprop", "sgd"] = ..., adam_eps: float = ..., weight_decay: float = ...,
        n_steps: int = ..., gae_lambda: float = ..., normalize_rewards: bool = ..., log_std_init: float = ...,
        cnn: Literal["nature", "impala"] = ..., batch_size: int = ..., n_epochs: int = ..., clip_range: _Schedule = ...,
        ent_coef: _Schedule = ..., vf_coef: float = ..., clip_range_vf: _Schedule | None = ...,
        target_kl: float | None = ..., normalize_advantage: bool = ..., **settings: Unpack[_SharedTrunkFields],
    ) -> None: ...

class PQN(ManagedAlgorithm):
    """Q-learning from rollouts, without replay and target network (Gallici et al. 2024)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        batch_size: int = ..., n_epochs: int = ..., td_lambda: float = ..., layer_norm: bool = ...,
        exploration_fraction: float = ..., exploration_initial_eps: float = ..., exploration_final_eps: float = ...,
        **settings: Unpack[_CollectHyper],
    ) -> None: ...

class PrioritizedDQN(ManagedAlgorithm):
    """DQN with prioritised replay (Schaul et al. 2016)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., target_update_interval: int = ..., exploration_fraction: float = ...,
        exploration_initial_eps: float = ..., exploration_final_eps: float = ..., exploration_ladder: float = ...,
        double: bool = ..., dueling: bool = ..., noisy: bool = ..., noisy_sigma: float = ...,
        target_rule: _TargetRule = ..., rule_temperature: float = ..., rule_alpha: float = ...,
        munchausen_clip: float = ..., hysteretic: float = ..., cnn: Literal["nature", "impala"] = ...,
        cnn_width: int = ..., augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., layer_norm: bool = ..., network: Literal["mlp", "simba", "bro"] = ...,
        **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class QRDQN(ManagedAlgorithm):
    """Quantile regression of the return (Dabney et al. 2018)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., target_update_interval: int = ..., exploration_fraction: float = ...,
        exploration_initial_eps: float = ..., exploration_final_eps: float = ..., exploration_ladder: float = ...,
        double: bool = ..., dueling: bool = ..., noisy: bool = ..., noisy_sigma: float = ...,
        target_rule: _TargetRule = ..., rule_temperature: float = ..., rule_alpha: float = ...,
        munchausen_clip: float = ..., hysteretic: float = ..., cnn: Literal["nature", "impala"] = ...,
        cnn_width: int = ..., augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., layer_norm: bool = ..., network: Literal["mlp", "simba", "bro"] = ...,
        num_quantiles: int = ..., kappa: float = ..., **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class R2D2(ManagedAlgorithm):
    """DRQN with stored states, burn-in, rescaled values and prioritised sequences (Kapturowski et al. 2019)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., target_update_interval: int = ..., exploration_fraction: float = ...,
        exploration_initial_eps: float = ..., exploration_final_eps: float = ..., exploration_ladder: float = ...,
        double: bool = ..., dueling: bool = ..., noisy: bool = ..., noisy_sigma: float = ...,
        target_rule: _TargetRule = ..., rule_temperature: float = ..., rule_alpha: float = ...,
        munchausen_clip: float = ..., hysteretic: float = ..., cnn: Literal["nature", "impala"] = ...,
        cnn_width: int = ..., augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., layer_norm: bool = ..., network: Literal["mlp", "simba", "bro"] = ...,
        cell: Literal["lstm", "gru"] = ..., cell_size: int = ..., sequence_length: int = ..., burn_in: int = ...,
        overlap: int = ..., stored_state: bool = ..., value_rescaling: bool = ..., priority_eta: float = ...,
        **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class REDQ(ManagedAlgorithm):
    """SAC with randomised ensembles of critics (Chen et al. 2021)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ...,
        sde_sample_freq: int = ..., her: dict[str, Any] | None = ...,
        augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., shared_encoder: Literal["none", "drq", "nature", "impala"] = ...,
        feature_dim: int = ..., network: Literal["mlp", "simba", "bro"] = ...,
        critic_hidden_sizes: Sequence[int] | None = ..., target_update_interval: int = ..., policy_delay: int = ...,
        ent_coef: float | Literal["auto"] = ..., ent_coef_init: float = ...,
        target_entropy: float | Literal["auto"] = ..., entropy_per_action: float = ..., num_critics: int = ...,
        num_target_critics: int = ..., layer_norm: bool = ..., dropout: float = ...,
        **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class RLPD(ManagedAlgorithm):
    """SAC on batches of half prior, half new data (Ball et al. 2023)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        dataset: dict[str, Any] = ..., prior_share: float = ..., tau: float = ...,
        exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ..., sde_sample_freq: int = ...,
        her: dict[str, Any] | None = ..., augment: Literal["none", "shift", "shift_intensity"] = ...,
        augment_pad: int = ..., normalize_observations: bool = ...,
        shared_encoder: Literal["none", "drq", "nature", "impala"] = ..., feature_dim: int = ...,
        network: Literal["mlp", "simba", "bro"] = ..., critic_hidden_sizes: Sequence[int] | None = ...,
        target_update_interval: int = ..., policy_delay: int = ..., ent_coef: float | Literal["auto"] = ...,
        ent_coef_init: float = ..., target_entropy: float | Literal["auto"] = ..., entropy_per_action: float = ...,
        num_critics: int = ..., num_target_critics: int = ..., layer_norm: bool = ..., dropout: float = ...,
        **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class RND(ManagedAlgorithm):
    """PPO with a bonus for what a random network's imitator cannot predict (Burda et al. 2019)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        normalize_observations: bool = ..., hidden_sizes: Sequence[int] = ...,
        activation: Literal["relu", "tanh", "silu", "elu", "gelu"] = ..., max_grad_norm: float = ...,
        optimizer: Literal["adam", "adamw", "rmsprop", "sgd"] = ..., adam_eps: float = ..., weight_decay: float = ...,
        n_steps: int = ..., gae_lambda: float = ..., normalize_rewards: bool = ..., log_std_init: float = ...,
        cnn: Literal["nature", "impala"] = ..., batch_size: int = ..., n_epochs: int = ..., clip_range: _Schedule = ...,
        ent_coef: _Schedule = ..., vf_coef: float = ..., clip_range_vf: _Schedule | None = ...,
        target_kl: float | None = ..., normalize_advantage: bool = ..., bonus: Literal["rnd", "icm"] = ...,
        bonus_hidden_sizes: Sequence[int] = ..., bonus_features: int = ..., bonus_learning_rate: _Schedule = ...,
        bonus_update_share: float = ..., beta: float = ..., eta: float = ..., intrinsic_gamma: float = ...,
        extrinsic_coef: float = ..., intrinsic_coef: float = ..., episodic_bonus: bool = ...,
        normalize_bonus: bool = ..., **settings: Unpack[_SharedTrunkFields],
    ) -> None: ...

class RNDDQN(ManagedAlgorithm):
    """DQN with a bonus for what a random network's imitator cannot predict (Burda et al. 2019)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., target_update_interval: int = ..., exploration_fraction: float = ...,
        exploration_initial_eps: float = ..., exploration_final_eps: float = ..., exploration_ladder: float = ...,
        double: bool = ..., dueling: bool = ..., noisy: bool = ..., noisy_sigma: float = ...,
        target_rule: _TargetRule = ..., rule_temperature: float = ..., rule_alpha: float = ...,
        munchausen_clip: float = ..., hysteretic: float = ..., cnn: Literal["nature", "impala"] = ...,
        cnn_width: int = ..., augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., layer_norm: bool = ..., network: Literal["mlp", "simba", "bro"] = ...,
        bonus: Literal["rnd", "icm"] = ..., bonus_hidden_sizes: Sequence[int] = ..., bonus_features: int = ...,
        bonus_learning_rate: _Schedule = ..., bonus_update_share: float = ..., beta: float = ..., eta: float = ...,
        intrinsic_gamma: float = ..., intrinsic_coef: float = ..., normalize_bonus: bool = ...,
        **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class RainbowDQN(ManagedAlgorithm):
    """C51 with double, dueling, noisy, prioritised and 3-step learning (Hessel et al. 2018)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., target_update_interval: int = ..., exploration_fraction: float = ...,
        exploration_initial_eps: float = ..., exploration_final_eps: float = ..., exploration_ladder: float = ...,
        double: bool = ..., dueling: bool = ..., noisy: bool = ..., noisy_sigma: float = ...,
        target_rule: _TargetRule = ..., rule_temperature: float = ..., rule_alpha: float = ...,
        munchausen_clip: float = ..., hysteretic: float = ..., cnn: Literal["nature", "impala"] = ...,
        cnn_width: int = ..., augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., layer_norm: bool = ..., network: Literal["mlp", "simba", "bro"] = ...,
        num_atoms: int = ..., v_min: float | Literal["auto"] = ..., v_max: float | Literal["auto"] = ...,
        **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class ReBRAC(ManagedAlgorithm):
    """TD3+BC with penalties in actor and critic (Tarasov et al. 2023)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ...,
        sde_sample_freq: int = ..., her: dict[str, Any] | None = ..., network: Literal["mlp", "simba", "bro"] = ...,
        critic_hidden_sizes: Sequence[int] | None = ..., exploration_noise: _Schedule = ..., num_critics: int = ...,
        policy_delay: int = ..., target_policy_noise: float = ..., target_noise_clip: float = ...,
        actor_penalty: float = ..., critic_penalty: float = ..., normalize_q: bool = ..., layer_norm: bool = ...,
        **settings: Unpack[_OfflineHyper],
    ) -> None: ...

class RecurrentPPO(ManagedAlgorithm):
    """PPO with a recurrent actor and critic (LSTM or GRU)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        normalize_observations: bool = ..., hidden_sizes: Sequence[int] = ...,
        activation: Literal["relu", "tanh", "silu", "elu", "gelu"] = ..., max_grad_norm: float = ...,
        optimizer: Literal["adam", "adamw", "rmsprop", "sgd"] = ..., adam_eps: float = ..., weight_decay: float = ...,
        n_steps: int = ..., gae_lambda: float = ..., normalize_rewards: bool = ..., log_std_init: float = ...,
        cnn: Literal["nature", "impala"] = ..., batch_size: int = ..., n_epochs: int = ..., clip_range: _Schedule = ...,
        ent_coef: _Schedule = ..., vf_coef: float = ..., clip_range_vf: _Schedule | None = ...,
        target_kl: float | None = ..., normalize_advantage: bool = ..., cell: Literal["lstm", "gru"] = ...,
        cell_size: int = ..., sequence_length: int = ..., **settings: Unpack[_SharedTrunkFields],
    ) -> None: ...

class SAC(ManagedAlgorithm):
    """Soft actor-critic with automatic temperature (Haarnoja et al. 2018)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ...,
        sde_sample_freq: int = ..., her: dict[str, Any] | None = ...,
        augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., shared_encoder: Literal["none", "drq", "nature", "impala"] = ...,
        feature_dim: int = ..., network: Literal["mlp", "simba", "bro"] = ...,
        critic_hidden_sizes: Sequence[int] | None = ..., target_update_interval: int = ..., policy_delay: int = ...,
        ent_coef: float | Literal["auto"] = ..., ent_coef_init: float = ...,
        target_entropy: float | Literal["auto"] = ..., entropy_per_action: float = ...,
        critic: str | dict[str, Any] = ..., layer_norm: bool = ..., **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class SQIL(ManagedAlgorithm):
    """SAC with reward 1 on an expert's transitions and 0 on its own (Reddy et al. 2020)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        dataset: dict[str, Any] = ..., prior_share: float = ...,
        expert_dataset_kind: Literal["random", "policy", "replay", "npz", "hdf5", "minari"] | None = ...,
        expert_dataset_path: str | None = ..., tau: float = ..., exploration: Literal["gaussian", "ou", "gsde"] = ...,
        ou_theta: float = ..., sde_sample_freq: int = ..., her: dict[str, Any] | None = ...,
        augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., shared_encoder: Literal["none", "drq", "nature", "impala"] = ...,
        feature_dim: int = ..., network: Literal["mlp", "simba", "bro"] = ...,
        critic_hidden_sizes: Sequence[int] | None = ..., target_update_interval: int = ..., policy_delay: int = ...,
        ent_coef: float | Literal["auto"] = ..., ent_coef_init: float = ...,
        target_entropy: float | Literal["auto"] = ..., entropy_per_action: float = ...,
        critic: str | dict[str, Any] = ..., layer_norm: bool = ..., **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class SimBa(ManagedAlgorithm):
    """SAC with residual LayerNorm networks, normalised observations and weight decay (Lee et al. 2024)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ...,
        sde_sample_freq: int = ..., her: dict[str, Any] | None = ...,
        augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., shared_encoder: Literal["none", "drq", "nature", "impala"] = ...,
        feature_dim: int = ..., network: Literal["mlp", "simba", "bro"] = ...,
        critic_hidden_sizes: Sequence[int] | None = ..., target_update_interval: int = ..., policy_delay: int = ...,
        ent_coef: float | Literal["auto"] = ..., ent_coef_init: float = ...,
        target_entropy: float | Literal["auto"] = ..., entropy_per_action: float = ...,
        critic: str | dict[str, Any] = ..., layer_norm: bool = ..., **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class TD3(ManagedAlgorithm):
    """Twin delayed deterministic policy gradient (Fujimoto et al. 2018)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ...,
        sde_sample_freq: int = ..., her: dict[str, Any] | None = ...,
        augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., network: Literal["mlp", "simba", "bro"] = ...,
        critic_hidden_sizes: Sequence[int] | None = ..., exploration_noise: _Schedule = ...,
        shared_encoder: Literal["none", "drq", "nature", "impala"] = ..., feature_dim: int = ...,
        num_critics: int = ..., policy_delay: int = ..., target_policy_noise: float = ...,
        target_noise_clip: float = ..., critic: str | dict[str, Any] = ..., layer_norm: bool = ...,
        **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class TD3BC(ManagedAlgorithm):
    """TD3 with a behavioural-cloning term (Fujimoto & Gu 2021)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ...,
        sde_sample_freq: int = ..., her: dict[str, Any] | None = ..., network: Literal["mlp", "simba", "bro"] = ...,
        critic_hidden_sizes: Sequence[int] | None = ..., exploration_noise: _Schedule = ..., num_critics: int = ...,
        policy_delay: int = ..., target_policy_noise: float = ..., target_noise_clip: float = ..., alpha: float = ...,
        normalize_observations: bool = ..., **settings: Unpack[_OfflineHyper],
    ) -> None: ...

class TDMPC2(ManagedAlgorithm):
    """Planning in a learned latent space with a terminal value (Hansen et al. 2024)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        size: Literal["tiny", "200k", "1m", "5m", "19m", "48m", "317m"] = ..., horizon: int = ...,
        batch_size: int = ..., buffer_size: int = ..., learning_starts: int = ..., pretrain: bool = ...,
        gradient_steps: int = ..., discount_denom: float = ..., discount_min: float = ..., discount_max: float = ...,
        rho: float = ..., consistency_coef: float = ..., reward_coef: float = ..., value_coef: float = ...,
        episodic: bool = ..., termination_coef: float = ..., ent_coef: float = ..., tau: float = ...,
        dropout: float = ..., num_bins: int = ..., v_min: float = ..., v_max: float = ..., log_std_min: float = ...,
        log_std_max: float = ..., encoder_lr_scale: float = ..., max_grad_norm: float = ..., adam_eps: float = ...,
        actor_adam_eps: float = ..., plan: bool = ..., plan_population: int = ..., plan_elites: int = ...,
        plan_policy_samples: int = ..., plan_iterations: int = ..., plan_min_std: float = ...,
        plan_max_std: float = ..., plan_temperature: float = ..., **settings: Unpack[_Hyper],
    ) -> None: ...

class TQC(ManagedAlgorithm):
    """SAC with truncated quantile critics (Kuznetsov et al. 2020)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ...,
        sde_sample_freq: int = ..., her: dict[str, Any] | None = ...,
        augment: Literal["none", "shift", "shift_intensity"] = ..., augment_pad: int = ...,
        normalize_observations: bool = ..., shared_encoder: Literal["none", "drq", "nature", "impala"] = ...,
        feature_dim: int = ..., network: Literal["mlp", "simba", "bro"] = ...,
        critic_hidden_sizes: Sequence[int] | None = ..., target_update_interval: int = ..., policy_delay: int = ...,
        ent_coef: float | Literal["auto"] = ..., ent_coef_init: float = ...,
        target_entropy: float | Literal["auto"] = ..., entropy_per_action: float = ..., num_critics: int = ...,
        num_quantiles: int = ..., top_quantiles_to_drop_per_net: int = ..., average_critics: bool = ...,
        layer_norm: bool = ..., **settings: Unpack[_OffPolicyHyper],
    ) -> None: ...

class TRPO(ManagedAlgorithm):
    """Trust-region policy optimisation (Schulman et al. 2015)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        target_kl: float = ..., cg_max_steps: int = ..., cg_damping: float = ..., line_search_max_iter: int = ...,
        line_search_shrinking_factor: float = ..., n_critic_updates: int = ..., batch_size: int = ...,
        normalize_advantage: bool = ..., **settings: Unpack[_RolloutHyper],
    ) -> None: ...

class XQL(ManagedAlgorithm):
    """IQL with Gumbel regression of the value (Garg et al. 2023)"""
    def __init__(
        self, env: _Env = None, *, config: TrainConfig | None = None, env_fn: _Make = None, features: Any = None,
        tau: float = ..., exploration: Literal["gaussian", "ou", "gsde"] = ..., ou_theta: float = ...,
        sde_sample_freq: int = ..., her: dict[str, Any] | None = ..., actor_learning_rate: _Schedule = ...,
        expectile: float = ..., beta: float = ..., max_weight: float = ..., num_critics: int = ...,
        layer_norm: bool = ..., temperature: float = ..., max_exponent: float = ..., **settings: Unpack[_OfflineHyper],
    ) -> None: ...

train_a2c: _Train
train_a3c: _Train
train_acer: _Train
train_acktr: _Train
train_airl: _Train
train_apex_ddpg: _Train
train_apex_dqn: _Train
train_appo: _Train
train_ars: _Train
train_awac: _Train
train_awac_online: _Train
train_bbf: _Train
train_bc: _Train
train_bcq: _Train
train_bootstrapped_dqn: _Train
train_bro: _Train
train_c51_dqn: _Train
train_cal_ql: _Train
train_cal_ql_online: _Train
train_combo: _Train
train_cql: _Train
train_crossq: _Train
train_crr: _Train
train_d4pg: _Train
train_dac: _Train
train_dagger: _Train
train_ddpg: _Train
train_decision_transformer: _Train
train_discrete_cql: _Train
train_discrete_iq_learn: _Train
train_discrete_iq_learn_offline: _Train
train_discrete_iql: _Train
train_discrete_sac: _Train
train_discrete_sqil: _Train
train_double_dqn: _Train
train_dqn: _Train
train_dreamer: _Train
train_droq: _Train
train_drq_v2: _Train
train_drqn: _Train
train_dueling_dqn: _Train
train_edac: _Train
train_fast_td3: _Train
train_fqf: _Train
train_fql: _Train
train_gail: _Train
train_icm: _Train
train_icm_dqn: _Train
train_impala: _Train
train_iq_learn: _Train
train_iq_learn_offline: _Train
train_iql: _Train
train_iql_online: _Train
train_iqn: _Train
train_marwil: _Train
train_mbpo: _Train
train_mopo: _Train
train_mpo: _Train
train_munchausen_dqn: _Train
train_n_step_dqn: _Train
train_naf: _Train
train_noisy_dqn: _Train
train_openai_es: _Train
train_pets: _Train
train_ppg: _Train
train_ppo: _Train
train_pqn: _Train
train_prioritized_dqn: _Train
train_qr_dqn: _Train
train_r2d2: _Train
train_rainbow_dqn: _Train
train_rebrac: _Train
train_recurrent_ppo: _Train
train_redq: _Train
train_rlpd: _Train
train_rnd: _Train
train_rnd_dqn: _Train
train_sac: _Train
train_simba: _Train
train_sqil: _Train
train_td3: _Train
train_td3_bc: _Train
train_td_mpc2: _Train
train_tqc: _Train
train_trpo: _Train
train_xql: _Train

__all__ = ["Callback", "EarlyStopping", "ExperimentManager", "ManagedAlgorithm", "TrainConfig", "TrainResult",
    "UserError", "__version__", "algorithm_class", "allow_import", "list_algorithms", "load", "make_config"]
