"""Capacity on paper: what a fleet of models, devices and replicas costs, and how long its nodes take to be ready."""
