"""Configurations of released models, for plans without their weights: hyperparameters alone.

Source: the released config.json files, as specifications of the models restate them.
"""
