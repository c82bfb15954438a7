"""The registry line. It is read by every command, so it imports nothing heavy: `target` is imported when needed."""

from rl_training.registry import DISCRETE, Entry

ENTRY = Entry(
    name="boltzmann_dqn",
    class_name="BoltzmannDQN",
    target="rl_training_boltzmann.algorithm:BoltzmannDQN",
    family="value-based",
    loop="off_policy",
    actions=DISCRETE,
    summary="DQN that explores by sampling from softmax(Q / temperature)",
)
