"""Capacity planning: the costs of a fleet of models, devices and replicas, and the start-up time of its nodes."""
