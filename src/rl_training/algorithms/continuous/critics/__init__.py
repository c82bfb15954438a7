"""Critics for continuous actions, as objects that `sac` and `td3` are given: one file for each kind."""
