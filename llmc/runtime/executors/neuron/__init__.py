"""Neuron: HLO modules on this CPU, and NEFFs on NeuronCores, without torch."""
