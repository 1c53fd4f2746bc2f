"""vLLM on Intel Gaudi: the planner of the plug-in vllm-gaudi, restated.

ranges.py      the values of a dimension, by each strategy          filters.py   products, filters, drafts' buckets
lookup.py      the bucket that a step takes, and what a miss adds   demands.py   the steps of traffic
proposal.py    the lists of least padding under that look-up        blocks.py    highest block ids (contiguous PA)
bucket_file.py, log.py   what the server reads and prints           server.py    all of it, as the contract has it
"""
