"""Training on a Ray cluster: rollout actors, replay shards and several learners around the unchanged algorithms.

settings.py      the `cluster:` section of a configuration
connection.py    starting or joining Ray, and what the cluster must offer
remote_envs.py   environments in actors, everything else in the driver: the exact, synchronous way
actors.py        a rollout actor: environments and a copy of the policy
fleet.py         all rollout actors as the driver sees them: work in flight, failures, replacements
shards.py        replay in actors
learners.py      more learners, which average gradients with the driver's
loops.py         the training loops of the driver
tasks.py         whole runs as tasks: trials of a sweep
plan.py          which of these a configuration needs
"""
